"""The detector's process: the shell around ``decide.py``. ``python -P -m services.detector.main``.

One input is handled at a time: it is decided on, folded and appended before the next one. A signal is answered once the
events that follow from it are in the log; an agent without an answer repeats the signal, so a restart loses nothing. A
signal may overtake the log: a rank can die before the detector has read the plan that started it. So a signal waits
until the detector has read what the log had when the signal came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from services.detector.agent_requests import AgentRequests
from services.detector.decide import DetectorLimits, Monitor
from services.detector.decisions import limits_in_force
from services.detector.decisions.admission import Liveness
from services.detector.decisions.decision import Decision, Revoke
from services.detector.metrics import DetectorMetrics
from services.detector.nodes import silence
from services.detector.nodes.probing import ProbeQuestion
from services.detector.prober import Prober
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.cluster import DetectorState
from services.detector.state.stalls import StallLimits
from services.detector.state.unlogged import SelfTestQuestion
from services.detector.state_snapshot import KEPT
from shared.bus.cancellation import cancelled
from shared.bus.connection import Bus
from shared.clock import PROCESS_CLOCK
from shared.errors import Unavailable, UnicronError
from shared.events.union import Recorded
from shared.log.journal import Journal
from shared.log.own_events import OwnEvents
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
from shared.messages.reachability import ECHO, PUBLISHED_EVERY_S, REACHABILITY, Reachability
from shared.messages.signals import HEARTBEATS, SIGNALS, Heartbeat, Signal, received
from shared.service.changes import Changes
from shared.service.frame import Context, run
from shared.service.log_lines import concerning, ids
from shared.service.state_keeper import StateKeeper
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""Interval of the search for silent nodes and stalled tasks: a fifteenth of the default node time-out."""


CONSUMER = "detector"
"""Name of the detector's consumer of the log's stream."""


