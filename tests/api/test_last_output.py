"""The post-mortem has the last lines of failed workers, from the machines that have them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.api import last_output
from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.api.node_machines import NodeMachines, write_output

TASK = "gpt"


@pytest.fixture
async def healed(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over a task of which the process of n1/1 has ended, and was started again in generation 3."""
    story = Story(settings.run_dir / "log.db")
    story.running().process_exit().process_restored()
    story.log.close()
    async with serving(settings, bus, journal) as server:
        yield server


async def page(server: Server, **params: Any) -> Any:
    response = await server.http.get("/v1/incidents/i1/postmortem", params=params)
    assert response.status_code == 200, response.text
    return response.json() if not params else response.text


async def test_the_lines_are_those_of_the_process_that_failed(healed: Server, machines: NodeMachines) -> None:
    await machines.start("n0", "n1")
    long = "".join(f"line {number}\n" for number in range(1, 2000))
    write_output(machines.run_dir("n1"), TASK, "1-n1-1", f"{long}</pre><b>the last words</b>\n")
    write_output(machines.run_dir("n1"), TASK, "3-n1-1", "of the process in its place\n")
    made = await page(healed)
    (output,) = made["outputs"]
    assert (output["task"], output["worker"]) == (TASK, "n1/1")
    assert output["text"].endswith("line 1999\n</pre><b>the last words</b>")
    assert output["text"].startswith("line ")
    assert len(output["text"]) <= last_output.BYTES
    assert made["left_out"] == []
    html = await page(healed, format="html")
    assert "&lt;/pre&gt;&lt;b&gt;the last words&lt;/b&gt;" in html
    assert "last lines of the output of n1/1 (gpt), read from its node" in html
    assert "line 1999\n</pre><b>the last words</b>\n```" in await page(healed, format="md")


async def test_a_machine_that_does_not_answer_is_named(healed: Server, machines: NodeMachines) -> None:
    await machines.start("n0", "n1")
    machines.away.add("n1")
    made = await page(healed)
    assert made["outputs"] == []
    assert made["left_out"] == ["the last lines of n1/1: no machine that answers has them"]
    assert "Not on this page: the last lines of n1/1" in await page(healed, format="html")
