"""``unicron kill``: it asks on a terminal only, and waits for the end."""

from __future__ import annotations

import asyncio
import io
import json
import sys

import pytest

from shared.events.union import TaskStopped, TaskStopRequested
from tests.api.kit import Server
from tests.cli.conftest import Outcome, Unicron
from tests.condition import until


class Typed(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


def requests(api: Server) -> list[tuple[bool, bool]]:
    events = [recorded.event for recorded in api.journal.log.read()]
    return [(event.lose_steps, event.at_once) for event in events if isinstance(event, TaskStopRequested)]


async def killed(api: Server, unicron: Unicron, *arguments: str) -> Outcome:
    """Kill a task, and end it as the other services would."""
    waiting = asyncio.ensure_future(unicron("kill", "gpt", *arguments))

    async def asked() -> bool:
        return bool(requests(api))

    await until(asked)
    await api.append(TaskStopped, task="gpt", generation=1, step=0, path="")
    return await waiting


async def test_a_script_is_not_asked(api: Server, unicron: Unicron) -> None:
    assert (await unicron("kill", "gpt")).code == 3
    await api.http.post("/v1/tasks", json=api.spec())
    outcome = await killed(api, unicron, "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["state"] == "stopped"
    assert requests(api) == [(True, True)]
    assert (await unicron("kill", "gpt")).code == 0, "it has stopped already, as asked"
    assert requests(api) == [(True, True)]


async def test_at_a_terminal_nothing_is_done_before_the_answer(
    api: Server, unicron: Unicron, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    monkeypatch.setattr(sys, "stdin", Typed("n\n"))
    refused = await unicron("kill", "gpt")
    assert (refused.code, refused.out, requests(api)) == (1, "", [])
    assert "End gpt (pending, step 0) at once? All of it is lost." in refused.err
    monkeypatch.setattr(sys, "stdin", Typed("y\n"))
    outcome = await killed(api, unicron)
    assert (outcome.code, outcome.out) == (0, "gpt: stopped at step 0: ended at once as asked: nothing is saved\n")


async def test_yes_is_an_answer(api: Server, unicron: Unicron, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    monkeypatch.setattr(sys, "stdin", Typed(""))
    assert (await killed(api, unicron, "--yes")).code == 0
