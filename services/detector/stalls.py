"""Whether a task has stopped making progress, and whose fault it is (DESIGN section 4: hang, collective time-out).

A rank that hangs makes all others wait in the next collective. So the *task* stands still when its newest progress is
old; the culprits are the ranks that have not reached the collective; if all have, the collective itself is stuck.

A rank's clock runs only while it could: what it spent ready to run and without a CPU is not held against it. So limits
can be short and busy machines raise no alarm. A stopped process needs no such care, the kernel says that it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.severities import ErrorKind
from shared.signals import WorkerStatus

STOPPED = ("T", "t")
"""The kernel's letters for a process that was stopped, by a signal or by a debugger (proc(5))."""

SLOW_PHASES = frozenset({"setup", "checkpoint", "waiting", "aside"})
"""Regions in which no mean step applies."""

SETUP_FACTOR = 5.0
"""Joining a generation may take this many times longer than the longest time before: the first step's reasons."""

SETUP_FLOOR_S = 5.0
"""Joining takes 0.2 s, on a busy machine a second."""

FIRST_STEP_FACTOR = 5.0
"""The first step of a generation may take this many times longer than its mean: buffers are allocated, sockets opened
and caches filled in it (measured: up to 3 times on a busy machine)."""

DEVIATIONS = 6.0
"""A step this many standard deviations longer than the mean is no chance (Chebyshev: less than 3% of any distribution,
of a bell-shaped one less than one in 10**8)."""

_ORDER = {"ended": 0, "begun": 1, "compute": 2, "reduce": 3, "update": 4}
"""Order of the phases between two updates: ``WorkerStatus.step`` counts updates applied, so ``ended`` comes first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds from the settings (``shared/settings.py`` gives the reasons)."""

    hang_factor: float
    hang_floor_s: float
    stop_factor: float
    stop_floor_s: float
    collective_floor_s: float
    slow_region_timeout_s: float

    def step_limit_s(self, mean_s: float, deviation_s: float = 0.0) -> float:
        """Return how long a rank may make no progress where a step takes ``mean_s``."""
        return max(self.hang_factor * mean_s, mean_s + DEVIATIONS * deviation_s, self.hang_floor_s)


@dataclass(frozen=True, slots=True)
class Stall:
    """A task that stands still: what it is, who is to blame (nobody for a collective), for how long, and the limit."""

    kind: ErrorKind
    workers: tuple[str, ...]
    stalled_s: float
    limit_s: float


def find(
    statuses: Mapping[str, WorkerStatus],
    *,
    mean_s: float | None,
    deviation_s: float = 0.0,
    previous_mean_s: float | None,
    growth: float,
    data_parallel_only: bool,
    limits: Limits,
    setup_s: float | None = None,
) -> Stall | None:
    """Return the stall of a task, if it is one.

    Ages are as of each node's newest heartbeat, so they are lower bounds: a late heartbeat delays a verdict and
    never causes one.

    Args:
        statuses: worker -> status of every member, all in the task's present generation.
        mean_s: mean step of this generation; None before one was timed.
        deviation_s: standard deviation of its steps.
        previous_mean_s: mean step of the generation before, if known.
        growth: how much longer a step is expected to take than in the generation before (workers then / now).
        data_parallel_only: every replica is one rank, so ranks meet only in the reduction at the end of a step.
        limits: thresholds.
        setup_s: the longest that joining a generation has taken so far; None if that says nothing of this one.
    """
    ages = [own_age_s(s) for s in statuses.values()]
    known = [age for age in ages if age is not None]
    if not known or len(known) < len(ages):
        return None
    stalled_s = min(known)
    if any(s.phase == "setup" for s in statuses.values()) and setup_s is not None:
        late = _late_in_setup(statuses)
        limit_s = setup_limit_s(setup_s)
    else:
        late = _late(statuses, data_parallel_only)
        limit_s = _limit_s(statuses, mean_s, deviation_s, previous_mean_s, growth, bool(late), limits)
    if stalled_s <= limit_s:
        return None
    kind = ErrorKind.HANG if late else ErrorKind.COLLECTIVE_TIMEOUT
    return Stall(kind=kind, workers=late, stalled_s=stalled_s, limit_s=limit_s)


def own_age_s(status: WorkerStatus) -> float | None:
    """Return for how long a rank has made no progress although it could have run; None if it never made any."""
    return None if status.progress_age_s is None else max(0.0, status.progress_age_s - status.starved_s)


def held_s(status: WorkerStatus) -> float:
    """Return for how long a rank that was told to leave its step has not done so although it could have run."""
    if status.hold_age_s is None or status.progress_age_s is None or status.state != "training":
        return 0.0
    return max(0.0, min(status.hold_age_s, status.progress_age_s) - status.starved_s)


def setup_limit_s(setup_s: float) -> float:
    """Return how long joining a generation may take where it has taken ``setup_s`` at most."""
    return max(SETUP_FACTOR * setup_s, SETUP_FLOOR_S)


def stopped_limit_s(mean_s: float | None, limits: Limits) -> float:
    """Return how long a process may be stopped (kernel state T) before it counts as hanging, in whatever phase."""
    return max(limits.stop_factor * (mean_s or 0.0), limits.stop_floor_s)


def _limit_s(
    statuses: Mapping[str, WorkerStatus],
    mean_s: float | None,
    deviation_s: float,
    previous_mean_s: float | None,
    growth: float,
    somebody_late: bool,
    limits: Limits,
) -> float:
    if any(s.phase in SLOW_PHASES or s.phase is None for s in statuses.values()):
        return limits.slow_region_timeout_s
    if mean_s is not None:
        limit_s = limits.step_limit_s(mean_s, deviation_s)
    elif previous_mean_s is not None:
        limit_s = limits.step_limit_s(previous_mean_s * max(1.0, growth)) * FIRST_STEP_FACTOR
    else:
        return limits.slow_region_timeout_s
    # Data moves in threads whose want of a CPU is not counted.
    return limit_s if somebody_late else max(limit_s, limits.collective_floor_s)


def _late_in_setup(statuses: Mapping[str, WorkerStatus]) -> tuple[str, ...]:
    """Return the ranks that have done fewer parts of joining a generation than others; none if all are equally far."""
    parts = {w: s.micro_batch or 0 if s.phase == "setup" else None for w, s in statuses.items()}
    fewest = min(done for done in parts.values() if done is not None)
    late = tuple(w for w, done in parts.items() if done == fewest)
    return late if len(late) < len(parts) else ()


def _late(statuses: Mapping[str, WorkerStatus], data_parallel_only: bool) -> tuple[str, ...]:
    """Return the ranks that hold the others up; none if all have reached the collective."""
    stopped = tuple(w for w, s in statuses.items() if s.process_state in STOPPED)
    if stopped:
        return stopped
    places = {w: (s.step, _ORDER.get(s.phase or "", 0), s.micro_batch or 0) for w, s in statuses.items()}
    newest = max(step for step, _, _ in places.values())
    reached = {w for w, place in places.items() if place[:2] >= (newest, _ORDER["reduce"])}
    late = [w for w in statuses if w not in reached]
    if not late:
        return ()
    behind = min(places[w][0] for w in late)
    late = [w for w in late if places[w][0] == behind]
    if data_parallel_only:
        return tuple(late)
    # Ranks of other layouts wait for one another inside a step too: the one that is furthest behind is the cause.
    return (min(late, key=lambda w: (places[w], -(statuses[w].progress_age_s or 0.0), w)),)
