"""Rates over time, as points at which they change, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.outcome import Outcome, WafPoint
from simulator.workloads.trace import Trace


def steps(points: Sequence[WafPoint], horizon_s: float) -> tuple[list[float], list[float]]:
    """Return the times and the rates of a step function from 0 to the horizon; each rate holds until the next time.

    The rate is 0 before the first point. The last time is the horizon, with the rate that holds there.
    """
    times, rates = [0.0], [0.0]
    for at_s, rate in points:
        if at_s > horizon_s:
            break
        if at_s <= times[-1]:
            rates[-1] = rate
        else:
            times.append(at_s)
            rates.append(rate)
    if times[-1] < horizon_s:
        times.append(horizon_s)
        rates.append(rates[-1])
    return times, rates


def accumulated(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Return times and the weighted FLOP done until then; between two times they grow evenly.

    Computed work counts here when it is done. What a recovery throws away is therefore too much in the curve, and the
    curve is scaled to end at what remains (``accumulated_waf_flop``).
    """
    times, rates = steps(outcome.waf, outcome.horizon_s)
    done = [0.0]
    for began_s, ended_s, rate in zip(times, times[1:], rates, strict=False):
        done.append(done[-1] + (ended_s - began_s) * rate)
    scale = outcome.accumulated_waf_flop / done[-1] if done[-1] else 0.0
    return times, [flop * scale for flop in done]


def absences(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """Return by node of a trace the times in which it is not there, as (from, to)."""
    away_from = dict.fromkeys(trace.nodes[trace.present :], 0.0)
    found: dict[str, list[tuple[float, float]]] = {node: [] for node in trace.nodes}
    for each in trace.occurrences:
        if each.change == "down":
            away_from.setdefault(each.node, each.at_s)
        elif each.change == "up" and each.node in away_from:
            found[each.node].append((away_from.pop(each.node), each.at_s))
    for node, began_s in away_from.items():
        found[node].append((began_s, trace.horizon_s))
    return found
