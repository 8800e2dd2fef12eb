"""Fills a file system of a machine, as data that nobody has expected does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.machine import Machine

BLOCK_BYTES = 4096
"""A page: the least that a tmpfs gives out."""


@contextmanager
def full(machine: Machine, folder: str) -> Iterator[None]:
    """Leave no free page in the file system of a folder during the body.

    What processes free meanwhile, they may use again.
    """
    path = machine.path(folder) / "ballast"
    with path.open("wb") as file:
        size, step = 0, 1 << 30
        while step >= BLOCK_BYTES:
            try:
                os.posix_fallocate(file.fileno(), size, step)
                size += step
            except OSError:
                step //= 2
        try:
            yield
        finally:
            path.unlink()
