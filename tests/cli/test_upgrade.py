"""``unicron upgrade --check``: what a program of other versions would say of a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli.stack.upgrade import REFUSED, SIDE_BY_SIDE, TOGETHER, judged, own_versions
from shared.errors import Conflict, InvalidInput
from shared.events.union import OLDEST_DECIDER
from tests.api.kit import Server
from tests.cli.conftest import call_unicron

PAIR = [{"active": True}, {"active": False}]


def running(**changes: Any) -> dict[str, Any]:
    return {**own_versions(), "agents": {}, **changes}


def how(versions: dict[str, Any]) -> dict[str, str]:
    return {verdict.part: verdict.how for verdict in judged(versions, own_versions(), [])}


def events(**versions: int | None) -> dict[str, int]:
    found = {**own_versions()["events"], **{kind.replace("_", "."): number for kind, number in versions.items()}}
    return {kind: number for kind, number in found.items() if number is not None}


@pytest.mark.parametrize(
    ("versions", "verdicts"),
    [
        (running(), {"events": SIDE_BY_SIDE, "messages": SIDE_BY_SIDE, "decider": SIDE_BY_SIDE}),
        (running(events=events(cluster_configured=2)), {"cluster.configured": SIDE_BY_SIDE}),
        (running(events=events(cluster_configured=1)), {"cluster.configured": REFUSED}),
        (running(events=events(cluster_configured=4)), {"cluster.configured": SIDE_BY_SIDE}),
        (running(events=events(cluster_configured=5)), {"cluster.configured": REFUSED}),
        (running(events=events(task_dreamt=1)), {"task.dreamt": REFUSED}),
        (running(events=events(node_measured=None)), {"node.measured": TOGETHER}),
        (running(messages=own_versions()["messages"] + 2), {"messages": TOGETHER}),
        (running(agents={own_versions()["messages"] + 1: 7}), {"agents (7)": SIDE_BY_SIDE}),
        (running(decider=own_versions()["decider"] + 1), {"decider": SIDE_BY_SIDE}),
        (running(decider=own_versions()["decider"] + 2), {"decider": REFUSED}),
        (running(decider=OLDEST_DECIDER - 1), {"decider": REFUSED}),
    ],
)
def test_versions_one_apart_work_side_by_side(versions: dict[str, Any], verdicts: dict[str, str]) -> None:
    found = how(versions)
    assert {part: found[part] for part in verdicts} == verdicts
    others = {part: each for part, each in found.items() if part not in verdicts}
    assert set(others.values()) <= {SIDE_BY_SIDE}


def test_a_service_that_has_a_standby_goes_on() -> None:
    checks: list[dict[str, Any]] = [
        {"name": "planner", "instances": PAIR},
        {"name": "detector", "instances": []},
        {"name": "log"},
    ]
    found = {verdict.part: verdict.how for verdict in judged(running(), own_versions(), checks)}
    assert (found["planner"], found["detector"]) == (SIDE_BY_SIDE, TOGETHER)
    assert "log" not in found


async def test_the_command_asks_the_cluster(healed: Server) -> None:
    text = await call_unicron("upgrade", "--check", server=healed.url)
    assert (text.code, text.err) == (Conflict.exit_code, "")
    assert "none stands by: what it does waits for its start" in text.out
    as_json = await call_unicron("upgrade", "--check", "-o", "json", server=healed.url)
    found = {verdict["part"]: verdict for verdict in json.loads(as_json.out)["verdicts"]}
    assert {found[part]["how"] for part in ("events", "messages", "decider")} == {SIDE_BY_SIDE}
    refused = await call_unicron("upgrade", server=healed.url)
    assert (refused.code, refused.out) == (InvalidInput.exit_code, "")
    assert "give --check" in refused.err
