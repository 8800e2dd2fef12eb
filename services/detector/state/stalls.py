"""The rules that tell whether a set of ranks stands still, and which ranks are to blame. Pure.

A rank that hangs makes all others wait in the next collective. So a *task* stands still when the newest progress of all
its ranks is old. To blame are the ranks that have not reached the collective; if all have reached it, the collective
itself is stuck.

Only the time in which a rank could have run counts against the rank: the time in which it was ready to run and had no
CPU is taken off. So the limits can be short, and busy machines raise no alarm. For a stopped process no such care is
needed, because the kernel reports the stop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.detector.state.progress_gaps import GapLimits, HangLimit, ProgressGaps
from shared.events.severities import ErrorKind
from shared.messages.signals import WorkerStatus

STOPPED = ("T", "t")
"""The kernel's letters for a process that was stopped, by a signal or by a debugger (proc(5))."""

SLOW_PHASES = frozenset({"setup", "checkpoint", "waiting", "aside", "tail", "script"})
"""Phases that may take much longer than a step."""

UNLIMITED = frozenset({"tail", "script"})
"""Phases in which a rank reports nothing that a limit could be measured by: it runs code that does not use the library.
The part of a script behind the last step has a limit of its own (``script_ends.py``)."""

SETUP_FACTOR = 5.0
"""Joining a generation may take this many times the longest time before, for the reasons of ``FIRST_STEP_FACTOR``."""

SETUP_FLOOR_S = 5.0
"""No shorter limit applies to joining a generation, which takes 0.2 s, and a second on a busy machine (measured)."""

FIRST_STEP_FACTOR = 5.0
"""The first step of a generation may take this many times the limit of the others: it allocates buffers, opens sockets
and fills caches (measured: up to 3 times the mean on a busy machine)."""

COLD_STEPS = 3
"""Number of first steps in which a process has the time of a fresh start: kernels are compiled in the first one, and
again in the second or third, for shapes that come a second time (torch.compile) or for a graph that is recorded."""

COLD_FACTOR = 5.0
"""A fresh start may take this many times the longest one of its task so far. Chosen: the caches that made that start
quick may be cold on another node."""

COLD_FLOOR_S = 30.0
"""No shorter limit applies to a fresh start: it may read libraries, kernels and data that all earlier ones have found
in the page cache. A hang in it costs this time once; a start that is taken for one costs a process, or a node."""

BETWEEN_STEPS = frozenset({"ended", "aside"})
"""Phases in which a script does something of its own: it evaluates, fetches data or writes a file."""

DEVIATIONS = 6.0
"""A step that is this many standard deviations longer than the mean does not happen by chance (Chebyshev: less than 3%
of any distribution, and less than one in 10**8 of a normal one)."""

_ORDER = {"ended": 0, "begun": 1, "compute": 2, "reduce": 3, "update": 4}
"""Order of the phases between two updates: ``WorkerStatus.step`` counts updates applied, so ``ended`` comes first."""


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Thresholds for ranks that stand still, from the settings (``shared/settings/model.py`` gives the reasons).

    ``latency_s``: an interval of heartbeats and one of the search, after which a stall is known at the latest.
    """

    hang_factor: float
    hang_floor_s: float
    stop_factor: float
    stop_floor_s: float
    collective_floor_s: float
    slow_region_timeout_s: float
    busy_timeout_s: float = 240.0
    latency_s: float = 0.35

    @property
    def gaps(self) -> GapLimits:
        """Bounds of the limits that follow from recent times without progress."""
        return GapLimits(self.hang_floor_s, self.slow_region_timeout_s, self.latency_s)

    @property
    def hard_s(self) -> float:
        """The hard limit, seconds: for how long a rank that is at work may make no progress."""
        return max(self.busy_timeout_s, self.slow_region_timeout_s)

    def step_limit_s(self, mean_s: float, deviation_s: float = 0.0) -> float:
        """Return for how many seconds a rank may make no progress in a step.

        Args:
            mean_s: the mean of recent steps.
            deviation_s: their standard deviation.
        """
        return max(self.hang_factor * mean_s, mean_s + DEVIATIONS * deviation_s, self.hang_floor_s)


@dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that stand still.

    Attributes:
        kind: a hang of ``workers``, or a collective time-out.
        workers: the workers to blame; none for a collective time-out.
        stalled_s: for how long the ranks have stood still.
        limit: the limit that this exceeds.
    """

    kind: ErrorKind
    workers: tuple[str, ...]
    stalled_s: float
    limit: HangLimit

    @property
    def limit_s(self) -> float:
        """The limit in seconds."""
        return self.limit.limit_s


