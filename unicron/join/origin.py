"""A state that a task is given from outside: a checkpoint of another format than this library's.

Such a state counts if no member and no snapshot has one, and the task has no checkpoint of its own that is as new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

LOADED = "loaded"
"""The source of a rank's state: the value of ``Resumed.source``."""


class Origin(Protocol):
    """The argument of ``attach(origin=...)``; its text says where the state is."""

    def step(self) -> int:
        """Return how many updates the state stands behind, as this rank sees it; -1: there is none."""

    def load(self, model: Any, optimizer: Any, objects: Mapping[str, Any]) -> int:
        """Load the state into what ``build`` has returned, and into the objects of ``attach(state=...)``.

        All ranks call it, in the process groups of the generation, and collectives in it may be broken off.

        Returns: The updates behind which the state stands.

        Raises:
            InvalidSpec: the state cannot be loaded into these.
            RuntimeError: a peer was lost.
        """
