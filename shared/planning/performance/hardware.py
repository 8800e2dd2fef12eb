"""What a worker and its links can do: data-sheet numbers, each with its source, in ``hardware.json``."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from shared.errors import InvalidInput


class Hardware(NamedTuple):
    """One kind of worker in one kind of node. Bandwidths are per worker and in one direction.

    ``peak_flop_per_s``: dense 16-bit matrix products. ``sustained_fraction``: share of it that a large square product
    reaches for long (clocks fall under the power limit). ``multiprocessors``: units that tiles of a product are dealt
    to. ``intra_``: between workers of a node; ``inter_``: between nodes, a worker's share of the network cards.
    Latencies are of one hop of a collective. ``stack``: the training software
    that such workers are run with, a key of ``calibration.json``.
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


@cache
def _profiles() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("hardware.json").read_text(encoding="utf-8")
    profiles: dict[str, dict[str, Any]] = json.loads(text)
    return profiles


def names() -> list[str]:
    """Names of the profiles."""
    return list(_profiles())


def sources(name: str) -> dict[str, str]:
    """Where each number of a profile comes from."""
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
        raise InvalidInput(
            f"hardware: {name!r} is {problem}", [{"field": "hardware", "value": name, "problem": problem}]
        )
    fields = _profiles()[name]
    return Hardware(name=name, **{field: fields[field] for field in Hardware._fields if field != "name"})


def measured(base: Hardware, **numbers: float) -> Hardware:
    """Return ``base`` with measured numbers in place of its own, for workers that no data sheet describes.

    Raises:
        InvalidInput: an unknown field, or a number that is not finite and positive.
    """
    for field, value in numbers.items():
        problem = ""
        if field not in Hardware._fields[2:]:
            problem = f"unknown; known: {', '.join(Hardware._fields[2:])}"
        elif not (math.isfinite(value) and value > 0):
            problem = "must be finite and above 0"
        if problem:
            raise InvalidInput(f"{field}: {problem}", [{"field": field, "value": repr(value), "problem": problem}])
    return base._replace(**numbers)  # type: ignore[arg-type]
