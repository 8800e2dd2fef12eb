"""A decision: what follows from one input of the detector. Pure data; ``main.py`` carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.detector.decisions import status_events
from services.detector.evolve import evolve
from services.detector.incidents import observations
from services.detector.nodes.leftovers import Clean
from services.detector.nodes.probing import ProbeQuestion
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.cluster import DetectorState
from services.detector.state.unlogged import SelfTestQuestion
from shared.events.union import ErrorDetected, Event


@dataclass(frozen=True, slots=True)
class Revoke:
    """A message to an agent: the name of its node belongs to a newer agent."""

    node: str
    incarnation: str


@dataclass(slots=True)
class Decision:
    """The events to append, in order, the requests to agents, and the agents whose name belongs to another one.

    ``probes``: requests to probe; their answers are inputs (``Monitor.probed``). ``stacks``, ``tests``: requests for
    stacks and for self-tests, answered likewise (``Monitor.stacks_answered``, ``Monitor.tested``). ``notes``: lines for
    a person to read.
    """

    events: list[Event] = field(default_factory=list)
    cleans: list[Clean] = field(default_factory=list)
    revokes: list[Revoke] = field(default_factory=list)
    probes: list[ProbeQuestion] = field(default_factory=list)
    stacks: list[StacksQuestion] = field(default_factory=list)
    tests: list[SelfTestQuestion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, state: DetectorState, event: Event | None) -> None:
        """Fold an event into the state and add it to the decision, if there is one.

        Before an error comes how far the tasks have trained that it interrupts.
        """
        if isinstance(event, ErrorDetected):
            for summary in status_events.before_fault(state, event, event.detected_at):
                self.add(state, summary)
            observations.begin(state, event)
        if event is not None:
            evolve(state, event)
            self.events.append(event)
