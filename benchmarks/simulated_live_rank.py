"""The training script of ``benchmarks.simulated_live``: the built-in trainer, at the pace of a device.

Micro-batches begin no sooner than ``MICRO_BATCH_S`` after one another, as where a device computes them: what else the
machine's processors do then changes the rate of steps little. The wait makes up for time that the computing, reducing
and updating took since the micro-batch before, but not for a stop.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from unicron.protocol import environment
from unicron.train import train
from unicron.trainer.data import Samples

MICRO_BATCH_S = 0.06
"""Several times what a processor computes for a micro-batch of the task; six make a step of 0.36 s on two workers."""


def main() -> None:
    """Train until stopped."""
    read = Samples.batch
    next_s = 0.0

    def paced(samples: Samples, ids: list[int]) -> dict[str, torch.Tensor]:
        nonlocal next_s
        now_s = time.monotonic()
        time.sleep(max(0.0, next_s - now_s))
        next_s = max(next_s, now_s) + MICRO_BATCH_S
        return read(samples, ids)

    Samples.batch = paced  # type: ignore[assignment, method-assign]
    train(Path(os.environ[environment.SPEC]))


if __name__ == "__main__":
    main()
