"""Whether the parts of the control plane work, as REST answers it."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Instance(BaseModel):
    """A process of a service. ``active``: whether it does the service's work; false: it stands by.

    ``token``: of its lease, higher with each taking over; 0: it has none. ``lag``: as of a check.
    """

    process: str
    active: bool
    token: int = 0
    lag: int | None = None


class Check(BaseModel):
    """One condition of readiness. ``lag``: events of the log that the part has not handled; null: none follow from it.

    ``counters``: numbers by name, of a service; of all agents (check ``nodes``); of the api itself (check ``bus``).
    ``instances``: the processes of a service that has several, the active one first.
    """

    name: str
    ok: bool
    detail: str = Field(default="")
    lag: int | None = None
    counters: dict[str, int] = Field(default_factory=dict)
    instances: list[Instance] = Field(default_factory=list)


class Versions(BaseModel):
    """What the program of an answering api reads and writes, for ``unicron upgrade --check``.

    ``program``: its version. ``events``: event type -> schema version. ``messages``: of the messages that it sends.
    ``decider``: of the newest plan in the log; null: it has none. ``agents``: version of messages -> how many nodes'
    agents send it.
    """

    program: str
    events: dict[str, int]
    messages: int
    decider: int | None = None
    agents: dict[int, int] = Field(default_factory=dict)


class Readiness(BaseModel):
    """Whether tasks can be submitted. ``versions``: in the answer of ``GET /v1/status`` alone."""

    ready: bool
    checks: list[Check]
    versions: Versions | None = None
