"""How far behind people are who look at the live page while many events come.

A part of ``benchmarks.gateway``. The gateway is the real one over a bus of its own, and a log of a million events; the
events that come are those of ``benchmarks.log_course``, appended through a journal of another process and relayed. Each
viewer is a connection that follows the log, as the page does, with the requests that the page sends for what has
changed: at most every ``PAUSE_S``; while many events come or answers take long, about every ``BUSY_PAUSE_S``, or
``REST`` times as long as the answers took, and then an answer that others have got a moment ago will do
(``services/api/page/rounds.js``). They may also follow the output of one task, all of them the same one, as its page
does (``services/api/page/output.js``).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import psutil

from benchmarks.log_course import LARGE
from benchmarks.long_log import write_and_hold_back
from benchmarks.printed_output import Printing, print_and_serve
from benchmarks.report import Report
from cli.stack.child import Child
from services.api import present
from services.api.live import LiveState
from services.api.routers.nodes import node_map
from services.api.store.projection_store import Store
from services.api.store.tables import NODES, TASKS
from shared.bus import credentials
from shared.bus.connection import Bus
from shared.bus.identities import node_identity
from shared.events.union import Event
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.nats.nats_server import NatsServer
from shared.service import tokens
from shared.service.joining import CREDENTIAL
from shared.service.tokens import Scope
from shared.tasks.specification import GOING_ON
from shared.views.documents import TaskView

MOST_LAG_S = 2.0
MOST_P99_S = 0.3
MOST_CATCH_UP_S = 30.0
MOST_MAP_CPU_S = 0.3
LEAST_RATE = 0.95
"""Of the events that were to come in each second: a writer that cannot keep up would make all look quick."""

APPENDS_PER_S = 100
"""The services together append so often; each append has several events."""

PAUSE_S, BUSY_PAUSE_S, REST, SUMS_S = 0.5, 3.0, 2.0, 10.0
BUSY_EVENTS, BUSY_ROUND_S, BUSY_AGE_S, COSTS_AGE_S = 20, 0.5, 1, 5
_STATES = "&".join(f"state={state}" for state in GOING_ON)
_PATHS = (
    "/v1/troubles",
    "/v1/node-map",
    f"/v1/tasks?limit=100&ranks=false&order=newest&{_STATES}",
    "/v1/tasks?limit=20&ranks=false&order=newest&state=failed",
    "/v1/tasks?limit=20&ranks=false&order=newest&state=stopped&state=succeeded",
    "/v1/incidents?limit=25&order=newest&state=open",
    "/v1/incidents?limit=25&order=newest",
    "/v1/plans?limit=20&order=newest",
    "/v1/waf?from={since}",
)
_SUMS = ("/v1/costs?limit=1&breakdowns=false", "/v1/slow-workers?limit=10&order=newest")
OUTPUT = "/v1/tasks/{task}/logs?follow=true&tail=200&newest_bytes=32768"
_MARKS = "/v1/incidents?since={since}&order=newest&limit=200"
MARKS_EVERY = 6
"""Rounds of sums from one request for the incidents of the chart to the next; of more than 200 in its time none comes
between them (``services/api/page/lists.js``)."""
WAF_STEP_S, WAF_WINDOW_S = 5.0, 3600.0

_DRAIN_S = 5.0
"""For what is under way when the last event was appended; a viewer that lacks events then misses the bound."""
_TIMEOUT_S = 60.0
_CONNECTIONS = 6
"""Of one viewer at most: as many as browsers open to one server."""


def paths() -> list[str]:
    """Return what the page asks for after events of all kinds."""
    return [path.format(since=_window_start()) for path in _PATHS]


def sums(rounds: int = 0) -> list[str]:
    """Return what the page asks for now and then, whatever comes. ``rounds``: how many came before."""
    wanted = _SUMS if rounds % MARKS_EVERY else (*_SUMS, _MARKS)
    return [path.format(since=_window_start()) for path in wanted]


def _window_start() -> str:
    until_s = time.time() // WAF_STEP_S * WAF_STEP_S
    return datetime.fromtimestamp(until_s - WAF_WINDOW_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Seen:
    """What one viewer got: positions up to which it had the log, each with when; and its requests, when they began and
    how long they took."""

    positions: list[tuple[int, float]] = field(default_factory=list)
    requests_s: list[tuple[float, float]] = field(default_factory=list)
    failed: int = 0
    received_bytes: int = 0
    output_bytes: int = 0


class Viewer:
    """One page that somebody looks at.

    ``last``: position up to which it is to follow the log; ``output``: path of the output that it follows, or empty.
    """

    def __init__(self, client: aiohttp.ClientSession, last: int, output: str = "") -> None:
        self._client, self._last, self._output = client, last, output
        self._times = deque[float](maxlen=BUSY_EVENTS + 1)
        self._changed = asyncio.Event()
        self.seen = Seen()

    async def look(self, after: int, connected: asyncio.Semaphore) -> None:
        """Follow the log, and ask for what has changed, until the last event has come or the viewer is cancelled."""
        asking = [asyncio.create_task(self._ask()), asyncio.create_task(self._ask_sums())]
        if self._output:
            asking.append(asyncio.create_task(self._follow_output()))
        try:
            async with self._client.get(f"/v1/events?follow=true&brief=true&after={after}") as stream:
                rest = b""
                async for data in stream.content.iter_any():
                    connected.release()
                    rest = self._took(rest + data)
                    if self.seen.positions and self.seen.positions[-1][0] >= self._last:
                        return
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _took(self, data: bytes) -> bytes:
        """Take note of the events that have come whole; return what is left."""
        self.seen.received_bytes += len(data)
        whole, _, rest = data.rpartition(b"\n\n")
        place = whole.rfind(b"id: ")
        if place >= 0:
            position = int(whole[place + 4 : whole.index(b"\n", place)])
            now_s = time.monotonic()
            self._times.extend([now_s] * whole.count(b"\nevent: "))
            self.seen.positions.append((position, now_s))
            self._changed.set()
        return rest

    async def _ask(self) -> None:
        busy = False
        while True:
            await self._changed.wait()
            if not busy:
                self._changed.clear()
            began_s = time.monotonic()
            await asyncio.gather(*(self._get(path, BUSY_AGE_S if busy else 0) for path in paths()))
            took_s = time.monotonic() - began_s
            busy = self._many_came() or took_s > BUSY_ROUND_S
            pause_s = max(BUSY_PAUSE_S, REST * took_s) * random.uniform(0.75, 1.25)
            await asyncio.sleep(pause_s if busy else PAUSE_S)

    def _many_came(self) -> bool:
        return len(self._times) > BUSY_EVENTS and time.monotonic() - self._times[0] < BUSY_PAUSE_S

    async def _follow_output(self) -> None:
        async with self._client.get(self._output, headers={"Accept": "application/x-ndjson"}) as answer:
            self.seen.failed += not answer.ok
            async for data in answer.content.iter_any():
                self.seen.output_bytes += len(data)
        self.seen.failed += 1  # the task goes on, and so does its output

    async def _ask_sums(self) -> None:
        for rounds in itertools.count():
            await asyncio.gather(*(self._get(path, COSTS_AGE_S if "costs" in path else 0) for path in sums(rounds)))
            await asyncio.sleep(SUMS_S)

    async def _get(self, path: str, age_s: int) -> None:
        headers = {"Cache-Control": f"max-age={age_s}"} if age_s else None
        began_s = time.monotonic()
        try:
            async with self._client.get(path, headers=headers) as answer:
                await answer.read()
                self.seen.failed += not answer.ok
        except (aiohttp.ClientError, TimeoutError):
            self.seen.failed += 1
        self.seen.requests_s.append((began_s, time.monotonic() - began_s))


def watch(
    url: str, given: list[str], after: int, last: int, ready: str, seconds: float, output: str
) -> tuple[list[Seen], float]:
    """Look at the page with one viewer for each token; return what they saw, and the processor time that it took.

    The file ``ready`` is written when all follow the log. ``output``: as ``Viewer``.
    """
    return asyncio.run(_watch(url, given, after, last, Path(ready), seconds, output))


async def _watch(
    url: str, given: list[str], after: int, last: int, ready: Path, seconds: float, output: str
) -> tuple[list[Seen], float]:
    connected = asyncio.Semaphore(0)
    async with AsyncExitStack() as stack:
        viewers = []
        for token in given:
            headers = {"Authorization": f"Bearer {token}"}
            client = aiohttp.ClientSession(
                url,
                headers=headers,
                connector=aiohttp.TCPConnector(limit_per_host=_CONNECTIONS, keepalive_timeout=_TIMEOUT_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_read=_TIMEOUT_S),
            )
            viewers.append(Viewer(await stack.enter_async_context(client), last, output))
        looking = [asyncio.create_task(viewer.look(after, connected)) for viewer in viewers]
        for _ in viewers:
            await connected.acquire()
        await asyncio.to_thread(ready.touch)
        began_s = time.process_time()
        _, late = await asyncio.wait(looking, timeout=seconds + _DRAIN_S)
        for task in late:
            task.cancel()
        await asyncio.wait(looking)
        took_s = time.process_time() - began_s
    return [viewer.seen for viewer in viewers], took_s


def _later(event: Event, later: timedelta) -> Event:
    """Return an event at a later time: it is appended when it occurs."""
    times = {name: value + later for name, value in vars(event).items() if isinstance(value, datetime)}
    return event.model_copy(update=times)


@dataclass(frozen=True)
class Load:
    """What comes while viewers look: events per second for some seconds, then a burst, then a flood.

    ``output_bytes_per_s``: what the ranks of the task print that all viewers look at; 0: they look at none.
    """

    viewers: int
    earlier: int
    """Events that the log has before anybody looks, at least."""
    events_per_s: int
    seconds: float
    burst_per_s: int = 200
    burst_s: float = 10.0
    flood: int = 20_000
    flood_s: float = 10.0
    output_bytes_per_s: int = 0

    @property
    def usual(self) -> int:
        """Events before the flood."""
        return int(self.events_per_s * self.seconds) + int(self.burst_per_s * self.burst_s)


async def measure(report: Report, load: Load) -> None:
    """Have viewers look while events are appended."""
    async with AsyncExitStack() as stack:
        # In memory: log and bus write each event to the disk, of which some take ten milliseconds for that.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unicron-viewers-", dir="/dev/shm"))
        run_dir = Path(folder)
        (run_dir / "services").mkdir()
        held_back = load.usual + load.flood
        earlier, events = write_and_hold_back(run_dir / "log.db", load.earlier + held_back, held_back, LARGE)
        events = events[:held_back]
        nats = await stack.enter_async_context(NatsServer(run_dir / "nats"))
        log = stack.enter_context(closing(EventLog(f"sqlite:///{run_dir / 'log.db'}")))
        # The projections are of the whole log before the gateway starts, as those of one that is started again.
        began_s = time.process_time()
        with closing(Store(f"sqlite:///{run_dir / 'projections.db'}")) as store:
            while records := log.read(after=store.position(), limit=1000):
                store.fold(records)
            report.line("folded", events=earlier, cpu_s=round(time.process_time() - began_s, 1))
            _measure_map(report, store)
            task = _most_ranks(store)
        credential = credentials.read(nats.keys.credential_file("planner"))
        bus = await Bus.connect(nats.url, credential=credential, name="benchmark")
        stack.push_async_callback(bus.close)
        journal = await stack.enter_async_context(Journal(log, bus))
        environment = {
            **os.environ,
            "UNICRON_RUN_DIR": str(run_dir),
            "UNICRON_NATS_URL": nats.url,
            "UNICRON_PORT": "0",
            CREDENTIAL: str(nats.keys.credential_file("api")),
        }
        child = Child("api", "services.api.main", environment, run_dir)
        stack.push_async_callback(child.end)
        process = psutil.Process((await child.start()).pid)
        url = f"http://127.0.0.1:{int((run_dir / 'services' / 'api.port').read_text())}"
        given = [
            tokens.add(run_dir / "tokens.json", f"viewer-{number}", Scope.READ, datetime.now(UTC))
            for number in range(load.viewers)
        ]
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))
        ready = run_dir / "ready"
        output = ""
        if load.output_bytes_per_s:
            printing = _printing(nats, task, run_dir / "nodes", load.output_bytes_per_s)
            machines = multiprocessing.get_context("spawn").Process(target=print_and_serve, args=(printing,))
            machines.start()
            stack.callback(machines.join)
            stack.callback(machines.terminate)
            output = OUTPUT.format(task=task.name)
        loop = asyncio.get_running_loop()
        # All follow from one event before those that come: its receipt says that a viewer is there.
        seconds = load.seconds + load.burst_s + load.flood_s + MOST_CATCH_UP_S
        arguments = (url, given, earlier - 1, earlier + len(events), str(ready), seconds, output)
        watching = loop.run_in_executor(pool, watch, *arguments)
        while not ready.exists() and not watching.done():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
        began = _cpu_s(process), time.process_time()
        first, last = int(load.events_per_s * load.seconds), load.usual
        times, took_s = await _append(journal, events[:first], load.events_per_s)
        usual_s = _cpu_s(process) - began[0]
        burst_at_s = time.monotonic()
        more, burst_s = await _append(journal, events[first:last], load.burst_per_s)
        quiet_at_s = time.monotonic()
        flood, flood_s = await _append(journal, events[last:], int(load.flood / load.flood_s))
        gateway_s, writer_s = _cpu_s(process) - began[0], time.process_time() - began[1]
        seen, viewers_s = await watching
    used_s = {"gateway": gateway_s, "gateway, before the burst": usual_s, "writer": writer_s, "viewers": viewers_s}
    lasted_s = round(took_s + burst_s + flood_s, 1)
    report.line("processor time, s", seconds=lasted_s, **{name: round(s, 1) for name, s in used_s.items()})
    for name, rate, found, during_s in (
        ("events appended each second", load.events_per_s, times, took_s),
        ("events appended each second of the burst", load.burst_per_s, more, burst_s),
        ("events appended each second of the flood", load.flood / load.flood_s, flood, flood_s),
    ):
        report.at_least(name, round(len(found) / during_s, 1), LEAST_RATE * rate, events=len(found))
    if output:
        received = sum(one.output_bytes for one in seen)
        report.line(
            "output", printed_bytes_per_s=load.output_bytes_per_s, ranks=len(printing.files), received_bytes=received
        )
    _report(report, seen, [*times, *more], earlier + 1, burst_at_s, quiet_at_s)
    last_s = [
        next((at_s for position, at_s in one.positions if position >= earlier + held_back), math.inf) for one in seen
    ]
    report.at_most(
        "caught up with the flood behind its last event, s", round(max(last_s) - flood[-1], 2), MOST_CATCH_UP_S
    )


def _most_ranks(store: Store) -> TaskView:
    """Return the task in training that has most ranks."""
    with store.reading() as views:
        return max(views.page(TASKS, states=GOING_ON), key=lambda task: len(task.members))


def _printing(nats: NatsServer, task: TaskView, folder: Path, bytes_per_s: int) -> Printing:
    """Return what the task's ranks print, each on its node."""
    places = [member.worker.split("/") for member in task.members]
    nodes = sorted({node for node, _ in places})
    nats.keys.make(more=[node_identity(node) for node in nodes])
    nats.reload()
    keys = {node: str(nats.keys.credential_file(node_identity(node))) for node in nodes}
    files = tuple((node, f"{task.generation}-{node}-{slot}.log") for node, slot in places)
    return Printing(nats.url, task.name, files, keys, str(folder), bytes_per_s)


