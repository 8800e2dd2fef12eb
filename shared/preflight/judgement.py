"""The judgement of what a preflight has measured: which rates are slow, and so whether the node is refused. Pure.

A rate is compared with the published one of the hardware, where there is one (``published.py``), and else with the
median of the nodes of this cluster that are alike. Where there are too few of these, it is only reported.

An all-reduce with a neighbour is slow if either of the two is. So the best of a node's neighbours counts, and a node is
slow only if it is so with two of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from shared.events.measurements import NEIGHBOUR, Measurement, Quantity, Rate, Verdict
from shared.preflight.published import published
from shared.text import amount

LEAST_LIKE = 3
"""Other nodes that are alike, from which their median counts: of three, one that is slow does not move it."""

_FAST_ENOUGH: dict[Quantity, float] = {
    "processor matrix products": 0.5,
    "host memory": 0.5,
    "disk write": 0.25,
    "disk read": 0.25,
}
"""Parts of the expected rate below which a node is slow, for quantities of the host. Other programs share processor,
memory and disk with the ranks, and a disk's rate varies by a factor of two with what it has just done. Ranks compute on
the devices, and write to the disk beside their steps: only what is broken should count."""

FAST_ENOUGH = 0.7
"""The part for all other quantities. Equal devices differ by 8% and at most 22% (Sinha et al., "Not All GPUs Are
Created Equal", SC22), so no whole device is below. Of a synchronous step all ranks wait for the slowest one: at 0.7 of
the rate of its peers it makes theirs last 1.4 times as long."""


class Judgement(NamedTuple):
    """What comes of a measurement.

    Attributes:
        verdict: whether the node is slow.
        rates: what was measured, each with its bound.
        reason: the rates that are slow, or else why the node is not accepted; empty: it is.
    """

    verdict: Verdict
    rates: list[Rate]
    reason: str


def judge(measured: Measurement, others: Iterable[Measurement]) -> Judgement:
    """Judge a measurement beside the newest ones of the other nodes."""
    alike = [other for other in others if other.is_like(measured)]
    rates = _with_neighbours([_judged(rate, measured, alike) for rate in measured.rates])
    slow = [str(rate) for rate in rates if rate.is_slow]
    if slow:
        return Judgement("refused", rates, "; ".join(slow))
    if any(rate.bound is not None for rate in rates):
        return Judgement("accepted", rates, "")
    if not rates:
        return Judgement("reported", rates, "; ".join(measured.problems) or "nothing was measured")
    return Judgement("reported", rates, rates[0].basis)


def _judged(rate: Rate, measured: Measurement, alike: list[Measurement]) -> Rate:
    """Return a rate with its bound, and with what the bound follows from."""
    part = _FAST_ENOUGH.get(rate.quantity, FAST_ENOUGH)
    if (known := published(rate.quantity, measured)) is not None:
        return _with_bound(rate, part * known.value, f"{part:g} of {known.source}")
    stands_for_all = max if rate.quantity == NEIGHBOUR else median
    typical = [stands_for_all(found) for other in alike if (found := _values(other, rate.quantity))]
    if len(typical) < LEAST_LIKE:
        few = f"nothing is published, and {len(typical)} of {LEAST_LIKE} nodes that are alike are known"
        return _with_bound(rate, None, few)
    usual = median(typical)
    basis = f"{part:g} of {amount(usual, rate.unit)}, the median of {len(typical)} nodes with {measured}"
    return _with_bound(rate, part * usual, basis)


def _with_neighbours(rates: list[Rate]) -> list[Rate]:
    """Return rates of which those with neighbours are slow only if all of them are, and these are several."""
    among = [rate for rate in rates if rate.quantity == NEIGHBOUR]
    slow = [rate for rate in among if rate.is_slow]
    if len({rate.peer for rate in slow}) > 1 and len(slow) == len(among):
        return rates
    why = "another one is fast" if len(slow) < len(among) else "one neighbour does not say which of the two is slow"
    return [_with_bound(rate, None, f"{rate.basis}: slow, but {why}") if rate in slow else rate for rate in rates]


def _with_bound(rate: Rate, bound: float | None, basis: str) -> Rate:
    return rate.model_copy(update={"bound": bound, "basis": basis})


def _values(measured: Measurement, quantity: Quantity) -> list[float]:
    return [rate.value for rate in measured.rates if rate.quantity == quantity]
