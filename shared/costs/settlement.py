"""Settlement: what the charges of a time add up to, by the keys of the report. Pure.

Charges are settled second by second, so that amounts of times that meet add up to those of both together. What can no
longer change is therefore settled once and stored (``services/api/store/settled_rows.py``); a request adds the open
time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from shared.costs.charges import Charge
from shared.costs.claims import FAILURE_PARTS, Claim, Part
from shared.costs.ledger import CATEGORIES, History, Ledger, ledger
from shared.costs.service_levels import healthy_flop, trained_s
from shared.costs.span_claims import Window, allocated_worker_s, held_worker_s
from shared.views.documents import TaskView

DAY_S = 86_400.0

ALL, TASK, NODE, CAUSE, INCIDENT, SUBMISSION = "all", "task", "node", "cause", "incident", "submission"
"""Dimensions of amounts: everything, and the keys of the report. A submission has only the time for which its task
trained."""

DIMENSIONS = (ALL, TASK, NODE, CAUSE, INCIDENT, SUBMISSION)

PARTS = {part: part.name.lower() for part in CATEGORIES}
"""The column of each part's worker-seconds."""

COLUMNS = (
    *PARTS.values(),
    "worker_s",
    "lost_flop",
    "allocated_worker_s",
    "held_worker_s",
    "by_task_worker_s",
    "by_incident_worker_s",
    "healthy_flop",
    "trained_s",
)
"""Amounts of a key. ``worker_s``: the worker-seconds of all parts. The others, except ``lost_flop`` and ``trained_s``,
exist for everything only: time in which nodes were allocated, and that claims cover; failure parts added up by task and
by incident."""

Amounts = dict[str, float]
Sums = dict[str, dict[str, Amounts]]
"""Amounts by dimension and key."""

_UNUSED = frozenset({Part.UNSCHEDULED, Part.IDLE})


def no_amounts() -> Amounts:
    """Return the amounts of nothing."""
    return dict.fromkeys(COLUMNS, 0.0)


def submission_key(task: TaskView) -> str:
    """Return the key of a task's latest submission: the name may have had others."""
    return f"{task.position}/{task.name}"


def failure_worker_s(amounts: Amounts) -> float:
    """Return the worker-seconds of the failure parts."""
    return sum(amounts[PARTS[part]] for part in FAILURE_PARTS)


def add_worker_s(amounts: Amounts, claim: Claim, worker_s: float) -> None:
    """Add the worker-seconds that a claim is charged to the amounts of one of its keys, in place.

    ``lost_flop``: worker-seconds of a failure part times the weighted FLOP/s that one worker achieved before.
    """
    amounts[PARTS[claim.part]] += worker_s
    amounts["worker_s"] += worker_s
    if claim.part in FAILURE_PARTS:
        amounts["lost_flop"] += worker_s * claim.flop_per_worker_s


def add(sums: Sums, other: Sums) -> None:
    """Add other amounts to ``sums``, in place."""
    for dimension, rows in other.items():
        known = sums.setdefault(dimension, {})
        for key, amounts in rows.items():
            if key in known:
                known[key] = {name: known[key][name] + amounts[name] for name in COLUMNS}
            else:
                known[key] = dict(amounts)


def settle_window(history: History, tasks: Mapping[str, TaskView], window: Window, as_of: datetime) -> Sums:
    """Settle a window; return its amounts.

    Args:
        history: the views whose claims reach into the window, and all plans of their incidents; more do no harm.
        tasks: by name, at least those of the plans.
        window: the window to settle.
        as_of: stands in for times that have not come yet; not before the window's end.
    """
    book = ledger(history, as_of, window)
    return sums_of(book, history, tasks, window)


def sums_of(book: Ledger, history: History, tasks: Mapping[str, TaskView], window: Window) -> Sums:
    """Return the amounts of the charges of a window. The key of a dimension that does not apply is empty."""
    whole = no_amounts()
    by_task, by_node, by_cause, by_incident = (defaultdict[str, Amounts](no_amounts) for _ in range(4))
    training: dict[str, list[Charge]] = {}
    # What each of some workers is charged: many charges are of the same ones, whose nodes are looked up once.
    shares = defaultdict[tuple[str, ...], Amounts](no_amounts)
    for charge in book.charges:
        claim, each_s = charge.claim, charge.each_s
        worker_s = len(charge.workers) * each_s
        for amounts in (whole, by_task[claim.task], by_cause[book.cause(claim)], by_incident[claim.incident]):
            add_worker_s(amounts, claim, worker_s)
        add_worker_s(shares[charge.workers], claim, each_s)
        if claim.part is Part.TRAINING:
            training.setdefault(claim.task, []).append(charge)
    for workers, each in shares.items():
        charged = [(name, amount) for name, amount in each.items() if amount]
        for node, count in Counter(worker.rpartition("/")[0] for worker in workers).items():
            amounts = by_node[node]
            for name, amount in charged:
                amounts[name] += count * amount
    whole["allocated_worker_s"] = allocated_worker_s(book.allocated)
    used = (claim for claim in book.claims if claim.part not in _UNUSED)
    whole["held_worker_s"] = held_worker_s(used, book.allocated)
    whole["by_task_worker_s"] = sum(map(failure_worker_s, by_task.values()))
    whole["by_incident_worker_s"] = sum(failure_worker_s(row) for key, row in by_incident.items() if key)
    whole["healthy_flop"] = healthy_flop(history.spans, window)
    submissions = {}
    for name, charges in training.items():
        if (task := tasks.get(name)) is not None:
            submissions[submission_key(task)] = {**no_amounts(), "trained_s": trained_s(task, charges, window)}
    return {
        ALL: {"": whole},
        TASK: dict(by_task),
        NODE: dict(by_node),
        CAUSE: dict(by_cause),
        INCIDENT: dict(by_incident),
        SUBMISSION: submissions,
    }


def incident_sums(book: Ledger, window: Window) -> Sums:
    """Return the amounts of the charges of a window by incident alone."""
    by_incident = defaultdict[str, Amounts](no_amounts)
    for charge in book.charges_within(window):
        add_worker_s(by_incident[charge.claim.incident], charge.claim, charge.worker_s)
    return {INCIDENT: dict(by_incident)}


def cut_at_days(start_s: float, end_s: float, first_s: float) -> Iterator[Window]:
    """Yield the parts of a time that lie in one day of UTC each; a time before ``first_s`` is not cut."""
    low = start_s
    while low < end_s:
        day_end_s = (math.floor(max(low, min(first_s, end_s)) / DAY_S) + 1) * DAY_S
        yield Window(low, min(day_end_s, end_s))
        low = day_end_s


def day_of(end_s: float) -> datetime:
    """Return the beginning of the day of UTC that a time ends in; midnight belongs to the day before."""
    return datetime.fromtimestamp((math.ceil(end_s / DAY_S) - 1) * DAY_S, UTC)


def first_allocated_s(history: History) -> float:
    """Return when the first node span begins; infinite if there is none."""
    return min((span.start.timestamp() for span in history.spans if span.workers and span.node), default=math.inf)


def costliest(rows: Mapping[str, Amounts], limit: int | None) -> Sequence[str]:
    """Return the keys of the rows of the most worker-seconds, the largest first; ``limit``: how many; None: all."""
    return sorted((key for key in rows if key), key=lambda key: (-rows[key]["worker_s"], key))[:limit]
