"""A verification by several processes, with the report that one makes.

Deciding again takes most of the time of a verification, and folding little. So each process makes a whole pass over the
log, and judges its share of the recorded answers, some that follow one another at a time (``SHARED_AT_ONCE``): no state
has to travel between processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from services.planner.replay.log_fold import NO_POLICIES, Policies
from services.planner.replay.sources import Source
from services.planner.replay.verification import Findings, Report, Share, Verification, report_of
from shared.log.anchors import Anchor, Defect
from shared.planning import compiled


def verify(
    source: Source,
    decider: int,
    anchors: Iterable[Anchor] = (),
    defects: Iterable[Defect] = (),
    jobs: int = 1,
    policies: Policies = NO_POLICIES,
) -> Report:
    """Return the verification of a log.

    Args:
        source: the log; it can be pickled if there are several jobs.
        decider: the decider whose plans are compared byte for byte.
        anchors: hashes that the log must have.
        defects: what is known to be wrong already.
        jobs: number of processes.
        policies: the functions of the policies that simulated histories name; they can be pickled if there are several
            jobs.
    """
    anchors, defects = tuple(anchors), tuple(defects)
    if jobs > 1:
        once = partial(_findings, source.as_it_is(), decider, anchors, defects, dict(policies))
        # Forking would copy the locks of a caller's threads.
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            passes = list(pool.map(once, [Share(number, jobs) for number in range(jobs)]))
        if len({_end(each) for each in passes}) == 1:
            return report_of(passes, decider)
        # In a single process a decision failed; the other processes have judged what follows it.
    return report_of([_findings(source, decider, anchors, defects, policies, Share())], decider)


def _end(found: Findings) -> tuple[object, ...]:
    """Return how far a pass has come, and where it failed."""
    return found.events, found.folded, *(each for each in found.found if each.part == 2)


def _findings(
    source: Source,
    decider: int,
    anchors: tuple[Anchor, ...],
    defects: tuple[Defect, ...],
    policies: Policies,
    share: Share,
) -> Findings:
    compiled.compile_when_large()
    return Verification(source, decider, anchors, defects, share, policies).findings()
