"""Runs of workers: a list of worker ids as short text, for the plans of the log.

    n0000/0-7,n0001/0-3,n0002/5
    n[0000-2047]/0-7,n[0000-0240:16]/0-3

Workers of one node whose slots follow one another are a run. In messages, nodes with the same slots are one run, too,
if their numbers follow one another at the same distance (much as in Slurm's host lists): ranks are dealt over failure
domains, so the next node is often one of the next domain. The log names each node. The order is kept, since the order
of a stage's members is that of their ranks. A list that such a text would not give back (slots that are no numbers)
stays a list, so both forms are read. The plan of a large cluster names thousands of workers, most of them whole nodes
in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, repeat
from typing import Any, NamedTuple, Protocol

MAX_RUN = 65_536
"""Most workers of one run: more than any node has. A damaged log must not fill the memory."""


MAX_DIGITS = 9
"""Most digits of a node's number that count as one."""

_NUMBERED = re.compile(rf"(.*?)(\d{{1,{MAX_DIGITS}}})", re.ASCII | re.DOTALL)
_NODES = re.compile(
    rf"([^\[]*)\[(\d{{1,{MAX_DIGITS}}})-(\d{{1,{MAX_DIGITS}}})(?::(\d{{1,{MAX_DIGITS}}}))?\]/(\d+)(?:-(\d+))?", re.ASCII
)


def runs_of(workers: Sequence[str], *, over_nodes: bool = False) -> str | None:
    """Return the workers as text; None if the text would not say exactly these workers.

    ``over_nodes``: whether nodes with the same slots may be one run.
    """
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
    return ",".join(_over_nodes(runs) if over_nodes else runs)


class _Numbered(NamedTuple):
    """A run whose node ends with a number: ``prefix``, the number with its digits, and the slots."""

    prefix: str
    number: int
    digits: int
    slots: str

    @classmethod
    def of(cls, run: str) -> _Numbered | None:
        """Return a run's parts; None if its node does not end with a number."""
        node, _, slots = run.rpartition("/")
        found = _NUMBERED.fullmatch(node)
        return cls(found[1], int(found[2]), len(found[2]), slots) if found is not None else None

    def text(self, last: int, step: int) -> str:
        """Return the text of the run over nodes that begins with this one."""
        every = f":{step}" if step > 1 else ""
        return f"{self.prefix}[{self.number:0{self.digits}d}-{last:0{self.digits}d}{every}]/{self.slots}"


def _over_nodes(runs: Sequence[str]) -> list[str]:
    """Return the runs; those with the same slots whose nodes follow one another at the same distance are one."""
    found: list[str] = []
    begun = 0
    while begun < len(runs):
        first, count, step = _Numbered.of(runs[begun]), 1, 0
        while first is not None and begun + count < len(runs):
            step = step or _distance(first, runs[begun + 1])
            following = f"{first.number + count * step:0{first.digits}d}"
            if not step or len(following) > MAX_DIGITS:
                break
            if runs[begun + count] != f"{first.prefix}{following}/{first.slots}":
                break
            count += 1
        last = first.number + (count - 1) * step if first is not None else 0
        found.append(runs[begun] if first is None or count == 1 else first.text(last, step))
        begun += count
    return found


def _distance(first: _Numbered, run: str) -> int:
    """Return by how much the node of a run is behind that of the first one; 0: it cannot be in one run with it."""
    other = _Numbered.of(run)
    if other is None or (other.prefix, other.slots) != (first.prefix, first.slots):
        return 0
    return max(0, other.number - first.number)


def _run(first: str, last: str) -> str:
    """Return the text of a run, given its first and its last worker."""
    return first if first == last else f"{first}-{last.rpartition('/')[2]}"


