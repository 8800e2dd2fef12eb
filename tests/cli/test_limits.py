"""``/v1/limits`` and ``unicron nodes --detector``: what the detector answers, or that it does not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection

import pytest

from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.messages.limits_in_force import LIMITS, HangLimitInForce, LimitsReply, LimitsRequest, NodeLimits, TaskLimits
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.cli.conftest import call_unicron


@pytest.fixture
async def two_nodes(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway of a cluster with nodes n0 and n1."""
    story = Story(settings.run_dir / "log.db")
    story.running()
    story.log.close()
    async with serving(settings, bus, journal) as server:
        yield server


def limits_of(node: str) -> NodeLimits:
    rank = HangLimitInForce(
        worker=f"{node}/0", task="gpt", rank=0, phase="compute", age_s=0.1, limit_s=4.5, source="phase", quantile_s=1.5
    )
    return NodeLimits(
        node=node,
        silence_s=0.2,
        phi=0.0,
        ask_s=0.3,
        limit_s=1.2,
        source="floor",
        samples=256,
        median_delay_s=0.001,
        longest_delay_s=0.02,
        ranks=[rank],
    )


async def detector(bus: Bus, unknown: Collection[str] = ("n1",)) -> list[list[str]]:
    """A detector that knows every node but the ``unknown`` ones; return the nodes of each request that it gets."""
    asked: list[list[str]] = []

    async def answer(request: LimitsRequest) -> LimitsReply:
        asked.append(request.nodes)
        return LimitsReply(nodes=[limits_of(name) for name in request.nodes if name not in unknown])

    await bus.serve(LIMITS, answer)
    return asked


async def test_the_limits_are_those_that_the_detector_answers(two_nodes: Server, bus: Bus) -> None:
    asked = await detector(bus)
    page = (await two_nodes.http.get("/v1/limits")).json()
    assert [node["node"] for node in page["items"]] == ["n0"]
    assert asked == [["n0", "n1"]]
    text = await call_unicron("nodes", "--detector", server=two_nodes.url)
    assert (text.code, text.err) == (0, "")
    assert [word for word in ("n0", "floor", "1.200", "n0/0", "phase", "4.500") if word not in text.out] == []
    as_json = await call_unicron("nodes", "--detector", "-o", "json", server=two_nodes.url)
    assert json.loads(as_json.out)["items"] == page["items"]


async def test_show_names_the_limits_of_a_task(two_nodes: Server, bus: Bus) -> None:
    found = TaskLimits(
        task="gpt", step_s=0.5, first_steps_s=60.0, longest_start_s=12.0, between_steps_s=120.0, hard_s=240.0
    )

    async def answer(request: LimitsRequest) -> LimitsReply:
        return LimitsReply(nodes=[], tasks=[found] if request.tasks == ["gpt"] else [])

    await bus.serve(LIMITS, answer)
    text = await call_unicron("show", "gpt", server=two_nodes.url)
    (line,) = [line for line in text.out.splitlines() if line.startswith("hang_limits")]
    assert line.partition(" ")[2].strip() == (
        "a step 0.5 s, first steps of a process 60 s (the longest start so far took 12 s), between steps 120 s; "
        "hard limit, if it is at work there: 240 s"
    )
    assert (await two_nodes.http.get("/v1/limits/gpt")).json() == found.model_dump()
    assert (await two_nodes.http.get("/v1/limits/other")).status_code == 404


async def test_without_a_detector_there_are_no_limits(two_nodes: Server) -> None:
    answer = await two_nodes.http.get("/v1/limits")
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    shown = await call_unicron("show", "gpt", server=two_nodes.url)
    assert (shown.code, "hang_limits" in shown.out) == (0, False)
