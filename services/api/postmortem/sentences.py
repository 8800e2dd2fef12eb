"""Sentences of the page that compare numbers, for both forms of it. Pure."""

from __future__ import annotations

from services.api.flop_text import flop
from services.api.interface.costs import IncidentCost
from services.api.postmortem.model import Alike, Replanned

SAME = 5e-4
"""Relative difference below which two numbers are the same in three digits."""


def failure_worker_s(cost: IncidentCost) -> float:
    """Return the worker-seconds of all parts of an incident's cost."""
    return sum((cost.detection_worker_s, cost.transition_worker_s, cost.recompute_worker_s, cost.sub_healthy_worker_s))


def difference(value: float) -> str:
    """Return a difference of FLOP as ``X more`` or ``X less``."""
    return f"{flop(abs(value))} {'less' if value < 0.0 else 'more'}"


def fewer(model: Replanned) -> str:
    """Return why a restarted task does not go on with fewer workers."""
    if not model.shrunk_workers:
        return (
            f"no number of workers that is left is useful to it; with its {model.workers} back it is worth "
            f"{flop(model.restored_flop)}"
        )
    return (
        f"with the {model.shrunk_workers} left it would be worth {flop(model.shrunk_flop)}, "
        f"{difference(model.shrunk_flop - model.restored_flop)} than the {flop(model.restored_flop)} with "
        f"{model.workers}"
    )


def replanned(model: Replanned) -> str:
    """Return what the solver would have given all tasks, and what that is worth beside the answer that was given."""
    if not model.assignment:
        return "nothing: what was left is too few for the tasks that run"
    counts = ", ".join(f"{task} {workers}" for task, workers in model.assignment.items())
    gain = model.assignment_flop - model.kept_flop
    compared = "as much as" if abs(gain) < SAME * abs(model.kept_flop) else f"{difference(gain)} than"
    kept = f"the {flop(model.kept_flop)} with the failed worker back"
    return f"{counts}; all tasks together worth {flop(model.assignment_flop)}, {compared} {kept}"


def happened(alike: Alike) -> str:
    """Return whether an incident has happened before."""
    if not alike.examined:
        return "No: the log has no earlier incident."
    first = "No incident was like it" if not alike.newest else "There were incidents like it"
    return (
        f"{first}: of the {alike.examined} before, {alike.same_kind} of the same kind, {alike.same_node} of the same "
        f"node, {alike.same_worker} of the same worker."
    )
