"""What ``StateMoved`` events say about a phase that has ended."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from services.transition.phases import ENDINGS, generation_of, stage_of
from services.transition.state import Failure, Part, Phase, Run, State
from shared.commands import WorkerResult
from shared.events import StateMoved, derived_id

Moved = Literal["held", "prepared", "resumed", "drained", "released", "restored", "ended", "failed"]

RANK_RAISED = "rank-raised"
"""Code of an answer about ranks that raised. One that names no worker: what they raised is that they lost a peer."""

_NAMES: dict[Phase, Moved] = {
    Phase.HOLD: "held",
    Phase.PREPARE: "prepared",
    Phase.CONFIGURE_INTERRUPTED: "resumed",
    Phase.DRAIN: "drained",
    Phase.RELEASE: "released",
    Phase.CONFIGURE_TARGET: "restored",
}

_WALL: dict[Phase, tuple[tuple[str, Phase], ...]] = {
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
"""Wall times that a stage's event carries beside those of its ranks: of every phase that led to it."""


def name_of(part: Part, phase: Phase) -> Moved | None:
    """Return what the end of the phase is called in the log; None if it is not told of."""
    if phase is Phase.RELEASE and part.change.action in ENDINGS:
        return "ended"
    return _NAMES.get(phase)


def milestone(state: State, part: Part, phase: Phase, moved: Moved, at: datetime, *, complete: bool) -> StateMoved:
    """Return the event for the end of a phase: the slowest rank's time of each sub-phase, and the phase's own."""
    results = _results(part, phase)
    durations = _slowest(list(results.values()))
    for name, timed in _WALL.get(phase, ((phase.value, phase),)):
        if timed in part.runs:
            durations[name] = part.runs[timed].seconds(at)
    if moved == "ended" and Phase.STOP in part.runs:
        results = {**_results(part, Phase.STOP), **results}
        durations["stop"] = part.runs[Phase.STOP].seconds(at)
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
        step=max((result.step for result in results.values()), default=0) or state.steps.get(part.task, 0),
        durations_s=durations,
        sources={worker: result.source for worker, result in sorted(results.items()) if result.source},
        pids={worker: result.pid for worker, result in sorted(results.items()) if result.pid is not None},
        deal=dict(sorted(deal.items())),
        steps_recomputed=max((result.steps_recomputed for result in results.values()), default=0),
        complete=complete,
    )


def failed(state: State, part: Part, at: datetime) -> StateMoved:
    """Return the event that ends a part with its failures, the first one first.

    Where all who answered only missed a peer, those who have not answered are to blame.
    """
    phase = part.failures[0].phase
    named = {worker for failure in part.failures for worker in failure.workers}
    runs = [part.runs[f.phase] for f in part.failures if f.phase in part.runs]
    unheard = {worker for run in runs for send in run.outstanding.values() for worker in send.workers}
    missing_peers = all(failure.code == RANK_RAISED for failure in part.failures)
    workers = sorted(named or (unheard if missing_peers else ()))
    return StateMoved(
        event_id=event_id(part, "failed"),
        occurred_at=at,
        plan=part.plan,
        task=part.task,
        incident=part.incident,
        generation=generation_of(part, phase),
        phase="failed",
        started_at=_began(part, phase, at),
        step=state.steps.get(part.task, 0),
        durations_s={name: part.runs[p].seconds(at) for p in Phase if p in part.runs for name in (p.value,)},
        failed_workers=workers,
        detail="; ".join(describe(failure) for failure in part.failures),
    )


def describe(failure: Failure) -> str:
    """Return a failure in words; its code comes first, so that a reader can tell what was reported otherwise."""
    return f"{failure.code}: {failure.phase.value}: {failure.detail}"


def event_id(part: Part, moved: Moved) -> str:
    """Return the id of a part's event: told twice, appended once."""
    return derived_id(part.plan, "transition", f"{part.task}/{moved}")


def _began(part: Part, phase: Phase, at: datetime) -> datetime:
    run = part.runs.get(phase)
    return min(run.started_at, at) if run else at


def _results(part: Part, phase: Phase) -> dict[str, WorkerResult]:
    run: Run | None = part.runs.get(phase)
    return {worker: result for reply in run.replies for worker, result in reply.workers.items()} if run else {}


def _slowest(results: list[WorkerResult]) -> dict[str, float]:
    durations: dict[str, float] = {}
    for result in results:
        for name, seconds in result.phases.items():
            durations[name] = max(durations.get(name, 0.0), seconds)
    return durations
