"""What the pure cores of detector, planner and transition take of a processor with many nodes. JSON lines.

    python -m benchmarks.fleet.cores [--nodes 250,1000,2000] [--workers 8]

The courses are those of ``benchmarks.fleet`` in simulated time and one process: nodes join; all train one task; a rank
ends; a tenth of the nodes ends at once. ``cpu_s`` has the processor seconds of each service's core, with reading and
writing its messages, and without bus and database; ``ms`` what one input takes. Only processor time is measured, so the
figures are the same on a busy machine, but for its caches.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from benchmarks.fleet.__main__ import HEARTBEATS_PER_S, LEAST_INTERVAL_S, TIMEOUT_INTERVALS, sizes, task_spec
from benchmarks.report import Report, at_least, run
from services.detector import main as detector
from services.detector.decide import decide as detect
from services.detector.decisions.inputs import Echo, Probed, Tick
from services.detector.evolve import evolve as fold_detector
from services.detector.nodes.probing import ProbeQuestion
from services.detector.state.cluster import DetectorState
from services.planner.evolve import evolve as fold_planner
from services.planner.main import configuration
from services.planner.replay.log_fold import Fold
from services.transition.decide import decide as move
from services.transition.evolve import evolve as fold_transition
from services.transition.main import limits
from services.transition.state import Replied, Send, State
from shared.events.plans import Stage
from shared.events.union import ErrorDetected, Event, PlanDecided, Recorded, TaskSubmitted
from shared.messages.commands import COMMANDS, Reply, WorkerResult
from shared.messages.probes import Outcome
from shared.messages.signals import HEARTBEATS, SIGNALS, Heartbeat, ProcessExited, StepReport, WorkerStatus
from shared.service.core import Append, Logged, Started, StateFold
from shared.settings.model import Settings
from shared.tasks.specification import parse_spec

TICK_S = 0.1
STEP_S = 2.0
TRAINING_S = 4.0
ERROR_MS, PLAN_MS, HOLD_BYTES = 100.0, 300.0, 2000
"""Bounds: the processor time from the signal of a rank's end to its error, and to its plan; what a node is sent."""

URGENT = ("detector signal", "planner error.detected")
"""Inputs whose time is shown however short it is."""

T = TypeVar("T")


