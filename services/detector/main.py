"""The detector's process: its core (``evolve``, ``decide``) in the runner that all services have.

    python -P -m services.detector.main

A signal is answered once the events that follow from it are in the log; an agent without an answer repeats the signal,
so a restart loses nothing. A signal may overtake the log: a rank can die before the detector has read the plan that
started it. So a signal waits until the detector has read what the log had when the signal came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import uuid
from datetime import datetime

from services.detector.agent_requests import AgentRequests
from services.detector.decide import decide
from services.detector.decisions import limits_in_force
from services.detector.decisions.admission import Ask, Liveness
from services.detector.decisions.decision import DetectorLimits, Effect, Note, Question, Revoke
from services.detector.decisions.inputs import Echo, Greeting, Input, NodeTested, Probed, StacksGiven, Tick
from services.detector.evolve import evolve
from services.detector.metrics import ReadingLag, detector_metrics
from services.detector.neighbours import Neighbours
from services.detector.nodes import silence
from services.detector.nodes.leftovers import Clean
from services.detector.nodes.probing import ProbeQuestion
from services.detector.prober import Prober
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.cluster import DetectorState
from services.detector.state.stalls import StallLimits
from services.detector.state.unlogged import SelfTestQuestion
from services.detector.state_snapshot import KEPT
from shared.bus.newest import Newest
from shared.clock import PROCESS_CLOCK
from shared.errors import Unavailable, UnicronError
from shared.machine.network import network_stack
from shared.messages.admission import (
    DEPARTURES,
    HELLO,
    INCARNATION,
    REVOKED,
    Answer,
    Departure,
    DepartureAnswer,
    Hello,
    Revocation,
)
from shared.messages.limits_in_force import LIMITS, LimitsReply, LimitsRequest
from shared.messages.preflight import NEIGHBOUR, PREFLIGHT, NeighbourAnswer, PreflightAnswer, PreflightReport
from shared.messages.reachability import ECHO, PUBLISHED_EVERY_S, REACHABILITY, Reachability
from shared.messages.signals import HEARTBEATS, SIGNALS, Heartbeat, Signal, received
from shared.model import Clock
from shared.service.core import Append, StateFold
from shared.service.frame import Context, run
from shared.service.log_lines import concerning, ids
from shared.service.metrics import StateMetrics
from shared.service.runner import Runner
from shared.service.state_keeper import StateKeeper
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

_HEARTBEATS_A_TURN = 20
"""How many heartbeats are read in succession. Signals and further messages then have a turn, for which they wait some
milliseconds."""

_REST_FACTOR = 9.0
"""Least pause after a tick, as a multiple of the tick's duration. Ticks thus take at most a tenth of the time, however
many nodes they look at, and the rest is for what nodes send."""

TICK_S = 0.1
"""Interval of the search for silent nodes and stalled tasks: a fifteenth of the default node time-out."""


def limits(settings: Settings) -> DetectorLimits:
    """Return the core's thresholds."""
    return DetectorLimits(
        heartbeat_interval_s=settings.heartbeat_interval_s,
        node_timeout_s=settings.node_timeout_s,
        progress_interval_s=settings.progress_interval_s,
        restart_window_s=settings.restart_window_s,
        escalation=settings,
        stalls=StallLimits(
            hang_factor=settings.hang_factor,
            hang_floor_s=settings.hang_floor_s,
            stop_factor=settings.stop_factor,
            stop_floor_s=settings.stop_floor_s,
            collective_floor_s=settings.collective_floor_s,
            slow_region_timeout_s=settings.slow_region_timeout_s,
            busy_timeout_s=settings.busy_timeout_s,
            latency_s=settings.heartbeat_interval_s + TICK_S,
        ),
        network=network_stack(),
        drain_timeout_s=settings.drain_timeout_s,
    )


