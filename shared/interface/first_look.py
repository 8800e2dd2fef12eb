"""Answers of the interface for the first look at a cluster: what is wrong now, and what all workers do."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from shared.interface.readiness import Readiness
from shared.text import Time

TroubleKind = Literal[
    "control-plane",
    "incident",
    "task-failed",
    "storage",
    "unreachable",
    "reported",
    "task-waits",
    "slow-workers",
    "queue",
]
"""The gravest first."""


class Trouble(BaseModel):
    """A cause of what is wrong now, with all that follows from it.

    ``key``: stays the same as long as the cause does, and names it where somebody acknowledges it. ``grave``: training
    stands, or what breaks next may not be healed. ``needs_somebody``: it does not end by itself, as a fault does that
    is being healed. ``state``: in a word or two; ``what``: in a sentence. ``todo``: what to do about it, in sentences;
    the commands in them are in back quotes.

    ``since``: null: not known. Of an open incident ``usual_s`` is the median time of healed ones of its kind, and
    ``late_s`` by how much longer it takes; null: there is none, or it is not late.

    ``money_per_hour``: what it loses now; null: not known. ``cost_basis``: what that is, in words.

    ``by``: who takes care of it (``acknowledged``), else who has written the newest note about it; null: nobody.
    ``owners``: of the tasks. ``incidents``, ``slow_workers``: their ids. ``tasks``, ``nodes``: that it is about.
    """

    key: str
    kind: TroubleKind
    grave: bool
    needs_somebody: bool = False
    state: str
    what: str
    todo: list[str]
    since: Time | None = None
    usual_s: float | None = None
    late_s: float | None = None
    money_per_hour: float | None = None
    cost_basis: str = ""
    by: str | None = None
    acknowledged: bool = False
    note: str | None = None
    owners: list[str] = Field(default_factory=list)
    incidents: list[str] = Field(default_factory=list)
    slow_workers: list[str] = Field(default_factory=list)
    tasks: list[str] = Field(default_factory=list)
    nodes: list[str] = Field(default_factory=list)


class Troubles(BaseModel):
    """What is wrong now, the gravest first; ``more``: how many further causes there are.

    ``money_per_hour``: of all causes whose cost is known, in ``currency``. ``status``: of the control plane.
    """

    as_of: Time
    items: list[Trouble]
    more: int
    money_per_hour: float
    currency: str
    status: Readiness


class NodeMap(BaseModel):
    """All nodes that have not left, in columns: ``names``, ``states``, ``domains``, ``workers`` have one item of each.

    ``states``, ``domains``: indices into ``state_names`` (as of a node's ``state``) and ``domain_names``. ``workers``:
    runs of workers of which all do the same, one behind the other: index into ``task_names`` (-1: no task), index into
    ``use_names`` (as of a worker's ``state``), number of workers. ``reasons``: of nodes that have one. ``slow``: worker
    -> slowdown, of slow ones.
    """

    names: list[str] = Field(default_factory=list)
    states: list[int] = Field(default_factory=list)
    domains: list[int] = Field(default_factory=list)
    workers: list[list[int]] = Field(default_factory=list)
    state_names: list[str] = Field(default_factory=list)
    domain_names: list[str] = Field(default_factory=list)
    task_names: list[str] = Field(default_factory=list)
    use_names: list[str] = Field(default_factory=list)
    reasons: dict[str, str] = Field(default_factory=dict)
    slow: dict[str, float] = Field(default_factory=dict)
