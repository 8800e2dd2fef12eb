"""The lost workers that a node's ranks have to know of when they are held.

A rank goes on with its micro-batches in a hold if some rank of its generation is lost, and none of its own replica
(``unicron.link.sparing``). So a node is told the lost workers of its own ranks' replicas, and one lost worker beside
them. All of them would be a text that grows with the cluster, for each of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.events.plans import Stage


class _Losses(NamedTuple):
    """What is lost of one stage.

    ``replicas``: worker -> its data-parallel replica. ``broken``: replica -> its lost workers. ``first``: one of them.
    """

    replicas: dict[str, int]
    broken: dict[int, list[str]]
    first: str


class LostPeers:
    """The lost workers of a task.

    Args:
        lost: all of them, sorted.
        stages: those in which the task's ranks may be; none: it is not known, and each node is told all of them.
    """

    def __init__(self, lost: Sequence[str], stages: Iterable[Stage]) -> None:
        self._lost = list(lost)
        self._stages: list[_Losses] = []
        for stage in stages:
            tensor, data = stage.layout.tensor, stage.layout.data
            replicas = {member.worker: member.rank // tensor % data for member in stage.members}
            members = [worker for worker in lost if worker in replicas]
            broken: dict[int, list[str]] = {}
            for worker in members:
                broken.setdefault(replicas[worker], []).append(worker)
            if members:
                self._stages.append(_Losses(replicas, broken, members[0]))

    def of(self, workers: Iterable[str]) -> list[str]:
        """Return the lost workers of which these workers' ranks have to know, sorted."""
        if not self._stages:
            return self._lost
        found = {losses.first for losses in self._stages}
        for worker in workers:
            for losses in self._stages:
                found.update(losses.broken.get(losses.replicas.get(worker, -1), ()))
        return sorted(found)
