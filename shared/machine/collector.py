"""How often Python's garbage collector runs in processes that fold large states.

A plan for a cluster of thousands of workers makes tens of thousands of objects. Nearly all of them live on, and none of
them is in a cycle. By default the collector looks at young objects after every 700 new ones, and at all objects now
and then. With 2,048 nodes a plan that moves 9 tasks takes 0.05 s here, and 0.2 to 0.35 s by default
(``benchmarks.planner``, ``moved``); of a simulation's processor time a fifth is saved (``benchmarks.simulator``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 20, 20)
"""New objects between two collections, and collections of each generation between two of the next: those of some plans
of 2,048 nodes, so that most are gone when they are looked at. 100,000 small objects take 10 MB."""


def collect_seldom() -> None:
    """Have the collector run seldom in this process from now on, and not look at what there is already."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Have the collector run seldom meanwhile."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
