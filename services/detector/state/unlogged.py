"""What is seen of one incident while it is watched. Part of the detector's state: telemetry, until it is in the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from services.detector.state.pairs import Pair
from shared.events.node_events import CheckResult
from shared.events.union import Observation
from shared.messages.probes import Outcome, ProbeTarget

RETRY_S = 30.0
"""Time until a node that has failed its self-test is asked again: a test is a second of load for it, and for its
peers."""

RETRY_MAX_S = 900.0
"""Longest time until a node is asked again, as for links (``isolation.RETURN_MAX_S``)."""


@dataclass(slots=True)
class IncidentWatch:
    """An incident whose further observations are collected (``observations.py``).

    Attributes:
        incident: its id.
        task: of the error event; None for a fault of a node.
        tasks: those that the fault hit.
        worker: the worker that the error event names.
        node: the node that it names.
        due_at: when the collection ends.
        observations: what was seen, the error event itself first.
        omitted: how many observations were left out.
    """

    incident: str
    task: str | None
    tasks: frozenset[str]
    worker: str | None
    node: str | None
    due_at: datetime
    observations: list[Observation] = field(default_factory=list)
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a witness found out about a node (``probing.py``). ``outcome``: None if it found nothing out.

    ``round_trip_s``: between the two; None if it is not known.
    """

    outcome: Outcome | None
    asked_at: datetime
    answered_at: datetime
    round_trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Probes among the nodes of a task, put before a fault is judged that a link may have caused (``links.py``).

    Attributes:
        since: when its first round was asked.
        asked_at: when the present round was asked.
        asked: (witness, node) of the probes of the present round.
        answered: the same, of the rounds before.
        waiting: the pairs of the further rounds (``links.py``).
        suspects: the pairs that an inquiry just before this one found broken.
    """

    since: datetime
    asked_at: datetime
    asked: frozenset[tuple[str, str]] = frozenset()
    answered: frozenset[tuple[str, str]] = frozenset()
    waiting: tuple[Pair, ...] = ()
    suspects: frozenset[Pair] = frozenset()


@dataclass(slots=True)
class Isolation:
    """A node that is left out, until its links work again or an operator returns it (``isolation.py``).

    Attributes:
        error: id of the error event that isolated it.
        since: when it isolated the node.
        return_after_s: for how long its links must work before it returns, seconds.
        until_returned: whether only an operator returns it: a lemon, a link that has broken too often, or a monitor's
            report.
        asked_at: when it was last asked to probe the others. This and the next are not in the log.
        whole_since: node -> the time since which every probe of that node has got through.
    """

    error: str
    since: datetime
    return_after_s: float
    until_returned: bool = False
    asked_at: datetime | None = None
    whole_since: dict[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Condemnation:
    """Why a node is left out that an error of SEV1 has isolated, other than that of a link (``Isolation``).

    Attributes:
        error: id of the error event.
        by_device: whether a fault of a device did. Then only a user or a new agent returns the node.
    """

    error: str
    by_device: bool


@dataclass(frozen=True, slots=True)
class SelfTestQuestion:
    """A request to a node's agent to test itself.

    Attributes:
        node: its name.
        incarnation: the incarnation of the agent that is meant.
        peers: healthy nodes of its kind, for the bandwidth.
        asked_at: when the question was put.
    """

    node: str
    incarnation: str
    peers: Mapping[str, ProbeTarget]
    asked_at: datetime


@dataclass(slots=True)
class SelfTestState:
    """The self-test of one agent.

    Attributes:
        incarnation: the agent's.
        failures: how often it has failed.
        next_at: when it is asked again; None: at once.
        checks: what it found when it passed; None: it has not passed.
    """

    incarnation: str
    failures: int = 0
    next_at: datetime | None = None
    checks: list[CheckResult] | None = None

    @property
    def pause(self) -> timedelta:
        """How long after a question the next one is put. An agent does one test after the other."""
        return timedelta(seconds=min(RETRY_S * 2**self.failures, RETRY_MAX_S))
