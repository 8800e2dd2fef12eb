"""Profiles of hardware: data-sheet numbers of a worker and its links, each with its source, from ``hardware.json``."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from shared.errors import InvalidInput


class Hardware(NamedTuple):
    """One kind of worker in one kind of node. Bandwidths are per worker and in one direction.

    Attributes:
        name: name of the profile.
        stack: training software of such workers, a key of ``calibration.json``.
        peak_flop_per_s: rate of dense 16-bit matrix products.
        sustained_fraction: share of the peak that a large square product reaches for long; clocks fall under the power
            limit.
        multiprocessors: units to which the tiles of a product are distributed.
        memory_bytes: device memory.
        memory_bytes_per_s: bandwidth of the device memory.
        intra_bytes_per_s: bandwidth between workers of a node.
        intra_latency_s: latency of one hop of a collective inside a node.
        inter_bytes_per_s: bandwidth between nodes, a worker's share of the network cards.
        inter_latency_s: latency of one hop of a collective between nodes.
        workers_per_node: workers of one node.
    """

    name: str
    stack: str
    peak_flop_per_s: float
    sustained_fraction: float
    multiprocessors: int
    memory_bytes: float
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    intra_latency_s: float
    inter_bytes_per_s: float
    inter_latency_s: float
    workers_per_node: int


NUMBERS = tuple(field for field in Hardware._fields if field not in ("name", "stack"))
"""The fields of a profile that are numbers, which a measurement may replace."""


@cache
def _profiles() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("hardware.json").read_text(encoding="utf-8")
    profiles: dict[str, dict[str, Any]] = json.loads(text)
    return profiles


def names() -> list[str]:
    """Return the names of the profiles."""
    return list(_profiles())


def sources(name: str) -> dict[str, str]:
    """Return the source of each number of a profile."""
    profile(name)
    return dict(_profiles()[name]["sources"])


@cache
def profile(name: str) -> Hardware:
    """Return the profile of that name.

    Raises:
        InvalidInput: no such profile.
    """
    if name not in _profiles():
        problem = f"unknown; known: {', '.join(names())}"
        raise InvalidInput.of("hardware", name, problem, f"hardware: {name!r} is {problem}")
    fields = _profiles()[name]
    return Hardware(name=name, **{field: fields[field] for field in Hardware._fields if field != "name"})


def measured(base: Hardware, **numbers: float) -> Hardware:
    """Return ``base`` with measured numbers in place of its own, for workers that no data sheet describes.

    Raises:
        InvalidInput: an unknown field, or a number that is not finite and positive.
    """
    for field, value in numbers.items():
        problem = ""
        if field not in NUMBERS:
            problem = f"unknown; known: {', '.join(NUMBERS)}"
        elif not (math.isfinite(value) and value > 0):
            problem = "must be finite and above 0"
        if problem:
            raise InvalidInput.of(field, repr(value), problem, f"{field}: {problem}")
    return base._replace(**numbers)  # type: ignore[arg-type]