def find(
    statuses: Mapping[str, WorkerStatus],
    *,
    mean_s: float | None,
    deviation_s: float = 0.0,
    previous_mean_s: float | None,
    growth: float,
    data_parallel_only: bool,
    limits: StallLimits,
    setup_s: float | None = None,
    gaps: ProgressGaps | None = None,
    cold: HangLimit | None = None,
    in_collective: Collection[str] = (),
    whole: bool = True,
    part: float = 1.0,
) -> Stall | None:
    """Return the stall of a set of ranks; None if they make progress, or run code of which nothing is reported.

    The ages are those of each node's newest heartbeat, so they are lower bounds: a late heartbeat can delay a stall,
    and cannot cause one.

    Args:
        statuses: worker -> status of every member, all in the same generation.
        mean_s: mean step of this generation; None before a step was timed.
        deviation_s: standard deviation of its steps.
        previous_mean_s: mean step of the generation before, if known.
        growth: expected step over that of the generation before: workers then / workers now.
        data_parallel_only: every replica is one rank, so ranks meet only in the reduction at the end of a step.
        limits: thresholds.
        setup_s: the longest time that joining a generation has taken; None if this one cannot be compared with it.
        gaps: recent times without progress of these ranks in this generation; None if they cannot be compared.
        cold: the limit of fresh starts (``cold_limit``); None: they have none of their own.
        in_collective: ranks that are known to wait in a collective, so that what they do there is no work.
        whole: whether these are all ranks of the task.
        part: the part of its limit that the time without progress is to exceed.
    """
    if any(s.phase in UNLIMITED for s in statuses.values()):
        return None
    ages = [own_age_s(s) for s in statuses.values()]
    known = [age for age in ages if age is not None]
    if not known or len(known) < len(ages):
        return None
    stalled_s = min(known)
    if any(s.phase == "setup" for s in statuses.values()) and setup_s is not None:
        late = _late_in_setup(statuses)
        limit = HangLimit(setup_limit_s(setup_s), "setup")
        if cold is not None and any(is_fresh(statuses[worker]) for worker in late):
            limit = longer(limit, cold)
    else:
        late = _late(statuses, data_parallel_only)
        limit = limit_of(statuses, mean_s, deviation_s, previous_mean_s, growth, late, limits, gaps, cold)
    first = {w for w in late if cold is not None and mean_s is None and in_first_step(statuses[w])}
    workers = {w for w in late if w not in in_collective and may_work(statuses[w], first=w in first)}
    blamed = tuple(w for w in late if exceeds(statuses[w], limit, limits, works=w in workers, part=part))
    if stalled_s <= part * limit.limit_s or (late and not blamed):
        return _alone(statuses, gaps, limits, whole, part) if data_parallel_only and gaps is not None else None
    if blamed and stalled_s > limits.hard_s > limit.limit_s and workers.issuperset(blamed):
        limit = HangLimit(limits.hard_s, "hard")
    kind = ErrorKind.HANG if late else ErrorKind.COLLECTIVE_TIMEOUT
    return Stall(kind=kind, workers=blamed, stalled_s=stalled_s, limit=limit)


def cold_limit(cold_s: float | None, limits: StallLimits) -> HangLimit:
    """Return for how long a fresh start may make no progress: a process in its first steps, or a first step of a group.

    Args:
        cold_s: the longest first step of fresh processes of the task so far; None: there was none.
        limits: thresholds.
    """
    if cold_s is None:
        return HangLimit(limits.slow_region_timeout_s, "cold")
    return HangLimit(min(max(COLD_FACTOR * cold_s, COLD_FLOOR_S), limits.hard_s), "cold")


def longer(limit: HangLimit, other: HangLimit) -> HangLimit:
    """Return the longer one of two limits."""
    return other if other.limit_s > limit.limit_s else limit


def is_fresh(status: WorkerStatus) -> bool:
    """Return whether a process is in its first steps; False where its agent does not say."""
    return status.steps_done is not None and status.steps_done < COLD_STEPS


