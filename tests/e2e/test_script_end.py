"""Code behind a script's loop: it is part of the task, fails it, and is repeated alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.kit import Client, Record, rank, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SCRIPT = """
import os, pathlib, time
import torch, unicron

def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)

run = unicron.attach(steps=12, micro_batches=8, build=build)
steps = 0
for step in run.steps():
    with step:
        for k in step.micro_batches():
            loss = run.model(torch.ones(4) * k).square().sum()
            (loss / 8).backward()
            step.commit(k, float(loss.detach()), [k])
        step.reduce()
        run.optimizer.step()
    steps += 1
folder, number = pathlib.Path(os.environ["FOLDER"]), run.generation.rank
with (folder / "course").open("a") as course:
    course.write(f"{number} {steps}\\n")
while (folder / "wait").exists() and number == 0:
    time.sleep(0.02)
if (folder / "fail").exists() and number == 0:
    raise ValueError("no room for the report")
(folder / "report").write_text("done")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a script whose ranks write down where they come behind the loop."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def task(name: str, folder: Path, **fields: object) -> Record:
    spec = small_task(name, folder / "script.py", steps=12, batch={"global": 8}, workers={"min": 2, "max": 2})
    return spec | {"script": str(folder / "script.py"), "env": {"FOLDER": str(folder)}, **fields}


def course(folder: Path) -> list[str]:
    """Return the ranks that have come behind the loop, each with the steps that it has done; sorted."""
    path = folder / "course"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_an_exception_behind_the_loop_fails_the_task_and_resuming_runs_that_part_alone(
    client: Client, folder: Path
) -> None:
    (folder / "fail").touch()
    incidents = len(client.items("/v1/incidents"))
    client.submit(task("raises-behind-the-loop", folder))
    failed = client.until_state("raises-behind-the-loop", "failed")
    assert "ValueError: no room for the report" in failed["reason"]
    assert "no room for the report" in failed["traceback"]
    assert failed["saved_step"] == 12
    (folder / "fail").unlink()
    client.http.post("/v1/tasks/raises-behind-the-loop/resume").raise_for_status()
    client.until_state("raises-behind-the-loop", "succeeded")
    assert course(folder) == ["0 0", "0 12", "1 0", "1 12"]
    assert (folder / "report").read_text() == "done"
    assert len(client.items("/v1/incidents")) == incidents


def test_a_process_killed_behind_the_loop_repeats_that_part_alone(client: Client, folder: Path) -> None:
    (folder / "wait").touch()
    client.submit(task("killed-behind-the-loop", folder))
    client.until("both ranks have come behind the loop", lambda: len(course(folder)) == 2)
    waiting = client.until("it is shown", lambda: t if (t := client.task("killed-behind-the-loop"))["reason"] else None)
    assert waiting["reason"].startswith("all steps are done and saved; its script goes on behind the last one")
    os.kill(rank(waiting, 0)["pid"], signal.SIGKILL)
    client.until("the part is repeated", lambda: len(course(folder)) == 4)
    (folder / "wait").unlink()
    client.until_state("killed-behind-the-loop", "succeeded")
    assert course(folder) == ["0 0", "0 12", "1 0", "1 12"]
    (incident,) = client.incidents("killed-behind-the-loop")
    assert (incident["kind"], incident["severity"], incident["steps_recomputed"]) == ("process-exit", "SEV2", 0)


def test_a_script_that_does_not_end_in_time_fails_the_task(client: Client, folder: Path) -> None:
    (folder / "wait").touch()
    client.submit(task("late-behind-the-loop", folder, finish_timeout_s=2))
    failed = client.until_state("late-behind-the-loop", "failed")
    assert "did not end within 2 s behind the last step (finish_timeout_s)" in failed["reason"]
    assert course(folder) == ["0 12", "1 12"]
