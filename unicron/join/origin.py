"""A state that a task is given from outside: a checkpoint that is not this library's, as of a framework's own format.

It counts where no member and no snapshot has a state, and where the task has no checkpoint of its own that is as new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

LOADED = "loaded"
"""Where the state of a rank came from: the value of ``Resumed.source``."""


class Origin(Protocol):
    """What ``attach(origin=...)`` takes; its text says where the state is."""

    def step(self) -> int:
        """Return how many updates the state stands behind, as this rank sees it; -1: there is none."""

    def load(self, model: Any, optimizer: Any, objects: Mapping[str, Any]) -> int:
        """Load the state into what ``build`` has returned, and into the objects of ``attach(state=...)``.

        All ranks call it, in the process groups of the generation, and collectives in it may be broken off.

        Returns:
            The updates that it stands behind.

        Raises:
            InvalidSpec: it cannot be loaded into these.
            RuntimeError: a peer was lost.
        """
