"""A task that trains while a test does something to the machines, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.bed import Bed
from tests.e2e.kit import Pace, Record, reference, small_task

STEPS = 40
"""More than a task does at its pace while a test lasts."""

MODEL = {"layers": 1, "hidden": 32, "heads": 4, "sequence_length": 32}
"""As small as a model can be: what is tested is around it."""

BATCH_S = 0.2
"""Pace of the tasks: a step of three workers takes 0.6 s, one of two 0.8 s."""

FIRST_STEPS = 3
"""A task has done these when a test begins: enough for the mean step, which time limits need."""


def on_all_nodes(bed: Bed, name: str) -> Record | None:
    """Return a task as it is, if it has a rank on each node; else None."""
    task = bed.client.task(name)
    return task if {rank["node"] for rank in task["ranks"]} == set(bed.nodes) else None


@contextmanager
def training(bed: Bed, name: str, corpus: Path, folder: Path, *, steps: int = STEPS) -> Iterator[Record]:
    """Train a task of one rank on each node; the body gets it as it was after its first steps.

    After the body the task trains to its end at full speed. It must have the samples of a run without failures, and the
    parameters of that run bit for bit, since the task is exact.
    """
    spec = small_task(name, corpus, model=MODEL, steps=steps, exact=True, checkpoint={"every": 0})
    pace = Pace(folder, BATCH_S)
    with ThreadPoolExecutor() as pool:
        expected = pool.submit(reference, spec, folder / "reference")
        bed.client.submit(pace.of(spec))
        try:
            bed.client.until_step(name, FIRST_STEPS)
            # Heartbeats tell of steps before the log has told of the ranks that do them.
            yield bed.client.until("all nodes train", lambda: on_all_nodes(bed, name))
        except BaseException:
            # Otherwise it would have the workers of the next test's task.
            bed.client.http.post(f"/v1/tasks/{name}/stop", json={"lose_steps": True})
            raise
        finally:
            pace.end()
        result = bed.client.until_state(name, "succeeded")["result"]
        parameters, samples = expected.result()
    assert (result["steps"], result["samples_sha256"]) == (steps, samples)
    assert bed.file(result["parameters_path"]) == parameters.read_bytes()
