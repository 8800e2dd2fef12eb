"""A decision: what follows from one input of the detector. Pure data; ``main.py`` carries it out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from services.detector.decisions import status_events
from services.detector.decisions.admission import Ask
from services.detector.evolve import evolve
from services.detector.incidents import observations
from services.detector.nodes.leftovers import Clean
from services.detector.nodes.probing import ProbeQuestion
from services.detector.nodes.silence_limits import SilenceLimits
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.cluster import DetectorState
from services.detector.state.stalls import StallLimits
from services.detector.state.unlogged import SelfTestQuestion
from shared.events.union import ErrorDetected, Event
from shared.messages.admission import Answer, DepartureAnswer
from shared.messages.preflight import PreflightAnswer
from shared.service.core import Append
from shared.settings.escalation import EscalationLimits


@dataclass(frozen=True, slots=True)
class DetectorLimits:
    """Thresholds of the detector, from the settings (``shared/settings/model.py`` gives the reasons); seconds.

    ``network``: the network stack of the detector (``shared.machine.network``); empty: unknown.
    """

    heartbeat_interval_s: float
    node_timeout_s: float
    progress_interval_s: float
    restart_window_s: float
    stalls: StallLimits
    escalation: EscalationLimits = field(default_factory=EscalationLimits)
    network: str = ""
    drain_timeout_s: float = 60.0

    @property
    def silence(self) -> SilenceLimits:
        """For how long nodes may be silent."""
        return SilenceLimits(self.heartbeat_interval_s, self.node_timeout_s, self.stalls, self.network)


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: a line for a person to read."""

    text: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """Effect: a message to an agent that the name of its node belongs to a newer agent."""

    node: str
    incarnation: str


Question = ProbeQuestion | StacksQuestion | SelfTestQuestion
"""Questions that agents answer, or the detector's own probes; the answers are inputs."""

Effect = Append | Note | Revoke | Clean | Question | Answer | Ask | DepartureAnswer | PreflightAnswer
"""What the detector does: it appends, notes, revokes, or asks agents. The last four answer the input's sender."""


@dataclass(slots=True)
class Decision:
    """A decision in the making, on one input.

    Attributes:
        state: the detector's; events are folded into it at once.
        now: the time of the input.
        limits: thresholds.
        events: the events to append, in order.
        others: the other effects.
    """

    state: DetectorState
    now: datetime
    limits: DetectorLimits
    events: list[Event] = field(default_factory=list)
    others: list[Effect] = field(default_factory=list)

    def add(self, event: Event | None) -> None:
        """Fold an event into the state and have it appended, if there is one.

        Before an error, how far the interrupted tasks have trained is appended.
        """
        if isinstance(event, ErrorDetected):
            for summary in status_events.before_fault(self.state, event, event.detected_at):
                self.add(summary)
            observations.begin(self.state, event)
        if event is not None:
            evolve(self.state, event, self.now)
            self.events.append(event)

    def note(self, lines: Iterable[str]) -> None:
        """Have lines written for a person to read."""
        self.others += map(Note, lines)

    def effects(self) -> list[Effect]:
        """Return the effects: first what is appended."""
        return [Append(self.events), *self.others] if self.events else self.others
