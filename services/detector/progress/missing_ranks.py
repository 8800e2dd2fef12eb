"""Which ranks are missing from which collective, from what torch's flight recorder has on each rank. Pure.

The ranks of a group enter its collectives in one order and count them. A collective that some ranks have entered and
that has not ended waits for the ranks whose count is lower. A rank that did not answer may be one of them. Sends and
receives count on the two ranks that they are between alone, so a group that has both could be misread; Megatron's have
either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from shared.events.evidence import MISSING_COLLECTIVES
from shared.messages.stacks import GroupRecord

Records = Mapping[int, Sequence[GroupRecord]]
"""Rank -> its groups, for the ranks that answered."""


def missing(records: Records) -> list[dict[str, Any]]:
    """Return, for each group, the oldest collective that has not ended and who is missing from it.

    Each is ``collective``, ``group``, ``sequence`` (its number in the group), ``entered`` (the ranks that wait in it),
    ``missing`` (ranks that have not entered it) and ``unknown`` (ranks of the group that did not answer). Where nobody
    is missing and all answered, all ranks have entered the collective, and it does not end. Collectives with missing
    ranks come first.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, GroupRecord]] = defaultdict(dict)
    for rank, own in records.items():
        for record in own:
            groups[record.group, tuple(record.ranks)][rank] = record
    found = [one for (name, ranks), answers in groups.items() if (one := _oldest(name, ranks, answers)) is not None]
    found.sort(key=lambda one: (not one["missing"], not one["unknown"], len(one["entered"]), one["group"]))
    return found[:MISSING_COLLECTIVES]


def _oldest(name: str, ranks: tuple[int, ...], answers: Mapping[int, GroupRecord]) -> dict[str, Any] | None:
    """Return the oldest collective of a group that waits for a rank; else the oldest that has not ended, if any."""
    waits: dict[int, str] = {}
    for answer in answers.values():
        waits.update({wait.sequence: wait.name for wait in answer.waits})
    described = [_described(name, ranks, answers, sequence, waits[sequence]) for sequence in sorted(waits)]
    return next((one for one in described if one["missing"]), described[0] if described else None)


def _described(
    name: str, ranks: tuple[int, ...], answers: Mapping[int, GroupRecord], sequence: int, operation: str
) -> dict[str, Any]:
    return {
        "collective": operation,
        "group": name,
        "sequence": sequence,
        "entered": sorted(r for r, one in answers.items() if any(wait.sequence == sequence for wait in one.waits)),
        "missing": sorted(r for r, one in answers.items() if one.entered < sequence),
        "unknown": sorted(set(ranks) - set(answers)),
    }