class DetectorService(Runner[DetectorState, Input, Effect]):
    """The service: its core, the messages of agents, and the requests to them."""

    def __init__(
        self, context: Context, keeper: StateKeeper[DetectorState] | None = None, clock: Clock = PROCESS_CLOCK.now
    ) -> None:
        super().__init__(context, StateFold(evolve, DetectorState()), clock, keeper)
        self._bus = context.bus
        self._prober = Prober(context.bus)
        self._agents = AgentRequests(context.bus)
        self._neighbours = Neighbours(context.bus, lambda: self.state)
        self._limits = limits(context.settings)
        self._lag = ReadingLag()
        shown = StateMetrics(lambda: detector_metrics(self.state, self._limits, self.taken, self._lag, self._clock()))
        context.registry.register(shown)
        self._shown, self._shown_at_s = Reachability(), -PUBLISHED_EVERY_S
        self._echo = uuid.uuid4().hex
        self._heartbeats: Newest[Heartbeat] | None = None
        self._signals: dict[tuple[str, str], asyncio.Future[str | None]] = {}
        """Node and id of each signal that has no answer yet -> the answer to its newest repeat."""

    def decide(self, state: DetectorState, item: Input, at: datetime) -> tuple[DetectorState, list[Effect]]:
        """Decide (``services.detector.decide``)."""
        return decide(state, item, at, self._limits)

    async def begin_standing_by(self) -> None:
        """Hear the nodes: the newest heartbeat of each is read when this detector takes over."""
        self._heartbeats = await self._bus.newest(HEARTBEATS, self._clock)

    async def begin(self) -> None:
        """Receive the messages of agents, and look for what time shows."""
        await self._bus.subscribe(ECHO, self._receive_echo, self._echo)
        if self._heartbeats is None:
            self._heartbeats = await self._bus.newest(HEARTBEATS, self._clock)
        await self._bus.serve(SIGNALS, self._signal, refuse=lambda err: err.detail)
        await self._bus.serve(
            HELLO, self._hello, refuse=lambda err: Answer(verdict="refused", code=err.code, detail=err.detail)
        )
        await self._bus.serve(
            DEPARTURES, self._departure, refuse=lambda err: DepartureAnswer(verdict="refused", detail=err.detail)
        )
        await self._bus.serve(
            PREFLIGHT, self._preflight, refuse=lambda err: PreflightAnswer(verdict="reported", reason=err.detail)
        )
        await self._bus.serve(NEIGHBOUR, self._neighbours.find, refuse=lambda _: NeighbourAnswer())
        await self._bus.serve(LIMITS, self._limits_in_force, refuse=lambda _: LimitsReply(nodes=[]))
        self.spawn(self._keep_echoing(), "echo")
        self.spawn(self._keep_judging(self._heartbeats), "ticks")

    async def _keep_echoing(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                await self._bus.publish(ECHO, None, self._echo)
            await asyncio.sleep(TICK_S)

    async def _keep_judging(self, heartbeats: Newest[Heartbeat]) -> None:
        """Read what nodes have sent, and look for what time shows, by turns.

        A tick judges the moment up to which all was read: a detector that is behind looks less often, and judges no
        node by heartbeats that it has not read.
        """
        clock_s = asyncio.get_running_loop().time
        tick_at_s = clock_s()
        while True:
            await heartbeats.wait(max(0.0, tick_at_s - clock_s()))
            at = self._clock()
            for number, (heartbeat, came_at) in enumerate(heartbeats.take(), 1):
                await self._take(heartbeat, f"a heartbeat of {heartbeat.node}", came_at)
                if number % _HEARTBEATS_A_TURN == 0:
                    await asyncio.sleep(0)
            if clock_s() < tick_at_s:
                continue
            self._lag.note((self._clock() - at).total_seconds(), heartbeats.replaced, clock_s())
            began_s = clock_s()
            await self.feed(Tick(), at)
            with contextlib.suppress(Unavailable):
                await self._publish(silence.reachability(self.state))
            tick_at_s = clock_s() + max(TICK_S, _REST_FACTOR * (clock_s() - began_s))

    # ---- inputs

    async def _signal(self, signal: Signal) -> str | None:
        """Decide on a signal; return why it was dropped, or None.

        The newest repeat has the answer to the first, and nobody waits for that to the others any more. Otherwise a
        detector that is behind would have the more to do the longer the agents wait.
        """
        received_at, name = self._clock(), (signal.node, signal.signal_id)
        newest: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        before, self._signals[name] = self._signals.get(name), newest
        if before is not None:
            before.cancel()
            return await newest
        try:
            with concerning(ids(signal)):
                await self.has_folded_log()
                verdict = await self._take(received(signal, received_at), f"signal {signal.kind} of {signal.node}")
            if not (newest := self._signals[name]).done():
                newest.set_result(verdict)
            return verdict
        finally:
            self._signals.pop(name).cancel()  # without an answer there is none to a repeat, and the agent asks again

    async def _take(self, item: Input, what: str, at: datetime | None = None) -> str | None:
        """Decide on what an agent has sent; return why it was dropped, or None.

        A message on which the core fails is dropped: without a reply to its signal the agent would repeat it for ever,
        and its other signals would wait. Errors of log and bus are raised: there is no reply then, and the agent
        repeats the message.
        """
        try:
            await self.feed(item, at)
        except Exception as err:
            if isinstance(err, UnicronError) or self.has_failed:
                raise
            logger.exception("%s was dropped", what)
            return f"internal error of the detector: {type(err).__name__}"
        return None

    async def _departure(self, departure: Departure) -> DepartureAnswer:
        await self.has_folded_log()
        return next(each for each in await self.feed(departure) if isinstance(each, DepartureAnswer))

    async def _preflight(self, report: PreflightReport) -> PreflightAnswer:
        await self.has_folded_log()
        return next(each for each in await self.feed(report) if isinstance(each, PreflightAnswer))

    async def _limits_in_force(self, request: LimitsRequest) -> LimitsReply:
        """Answer which limits are in force."""
        nodes = limits_in_force.of_nodes(self.state, self._limits.silence, request.nodes, self._clock())
        return LimitsReply(nodes=nodes, tasks=limits_in_force.of_tasks(self.state, self._limits.silence, request.tasks))

    async def _hello(self, hello: Hello) -> Answer:
        answers: dict[str, Liveness] = {}
        while True:
            match await self.feed(Greeting(hello, answers)):
                case [Ask(node=node, incarnation=incarnation)]:
                    answers[incarnation] = await self._prober.alive(node, incarnation)
                case [Answer() as answer]:
                    break
        if answer.verdict == "refused":
            logger.warning("an agent was refused: %s: %s", answer.code, answer.detail)
        return answer

    async def _receive_echo(self, _: None) -> None:
        await self.feed(Echo())

    async def _publish(self, shown: Reachability) -> None:
        """Publish which nodes are unreachable, if that has changed or a repetition is due."""
        at_s = PROCESS_CLOCK.seconds()
        if shown != self._shown or at_s - self._shown_at_s >= PUBLISHED_EVERY_S:
            self._shown, self._shown_at_s = shown, at_s
            await self._bus.publish(REACHABILITY, shown)

    # ---- effects

    def perform(self, effect: Effect) -> None:
        """Write down what was appended, and begin what is asked of agents."""
        match effect:
            case Append(events=events):
                for event in events:
                    logger.info("%s %s", event.type, event.stream, extra=ids(event))
            case Note(text=text):
                logger.warning("%s", text)
            case Revoke():
                self.spawn(self._revoke(effect), "revocation")
            case Clean():
                self.spawn(self._agents.clean(effect), "clean")
            case ProbeQuestion() | StacksQuestion() | SelfTestQuestion():
                self.spawn(self._ask(effect), "question")

    async def _revoke(self, revoke: Revoke) -> None:
        """Tell an agent that its node's name belongs to another one. The agent is told again at its next heartbeat."""
        detail = f"the node name {revoke.node} was given to another agent while this one could not be reached"
        logger.warning("agent %s: %s", revoke.incarnation, detail)
        if re.fullmatch(INCARNATION, revoke.incarnation) is not None:
            message = Revocation(node=revoke.node, detail=detail)
            with contextlib.suppress(Unavailable):
                await self._bus.publish(REVOKED, message, revoke.node, revoke.incarnation)

    async def _ask(self, question: Question) -> None:
        """Have a question answered, by this process or by an agent."""
        answer: Input
        match question:
            case ProbeQuestion():
                answer = Probed(question, *await self._prober.ask(question))
            case StacksQuestion():
                answer = StacksGiven(question, await self._agents.stacks(question))
            case SelfTestQuestion():
                answer = NodeTested(question, await self._agents.self_test(question))
        await self._take(answer, f"the answer to {question}")


async def serve(context: Context) -> None:
    """Run the detector until cancelled."""
    async with StateKeeper(context, KEPT) as keeper:
        await DetectorService(context, keeper).run()


if __name__ == "__main__":
    sys.exit(run("detector", serve, leased=True))