def _following(worker: str) -> str:
    """Return the worker in the next slot of the same node; empty if a text of runs cannot have this worker."""
    node, _, slot = worker.rpartition("/")
    if not node or "," in node or "[" in node or not slot.isdecimal() or str(int(slot)) != slot:
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
        if "[" in run:
            found += _of_nodes(run)
        elif node and slots.isdecimal():
            found.append(run)
        else:
            found += _workers(run, node, slots)
    return found


def _of_nodes(run: str) -> list[str]:
    """Return the workers of a run over several nodes."""
    found = _NODES.fullmatch(run)
    if found is None or int(found[4] or 1) == 0:
        raise ValueError(f"{run!r} is not <name>[<first>-<last>:<step>]/<slots>")
    prefix, first, last, step, slot, last_slot = found.groups()
    nodes = range(int(first), int(last) + 1, int(step or 1))
    slots = range(int(slot), int(last_slot or slot) + 1)
    if not 0 < len(slots) <= MAX_RUN or not 0 < len(nodes) * len(slots) <= MAX_WORKERS:
        raise ValueError(f"{run!r} has {len(nodes)} nodes with {len(slots)} workers; allowed are {MAX_WORKERS} in all")
    return [f"{prefix}{node:0{len(first)}d}/{slot}" for node in nodes for slot in slots]


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
    """Return the workers as text if that is possible; an empty list stays a list."""
    return (runs_of(workers) or workers) if workers else workers


def full_workers(value: Any) -> Any:
    """Return the list of workers that ``short_workers`` has written; any other value as it is.

    Raises:
        ValueError: a text that is no text of runs.
    """
    return workers_of(value) if isinstance(value, str) else value


class _Member(Protocol):
    """What is written about a member of a stage (``shared.events.plans.Member``)."""

    @property
    def rank(self) -> int:
        """The member's rank."""

    @property
    def worker(self) -> str:
        """The member's worker."""

    @property
    def node(self) -> str:
        """The worker's node."""

    @property
    def source(self) -> str:
        """Where the member has its state from."""


def short_members(members: Sequence[_Member], *, over_nodes: bool = False) -> list[dict[str, Any]]:
    """Return the members of a stage as groups of neighbours that have their state from the same source.

    A member's rank is its place, and its node that of its worker; other members are written one by one.
    ``over_nodes``: as of ``runs_of``.
    """
    neighbours = groupby(members, key=lambda member: member.source)
    groups = [
        {"source": source, "workers": runs_of([m.worker for m in group], over_nodes=over_nodes)}
        for source, group in neighbours
    ]
    if all(group["workers"] for group in groups) and _are_in_order(members):
        return groups
    return [{"rank": m.rank, "worker": m.worker, "node": m.node, "source": m.source} for m in members]


def _are_in_order(members: Sequence[_Member]) -> bool:
    """Return whether each member's rank is its place, and its node that of its worker."""
    # Lists, not generators: a plan of a large cluster asks for thousands of members.
    if [m.rank for m in members] != list(range(len(members))):
        return False
    return [m.node for m in members] == [m.worker.rpartition("/")[0] for m in members]


def _values(rank: int, worker: str, source: str) -> object:
    return {"rank": rank, "worker": worker, "node": worker.rpartition("/")[0], "source": source}


def full_members(value: Any, member: Callable[[int, str, str], object] = _values) -> Any:
    """Return the members that ``short_members`` has written; any other value as it is.

    Args:
        value: as it was read.
        member: makes a member of its rank, its worker and its source; else it is a mapping of these and its node.

    Raises:
        ValueError: a group without workers.
    """
    if not isinstance(value, list):
        return value
    if not all(isinstance(group, Mapping) and isinstance(group.get("workers"), str) for group in value):
        return value
    members: list[object] = []
    for group in value:
        workers, source = workers_of(group["workers"]), str(group.get("source"))
        members += map(member, range(len(members), len(members) + len(workers)), workers, repeat(source))
        if len(members) > MAX_WORKERS:
            raise ValueError(f"more than {MAX_WORKERS} members")
    return members