def _measure_map(report: Report, store: Store) -> None:
    """Report what the map of all nodes takes, of a gateway that has read nothing yet."""
    began_s = time.process_time()
    with store.reading() as views:
        assigned = present.assigned_ranks(views.page(TASKS, states=GOING_ON))
        made = node_map(views.page(NODES), LiveState(), assigned)
    text = made.model_dump_json()
    took_s = round(time.process_time() - began_s, 3)
    about = {"nodes": len(made.names), "size_bytes": len(text)}
    report.at_most("the map of all nodes takes processor time, s", took_s, MOST_MAP_CPU_S, **about)


def _cpu_s(process: psutil.Process) -> float:
    """Return the processor time of the gateway and of the processes that it has started."""
    each = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(times.user + times.system for times in each))


async def _append(journal: Journal, events: list[Event], events_per_s: int) -> tuple[list[float], float]:
    """Append events at a rate; return when each append was called, for every event, and how long all took."""
    size = max(1, events_per_s // APPENDS_PER_S)
    times: list[float] = []
    began_s = time.monotonic()
    for first in range(0, len(events), size):
        await asyncio.sleep(max(began_s + first / events_per_s - time.monotonic(), 0.0))
        later = datetime.now(UTC) - events[first].occurred_at
        part = [_later(event, later) for event in events[first : first + size]]
        times += [time.monotonic()] * len(part)
        await journal.append(part)
    return times, time.monotonic() - began_s


def lags(seen: Seen, times: list[float], first: int) -> list[float]:
    """Return how old the oldest event of each receipt was; an event that has not come counts as endlessly late.

    Args:
        seen: by one viewer.
        times: when each event was appended.
        first: position of the first of them.
    """
    found, next_ = [], first
    behind = first + len(times)
    for position, at_s in seen.positions:
        if next_ <= position and next_ < behind:
            found.append(at_s - times[next_ - first])
            next_ = position + 1
    return found if next_ >= behind else [*found, math.inf]


def _report(
    report: Report, seen: list[Seen], times: list[float], first: int, burst_at_s: float, quiet_at_s: float
) -> None:
    """Report what holds before the flood, which comes at ``quiet_at_s``."""
    found = sorted(lag for one in seen for lag in lags(one, times, first))
    p50_s = round(found[len(found) // 2], 3)
    report.at_most("an event is seen after, s", round(found[-1], 3), MOST_LAG_S, p50_s=p50_s, viewers=len(seen))
    report.equal("requests of the viewers that failed", sum(one.failed for one in seen), 0)
    asked = [request for one in seen for request in one.requests_s]
    opened_s = min(began_s for began_s, _ in asked)
    late = Counter(int(began_s - opened_s) for began_s, took_s in asked if took_s > MOST_P99_S)
    report.line("late answers by second", burst_at_s=int(burst_at_s - opened_s), late=dict(sorted(late.items())))
    for during, from_s, until_s in (("", -math.inf, burst_at_s), (" during the burst", burst_at_s, quiet_at_s)):
        requests = sorted(took_s for began_s, took_s in asked if from_s <= began_s < until_s)
        p50_s, p99_s = (round(requests[int(part * (len(requests) - 1))], 3) for part in (0.5, 0.99))
        name = f"a list answers in (p99){during}, s"
        most_s = round(requests[-1], 3)
        report.at_most(name, p99_s, MOST_P99_S, requests=len(requests), p50_s=p50_s, most_s=most_s)
