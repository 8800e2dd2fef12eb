"""Datasets, read without waiting for peers: a process that is new reads them while the others are in a step.

As in stock, rank 0 makes indices that are not in the cache, and all others load them. Stock has a barrier in between.
Here the others try again until the files are there, which are written aside and renamed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from unicron.megatron.construction import without_collectives

PAUSE_S = 0.5
"""Pause between two looks for a file: short beside the imports before, and long beside a look at a file system."""

HEARTBEAT_S = 20.0
"""Pause between two reports that this rank is at work: less than the limits of a hang. Indices may take minutes."""


def read(
    build: Callable[[], Iterable[Any]], *, rank: int, limit_s: float, heartbeat: Callable[[], None]
) -> tuple[Any, ...]:
    """Return the datasets that an owner's builder makes.

    Args:
        build: the builder.
        rank: this process's.
        limit_s: how long this rank waits for rank 0, and reports that it is at work; stock's time-out of a barrier.
        heartbeat: reports that this rank is at work.

    Raises:
        FileNotFoundError: a file is not there. Ranks other than 0 have waited ``limit_s`` for it.
    """
    end_s = time.monotonic() + limit_s
    with _reporting(heartbeat, end_s), _whole_files(), without_collectives():
        while True:
            try:
                return tuple(build())
            except FileNotFoundError:
                if rank == 0 or time.monotonic() >= end_s:
                    raise
            time.sleep(PAUSE_S)


@contextlib.contextmanager
def _reporting(heartbeat: Callable[[], None], end_s: float) -> Iterator[None]:
    """Report again and again that this rank is at work, until a time of the monotonic clock."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(HEARTBEAT_S) and time.monotonic() < end_s:
            heartbeat()

    heartbeat()
    thread = threading.Thread(target=report, name="unicron-datasets", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _whole_files() -> Iterator[None]:
    """Have ``numpy.save`` write to another name and rename: nobody loads a file that is not whole."""
    import numpy

    save = numpy.save

    def whole(file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(file, *args, **kwargs)
            return
        path = Path(file)
        if path.suffix != ".npy":  # which numpy appends
            path = path.with_name(f"{path.name}.npy")
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.npy")
        try:
            save(partial, *args, **kwargs)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    numpy.save = whole
    try:
        yield
    finally:
        numpy.save = save
