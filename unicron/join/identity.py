"""What a member of a generation is, beside its state: its code, settings, data and library versions. Pure.

A newcomer is not trusted to be what the survivors are: somebody may have edited the script, or what it reads, while it
trained. So all members are compared before a newcomer takes part (``unicron.join.comparison``), and each evaluates the
functions here on the same values, so that all agree on who differs in what.

An identity is text by field. A field is ``<kind>/<name>``, and the kinds are

    code       a file of the script's own, by its module's name: the script, and what it imports
    setting    a setting of the task, as this process uses it
    data       the task's data: its size, and a hash of its index or of samples
    version    of a library that computes
    optimizer  a hyperparameter, as the next update uses it
    parameter  values of the model
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

KINDS = ("code", "setting", "data", "version", "optimizer", "parameter")
"""The kinds of fields, in the order in which differences are told: a difference further down follows from one above."""

REPORTED = 5
"""Most differences that an error lists; the error says how many further ones there are."""

RECORDED = 1000
"""Most fields that the log has of a task: some 80 KB, where a message of NATS has 1 MB. If a repository has more
modules, a part of them is recorded."""

Identity = Mapping[str, str]
"""Field -> value."""


class Difference(NamedTuple):
    """A field in which a member is not what the others are."""

    field: str
    own: str
    expected: str
    """What the survivors have; without a survivor, what the log has recorded, or else what most members have."""

    def text(self, own: str, others: str) -> str:
        """Return the difference in words, with both values and where each is."""
        kind, _, name = self.field.partition("/")
        return f"{kind}: {name} is {self.own} {own} and {self.expected} {others}"


def digest(identity: Identity) -> int:
    """Return a number that differs where identities do; it fits a signed integer of 64 bits."""
    text = "\0".join(f"{name}\0{identity[name]}" for name in sorted(identity))
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8], "little") >> 1


def recordable(identity: Identity) -> dict[str, str]:
    """Return the part of an identity that the log is to have: all of it, or else as many files of code as fit."""
    ordered = sorted(identity, key=lambda name: (name.startswith("code/"), name))
    return {name: identity[name] for name in ordered[:RECORDED]}


def differing(
    identities: Sequence[Identity], proven: Collection[int], recorded: Identity, *, judged: Collection[int]
) -> dict[int, list[Difference]]:
    """Return the members that are not what the others are, with all that differs.

    The values of the lowest proven member count. Without a proven member those that the log has recorded count, and
    else those that most members have (of the lowest member, if equally many have others). Members are compared in the
    fields that they have in common: a member that has trained may have imported more than a new one.

    Args:
        identities: those of all members, by rank.
        proven: the ranks that have trained: they have been compared before.
        recorded: what the log has of the task; empty: nothing.
        judged: the ranks that may be told to leave.
    """
    found: dict[int, list[Difference]] = {}
    fields = {name for identity in identities for name in identity}
    for name in sorted(fields, key=lambda name: (_place(name), name)):
        having = [rank for rank, identity in enumerate(identities) if name in identity]
        expected = _expected(name, identities, [r for r in having if r in proven], having, recorded)
        for rank in having:
            if rank in judged and identities[rank][name] != expected:
                found.setdefault(rank, []).append(Difference(name, identities[rank][name], expected))
    return found


def _place(field: str) -> int:
    kind = field.partition("/")[0]
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _expected(
    name: str, identities: Sequence[Identity], proven: Sequence[int], having: Sequence[int], recorded: Identity
) -> str:
    """Return the value that counts."""
    if proven:
        return identities[proven[0]][name]
    if name in recorded:
        return recorded[name]
    counted = Counter(identities[rank][name] for rank in having)  # among equals the first comes first: the lowest rank
    return counted.most_common(1)[0][0]


def described(differences: Sequence[Difference], own: str, others: str) -> str:
    """Return differences in words, with both values of each.

    Args:
        differences: at least one.
        own: where the member's own values are, with a preposition: ``here``.
        others: where the expected ones are: ``on rank 0``.
    """
    texts = [one.text(own, others) for one in differences[:REPORTED]]
    if len(differences) > REPORTED:
        texts.append(f"and {len(differences) - REPORTED} more")
    return "; ".join(texts)


def signature(differences: Sequence[Difference]) -> str:
    """Return a text that is equal for two members that differ in the same way, whatever their step.

    A hyperparameter may change with every step, and parameters do: for these only the first field counts. For all
    others the value counts too: a file that was edited twice is another difference.
    """
    first = differences[0]
    kind = first.field.partition("/")[0]
    return first.field if kind in ("optimizer", "parameter") else f"{first.field}={first.own}"