class Cores:
    """The three services, fed with what the nodes of one size send and with one another's events."""

    def __init__(self, nodes: int, workers: int) -> None:
        self.names = [f"n{number:04d}" for number in range(nodes)]
        self.slots, self.now, self.dead = workers, datetime(2030, 1, 1, tzinfo=UTC), set[str]()
        self.interval_s = max(LEAST_INTERVAL_S, nodes / HEARTBEATS_PER_S)
        settings = Settings(heartbeat_interval_s=self.interval_s, node_timeout_s=TIMEOUT_INTERVALS * self.interval_s)
        self.detector_limits = detector.limits(settings)
        self.detector = StateFold(fold_detector, DetectorState())
        self.planner, self.transition = Fold(), StateFold(fold_transition, State(limits=limits(settings)))
        self.log: list[Recorded] = []
        self._unread: deque[Recorded] = deque()
        self._sends: deque[Send] = deque()
        self._cpu_s: defaultdict[str, float] = defaultdict(float)
        self._inputs = Counter[str]()
        self.sent = Counter[str]()
        self.largest = Counter[str]()
        """Bytes of the largest command of each kind."""
        self._pids: dict[str, int] = {}
        self._sequence, self._ticks = Counter[str](), 0
        self.training_since: datetime | None = None
        self._stage: Stage | None = None
        self._ranks: dict[str, int] = {}
        """The stage that is formed, and the ranks of its members."""
        self.ranks: dict[str, tuple[int, int]] = {}
        """Worker -> generation and rank, of those that train."""
        self._incarnations = {name: uuid.uuid4().hex for name in self.names}
        self._append([configuration(settings, event_id=str(uuid.uuid4()), at=self.now)])
        self._detect(Started(), "start")
        self._move(Started(), "start")
        self.settle()

    def _timed(self, what: str, work: Callable[[], T]) -> T:
        """Return what some work returns, and count its processor time for ``<service> <input>``."""
        began_s = time.process_time()
        try:
            return work()
        finally:
            self._cpu_s[what] += time.process_time() - began_s
            self._inputs[what] += 1

    def fields(self) -> dict[str, Any]:
        """Return what the services have taken since the last call."""
        total: dict[str, float] = {}
        for what, seconds in self._cpu_s.items():
            service = what.partition(" ")[0]
            total[service] = total.get(service, 0.0) + seconds
        ms = {
            what: round(1e3 * one / self._inputs[what], 3)
            for what, one in self._cpu_s.items()
            if one >= 0.02 or what in URGENT
        }
        found = {
            "cpu_s": {service: round(seconds, 2) for service, seconds in total.items()},
            "ms": dict(sorted(ms.items(), key=lambda item: -self._cpu_s[item[0]])),
            "commands": dict(self.sent),
            "largest_bytes": dict(self.largest),
        }
        self._cpu_s.clear()
        self._inputs.clear()
        self.sent.clear()
        self.largest.clear()
        return found

    # ---- the services

    def _append(self, events: Iterable[Event]) -> None:
        for event in events:
            about: dict[str, Any] = {"position": len(self.log) + 1, "recorded_at": self.now, "stream": event.stream}
            record = Recorded.model_construct(**about, event=event, stream_version=0, previous_hash="", hash="")
            self.log.append(record)
            self._unread.append(record)

    def _take(self, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, Append):
                self._append(effect.events)
            elif isinstance(effect, Send):
                self._sends.append(effect)
            elif isinstance(effect, ProbeQuestion):
                self._probe(effect)

    def _detect(self, item: Any, what: str) -> None:
        state, effects = self._timed(
            f"detector {what}", lambda: detect(self.detector.state, item, self.now, self.detector_limits)
        )
        self.detector.decided(state, effects)
        self._take(effects)

    def _move(self, item: Any, what: str) -> None:
        state, effects = self._timed(f"transition {what}", lambda: move(self.transition.state, item, self.now))
        self.transition.decided(state, effects)
        self._take(effects)

    def _plan(self, record: Recorded) -> None:
        def answer() -> list[Event]:
            decided = self.planner.decide(record)
            state = self.planner.state
            for event in decided:
                state = fold_planner(state, event, record.recorded_at)
            self.planner.decided(state, [Append(decided)])
            return decided

        if self._timed(f"planner fold {record.event.type}", lambda: self.planner.take(record)):
            self._append(self._timed(f"planner {record.event.type}", answer))

    def settle(self) -> None:
        """Have the services handle all that is in the log, and the nodes all commands, until nothing is left."""
        while self._unread or self._sends:
            if not self._unread:
                self._carry_out(self._sends.popleft())
                continue
            record = self._unread.popleft()
            kind = record.event.type
            if self._timed(f"detector fold {kind}", partial(self.detector.take, record)):
                self._detect(Logged(record), kind)
            self._plan(record)
            if self._timed(f"transition fold {kind}", partial(self.transition.take, record)):
                self._move(Logged(record), kind)

    # ---- the nodes

    def _probe(self, question: ProbeQuestion) -> None:
        outcomes = {peer: Outcome.ABSENT if peer in self.dead else Outcome.REACHED for peer in question.peers}
        if question.witness not in self.dead:
            self._detect(Probed(question, outcomes, {}), "probed")

    def _carry_out(self, send: Send) -> None:
        command = send.command
        data = self._timed(f"transition write {command.kind}", lambda: COMMANDS.request.encode(command))
        self.sent[command.kind] += 1
        self.sent["bytes"] += len(data)
        self.largest[command.kind] = max(self.largest[command.kind], len(data))
        if send.node in self.dead:
            return
        if command.kind == "configure":
            if command.stage is not self._stage:
                self._stage, self._ranks = command.stage, {m.worker: m.rank for m in command.stage.members}
            self.ranks |= {worker: (command.generation, self._ranks[worker]) for worker in send.workers}
            self.training_since = self.now
        results = {w: WorkerResult(pid=self._pids.setdefault(w, 1000 + len(self._pids)), step=5) for w in send.workers}
        about: dict[str, Any] = {"command_id": command.command_id, "node": send.node, "ok": True}
        reply = COMMANDS.reply.encode(Reply(**about, workers=results, host="127.0.0.1", port=29_500))
        read = self._timed("transition read reply", lambda: COMMANDS.reply.decode(reply))
        self._move(Replied(command.command_id, read, self.now), f"reply to {command.kind}")
        self._beat(send.node)  # as an agent does when its ranks have changed

    def _status(self, worker: str) -> WorkerStatus:
        if worker not in self.ranks or self.training_since is None:
            return WorkerStatus(worker=worker)
        generation, rank = self.ranks[worker]
        seconds = (self.now - self.training_since).total_seconds()
        done = int(seconds / STEP_S)
        reports = [StepReport(5 + step, 0.8 * STEP_S, 4) for step in range(max(1, done - 1), done + 1)]
        about: dict[str, Any] = {"worker": worker, "state": "training", "task": "all", "generation": generation}
        about |= {"rank": rank, "pid": self._pids[worker], "step": 5 + done, "process_state": "S", "phase": "compute"}
        about |= {"progress_age_s": seconds % (STEP_S / 4), "gaps_s": {"compute": 0.1}, "steps": reports}
        return WorkerStatus(**about, step_s=STEP_S, steps_timed=done, steps_done=done)

    def _beat(self, name: str) -> None:
        self._sequence[name] += 1
        heartbeat = Heartbeat(
            node=name,
            incarnation=self._incarnations[name],
            agent_pid=1,
            sequence=self._sequence[name],
            sent_at=self.now,
            interval_s=self.interval_s,
            probe="127.0.0.1:1",
            supervisor=self._incarnations[name],
            workers=[self._status(f"{name}/{slot}") for slot in range(self.slots)],
        )
        data = HEARTBEATS.request.encode(heartbeat)
        self._detect(self._timed("detector read heartbeat", lambda: HEARTBEATS.request.decode(data)), "heartbeat")

    def pass_time(self, seconds: float) -> None:
        """Let time pass: nodes send heartbeats, each in its turn, and the detector ticks."""
        turns = max(1, round(self.interval_s / TICK_S))
        for _ in range(round(seconds / TICK_S)):
            self.now += timedelta(seconds=TICK_S)
            self._ticks += 1
            self._detect(Echo(), "echo")
            for number, name in enumerate(self.names):
                if (self._ticks + number) % turns == 0 and name not in self.dead:
                    self._beat(name)
            self._detect(Tick(), "tick")
            self.settle()

    def submit(self) -> None:
        """Submit one task for all workers."""
        spec = parse_spec(task_spec(len(self.names) * self.slots, "/data"))
        about: dict[str, Any] = {"event_id": str(uuid.uuid4()), "occurred_at": self.now, "actor": "local"}
        self._append([TaskSubmitted(**about, task="all", spec=spec)])
        self.settle()

    def exit_rank(self) -> None:
        """Have a rank end."""
        data = SIGNALS.request.encode(self.exit_of(self.names[17 % len(self.names)], 3))
        self._detect(self._timed("detector read signal", lambda: SIGNALS.request.decode(data)), "signal")
        self.settle()

    def exit_of(self, name: str, slot: int) -> ProcessExited:
        """Return the signal of the end of a rank, which trains no more."""
        worker = f"{name}/{slot}"
        generation, rank = self.ranks.pop(worker)
        about: dict[str, Any] = {"node": name, "incarnation": self._incarnations[name], "occurred_at": self.now}
        about |= {"task": "all", "worker": worker, "generation": generation, "rank": rank, "step": 6}
        return ProcessExited(**about, signal_id=str(uuid.uuid4()), pid=self._pids.pop(worker), exit_code=-9)


