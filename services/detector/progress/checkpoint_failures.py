"""Which failures of checkpoints the log gets: the first of a run of failures, and those of another kind. Pure.

A checkpoint may fail every few steps for weeks (a full disk), and on every rank. The log has each kind of failure once
until a checkpoint is written again.
"""

from __future__ import annotations

import re

from services.detector.state.task import MonitoredTask

MAX_KINDS = 8
"""Kinds of one run of failures that the log gets. Chosen: a reader learns nothing from further ones, and a reason that
differs every time (a file's random name) must not fill the log."""

_DIGITS = re.compile(r"\d+")


def kind_of(reason: str) -> str:
    """Return the kind of a failure: its reason without the numbers, among which are step, rank and generation."""
    return _DIGITS.sub("#", reason)


def is_new(task: MonitoredTask, reason: str) -> bool:
    """Return whether the log is to get a failure of a checkpoint of the task."""
    return kind_of(reason) not in task.checkpoint_failures and len(task.checkpoint_failures) < MAX_KINDS
