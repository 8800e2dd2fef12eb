"""Which workers compute persistently slower than their peers: a sequential test on own compute times. Pure.

The peers of a rank are the ranks of its pipeline stage: they compute the same work on different samples. From each step
a rank has the logarithm of its time for a micro-batch over the median of its peers' (*log ratio*), so that a factor
that slows or speeds all of them up counts for nothing. With one peer, both times are taken over
their own past first: of two ranks the one that has changed more is slow, and two that always differed are not judged.

The test is a CUSUM (Page, Biometrika 41, 1954) of bounded scores. A step adds 1 if the log ratio is clearly above a
limit, takes 1 off if it is clearly below, and something in between near the limit; the sum never falls below 0. A
worker is slow when the sum reaches ``EVIDENCE``. So no step counts for more than 1, however long it took: a stall of
one rank's data, a snapshot, or a process that was stopped for a while makes no slow worker. A step that computes for
less than ``FULL_STEP_S`` counts for less: what a busy machine does to a rank lasts for many such steps.

The times of a slow rank are no noise: the scale of the log ratios is taken from steps in which nothing had changed, or
one slowdown would raise the limit above the next. The scale belongs to the machine and outlives a process: on busy
cores, ranks that began anew without it would be taken for slow ones (``benchmarks/detection_soak.py``).

**False alarms.** The limit is at least ``QUANTILE`` robust standard deviations above 0, so a score is positive with
probability p <= 0.1 where nothing is wrong. With independent steps, sums of such scores reach h on average once in
((1 - p) / p) ** h steps or later (Lundberg's inequality for the random walk, Lorden 1971 for the mean time): 9 ** 9 =
3.9e8 steps of a rank, 5e5 rank-hours at 5 s a step. Steps are not independent; ``benchmarks/simulated_steps.py`` shows
what holds of autocorrelated ones. A rank that is slower by 1.3 for ``EVIDENCE`` steps is slow by definition.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

LEAST_SLOWDOWN = 1.3
"""The slowdown that is to be found within 20 steps (the requirement on the detector)."""

LIMIT = 0.6 * math.log(LEAST_SLOWDOWN)
"""Log ratio above which a step speaks for a slow worker: a factor of 1.17. Halfway (1.14) the likelihoods of 1.0 and
``LEAST_SLOWDOWN`` are equal under symmetric noise; it is somewhat higher, since slow phases come and go: of phases of
up to 1.2, a simulated day of 1,000 ranks had three false alarms with 0.5 and one with 0.6."""

OVER_LIMIT = math.log(1.1)
"""Log ratio below which a step speaks for the end of a slowdown: below ``LIMIT``, so that a worker near the limit does
not come and go; a slowdown of 1.1 is the paper's warning level."""

QUANTILE = 1.2816
"""Standard deviations that a normal value exceeds with probability 0.1."""

SOFTNESS = 0.05
"""Distance of a log ratio from the limit at which a step counts fully. Below the noise of a step (``PRIOR_SCALE``), so
that the score depends on the side of the limit and little on the size."""

EVIDENCE = 9.0
"""Sum of scores at which the test decides. With log ratios around log(1.3) and a standard deviation of 0.07, a step
adds 0.8 on average: 12 steps, and fewer than 20 in most courses. With more, some slow workers would be found after 20
steps (``benchmarks.detection``)."""

FULL_STEP_S = 0.1
"""Own compute time, seconds, from which a step counts fully. Log ratios of shorter steps are far from independent: on
busy cores a rank whose steps compute for 19 to 30 ms is now and then slower by 1.3 to 2 for 12 to 50 steps (the soak of
``benchmarks/detection.py``). Their evidence stays at 0.6 of ``EVIDENCE`` with this weight. Steps of 0.1 s count as
those of 10 s."""

QUANTUM = 1.1
"""Slowdowns are published as powers of this, like the planner's corrections of throughput: what is nearer has no effect
on a plan and only noise."""

LEAST_PUBLISHED = 1.21
"""Smallest slowdown that is published: ``QUANTUM`` squared. The next smaller power is below the slowdowns that
``LIMIT`` separates from none."""

WINDOW = 128
"""Log ratios from which their scale is known: a median absolute deviation within a tenth."""

FEW = 3
"""Size up to which one slow rank of a group shifts the log ratios of the others without limit: the median of two peers
is their mean. In a larger group it shifts them by no more than the distance between two of them."""

REVIEW = 32
"""Steps after which a slowdown is estimated again. The median of so many has a standard deviation of 0.22 of a
step's."""

