"""The parameter groups of an optimizer, the same on all ranks, and their numbers, by group.

The ranks of a divided model may have different groups: a pipeline stage without embeddings has no group for Megatron's
``decoupled_lr``. Megatron gathers the keys of all ranks' groups when it builds an optimizer, and gives each rank empty
groups for those that it lacks, which schedulers follow as the others. Here a rank builds without its peers
(``unicron.megatron.construction``), so the members of a generation tell each other afterwards.

A group is known by its numbers as ``build`` has set them; groups with equal numbers are told apart by their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unicron.megatron.optimizer import OF_PEERS, torch_optimizers
from unicron.state import user_values

Groups = list[dict[str, dict[str, Any]]]
"""A group's identity -> its values, for each torch optimizer."""


class OptimizerGroups:
    """The groups of one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        """Take the groups as ``build`` has made them."""
        self._optimizers = torch_optimizers(optimizer)
        self._built = [[user_values.numbers_of(group) for group in one.param_groups] for one in self._optimizers]
        self._identities = [_identities(numbers) for numbers in self._built]

    def plain(self) -> Groups:
        """Return what other ranks need to know of the groups: values without tensors."""
        return [
            {
                identity: {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
                | built
                for identity, built, group in zip(identities, of_one, one.param_groups, strict=True)
            }
            for identities, of_one, one in zip(self._identities, self._built, self._optimizers, strict=True)
        ]

    def align(self, of_ranks: Iterable[Groups]) -> None:
        """Add an empty group for each that other ranks have and this one lacks.

        Args:
            of_ranks: the ``plain`` groups of all ranks.
        """
        for listed in of_ranks:
            for number, groups in enumerate(listed[: len(self._optimizers)]):
                for identity, values in groups.items():
                    if identity not in self._identities[number]:
                        added = {"params": [], OF_PEERS: True, **{k: _restored(v) for k, v in values.items()}}
                        self._optimizers[number].param_groups.append(added)
                        self._identities[number].append(identity)
                        self._built[number].append(user_values.numbers_of(added))

    def numbers(self) -> Groups:
        """Return the numbers that the groups have now."""
        return [
            {
                identity: user_values.numbers_of(group)
                for identity, group in sorted(zip(identities, one.param_groups, strict=True), key=lambda pair: pair[0])
            }
            for identities, one in zip(self._identities, self._optimizers, strict=True)
        ]

    def fitting(self, saved: Any) -> list[list[Mapping[str, Any]]] | None:
        """Return saved numbers in the order of these groups; None: they belong to an optimizer with other groups.

        Args:
            saved: what ``numbers`` returned, of any rank; or, of an early version, numbers in the order of the groups.
        """
        if len(saved) != len(self._optimizers):
            return None
        found = []
        for identities, groups in zip(self._identities, saved, strict=True):
            if isinstance(groups, dict) and groups.keys() >= set(identities):
                found.append([groups[identity] for identity in identities])
            elif len(groups) == len(identities):
                # If the hyperparameters of ``build`` are others, the groups are those in the same place.
                values = list(groups.values()) if isinstance(groups, dict) else list(groups)
                order = sorted(identities) if isinstance(groups, dict) else identities
                found.append([values[order.index(identity)] for identity in identities])
            else:
                return None
        return found

    def set(self, numbers: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Set the numbers of the groups, in their order."""
        for one, groups in zip(self._optimizers, numbers, strict=True):
            for group, values in zip(one.param_groups, groups, strict=True):
                user_values.set_numbers(group, values)

    def rebuild(self) -> None:
        """Set the numbers that ``build`` has set."""
        self.set(self._built)


def _identities(built: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that tell groups apart, in their order."""
    texts = [json.dumps(numbers, sort_keys=True) for numbers in built]
    return [f"{text} {texts[:place].count(text)}" for place, text in enumerate(texts)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None)


def _restored(value: Any) -> Any:
    """Return a value of a group in a form that can be a key: several numbers become a tuple."""
    return tuple(value) if isinstance(value, list) else value