def in_first_step(status: WorkerStatus) -> bool:
    """Return whether a rank has ended no step of its generation.

    The mean of a stage's steps is not known while its plan is under way; its ranks may have ended many steps by then.
    """
    return status.steps_timed == 0


def may_work(status: WorkerStatus, *, first: bool) -> bool:
    """Return whether what a rank's process or device does may be work, and not the wait for a collective.

    It may be work between two steps and while the user's ``build`` runs; inside a step only in a fresh start. A warm
    rank has a limit of its own, and a warm rank that spins would otherwise not be found.

    Args:
        status: of the rank.
        first: whether it is in the first step of a generation.
    """
    if status.phase == "setup":
        return status.setup_parts == 1
    return status.phase in BETWEEN_STEPS or (status.phase in ("begun", "compute") and (first or is_fresh(status)))


def exceeds(
    status: WorkerStatus,
    limit: HangLimit,
    limits: StallLimits,
    *,
    works: bool,
    part: float = 1.0,
    own_s: float | None = None,
) -> bool:
    """Return whether a rank has made no progress for longer than its limit.

    Args:
        status: of the rank.
        limit: the rank's limit if it is idle.
        limits: thresholds; the hard limit is that of a rank that is at work.
        works: whether the time in which it was at work does not count.
        part: the part of both limits that counts.
        own_s: for how long it has made no progress, if not for ``own_age_s``; seconds.
    """
    age_s = own_s if own_s is not None else own_age_s(status) or 0.0
    if works and status.idle_s is not None and age_s <= part * max(limits.hard_s, limit.limit_s):
        age_s = min(age_s, max(0.0, status.idle_s - status.starved_s))
    return age_s > part * limit.limit_s


def _alone(
    statuses: Mapping[str, WorkerStatus], gaps: ProgressGaps, limits: StallLimits, whole: bool, part: float
) -> Stall | None:
    """Return the stall of data-parallel ranks that compute for longer than they ever do, while others make progress.

    Such ranks wait for nobody, so the others need not have come to wait for them. A rank is judged so only by what is
    known of the rank itself, and not beside ranks in slow regions, for which it may wait in code of the user. The first
    micro-batch is another matter: it may wait for parameters of a rank that has yet to update them, so in its phase a
    rank is judged beside all the others only, and if none has done fewer steps.
    """
    if any(s.phase in SLOW_PHASES or s.phase is None for s in statuses.values()):
        return None
    fewest = min(s.step for s in statuses.values())
    late: dict[str, tuple[float, HangLimit]] = {}
    for worker, status in statuses.items():
        computes = status.phase == "compute" or (status.phase == "begun" and whole and status.step == fewest)
        if computes and (limit := gaps.limit(worker, status.phase, limits.gaps)) is not None:
            age_s = own_age_s(status) or 0.0
            if age_s > part * limit.limit_s:
                late[worker] = age_s, limit
    if not late:
        return None
    stalled_s, limit = min(late.values(), key=lambda found: found[0])
    return Stall(ErrorKind.HANG, tuple(late), stalled_s, limit)


def own_age_s(status: WorkerStatus) -> float | None:
    """Return for how many seconds a rank could have run without progress; None if it never made progress."""
    return None if status.progress_age_s is None else max(0.0, status.progress_age_s - status.starved_s)


def unheeded_hold_s(status: WorkerStatus) -> float:
    """Return for how many seconds a rank that was asked to leave its step could have done so and has not."""
    if status.hold_age_s is None or status.progress_age_s is None or status.state != "training":
        return 0.0
    return max(0.0, min(status.hold_age_s, status.progress_age_s) - status.starved_s)


def setup_limit_s(setup_s: float) -> float:
    """Return for how many seconds a rank may join a generation if that has taken ``setup_s`` at most before."""
    return max(SETUP_FACTOR * setup_s, SETUP_FLOOR_S)


def stopped_limit_s(mean_s: float | None, limits: StallLimits, gaps: ProgressGaps | None = None) -> float:
    """Return for how many seconds a process may be stopped, in any phase, before it counts as a hang.

    Args:
        mean_s: mean step; None if none is known.
        limits: thresholds.
        gaps: recent steps: where their distribution is known, the limit is no longer than what follows from it.
    """
    limit_s = limits.stop_factor * (mean_s or 0.0)
    if gaps is not None and (recent := gaps.step_limit(limits.gaps)) is not None:
        limit_s = min(limit_s, recent.limit_s)
    return max(limit_s, limits.stop_floor_s)


