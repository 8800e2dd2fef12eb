"""Futures of a pool of workers: which nodes may be lost and come back, and when, drawn at random.

    usable nodes     are lost at one rate, that of D_running (``problem.node_mtbf_s``)
    suspect nodes    usable ones that were lost three times or more at one age: by the durations of their own lives
    nodes away       come back by the durations of all repairs (``durations.py``), given how long they are away
    nodes lost next  likewise, from the moment of their loss

A node that left in order, or is away and cordoned, is not expected. A future is the same whatever the plan does.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from services.planner.durations import bin_of, loss_rates_per_s, rates_per_s, remaining_s
from services.planner.problem import node_mtbf_s
from services.planner.state import Node, State
from shared.planning.counted_draws import Draws, stratified

HORIZON_FAILURES = 8.0
"""How far futures reach, in expected times to the next loss of a node of the pool. The objective reaches to the next
loss, though most losses leave other tasks as they are; what a plan is worth after so many has been decided anew."""

MOST_STEPS = 64
"""Losses and returns in one future that are followed: several times as many as a horizon usually has."""

MOST_AWAY = 64
"""Nodes that may come back in a future: those that were lost last, which are the likeliest."""

SUSPECT = 3.0
"""A node is suspect whose own rate of losses, at its age or later, is so many times that of all nodes: after three
losses at one age, since the prior counts as one, and time passes. Two may be chance, or have one cause."""

MOST_SUSPECTS = 8
"""Suspect nodes that are drawn one by one, the most suspect first; the others count as usual nodes."""


class Away(NamedTuple):
    """A node that may come back. ``age_s``: how long it is away."""

    name: str
    workers: int
    age_s: float


class Suspect(NamedTuple):
    """A usable node with rates of losses of its own, by age (``durations.rates_per_s``). ``age_s``: since it joined."""

    age_s: float
    rates_per_s: tuple[float, ...]


class Prospect(NamedTuple):
    """What futures of a pool are drawn from.

    Attributes:
        nodes: usable nodes that are not suspect.
        node_workers: workers of a usual node.
        loss_per_s: rate at which each of ``nodes`` is lost.
        suspects: usable nodes with rates of their own.
        away: nodes that may come back, the latest first.
        return_per_s: rates of returns by age.
        running_s: expected time to the next loss, D_running before it is rounded to its grid.
        horizon_s: how far futures reach.
    """

    nodes: int
    node_workers: int
    loss_per_s: float
    suspects: tuple[Suspect, ...]
    away: tuple[Away, ...]
    return_per_s: tuple[float, ...]
    running_s: float
    horizon_s: float


class Step(NamedTuple):
    """A node is lost or comes back. ``workers``: below 0 where it is lost. ``place``: which one it is, in (0, 1)."""

    at_s: float
    workers: int
    place: float


def prospect(state: State, pool: str, at: datetime) -> Prospect | None:
    """Return what futures of a pool are drawn from; None if no node of it is usable. ``pool``: empty: all workers."""
    mine = [node for node in state.nodes.values() if pool in ("", node.hardware)]
    usable = [node for node in mine if node.usable]
    if not usable:
        return None
    loss_per_s = 1.0 / node_mtbf_s(state, at)
    suspects = _suspects(usable, at, loss_per_s)
    sizes = Counter(len(node.workers) for node in usable)
    repairs = state.repairs
    for node in state.nodes.values():
        if node.lost_at is not None and not node.injected:
            repairs = repairs.with_one((at - node.lost_at).total_seconds(), ended=False)
    away = [
        Away(node.name, len(node.workers), max(0.0, (at - node.lost_at).total_seconds()))
        for node in mine
        if node.lost_at is not None and not node.usable and not node.cordoned
    ]
    running_s = 1.0 / (loss_per_s * len(usable))
    return Prospect(
        nodes=len(usable) - len(suspects),
        node_workers=max(sizes, key=lambda size: (sizes[size], size)),
        loss_per_s=loss_per_s,
        suspects=suspects,
        away=tuple(sorted(away, key=lambda node: (node.age_s, node.name))[:MOST_AWAY]),
        return_per_s=rates_per_s(repairs, state.parameter("repair_prior_s")),
        running_s=running_s,
        horizon_s=HORIZON_FAILURES * running_s,
    )


def _suspects(usable: Sequence[Node], at: datetime, loss_per_s: float) -> tuple[Suspect, ...]:
    """Return the usable nodes that are likelier to be lost than others, the likeliest first."""
    found = []
    for node in usable:
        if node.lives is None:
            continue
        age_s = max(0.0, (at - node.since).total_seconds())
        rates = loss_rates_per_s(node.lives.with_one(age_s, ended=False), 1.0 / loss_per_s)
        highest = max(rates[bin_of(age_s) :])
        if highest >= SUSPECT * loss_per_s:
            found.append((-highest, node.name, Suspect(age_s, rates)))
    return tuple(suspect for _, _, suspect in sorted(found)[:MOST_SUSPECTS])


class Future(NamedTuple):
    """What may happen. ``steps``: losses and returns up to the horizon, by time. ``returns_s``: of each node away."""

    steps: list[Step]
    returns_s: list[float]


def futures(known: Prospect, seed: int, number: int, place: int) -> list[Future]:
    """Return as many futures. ``place``: of the pool among all pools; each has other futures.

    The next loss and the returns of the nodes away matter most, and their times are stratified over the futures.
    """
    first = place * (number + MOST_AWAY + 1)
    columns = [stratified(seed, first + number + i, number) for i in range(len(known.away) + 1)]
    return [_future(known, Draws(seed, first + i), [column[i] for column in columns]) for i in range(number)]


def _future(known: Prospect, draws: Draws, hazards: Sequence[float]) -> Future:
    """Return one future. ``hazards``: exponential draws for the next loss, and for the return of each node away."""
    # Entries are (time, number, workers): the number makes them differ, so that nothing else is compared.
    entries: list[tuple[float, int, int]] = []
    for node, hazard in zip(known.away, hazards[1:], strict=True):
        entries.append((remaining_s(known.return_per_s, node.age_s, hazard), len(entries), node.workers))
    returns_s = [at_s for at_s, _, _ in entries]
    for suspect in known.suspects:
        left_s = remaining_s(suspect.rates_per_s, suspect.age_s, draws.exponential())
        entries.append((left_s, len(entries), -known.node_workers))
    heapq.heapify(entries)
    number = len(entries)
    nodes, now_s = known.nodes, 0.0
    until_loss = hazards[0]  # in units of the rate of all nodes together, which changes with their number
    steps: list[Step] = []
    while len(steps) < MOST_STEPS:
        rate = known.loss_per_s * nodes
        loss_s = now_s + until_loss / rate if rate > 0.0 else known.horizon_s
        at_s = min(loss_s, entries[0][0]) if entries else loss_s
        if at_s >= known.horizon_s:
            break
        until_loss -= rate * (at_s - now_s)
        now_s = at_s
        if at_s == loss_s:
            workers, until_loss = -known.node_workers, draws.exponential()
            nodes -= 1
        else:
            _, _, workers = heapq.heappop(entries)
            nodes += 1 if workers > 0 else 0
        if workers < 0:
            back_s = at_s + remaining_s(known.return_per_s, 0.0, draws.exponential())
            heapq.heappush(entries, (back_s, number, known.node_workers))
            number += 1
        steps.append(Step(at_s, workers, draws.uniform()))
    return Future(steps, returns_s)
