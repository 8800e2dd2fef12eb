"""Generated traces: those of the Unicron paper's evaluation, and others by the same method.

Of the paper's traces the numbers of failures are known (``data/unicron_evaluation.csv``), the times are not. So the
numbers are fixed, and the seed draws times (a Poisson process, given its number of events), nodes (each node that is
there is as probable) and causes (figure 1, ``failure_mix``).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from shared.errors import InvalidInput
from simulator.workloads import failure_mix
from simulator.workloads.draws import Draws
from simulator.workloads.trace import Occurrence, Trace

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
WEEK_S = 7 * DAY_S

PAPER_NODES = 16
"""Nodes of the paper's cluster, of 8 A800 each (``data/unicron_evaluation.csv``, recalled)."""

MAX_NODES = 100_000
"""Most nodes of a generated trace: far above any real cluster, so that a slip is refused."""


class Failures(NamedTuple):
    """What a generated trace has.

    Attributes:
        nodes: number of nodes, all present at the start.
        horizon_s: length.
        losses: number of SEV1 failures, each the loss of a node.
        lighter: number of SEV2 and SEV3 failures.
        repair_s: least and greatest time for which a lost node is away, uniformly distributed; None: nodes return as
            often as they are lost, in a Poisson process of their own, the one that is away longest first.
    """

    nodes: int
    horizon_s: float
    losses: int
    lighter: int
    repair_s: tuple[float, float] | None


TRACE_A = Failures(PAPER_NODES, 8 * WEEK_S, 10, 33, (1 * DAY_S, 7 * DAY_S))
"""trace-a: 8 weeks, 10 SEV1 and 33 lighter failures, repair within 1 to 7 days (recalled)."""

TRACE_B = Failures(PAPER_NODES, WEEK_S, 26, 80, None)
"""trace-b: 7 days at 20 times the rate, 26 SEV1 and 80 lighter failures; nodes return at a similar rate (recalled).

On average 2.6 nodes are away (50 seeds). The other reading is ``TRACE_B_REPAIRED``."""

TRACE_B_REPAIRED = TRACE_B._replace(repair_s=(1.2 * HOUR_S, 8.4 * HOUR_S))
"""trace-b if "a similar rate" means that repairs are 20 times as fast as in trace-a: on average 0.7 nodes are away."""

FIG3 = Failures(8, WEEK_S, 10, 0, (1.5 * HOUR_S, 10.5 * HOUR_S))
"""Figure 3: 64 GPUs, 7 days, 10 node faults (read). The repair time is not known. Assumed: that of trace-a over 16, by
which the rate of losses per node is higher than there."""

SHORT_OUTAGES = Failures(PAPER_NODES, WEEK_S, 26, 80, (2 * 60.0, 30 * 60.0))
"""Not of the paper: the failures of trace-b, where lost nodes are back after 2 to 30 minutes, as after a reboot."""

SOURCE = "Unicron (arXiv 2401.00134), section 7"


def trace_a(seed: int, nodes: int = PAPER_NODES) -> Trace:
    """Return trace-a; on another number of nodes with the same rates per node, rounded to whole failures.

    Raises:
        InvalidInput: ``nodes`` is not from 1 to ``MAX_NODES``.
    """
    _check_nodes(nodes)
    scaled = TRACE_A._replace(
        nodes=nodes,
        losses=round(TRACE_A.losses * nodes / PAPER_NODES),
        lighter=round(TRACE_A.lighter * nodes / PAPER_NODES),
    )
    return generated("trace-a", scaled, seed, source=f"{SOURCE}, trace-a")


def trace_b(seed: int, failures: Failures = TRACE_B) -> Trace:
    """Return trace-b. ``failures``: ``TRACE_B``, or its other reading, ``TRACE_B_REPAIRED``, with the same losses."""
    return generated("trace-b", failures, seed, source=f"{SOURCE}, trace-b")


def fig3(seed: int) -> Trace:
    """Return the node faults of figure 3."""
    return generated("fig3", FIG3, seed, source="Unicron (arXiv 2401.00134), figure 3")


def short_outages(seed: int) -> Trace:
    """Return a trace whose lost nodes are back within minutes."""
    return generated("short-outages", SHORT_OUTAGES, seed, source="trace-b, with nodes back after 2 to 30 minutes")


def generated(name: str, failures: Failures, seed: int, *, source: str = "") -> Trace:
    """Return a trace with these failures, drawn by ``seed``.

    A failure at a time at which no node is there does not happen: of so many failures per node that all are away, the
    trace has fewer. ``source`` gets the parameters and the seed.

    Raises:
        InvalidInput: ``nodes`` of the failures is not from 1 to ``MAX_NODES``.
    """
    _check_nodes(failures.nodes)
    nodes = node_names(failures.nodes)
    text = f"{source}; generated with seed {seed}: {failures.losses} losses, {failures.lighter} lighter failures"
    return Trace(
        name, nodes, len(nodes), tuple(_occurrences(name, failures, seed, nodes)), failures.horizon_s, text.lstrip("; ")
    )


def node_names(count: int) -> tuple[str, ...]:
    """Return names of nodes, of equal length so that they sort by number."""
    digits = len(str(count - 1))
    return tuple(f"n{number:0{digits}}" for number in range(count))


def _check_nodes(nodes: int) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise InvalidInput.of("nodes", nodes, f"must be from 1 to {MAX_NODES}")


def _occurrences(name: str, failures: Failures, seed: int, nodes: tuple[str, ...]) -> Iterator[Occurrence]:
    """Yield what happens, in order of time. Each kind of draw has a stream of its own."""
    of_losses, of_lighter, of_returns = (Draws(f"{name}/{part}", seed) for part in ("losses", "lighter", "returns"))
    waiting: list[tuple[float, int, str, str]] = []  # time, sequence number, what, node
    horizon_s, repair_s = failures.horizon_s, failures.repair_s
    for at_s in of_losses.times(failures.losses, horizon_s):
        heappush(waiting, (at_s, len(waiting), "loss", ""))
    for at_s in of_lighter.times(failures.lighter, horizon_s):
        heappush(waiting, (at_s, len(waiting), "lighter", ""))
    if repair_s is None:
        for at_s in of_returns.times(failures.losses, horizon_s):
            heappush(waiting, (at_s, len(waiting), "return", ""))
    present, away = list(nodes), list[str]()
    number = len(waiting)
    while waiting:
        at_s, _, what, node = heappop(waiting)
        if what == "return":
            node = node or (away[0] if away else "")
            if node:
                away.remove(node)
                insort(present, node)
                yield Occurrence(at_s, node, "up")
        elif present and what == "loss":
            lost = of_losses.one_of(present)
            present.remove(lost)
            away.append(lost)
            yield Occurrence(at_s, lost, "down", of_losses.weighted(failure_mix.node_losses()))
            if repair_s is not None and (back_s := round(at_s + of_returns.uniform(*repair_s), 3)) <= horizon_s:
                number += 1
                heappush(waiting, (back_s, number, "return", lost))
        elif present:
            cause = of_lighter.weighted(failure_mix.lighter())
            assert cause.kind is not None  # of lighter causes
            yield Occurrence(at_s, of_lighter.one_of(present), "error", cause.kind.value)