class DetectorService:
    """Feeds the monitor from journal and bus, and carries out its decisions.

    Args:
        settings: thresholds.
        bus: connected.
        journal: of the log.
        keeper: of its state snapshots; None: it has none.
        registry: of the process's metrics; None: nobody reads them.
    """

    def __init__(
        self,
        settings: Settings,
        bus: Bus,
        journal: Journal,
        keeper: StateKeeper[DetectorState] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._bus, self._journal, self._settings, self._keeper = bus, journal, settings, keeper
        self._prober = Prober(bus)
        self._agents = AgentRequests(bus)
        self._clock = PROCESS_CLOCK
        limits = DetectorLimits(
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
        )
        self.monitor = Monitor(limits=limits, started_at=self._clock.now(), network=network_stack())
        self._metrics = DetectorMetrics(registry or CollectorRegistry(), lambda: self.monitor, self._clock.now)
        self._one_input = asyncio.Lock()
        self._own = OwnEvents()
        self._folded = asyncio.Event()
        self._last = self._position = 0
        self._moved_on = Changes()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests: set[asyncio.Task[None]] = set()
        self._shown, self._shown_at_s = Reachability(), -PUBLISHED_EVERY_S
        self._echo = uuid.uuid4().hex

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Fold the log, then work until cancelled. ``ready`` is called when the signals of agents are received."""
        found = await self._keeper.load() if self._keeper is not None else None
        if found is not None:
            self._position, self.monitor.state = found
        self._last = await self._journal.last_position()
        following = asyncio.create_task(self._journal.follow(self._record, consumer=CONSUMER, after=self._position))
        try:
            await self._caught_up(following)
            self.monitor.started_at = self._clock.now()
            async with self._one_input:
                await self._carry_out(self.monitor.escalate(self._clock.now()))
            await self._bus.subscribe(ECHO, self._receive_echo, self._echo)
            await self._bus.subscribe(HEARTBEATS, self._heartbeat)
            await self._bus.serve(SIGNALS, self._signal, refuse=lambda err: err.detail)
            await self._bus.serve(
                HELLO, self._hello, refuse=lambda err: Answer(verdict="refused", code=err.code, detail=err.detail)
            )
            await self._bus.serve(
                DEPARTURES, self._departure, refuse=lambda err: DepartureAnswer(verdict="refused", detail=err.detail)
            )
            await self._bus.serve(LIMITS, self._limits, refuse=lambda _: LimitsReply(nodes=[]))
            ready()
            ticking = asyncio.create_task(self._tick())
            try:
                await asyncio.gather(following, ticking, self._fatal)
            finally:
                await cancelled(ticking)
        finally:
            await cancelled(following, *self._requests)

    # ---- inputs

    async def _caught_up(self, following: asyncio.Task[None]) -> None:
        """Wait until the log's events of before the start have been folded. Nothing in them is decided again."""
        if self._last <= self._position:
            self._folded.set()
        waiting = asyncio.create_task(self._folded.wait())
        try:
            await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                await following
        finally:
            await cancelled(waiting)

    async def _record(self, record: Recorded) -> None:
        async with self._one_input:
            if self._own.skip(record.event):
                pass
            elif self._folded.is_set():
                await self._carry_out(self.monitor.record(record.event, self._clock.now()))
            else:
                self.monitor.fold(record.event)
            if record.position >= self._last:
                self._folded.set()
            self._position = record.position
            if self._keeper is not None:
                self._keeper.handled(record.position)
        self._moved_on.notify()

    async def _signal(self, signal: Signal) -> str | None:
        received_at = self._clock.now()
        self._metrics.signalled(signal.kind)
        with concerning(ids(signal)):
            return await self._take(received(signal, received_at))

    async def _take(self, signal: Signal) -> str | None:
        """Decide on a signal; return why it was dropped, or None.

        A signal that the core fails on is dropped: without a reply the agent would repeat it for ever, and its other
        signals would wait. Errors of log and bus are raised: there is no reply then, and the agent repeats the signal.
        """
        await self._folded_log()
        try:
            async with self._one_input:
                await self._carry_out(self.monitor.signal(signal, self._clock.now()))
        except Exception as err:
            if isinstance(err, UnicronError) or self._fatal.done():
                raise
            logger.exception("signal %s of %s was dropped", signal.kind, signal.node)
            return f"internal error of the detector: {type(err).__name__}"
        return None

    async def _folded_log(self) -> None:
        """Wait until all that the log has now has been folded."""
        position = await asyncio.to_thread(self._journal.log.last_position)
        await self._moved_on.until(lambda: self._position >= position)

    async def _departure(self, departure: Departure) -> DepartureAnswer:
        await self._folded_log()
        async with self._one_input:
            decision, answer = self.monitor.departure(departure, self._clock.now())
            await self._carry_out(decision)
        return answer

    async def _heartbeat(self, heartbeat: Heartbeat) -> None:
        received_at = self._clock.now()
        self._metrics.heard()
        async with self._one_input:
            await self._carry_out(self.monitor.heartbeat(heartbeat, received_at))

    async def _limits(self, request: LimitsRequest) -> LimitsReply:
        """Answer which limits are in force."""
        state, limits = self.monitor.state, self.monitor.silence_limits
        async with self._one_input:
            nodes = limits_in_force.of_nodes(state, limits, request.nodes, self._clock.now())
            tasks = limits_in_force.of_tasks(state, limits, request.tasks)
        return LimitsReply(nodes=nodes, tasks=tasks)

    async def _hello(self, hello: Hello) -> Answer:
        answers: dict[str, Liveness] = {}
        while True:
            async with self._one_input:
                answer = self.monitor.hello(hello, answers, self._clock.now())
            if isinstance(answer, Answer):
                break
            answers[answer.incarnation] = await self._prober.alive(answer.node, answer.incarnation)
        if answer.verdict == "refused":
            logger.warning("an agent was refused: %s: %s", answer.code, answer.detail)
        return answer

    async def _receive_echo(self, _: None) -> None:
        async with self._one_input:
            self.monitor.echo(self._clock.now())

    async def _tick(self) -> None:
        while True:
            async with self._one_input:
                await self._carry_out(self.monitor.tick(self._clock.now()))
                shown = silence.reachability(self.monitor.state)
            with contextlib.suppress(Unavailable):
                await self._bus.publish(ECHO, None, self._echo)
                await self._publish(shown)
            await asyncio.sleep(TICK_S)

    async def _publish(self, shown: Reachability) -> None:
        """Publish which nodes are unreachable, when that has changed or a repetition is due."""
        at_s = self._clock.seconds()
        if shown != self._shown or at_s - self._shown_at_s >= PUBLISHED_EVERY_S:
            self._shown, self._shown_at_s = shown, at_s
            await self._bus.publish(REACHABILITY, shown)

    # ---- effects

    async def _carry_out(self, decision: Decision) -> None:
        if decision.events:
            self._own.add(decision.events)
            await self._append(decision)
            for event in decision.events:
                logger.info("%s %s", event.type, event.stream, extra=ids(event))
        for note in decision.notes:
            logger.warning("%s", note)
        for revoke in decision.revokes:
            await self._revoke(revoke)
        requests = [self._agents.clean(clean) for clean in decision.cleans]
        requests += [self._probe(one) for one in decision.probes]
        requests += [self._ask_stacks(one) for one in decision.stacks]
        requests += [self._self_test(one) for one in decision.tests]
        for request in requests:
            task = asyncio.create_task(request)
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

    async def _append(self, decision: Decision) -> None:
        """Append. The events have been folded already: if they cannot reach the log, this process must end."""
        try:
            await self._journal.append(decision.events)
        except Exception as err:
            if not self._fatal.done():
                self._fatal.set_exception(err)
            raise

    async def _revoke(self, revoke: Revoke) -> None:
        """Tell an agent that its node's name belongs to another one. It is told again with its next heartbeat."""
        detail = f"the node name {revoke.node} was given to another agent while this one could not be reached"
        logger.warning("agent %s: %s", revoke.incarnation, detail)
        if re.fullmatch(INCARNATION, revoke.incarnation) is not None:
            message = Revocation(node=revoke.node, detail=detail)
            with contextlib.suppress(Unavailable):
                await self._bus.publish(REVOKED, message, revoke.node, revoke.incarnation)

    async def _probe(self, question: ProbeQuestion) -> None:
        """Have a question answered, by this process or by an agent, and decide on the answer."""
        outcomes, round_trips_s = await self._prober.ask(question)
        async with self._one_input:
            await self._carry_out(self.monitor.probed(question, outcomes, self._clock.now(), round_trips_s))

    async def _ask_stacks(self, question: StacksQuestion) -> None:
        """Have a node's ranks report what they do."""
        reply = await self._agents.stacks(question)
        if reply is not None:
            async with self._one_input:
                self.monitor.stacks_answered(question, reply)

    async def _self_test(self, question: SelfTestQuestion) -> None:
        """Have an isolated node test itself, and decide on the answer."""
        result = await self._agents.self_test(question)
        async with self._one_input:
            await self._carry_out(self.monitor.tested(question, result))


async def serve(context: Context) -> None:
    """Run the detector until cancelled."""
    async with StateKeeper(context, KEPT) as keeper:
        settings, bus, journal = context.settings, context.bus, context.journal
        service = DetectorService(settings, bus, journal, keeper, context.registry)
        await service.run(context.ready)


def main() -> int:
    """Run the detector; return its exit code."""
    return run("detector", serve)


if __name__ == "__main__":
    raise SystemExit(main())
