"""The reason of a task that ended as it started because one of its ranks cannot run it."""

from __future__ import annotations

import re

NOT_HEALED = frozenset({"NotHealed", "SeamDiffers", "UnsupportedModel", "UnsupportedState"})
"""Errors of the library (``unicron.errors``) with which a step cannot be healed, though the script may well train."""

_REASON = re.compile(r"worker \S+ of node \S+ cannot run it: (\w+): (.*)", re.DOTALL)


def reason_of(worker: str, node: str, error: str, detail: str) -> str:
    """Return the reason of the task's end. It names the worker: one node may lack a file that the others have.

    Args:
        worker: the rank's.
        node: the worker's.
        error: the name of what the rank raised.
        detail: its text.
    """
    return f"worker {worker} of node {node} cannot run it: {error}: {detail}"


def why_not_healed(reason: str) -> str:
    """Return why a step of a task cannot be healed, from the reason of its end; empty: it ended for another reason."""
    found = _REASON.fullmatch(reason)
    return found[2] if found is not None and found[1] in NOT_HEALED else ""
