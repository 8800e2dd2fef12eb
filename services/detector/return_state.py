"""What the detector knows of the self-test of an isolated node (``returns.py``). It is not in the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from shared.node_events import CheckResult
from shared.probes import ProbeTarget

RETRY_S = 30.0
"""Time until a node that has failed its self-test is asked again: a test is a second of load for it, and for its
peers."""

RETRY_MAX_S = 900.0
"""Longest such time, as for links (``isolation.RETURN_MAX_S``)."""


@dataclass(frozen=True, slots=True)
class Condemnation:
    """Why a node is left out that an error of SEV1 has isolated, other than that of a link (``Isolation``).

    Attributes:
        error: id of the error event.
        by_device: whether a fault of a device did. Then a user or a new agent returns it, and nothing else.
    """

    error: str
    by_device: bool


@dataclass(frozen=True, slots=True)
class SelfTestQuestion:
    """A request to a node's agent to test itself.

    Attributes:
        node: its name.
        incarnation: of the agent that is meant.
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
        incarnation: of the agent.
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
        """How long after a question the next one is put; longer than a test takes (``SELF_TEST_TIMEOUT_S``, twice)."""
        return timedelta(seconds=min(RETRY_S * 2**self.failures, RETRY_MAX_S))
