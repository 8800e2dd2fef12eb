"""What the paper reports of its evaluation, as far as it is known (``simulator/data/unicron_evaluation.csv``)."""

from __future__ import annotations

from typing import NamedTuple

from simulator import published

TITLES = {"Megatron": "megatron", "Bamboo": "bamboo", "Oobleck": "oobleck", "Varuna": "varuna"}
"""Systems as the paper names them, and their policies."""


class PublishedRatio(NamedTuple):
    """Accumulated WAF of Unicron over that of another system. ``known``: ``read``, or ``recalled`` and not compared."""

    trace: str
    policy: str
    ratio: float
    known: str


def published_ratios() -> list[PublishedRatio]:
    """Return the ratios of the paper's overall comparison, trace by trace.

    A row has one system and its ratio, or several of both, divided by slashes.
    """
    return [
        PublishedRatio(row.item.removeprefix("overall "), TITLES[title], float(value), row.known)
        for row in published.rows()
        if row.item.startswith("overall ")
        for title, value in zip(row.key.removeprefix("Unicron over ").split(" / "), row.value.split(" / "), strict=True)
    ]
