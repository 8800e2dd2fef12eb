"""Of which workers a task has files (output, metrics), and on which nodes, as the log knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.api.store.readers import ViewReader
from services.api.store.tables import NODES, PLANS, TASKS
from shared.names import is_name


@dataclass(frozen=True)
class FileOwners:
    """The workers whose files are read.

    ``workers``: on which processes of the task may have run. ``trained``: those of them that have trained, which have
    surely left files. ``states``: of the nodes, by name.
    """

    workers: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()
    states: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes of the workers."""
        return frozenset(node_of(worker) for worker in self.workers)

    def after(self, earlier: FileOwners) -> FileOwners:
        """Return whose files are read from now on: a process that was followed is followed to its end."""
        return FileOwners(self.workers | earlier.workers, self.trained | earlier.trained, self.states)

    def on(self, node: str) -> list[str]:
        """Return the workers on a node, in order."""
        return sorted(worker for worker in self.workers if node_of(worker) == node)


def node_of(worker: str) -> str:
    """Return the node of a worker."""
    return worker.rpartition("/")[0]


def file_owners(views: ViewReader, task: str, rank: int | None, *, history: bool) -> FileOwners:
    """Return of which workers a task has files.

    Args:
        views: of one moment.
        task: its name.
        rank: only the worker of this rank; None: all workers.
        history: whether to include the workers of all earlier plans.
    """
    view = views.find(TASKS, task)
    states = {node.name: node.state for node in views.page(NODES)}
    members = {member.worker for member in view.members if rank is None or member.rank == rank}
    workers, trained = {*members}, {*members}
    if rank is None:
        workers |= {*view.planned}
    if rank is None and history:
        for plan in views.page(PLANS, task=task):
            for milestone in plan.milestones:
                if milestone.task == task:
                    trained |= milestone.sources.keys()
            if task in plan.impacts:
                workers |= {*plan.impacts[task].before, *plan.impacts[task].after}
    # A log of an early version may have other names, which no agent has.
    named = frozenset(worker for worker in workers | trained if is_name(node_of(worker)))
    return FileOwners(named, frozenset(trained) & named, states)
