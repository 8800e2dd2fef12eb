"""The state-moved events of a part: the end of a phase, or the failure of the part."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from services.transition.phases import ENDINGS, generation_of, stage_of
from services.transition.state import Failure, Part, Phase, PhaseRun, State
from shared.events.codes import FailureCode
from shared.events.union import StateMoved, derived_id
from shared.messages.commands import WorkerResult

MovedPhase = Literal["held", "prepared", "resumed", "drained", "released", "restored", "ended", "failed"]
"""Values of ``StateMoved.phase``."""

_MOVED_PHASES: dict[Phase, MovedPhase] = {
    Phase.HOLD: "held",
    Phase.PREPARE: "prepared",
    Phase.CONFIGURE_INTERRUPTED: "resumed",
    Phase.DRAIN: "drained",
    Phase.RELEASE: "released",
    Phase.CONFIGURE_TARGET: "restored",
}

_WALL_TIMES: dict[Phase, tuple[tuple[str, Phase], ...]] = {
    Phase.CONFIGURE_INTERRUPTED: (
        ("hold", Phase.HOLD),
        ("store", Phase.STORE_INTERRUPTED),
        ("configure", Phase.CONFIGURE_INTERRUPTED),
    ),
    Phase.CONFIGURE_TARGET: (
        ("hold", Phase.HOLD),
        ("free", Phase.FREE),
        ("prepare", Phase.PREPARE),
        ("drain", Phase.DRAIN),
        ("release", Phase.RELEASE),
        ("store", Phase.STORE_TARGET),
        ("configure", Phase.CONFIGURE_TARGET),
    ),
}
"""Wall times in the event of a stage, beside the sub-phases of its ranks: those of the phases that lead to the
stage."""


def moved_phase(part: Part, phase: Phase) -> MovedPhase | None:
    """Return the name in the log of the end of a phase; None if the log does not record it."""
    if phase is Phase.RELEASE and part.change.action in ENDINGS:
        return "ended"
    return _MOVED_PHASES.get(phase)


def phase_ended(
    state: State, part: Part, phase: Phase, moved: MovedPhase, at: datetime, *, complete: bool
) -> StateMoved:
    """Return the event for the end of a phase, with its wall time and the slowest rank's time of each sub-phase."""
    results = _results(part, phase)
    durations_s = _slowest(list(results.values()))
    for name, timed in _WALL_TIMES.get(phase, ((phase.value, phase),)):
        if timed in part.runs:
            durations_s[name] = part.runs[timed].seconds(at)
    if moved == "ended" and Phase.STOP in part.runs:
        results = {**_results(part, Phase.STOP), **results}
        durations_s["stop"] = part.runs[Phase.STOP].seconds(at)
    deal: dict[str, list[int]] = {}
    for result in results.values():
        deal.update(result.deal)
    stage = stage_of(part, phase)
    return StateMoved(
        event_id=event_id(part, moved),
        occurred_at=at,
        plan=part.plan,
        task=part.task,
        incident=part.incident,
        generation=stage.generation if stage else generation_of(part, phase),
        phase=moved,
        started_at=_began(part, phase, at),
        step=max((result.step for result in results.values()), default=0) or state.task(part.task).step,
        durations_s=durations_s,
        sources={worker: result.source for worker, result in sorted(results.items()) if result.source},
        pids=_pids(results) if moved == "prepared" else {},
        deal=dict(sorted(deal.items())),
        steps_recomputed=max((result.steps_recomputed for result in results.values()), default=0),
        complete=complete,
    )


def _pids(results: dict[str, WorkerResult]) -> dict[str, int]:
    """Return the processes that were started.

    An event names each process once, when it was started: processes keep their ids, and there may be thousands.
    """
    return {worker: result.pid for worker, result in sorted(results.items()) if result.pid is not None}


def part_failed(state: State, part: Part, at: datetime) -> StateMoved:
    """Return the event that ends a part with its failures; phase and code are those of the first one.

    Where all workers that replied have only lost a peer, the workers that have not replied are to blame.
    """
    first = part.failures[0]
    named = {worker for failure in part.failures for worker in failure.workers}
    runs = [part.runs[f.phase] for f in part.failures if f.phase in part.runs]
    unanswered = {worker for run in runs for send in run.outstanding.values() for worker in send.workers}
    lost_peers = all(failure.code is FailureCode.RANK_RAISED for failure in part.failures)
    return StateMoved(
        event_id=event_id(part, "failed"),
        occurred_at=at,
        plan=part.plan,
        task=part.task,
        incident=part.incident,
        generation=generation_of(part, first.phase),
        phase="failed",
        started_at=_began(part, first.phase, at),
        step=state.task(part.task).step,
        durations_s={phase.value: part.runs[phase].seconds(at) for phase in Phase if phase in part.runs},
        code=first.code,
        failed_workers=sorted(named or (unanswered if lost_peers else ())),
        detail="; ".join(describe(failure) for failure in part.failures),
    )


def describe(failure: Failure) -> str:
    """Return a failure as text for people."""
    return f"{failure.code}: {failure.phase.value}: {failure.detail}"


def event_id(part: Part, moved: MovedPhase) -> str:
    """Return the id of a part's event, so that the event is appended once however often it is decided."""
    return derived_id(part.plan, "transition", f"{part.task}/{moved}")


def _began(part: Part, phase: Phase, at: datetime) -> datetime:
    run = part.runs.get(phase)
    return min(run.started_at, at) if run else at


def _results(part: Part, phase: Phase) -> dict[str, WorkerResult]:
    run: PhaseRun | None = part.runs.get(phase)
    return {worker: result for reply in run.replies for worker, result in reply.workers.items()} if run else {}


def _slowest(results: list[WorkerResult]) -> dict[str, float]:
    durations_s: dict[str, float] = {}
    for result in results:
        for name, seconds in result.phases.items():
            durations_s[name] = max(durations_s.get(name, 0.0), seconds)
    return durations_s
