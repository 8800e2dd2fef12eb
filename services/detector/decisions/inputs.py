"""What the detector decides on, beside the messages that it gets as they are: signals, heartbeats, departures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.detector.decisions.admission import Liveness
from services.detector.nodes.probing import ProbeQuestion
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.unlogged import SelfTestQuestion
from shared.messages.admission import Departure, Hello
from shared.messages.preflight import PreflightReport
from shared.messages.probes import Outcome
from shared.messages.self_test import SelfTestResult
from shared.messages.signals import Heartbeat, Signal
from shared.messages.stacks import StacksReply
from shared.service.core import Logged, Started


@dataclass(frozen=True, slots=True)
class Tick:
    """Some time has passed, in which silence or standstill may have become a fault."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The detector's own message came: the bus works, and so does this process."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The hello of an agent that starts. ``answers``: incarnation -> what became of the agents that were asked."""

    hello: Hello
    answers: Mapping[str, Liveness]


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to a request to probe. ``outcomes`` is empty if the witness did not answer."""

    question: ProbeQuestion
    outcomes: Mapping[str, Outcome]
    round_trips_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StacksGiven:
    """The answer to a request for stacks; None if there was none, as from an agent of an older version."""

    question: StacksQuestion
    reply: StacksReply | None


@dataclass(frozen=True, slots=True)
class NodeTested:
    """The answer to a request for a self-test. ``result``: None if there was none."""

    question: SelfTestQuestion
    result: SelfTestResult | None


FromAgent = Signal | Heartbeat | Greeting | PreflightReport | Departure
"""What agents send by themselves."""

Input = Logged | Started | Tick | Echo | FromAgent | Probed | StacksGiven | NodeTested