def measure_size(nodes: int, workers: int, report: Report) -> None:
    """Go through all courses with a number of nodes."""
    cores = Cores(nodes, workers)

    def line(course: str, **fields: Any) -> dict[str, Any]:
        found = cores.fields()
        report.line(course, nodes=nodes, **fields, **found)
        return found

    cores.pass_time(cores.interval_s)
    line("join")
    cores.submit()
    line("submission")
    cores.pass_time(TRAINING_S)
    line("training", simulated_s=TRAINING_S, interval_s=cores.interval_s)
    cores.exit_rank()
    ms = line("exit")["ms"]
    report.at_most(f"exit: ms until the error, {nodes} nodes", ms["detector signal"], ERROR_MS)
    until_plan_ms = ms["detector signal"] + ms["planner error.detected"]
    report.at_most(f"exit: ms until the plan, {nodes} nodes", until_plan_ms, PLAN_MS)
    cores.pass_time(cores.interval_s)
    cores.fields()
    cores.dead = set(cores.names[nodes // 2 : nodes // 2 + max(1, nodes // 10)])
    before = len(cores.log)
    events: list[Event] = []
    for _ in range(round(2 * TIMEOUT_INTERVALS)):
        cores.pass_time(cores.interval_s)
        events = [record.event for record in cores.log[before:]]
        if sum(isinstance(event, ErrorDetected) for event in events) == len(cores.dead):
            break
    lost, plans = (sum(isinstance(event, kind) for event in events) for kind in (ErrorDetected, PlanDecided))
    largest = line("loss of a tenth", lost=lost, plans=plans)["largest_bytes"]
    report.at_most(f"loss of a tenth: bytes of a hold, {nodes} nodes", largest["hold"], HOLD_BYTES)
    report.equal(f"loss of a tenth: decisions, {nodes} nodes", plans, 1)


async def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure each size."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    for nodes in options.nodes:
        measure_size(nodes, options.workers, report)


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--nodes", type=sizes, default=[250, 1000, 2000])
    parser.add_argument("--workers", type=at_least(4), default=8)
    return run(partial(measure, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
