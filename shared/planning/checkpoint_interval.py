"""How long to train between two checkpoints.

A checkpoint costs time each time, and a failure costs what was done since the newest one. Young (Communications of the
ACM 17, 1974): the sum is least at the square root of 2 x cost x mean time between failures. Daly (Future Generation
Computer Systems 22, 2006, equation 37) corrects that where checkpoints are not cheap.

Copies in memory are a second level (Moody et al., SC 2010): most failures never read a checkpoint from storage. Only
failures that lose the copies, too, count for storage. These are rarer by the probability that a second node, which has
the copy, is lost before the copy is made again.
"""

from __future__ import annotations

from math import sqrt

from shared.errors import InvalidInput


def interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time to train between two checkpoints, seconds, without the checkpoint itself (Daly, equation 37).

        sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C   for C < 2 M, else M

    Args:
        cost_s: C, the time for which training stops for a checkpoint.
        mtbf_s: M, mean time between the failures after which the newest checkpoint is read.

    Raises:
        InvalidInput: a time is not positive.
    """
    for name, value in (("cost_s", cost_s), ("mtbf_s", mtbf_s)):
        if not value > 0.0:
            raise InvalidInput(f"{name}: {value}; a time above 0 is allowed")
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    half = cost_s / (2.0 * mtbf_s)
    return sqrt(2.0 * cost_s * mtbf_s) * (1.0 + sqrt(half) / 3.0 + half / 9.0) - cost_s


def uncovered_mtbf_s(node_mtbf_s: float, nodes: int, copies: int, window_s: float) -> float:
    """Return the mean time between losses that copies in memory do not cover, seconds.

    One of a task's nodes is lost ``nodes`` times as often as a single one. Each copy of the task's state is on one
    other node, which is lost within the window with probability ``window_s / node_mtbf_s`` (small, and independent).

    Args:
        node_mtbf_s: mean time between losses of one node.
        nodes: nodes of the task.
        copies: number of copies of each part of its state, beside the one that is used; 0: every loss reads the
            checkpoint.
        window_s: the time from a loss until all copies are made again.
    """
    mtbf_s = node_mtbf_s / max(1, nodes)
    for _ in range(copies):
        mtbf_s = mtbf_s * max(1.0, node_mtbf_s / window_s)
    return mtbf_s
