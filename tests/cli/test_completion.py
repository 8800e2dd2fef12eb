"""What a shell proposes, as bash asks for it."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from cli.completion import incident_ids, plan_ids, task_names
from cli.main import load
from tests.api.kit import Server


async def proposed(server: str, *words: str) -> list[str]:
    """Return what bash proposes for the last word."""
    environment = {
        **os.environ,
        "_UNICRON_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["unicron", *words]),
        "COMP_CWORD": str(len(words)),
        "UNICRON_SERVER": server,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cli.main",
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 50)
    assert err == b""
    return out.decode().split()


@pytest.mark.slow
async def test_names_and_ids_are_those_of_the_server(healed: Server) -> None:
    (incident,) = (await healed.http.get("/v1/incidents")).json()["items"]
    plans = [plan["id"] for plan in (await healed.http.get("/v1/plans?order=newest")).json()["items"]]
    words = [
        (["sho"], ["show"]),
        (["show", "g"], ["gpt"]),
        (["show", "x"], []),
        (["drain", "n"], ["n0", "n1"]),
        (["inject", ""], ["gpt", "n0", "n1"]),
        (["postmortem", incident["id"][:2]], [incident["id"]]),
        (["incidents", "show", ""], [incident["id"]]),
        (["incidents", incident["id"][:2]], [incident["id"]]),
        (["incidents", ""], ["show", "acknowledge", "note", incident["id"]]),
        (["plan", "show", ""], plans),
        (["submit", "--k"], ["--key"]),
    ]
    found = await asyncio.gather(*(proposed(healed.url, *asked) for asked, _ in words))
    assert found == [expected for _, expected in words]


async def test_a_server_that_is_not_there_proposes_nothing_and_says_nothing() -> None:
    assert await proposed("http://127.0.0.1:9", "show", "g") == []


@pytest.mark.parametrize("proposals", [task_names, incident_ids, plan_ids])
async def test_a_server_that_is_none_proposes_nothing(proposals: object) -> None:
    context = load("show").make_context("show", ["gpt", "--server", "nonsense"])
    assert callable(proposals)
    assert proposals(context, "") == []
