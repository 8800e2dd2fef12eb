"""Runs of workers: a list of worker ids as short text, for the plans of the log.

    n0000/0-7,n0001/0-3,n0002/5

Workers of one node whose slots follow one another are a run. The order is kept, since the order of a stage's members is
that of their ranks. A list that such a text would not give back (slots that are no numbers) stays a list, so both forms
are read. The plan of a large cluster names thousands of workers, most of them whole nodes in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

MAX_RUN = 65_536
"""Most workers of one run: more than any node has. A damaged log must not fill the memory."""


def runs_of(workers: Sequence[str]) -> str | None:
    """Return the workers as text; None if the text would not say exactly these workers."""
    runs: list[str] = []
    first = last = following = ""
    for worker in workers:
        if worker != following:
            if first:
                runs.append(_run(first, last))
            first = worker
        last, following = worker, _following(worker)
        if not following:
            return None
    if first:
        runs.append(_run(first, last))
    return ",".join(runs)


def _run(first: str, last: str) -> str:
    """Return the text of a run, given its first and its last worker."""
    return first if first == last else f"{first}-{last.rpartition('/')[2]}"


def _following(worker: str) -> str:
    """Return the worker in the next slot of the same node; empty if a text of runs cannot have this worker."""
    node, _, slot = worker.rpartition("/")
    if not node or "," in node or not slot.isdecimal() or str(int(slot)) != slot:
        return ""
    return f"{node}/{int(slot) + 1}"


MAX_WORKERS = 1 << 20
"""Most workers of one text: more than any cluster has. A message of 1 MB could name thousands of millions."""


def workers_of(runs: str) -> list[str]:
    """Return the workers that a text says.

    Raises:
        ValueError: it is no such text, or says more than ``MAX_WORKERS``.
    """
    found: list[str] = []
    for run in runs.split(",") if runs else ():
        if len(found) > MAX_WORKERS:
            raise ValueError(f"more than {MAX_WORKERS} workers")
        node, _, slots = run.rpartition("/")
        if node and slots.isdecimal():
            found.append(run)
        else:
            found += _workers(run, node, slots)
    return found


def _workers(run: str, node: str, slots: str) -> list[str]:
    """Return the workers of a run of several."""
    first, _, last = slots.partition("-")
    if not node or not first.isdecimal() or not last.isdecimal():
        raise ValueError(f"{run!r} is neither <node>/<slot> nor <node>/<first>-<last>")
    numbers = range(int(first), int(last) + 1)
    if not 0 < len(numbers) <= MAX_RUN:
        raise ValueError(f"{run!r} has {len(numbers)} workers; allowed are 1 to {MAX_RUN}")
    return [f"{node}/{slot}" for slot in numbers]


def short_workers(workers: list[str]) -> str | list[str]:
    """Return the workers as text where that is possible; an empty list stays one."""
    return (runs_of(workers) or workers) if workers else workers


def full_workers(value: Any) -> Any:
    """Return the list of workers that ``short_workers`` has written; any other value as it is.

    Raises:
        ValueError: a text that is none of runs.
    """
    return workers_of(value) if isinstance(value, str) else value


class _Member(Protocol):
    """What is written of a member of a stage (``shared.events.plans.Member``)."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def worker(self) -> str:
        """Its worker."""

    @property
    def node(self) -> str:
        """The worker's node."""

    @property
    def source(self) -> str:
        """Where it has its state from."""


def short_members(members: Sequence[_Member]) -> list[dict[str, Any]]:
    """Return the members of a stage as groups of neighbours that have their state from the same source.

    A member's rank is its place, and its node that of its worker; other members are written one by one.
    """
    neighbours = groupby(members, key=lambda member: member.source)
    groups = [{"source": source, "workers": runs_of([m.worker for m in group])} for source, group in neighbours]
    if all(group["workers"] for group in groups) and _are_in_order(members):
        return groups
    return [{"rank": m.rank, "worker": m.worker, "node": m.node, "source": m.source} for m in members]


def _are_in_order(members: Sequence[_Member]) -> bool:
    """Return whether each member's rank is its place, and its node that of its worker."""
    # Lists, not generators: a plan of a large cluster asks for thousands of members.
    if [m.rank for m in members] != list(range(len(members))):
        return False
    return [m.node for m in members] == [m.worker.rpartition("/")[0] for m in members]


def full_members(value: Any) -> Any:
    """Return the members that ``short_members`` has written; any other value as it is.

    Raises:
        ValueError: a group without workers.
    """
    if not isinstance(value, list):
        return value
    if not all(isinstance(group, Mapping) and isinstance(group.get("workers"), str) for group in value):
        return value
    members: list[dict[str, Any]] = []
    for group in value:
        source = group.get("source")
        members += [
            {"rank": rank, "worker": worker, "node": worker.rpartition("/")[0], "source": source}
            for rank, worker in enumerate(workers_of(group["workers"]), start=len(members))
        ]
        if len(members) > MAX_WORKERS:
            raise ValueError(f"more than {MAX_WORKERS} members")
    return members
