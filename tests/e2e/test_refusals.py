"""A task that no rank can run fails at once, on the whole stack: with the rank's message, and without an incident."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.kit import Client, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

BUILD = """
import unicron

def build(tensor, pipeline):
    import no_such_module

for step in unicron.attach(steps=40, micro_batches=8, build=build).steps():
    pass
"""


@pytest.mark.parametrize(("name", "text"), [("no-module", "import no_such_module\n"), ("no-build", BUILD)])
async def test_a_task_that_its_ranks_refuse_fails_at_once(
    name: str, text: str, client: Client, corpus: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)

    def course() -> None:
        client.submit(small_task(name, corpus, script=str(script)))
        client.until_state(name, "failed")
        client.until("its workers are free", lambda: workers_of(client, name) == [])

    await asyncio.to_thread(course)
    reason = client.task(name)["reason"]
    assert reason.startswith("worker n")
    assert reason.endswith("cannot run it: ModuleNotFoundError: No module named 'no_such_module'")
    assert client.incidents(name) == []


def workers_of(client: Client, task: str) -> list[str]:
    return [w["worker"] for node in client.items("/v1/nodes") for w in node["workers"] if w["task"] == task]
