"""The training script of ``benchmarks.detection``: the built-in trainer, which notes how long each step took.

One line a step in ``steps-<pid>.txt`` of the task's folder: Unix time of the step's end, duration in seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from unicron.protocol import environment
from unicron.train import train
from unicron.training.step import Step

NOTES = "steps-{pid}.txt"


def main() -> None:
    """Train to the end."""
    notes = (Path(os.environ[environment.RUN_DIR]) / NOTES.format(pid=os.getpid())).open("w", buffering=1)
    leave = Step.__exit__

    def noted(
        step: Step, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        swallowed = leave(step, kind, error, trace)
        if not step.left:
            notes.write(f"{time.time():.6f} {time.monotonic() - step.began_s:.6f}\n")
        return swallowed

    Step.__exit__ = noted  # type: ignore[method-assign]
    train(Path(os.environ[environment.SPEC]))


if __name__ == "__main__":
    main()