def limit_of(
    statuses: Mapping[str, WorkerStatus],
    mean_s: float | None,
    deviation_s: float,
    previous_mean_s: float | None,
    growth: float,
    late: Sequence[str],
    limits: StallLimits,
    gaps: ProgressGaps | None,
    cold: HangLimit | None = None,
) -> HangLimit:
    """Return for how long ranks may make no progress outside of set-up.

    Args:
        statuses: as for ``find``.
        mean_s: see ``find``.
        deviation_s: see ``find``.
        previous_mean_s: see ``find``.
        growth: see ``find``.
        late: the ranks to blame, whose own limits count; none: those of all.
        limits: thresholds.
        gaps: see ``find``.
        cold: see ``find``.
    """
    slow = HangLimit(limits.slow_region_timeout_s, "slow-region")
    judged = late or list(statuses)
    limit = _warm_limit(statuses, mean_s, deviation_s, previous_mean_s, growth, late, limits, gaps)
    if any(statuses[worker].phase in BETWEEN_STEPS for worker in judged):
        limit = longer(limit, slow)
    first = mean_s is None and any(in_first_step(statuses[worker]) for worker in judged)
    if cold is not None and (first or any(is_fresh(statuses[worker]) for worker in judged)):
        limit = longer(limit, cold)
    return limit


def _warm_limit(
    statuses: Mapping[str, WorkerStatus],
    mean_s: float | None,
    deviation_s: float,
    previous_mean_s: float | None,
    growth: float,
    late: Sequence[str],
    limits: StallLimits,
    gaps: ProgressGaps | None,
) -> HangLimit:
    """Return the limit of ranks that are no fresh start, by what is known of their steps; arguments of ``limit_of``."""
    slow = HangLimit(limits.slow_region_timeout_s, "slow-region")
    if any(s.phase in SLOW_PHASES or s.phase is None for s in statuses.values()):
        return slow
    limit = _recent(statuses, late or list(statuses), limits, gaps) if gaps is not None and mean_s is not None else None
    if limit is None:
        if mean_s is not None:
            limit_s = limits.step_limit_s(mean_s, deviation_s)
            limit = HangLimit(limit_s, "floor" if limit_s == limits.hang_floor_s else "mean")
        elif previous_mean_s is not None:
            limit_s = limits.step_limit_s(previous_mean_s * max(1.0, growth)) * FIRST_STEP_FACTOR
            limit = HangLimit(limit_s, "first-step")
        else:
            return slow
    # A collective moves data in other threads, whose waits for a CPU are not counted.
    if late or limit.limit_s >= limits.collective_floor_s:
        return limit
    return HangLimit(limits.collective_floor_s, "collective")


def _recent(
    statuses: Mapping[str, WorkerStatus], workers: Sequence[str], limits: StallLimits, gaps: ProgressGaps
) -> HangLimit | None:
    """Return the longest of the ranks' own limits, by their recent gaps; None if one of them has none yet."""
    found = [gaps.limit(worker, statuses[worker].phase, limits.gaps) for worker in workers]
    known = [limit for limit in found if limit is not None]
    return max(known, key=lambda limit: limit.limit_s) if known and len(known) == len(found) else None


def _late_in_setup(statuses: Mapping[str, WorkerStatus]) -> tuple[str, ...]:
    """Return the ranks that have done the fewest parts of joining a generation; none if all have done equally many."""
    parts = {w: s.setup_parts or 0 if s.phase == "setup" else None for w, s in statuses.items()}
    fewest = min(done for done in parts.values() if done is not None)
    late = tuple(w for w, done in parts.items() if done == fewest)
    return late if len(late) < len(parts) else ()


def _late(statuses: Mapping[str, WorkerStatus], data_parallel_only: bool) -> tuple[str, ...]:
    """Return the ranks that the others wait for; none if all have reached the collective."""
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
    # In other layouts ranks wait for one another inside a step, too: the rank that is furthest behind is the cause.
    return (min(late, key=lambda w: (places[w], -(statuses[w].progress_age_s or 0.0), w)),)
