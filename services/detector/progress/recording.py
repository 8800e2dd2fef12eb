"""The time to record the progress of a task, or the failure of a checkpoint: when it changes, not when it is heard of.

Pure.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence, Set
from datetime import datetime

from services.detector.state.task import RECENT_STEPS, MonitoredTask
from shared.messages.signals import RankCopies

TIMED_STEPS = 2
"""Timed steps of a generation before its rate is recorded: the first step includes work that is done once."""

GROWTH = 0.1
"""Time between two summaries over the time since the rate has last changed. So a sum up to the newest summary lacks at
most a tenth of what was done since then, and the first ten summaries, of which the mean of rates is made
(``shared/projections/rates.py``), come as quickly as ever."""

LONGEST_S = 1800.0
"""Longest time between two summaries: what a report of a running task lags by, and short beside the days over which one
is accounted for. Ten tasks that nothing happens to have 14,400 summaries in 30 days."""

LEAST_CHANGE = 0.05
"""Relative difference of step times below which the rate is the same: half a step of the planner's corrections, which
are powers of 1.1."""

SIGNIFICANT = 3.0
"""Standard deviations by which two medians must differ to count as different: by chance one pair in 370 differs by
more."""

_MEDIAN_NOISE = 1.2533 * 1.4826
"""Standard deviation of the median of n normal values, times the square root of n, over their median absolute deviation
from it: sqrt(pi / 2), and the standard deviation of normal values over that deviation."""

MAX_KINDS = 8
"""Most kinds of one run of failures that the log gets. Chosen: a reader learns nothing from further ones, and a reason
that differs every time (a file's random name) must not fill the log."""

_DIGITS = re.compile(r"\d+")


def is_due(task: MonitoredTask, step: int, interval_s: float, now: datetime) -> bool:
    """Return whether progress is to be recorded: the first rate of a generation at once, then by change and time.

    Args:
        task: the detector's; ``rate_since`` is changed in place.
        step: the newest.
        interval_s: shortest time between two summaries of a generation.
        now: the time.
    """
    if task.change is not None or task.timed < TIMED_STEPS:
        return False
    last = task.progressed_at
    if task.progressed_generation != task.generation or last is None:
        task.rate_since = now
        return True
    if task.rate_since is None:  # the detector has started anew
        task.rate_since = now
    age_s = (now - last).total_seconds()
    if step <= task.progressed_step or age_s < interval_s:
        return False
    if task.timed - task.progressed_timed >= RECENT_STEPS and has_changed(task.progressed_step_s, task.durations_s):
        task.rate_since = now
        return True
    steady_s = (now - task.rate_since).total_seconds()
    return age_s >= min(GROWTH * steady_s, LONGEST_S)


def has_changed(recorded_s: float, durations_s: Sequence[float]) -> bool:
    """Return whether the median of some steps differs from a recorded one, in seconds, by more than their noise."""
    if recorded_s <= 0.0:
        return True
    present_s = statistics.median(durations_s)
    deviation_s = statistics.median(abs(duration - present_s) for duration in durations_s)
    noise_s = _MEDIAN_NOISE * deviation_s * math.sqrt(2.0 / len(durations_s))  # of the difference of two
    least_s = max(LEAST_CHANGE * recorded_s, SIGNIFICANT * noise_s)
    return bool(abs(present_s - recorded_s) > least_s)


def is_unrecorded(task: MonitoredTask) -> bool:
    """Return whether the task has trained on since its newest summary, which a fault makes worth knowing."""
    trains = task.change is None and not task.ended and task.progressed_generation == task.generation
    return trains and task.step > task.progressed_step and task.timed >= TIMED_STEPS


def kind_of(reason: str) -> str:
    """Return the kind of a failure: its reason without the numbers, among which are step, rank and generation."""
    return _DIGITS.sub("#", reason)


def is_new(known: Set[str], reason: str) -> bool:
    """Return whether the log is to get a failure. ``known``: the kinds of this run that it has."""
    return kind_of(reason) not in known and len(known) < MAX_KINDS


def is_lack_to_report(task: MonitoredTask, signal: RankCopies) -> bool:
    """Return whether the log is to get what a rank says of copies in memory, and note which are there.

    Signals of several agents may overtake one another: a lack that was made good before it is heard of is not recorded.
    """
    at = (signal.generation, signal.step)
    if not signal.lack:
        task.copied = max(task.copied, at)
        return bool(task.copies_lacking)
    return at >= task.copied and is_new(task.copies_lacking, signal.lack)
