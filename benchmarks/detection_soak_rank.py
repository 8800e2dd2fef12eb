"""The training script of ``benchmarks.detection --soak``: the built-in trainer, with stalls of data and evaluation.

All of that is drawn from the step and the process, so that every run has the same, and no rank the same as its peers.
Each is noted: a line ``stall`` or ``evaluation`` in ``soak-<pid>.txt`` of the task's folder.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unicron.protocol import environment
from unicron.train import train
from unicron.trainer.data import Samples
from unicron.training.run import Run
from unicron.training.step import Step

STALLS = 0.01
"""Part of the micro-batches whose data is late."""

STALL_S = 0.3
"""Longest stall: long beside a step, and below the floor of the limits for hangs (``hang_floor_s``)."""

EVALUATION_EVERY = 200
EVALUATION_S = 3.0
"""An evaluation: far longer than any limit that holds inside a step."""

NOTES = "soak-{pid}.txt"


def main() -> None:
    """Train to the end."""
    notes = (Path(os.environ[environment.RUN_DIR]) / NOTES.format(pid=os.getpid())).open("w", buffering=1)
    drawn = random.Random(environment.text(environment.WORKER))
    read, steps = Samples.batch, Run.steps

    def late(samples: Samples, ids: list[int]) -> Any:
        if drawn.random() < STALLS:
            time.sleep(drawn.uniform(0.0, STALL_S))
            notes.write("stall\n")
        return read(samples, ids)

    def evaluated(run: Run) -> Iterator[Step]:
        for step in steps(run):
            yield step
            if step.number % EVALUATION_EVERY == 0 and step.completed:
                run.heartbeat()
                time.sleep(EVALUATION_S)
                notes.write("evaluation\n")

    Samples.batch = late  # type: ignore[method-assign, assignment]
    Run.steps = evaluated  # type: ignore[method-assign, assignment]
    train(Path(os.environ[environment.SPEC]))


if __name__ == "__main__":
    main()