SCALED = 8
"""Number of noise values between two estimates of the scale, and before the first."""

PRIOR_SCALE = 0.1
"""Standard deviation of log ratios before ``SCALED`` of them are known: about the largest at which ``LIMIT`` holds as
it is."""

_MAD_TO_SIGMA = 1.4826
"""Standard deviation of normal values over their median absolute deviation: 1 / 0.6745."""

WARM_UP = 2
"""First steps of a generation that count for nothing: they allocate buffers and fill caches."""

HISTORY = 64
"""Number of own times that are the past of a rank that has one peer, or a stage of its own."""

LEAST_HISTORY = 16
"""Fewest own times that are such a past: with fewer the rank is not judged."""


@dataclass(frozen=True, slots=True)
class Change:
    """A worker whose slowdown has changed.

    Attributes:
        worker: its id.
        slowdown: the new slowdown, a power of ``QUANTUM``; 1.0: it is over.
        step: the first step at which it could be decided.
        measured: the estimate before it was quantised.
        spread: robust standard deviation of the worker's log ratios.
        steps: the number of steps of the estimate.
        peers: number of its peers.
    """

    worker: str
    slowdown: float
    step: int
    measured: float
    spread: float
    steps: int
    peers: int


@dataclass(slots=True)
class _Noise:
    """The log ratios of a worker in steps in which nothing had changed, and their robust standard deviation.

    A shift would widen it, and a scale that a slowdown has widened would hide the next one.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    scale: float | None = None
    """Scale of the log ratios; None while fewer than ``SCALED`` are known."""
    unscaled: int = 0

    def take(self, ratios: Sequence[float]) -> None:
        """Add more log ratios; estimate the scale again, now and then."""
        self.ratios.extend(ratios)
        self.unscaled += len(ratios)
        if self.unscaled >= SCALED:
            self.unscaled = 0
            self.scale = _deviation(self.ratios)


@dataclass(slots=True)
class _Track:
    """What is known of one worker in one generation, and in later generations that keep the ranks and their processes.

    ``noise`` outlives them.
    """

    noise: _Noise
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The ratios of all steps."""
    unsettled: int = 0
    """Newest log ratios of which it is not known whether they are noise or a change."""
    evidence: float = 0.0
    """The evidence of a change: that the worker is slow, or, of a slow worker, that the slowdown is over."""
    rising: int = 0
    """How many steps have passed since the evidence was 0."""
    unreviewed: int = 0

    def add(self, ratio: float, weight: float, *, slow: bool) -> None:
        """Take the log ratio of a step into the evidence.

        Args:
            ratio: the log ratio.
            weight: at most how much the step adds to the evidence, or takes off it.
            slow: whether the worker is known to be slow.
        """
        self.ratios.append(ratio)
        self.unsettled += 1
        limit = OVER_LIMIT if slow else max(LIMIT, QUANTILE * self.scale())
        score = max(-1.0, min(1.0, (limit - ratio if slow else ratio - limit) / SOFTNESS))
        self.evidence = min(EVIDENCE, max(0.0, self.evidence + weight * score))
        self.rising = self.rising + 1 if self.evidence > 0.0 else 0
        self.unreviewed += 1

    def scale(self) -> float:
        """Return the standard deviation of the log ratios.

        Before there is enough noise, that of the differences between successive ones, which no shift widens (von
        Neumann et al., Annals of Mathematical Statistics 12, 1941): a worker that is noisy from its first step on may
        rise at once, and none of its steps is known to be noise then.
        """
        if self.noise.scale is not None:
            return self.noise.scale
        if len(self.ratios) <= SCALED:
            return PRIOR_SCALE
        differences = [newer - older for older, newer in pairwise(self.ratios)]
        return max(PRIOR_SCALE, _deviation(differences) / math.sqrt(2.0))

    def settle(self) -> None:
        """Take the unsettled log ratios as noise."""
        count = min(self.unsettled, WINDOW)
        self.noise.take(list(self.ratios)[-count:] if count else [])
        self.unsettled = 0


