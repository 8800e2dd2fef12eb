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


ALONE = """
import pathlib
import torch, unicron

def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)

run = unicron.attach(steps=40, micro_batches=8, build=build)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            loss = run.model(torch.ones(4) * k).square().sum()
            (loss / 8).backward()
            step.commit(k, float(loss.detach()), [k])
        step.reduce()
        run.optimizer.step()
    if step.completed and step.number == 20 and run.generation.rank == 0:
        with run.boundary():
            pathlib.Path(__file__).with_name("begun").touch()
"""


async def test_a_boundary_that_one_rank_enters_alone_ends_a_task_that_has_trained(
    client: Client, corpus: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    spec = small_task("alone", corpus, script=str(script), batch={"global": 8}, workers={"min": 2, "max": 2})

    def course() -> None:
        client.submit(spec)
        client.until_state("alone", "failed")

    await asyncio.to_thread(course)
    line = ALONE.splitlines().index("        with run.boundary():") + 1
    assert client.task("alone")["reason"].startswith(
        f"WrongLoop: rank 0 is in run.boundary() behind step 20 (train.py:{line}), which other ranks have not entered: "
        "rank 1 is in step.reduce() of step 21. "
    )
    assert client.incidents("alone") == []
    assert not (tmp_path / "begun").exists()


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
