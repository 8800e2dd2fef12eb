"""What Megatron-LM shows of its progress: the line of its log for each report, and its tracker file.

Forks keep both, so it is known of a script that the library cannot heal inside the step in which step it is, and from
which one it would go on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TRACKER = "latest_checkpointed_iteration.txt"
"""File in ``--save`` that names the newest complete checkpoint (``megatron/training/checkpointing.py``)."""

_REPORT = re.compile(r"\biteration\s+(\d+)/\s*\d+\s*\|")
_DURATION = re.compile(r"elapsed time per iteration \(ms\):\s*([0-9.]+)")
_LOSS = re.compile(r"\blm loss:\s*([0-9.]+(?:[Ee][+-]?[0-9]+)?)")


class Report(NamedTuple):
    """A report of the log: updates done; the mean time of one, in seconds, and the loss, where it has them."""

    step: int
    step_s: float | None = None
    loss: float | None = None


class SavedStep(NamedTuple):
    """A complete checkpoint: its step and its folder."""

    step: int
    path: str


def read_report(line: str) -> Report | None:
    """Return the report in a line of output; None: it is another line."""
    if (found := _REPORT.search(line)) is None:
        return None
    duration, loss = _DURATION.search(line), _LOSS.search(line)
    return Report(
        int(found[1]),
        float(duration[1]) / 1000.0 if duration is not None else None,
        float(loss[1]) if loss is not None else None,
    )


def save_folder(arguments: Sequence[str]) -> str:
    """Return the value of ``--save``; empty: the arguments do not have it."""
    for at, argument in enumerate(arguments):
        if argument == "--save" and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith("--save="):
            return argument.partition("=")[2]
    return ""


def saved_step(folder: str) -> SavedStep | None:
    """Return the newest complete checkpoint in a folder, as its tracker names it; None: there is none."""
    if not folder:
        return None
    try:
        step = int((Path(folder) / TRACKER).read_text().strip())
    except (OSError, ValueError):  # the tracker is not there, or names a release
        return None
    path = Path(folder).resolve() / f"iter_{step:07d}"
    return SavedStep(step, str(path)) if step > 0 and path.is_dir() else None