@dataclass(slots=True)
class PeerGroup:
    """The test of the ranks of one pipeline stage, or of ranks that have a stage each.

    Attributes:
        unequal: whether the ranks compute different work, so that only their times over their past are comparable.
        tracks: by worker.
        noises: by worker, also of earlier processes.
        histories: of two ranks, or of unequal ones, by worker: the logarithms of its own times while nothing spoke
            against it, also of earlier processes; of three unequal ones or more without what a step has in common.
        departures: if there are two ranks, by worker, the logarithms of the newest times over its past.
    """

    unequal: bool = False
    tracks: dict[str, _Track] = field(default_factory=dict)
    noises: dict[str, _Noise] = field(default_factory=dict)
    histories: dict[str, deque[float]] = field(default_factory=dict)
    departures: dict[str, deque[float]] = field(default_factory=dict)

    def renew(self) -> None:
        """Go on with other processes: forget what speaks against a worker, but not how its times vary."""
        self.tracks.clear()
        self.departures.clear()

    def forget_work(self) -> None:
        """Go on with ranks of other work: forget also how long it took them."""
        self.renew()
        self.histories.clear()

    def take(
        self, step: int, times_s: Mapping[str, float], known: Mapping[str, float], *, compute_s: float = FULL_STEP_S
    ) -> list[Change]:
        """Take the times of one step; return the slowdowns that have changed.

        Args:
            step: its number.
            times_s: worker -> own compute time for a micro-batch, seconds, positive.
            known: worker -> slowdown that is known already; a worker without one is not slow.
            compute_s: own compute time of the quickest rank for all micro-batches of the step, seconds, positive.
        """
        if len(times_s) < 2:
            return []
        weight = min(1.0, compute_s / FULL_STEP_S)
        logs = {worker: math.log(time_s) for worker, time_s in times_s.items()}
        slow = {worker for worker in logs if known.get(worker, 1.0) > 1.0}
        # Of several unequal ranks only two may have reported the step.
        are_two = len(logs) == 2 and len(self.histories) <= 2
        ratios = self._of_two(logs) if are_two else _of_many(self._over_past(logs) if self.unequal else logs)
        changes: list[Change] = []
        for worker, ratio in ratios.items():
            track = self.tracks.get(worker)
            if track is None:
                track = self.tracks[worker] = _Track(self.noises.setdefault(worker, _Noise()))
            changed = not are_two or self._has_changed(logs)
            track.add(ratio, weight, slow=worker in slow)
            change = _judge(track, worker, step, known.get(worker, 1.0), len(logs) - 1, changed=changed)
            if change is not None:
                changes.append(change)
        self._settle(ratios.keys(), slow | {change.worker for change in changes})
        if are_two:
            self._remember(logs, is_steady=not slow and not changes)
        elif self.unequal:
            self._remember_each(logs, known, {change.worker for change in changes})
        return changes

    def _of_two(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Return the log ratios of two ranks less what they were in the past; none without a past of these two."""
        one, other = sorted(logs)
        if self.histories.keys() != logs.keys():
            self.histories.clear()
            self.histories.update({worker: deque(maxlen=HISTORY) for worker in (one, other)})
        pasts = self.histories[one], self.histories[other]
        if len(pasts[0]) < LEAST_HISTORY:
            return {}
        for worker, past in zip((one, other), pasts, strict=True):
            departures = self.departures.setdefault(worker, deque(maxlen=round(EVIDENCE)))
            departures.append(logs[worker] - median(past))
        usual = median([own - peer for own, peer in zip(*pasts, strict=True)])
        ratio = logs[one] - logs[other] - usual
        return {one: ratio, other: -ratio}

    def _over_past(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Return the logarithms over the rank's past, of ranks that have one; none if these are fewer than three."""
        pasts = {worker: self.histories.get(worker, ()) for worker in logs}
        known = {w: logs[w] - median(past) for w, past in pasts.items() if len(past) >= LEAST_HISTORY}
        return known if len(known) > 2 else {}

    def _has_changed(self, logs: Mapping[str, float]) -> bool:
        """Return whether, of two ranks, the slower one has become slower, rather than the other one faster."""
        return sum(median(self.departures[each]) for each in logs) > 0.0

    def _settle(self, workers: Collection[str], changed: Collection[str]) -> None:
        """Decide which of the newest log ratios are noise.

        The log ratios of a rise of the evidence are noise once the rise has come to nothing; log ratios that end in a
        change, and those of slow workers, are not. In a small group that holds for all ranks together, since each
        shifts the log ratios of the others.

        Args:
            workers: those that have a log ratio of this step.
            changed: those that are slow, or have just changed.
        """
        for together in [workers] if len(workers) <= FEW else [[worker] for worker in workers]:
            tracks = [self.tracks[worker] for worker in together]
            if any(worker in changed for worker in together):
                for track in tracks:
                    track.unsettled = 0
            elif not any(track.evidence for track in tracks):
                for track in tracks:
                    track.settle()

    def _remember(self, logs: Mapping[str, float], *, is_steady: bool) -> None:
        """Add a step to the past of two ranks, unless something speaks against one of them.

        The step is added to both pasts or to neither, so that what slows or speeds both up is in both. If a rank has
        become faster than ever, and has stayed so for ``WINDOW`` steps, its past is over: without a new one nothing
        would be found any more.

        Args:
            logs: the logarithms of the step's times.
            is_steady: whether neither of the ranks is slow or has just changed.
        """
        tracks = [self.tracks[worker] for worker in logs if worker in self.tracks]
        if not is_steady:
            return
        if any(track.evidence >= EVIDENCE and track.rising >= WINDOW for track in tracks):
            self.renew()
            self.noises.clear()
            self.histories.clear()
        elif not any(track.evidence for track in tracks):
            for worker, own in logs.items():
                self.histories[worker].append(own)

    def _remember_each(self, logs: Mapping[str, float], known: Mapping[str, float], changed: Collection[str]) -> None:
        """Add a step to the past of each rank against which nothing speaks: one hardly shifts the median of many.

        What the step has in common is taken off, since the pasts have not the same steps. A slow worker that has no
        past here gets what its times would be without the slowdown.

        Args:
            logs: the logarithms of the step's times.
            known: worker -> slowdown that was known before the step.
            changed: workers whose slowdown has just changed.
        """
        common = median((self._over_past(logs) or logs).values())
        for worker, own in logs.items():
            past = self.histories.setdefault(worker, deque(maxlen=HISTORY))
            track, slowdown = self.tracks.get(worker), known.get(worker, 1.0)
            may = len(past) < LEAST_HISTORY if slowdown > 1.0 else track is None or not track.evidence
            if may and worker not in changed:
                past.append(own - common - math.log(slowdown))


def quantised(slowdown: float) -> float:
    """Return the power of ``QUANTUM`` that is nearest on the logarithmic scale, at least 1.0."""
    return round(QUANTUM ** max(0, round(math.log(slowdown) / math.log(QUANTUM))), 3)


def _of_many(logs: Mapping[str, float]) -> dict[str, float]:
    """Return each rank's logarithm less the median of the others'."""
    order = sorted(logs, key=lambda worker: logs[worker])
    values = [logs[worker] for worker in order]
    others = len(values) - 1
    middle = others // 2
    found = {}
    for place, worker in enumerate(order):
        upper = values[middle if middle < place else middle + 1]
        if others % 2:
            found[worker] = values[place] - upper
        else:
            lower = values[middle - 1 if middle - 1 < place else middle]
            found[worker] = values[place] - (lower + upper) / 2
    return found


def _judge(track: _Track, worker: str, step: int, known: float, peers: int, *, changed: bool) -> Change | None:
    """Return the change of a worker that its newest log ratio decides.

    ``changed``: whether a high log ratio is due to the worker, and not to its peers.
    """
    slow = known > 1.0
    if track.evidence < EVIDENCE:
        return _review(track, worker, step, known, peers) if slow else None
    steps = min(track.rising, len(track.ratios))
    measured = _estimate(track, steps)
    slowdown = 1.0 if slow else quantised(measured)
    if not slow and (slowdown < LEAST_PUBLISHED or not changed):
        return None
    return _change(track, worker, step, slowdown, measured, steps, peers)


def _review(track: _Track, worker: str, step: int, known: float, peers: int) -> Change | None:
    """Return the change of a slowdown that has become another one, if it has."""
    if track.unreviewed < REVIEW:
        return None
    measured = _estimate(track, REVIEW)
    track.unreviewed = 0
    slowdown = quantised(measured)
    if slowdown < LEAST_PUBLISHED or abs(math.log(measured / known)) <= math.log(QUANTUM):
        return None
    return _change(track, worker, step, slowdown, measured, REVIEW, peers)


def _change(track: _Track, worker: str, step: int, slowdown: float, measured: float, steps: int, peers: int) -> Change:
    track.evidence, track.rising, track.unreviewed = 0.0, 0, 0
    return Change(worker, slowdown, step, measured, track.scale(), steps, peers)


def _estimate(track: _Track, steps: int) -> float:
    """Return the slowdown of the newest steps."""
    return math.exp(median(list(track.ratios)[-steps:]))


def _deviation(values: Sequence[float]) -> float:
    """Return the robust standard deviation: that of normal values with the same median absolute deviation."""
    middle = median(values)
    return _MAD_TO_SIGMA * median([abs(value - middle) for value in values])
