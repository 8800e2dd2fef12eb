"""Why training terminates: the causes of the Unicron paper's figure 1, from which generated traces draw theirs.

The table is ``data/unicron_fig1_table1.csv``; its severities are those of the paper's table 1.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from shared.events.severities import ErrorKind, Severity

KINDS: dict[str, ErrorKind] = {
    "NCCL timeout": ErrorKind.COLLECTIVE_TIMEOUT,
    "other network errors": ErrorKind.CONNECTION,
    "link flapping": ErrorKind.COLLECTIVE_TIMEOUT,
    "others": ErrorKind.EXCEPTION,
    "task hang": ErrorKind.HANG,
    "illegal memory access": ErrorKind.EXCEPTION,
    "connection refused": ErrorKind.CONNECTION,
    "CUDA errors": ErrorKind.EXCEPTION,
    "connection reset": ErrorKind.CONNECTION,
}
"""Cause -> kind of error, of the causes that are lighter than the loss of a node.

A flapping link shows as a collective that does not end: the paper finds both by online statistics. ``others`` have no
severity in the figure; they count as other software errors, SEV2, of which its table 1 has a row.
"""


class Cause(NamedTuple):
    """A row of the figure. ``share``: of all failures, 0 to 1; the shares add up to 1 but for rounding."""

    name: str
    share: float
    severity: Severity
    kind: ErrorKind | None
    """The kind of a lighter failure; None: the node is lost."""


@cache
def causes() -> tuple[Cause, ...]:
    """Return the causes, in the order of the figure."""
    text = files("simulator").joinpath("data/unicron_fig1_table1.csv").read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        severity = Severity(row["severity"]) if row["severity"] else Severity.SEV2
        found.append(Cause(row["cause"], float(row["pct_of_failures"]) / 100, severity, KINDS.get(row["cause"])))
    return tuple(found)


def node_losses() -> dict[str, float]:
    """Return cause -> share of the causes that take the node (SEV1)."""
    return {cause.name: cause.share for cause in causes() if cause.kind is None}


def lighter() -> dict[Cause, float]:
    """Return cause -> share of the causes that leave the node (SEV2 and SEV3)."""
    return {cause: cause.share for cause in causes() if cause.kind is not None}
