"""Hand-written histories: real events in a real log, with times of the test's choosing; and the gateway over it."""

from __future__ import annotations

import asyncio
import copy
import functools
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from fastapi import FastAPI
from starlette.datastructures import State

from services.api import main
from services.api.gateway import Gateway
from services.api.live import Live
from services.api.store.feed import Feed
from services.api.store.projection_store import Store
from services.planner.decide import DECIDER
from shared.bus.connection import Bus
from shared.costs.counterfactuals import counterfactuals
from shared.costs.ledger import History
from shared.costs.report import Account, Day, Period, report
from shared.costs.service_levels import achieved_flop
from shared.costs.settlement import settle_window
from shared.costs.span_claims import Window, allocated_intervals
from shared.events.plans import Layout, Member, Response, Stage, TaskChange, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    ClusterConfigured,
    ErrorDetected,
    Event,
    NodeJoined,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskProgressed,
    TaskSubmitted,
)
from shared.interface.costs import Costs, Counterfactual, IncidentCost
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.projections.evolve import evolve
from shared.service import tokens
from shared.service.frame import Context
from shared.service.tokens import Scope
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec, parse_spec
from shared.views.documents import ClusterView, Views
from tests.condition import until

START = datetime(2025, 3, 1, 12, 0, 0, tzinfo=UTC)
PRICE = 3.6
"""Per worker-hour: a worker-second is a thousandth of the currency."""


def spec_dict(name: str = "gpt", data: str = "corpus.txt", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 16},
        "batch": {"global": 8, "micro": 1},
        "steps": 100,
        "data": data,
        **changes,
    }


def spec(name: str = "gpt", **changes: Any) -> TaskSpec:
    return parse_spec(spec_dict(name, **changes))


def stage(generation: int, workers: list[str], *, kind: Any = "boundary", source: Any = "live") -> Stage:
    return Stage(
        kind=kind,
        generation=generation,
        layout=Layout(tensor=1, pipeline=1, data=len(workers), micro_batch=1),
        members=[
            Member(rank=rank, worker=worker, node=worker.split("/")[0], source=source)
            for rank, worker in enumerate(workers)
        ],
    )


def cost_history(views: Views) -> History:
    """Return all views, in the ledger's order."""
    return History(
        sorted(views.plans.values(), key=lambda plan: plan.position),
        sorted(views.incidents.values(), key=lambda incident: incident.position),
        sorted(views.spans.values(), key=lambda span: (span.position, span.id)),
    )


def cost_report(
    views: Views,
    as_of: datetime,
    cluster: ClusterView | None = None,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    period: Period | None = None,
) -> Costs:
    """Return the report of a settlement of all history at once: the reference for what is settled step by step."""
    history = cost_history(views)
    as_of = history.present(as_of)
    window = Window.of(start, as_of if end is None else min(end, as_of))
    tasks = list(views.tasks.values())
    account = Account(
        as_of=as_of,
        start=start,
        end=end,
        window=window,
        sums=settle_window(history, views.tasks, window, as_of),
        tasks={task.name: task for task in sorted(tasks, key=lambda task: task.position)},
        incidents=history.incidents,
        nodes=list(views.nodes.values()),
        flop=sum(task.flop(task.step) for task in tasks),
        weighted_flop=sum(task.weighted_flop(task.step) for task in tasks),
        achieved_flop=achieved_flop(history.spans, views.tasks, window, as_of.timestamp()),
        days=_days(history, views, window, as_of),
    )
    return report(account, cluster or views.cluster.get("cluster", ClusterView()), period=period)


def _days(history: History, views: Views, window: Window, as_of: datetime) -> list[Day]:
    intervals = [one for found in allocated_intervals(history.spans, window).values() for one in found]
    if not intervals:
        return []
    day = timedelta(days=1)
    start = datetime.fromtimestamp(min(low for low, _ in intervals), UTC).replace(hour=0, minute=0, second=0)
    start, days = start.replace(microsecond=0), []
    while start.timestamp() < max(high for _, high in intervals):
        within = Window(*window.clip(start.timestamp(), (start + day).timestamp()))
        sums = settle_window(history, views.tasks, within, as_of)
        achieved = achieved_flop(history.spans, views.tasks, within, as_of.timestamp())
        days.append(Day(start, sums["all"][""], achieved))
        start += day
    return days


def cost_of(views: Views, as_of: datetime, incident: str) -> IncidentCost:
    """Return the cost of one incident."""
    rows = {row.incident: row for row in cost_report(views, as_of, ClusterView(price_per_worker_hour=PRICE)).incidents}
    return IncidentCost(**{name: getattr(rows[incident], name) for name in IncidentCost.model_fields})


def other_answers(views: Views, as_of: datetime, incident: str, cost: IncidentCost) -> list[Counterfactual]:
    """Return the counterfactuals of one incident."""
    solved = sorted((plan.position, plan.decided_at) for plan in views.plans.values() if plan.solved)

    def next_solved(position: int) -> datetime | None:
        return next((at for behind, at in solved if behind > position), None)

    return counterfactuals(views.incidents[incident].other_answers, cost, next_solved, as_of)


def _of_present_decider(kind: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event; a plan's with the decider that has made it."""
    return {"decider": DECIDER, **fields} if kind is PlanDecided else fields


class Story:
    """Appends events at times given in seconds after ``START``."""

    def __init__(self, path: Path) -> None:
        self.seconds = 0.0
        self.log = EventLog(f"sqlite:///{path}", clock=lambda: self.time())
        self.records: list[Recorded] = []

    def time(self, seconds: float | None = None) -> datetime:
        return START + timedelta(seconds=self.seconds if seconds is None else seconds)

    def at(self, seconds: float) -> Story:
        self.seconds = seconds
        return self

    def add(self, kind: type[Any], /, **fields: Any) -> Recorded:
        fields = {"event_id": str(uuid.uuid4()), "occurred_at": self.time(), **fields}
        return self.append(kind(**_of_present_decider(kind, fields)))

    def append(self, event: Event) -> Recorded:
        (recorded,) = self.log.append([event])
        self.records.append(recorded)
        return recorded

    def views(self) -> Views:
        views = Views()
        for recorded in self.records:
            evolve(views, recorded)
        return views

    def cluster(self) -> Recorded:
        return self.add(
            ClusterConfigured,
            mtbf_node_s=1e6,
            throughput_hysteresis=0.2,
            transition_prior_s=2.0,
            worker_flop_per_s=1e9,
            price_per_worker_hour=PRICE,
            currency="EUR",
        )

    def node(self, name: str, workers: int = 2) -> Recorded:
        return self.add(
            NodeJoined,
            node=name,
            incarnation=str(uuid.uuid4()),
            agent_pid=100,
            domain="default",
            workers=[f"{name}/{slot}" for slot in range(workers)],
        )

    def submit(self, name: str = "gpt", **changes: Any) -> Recorded:
        return self.add(TaskSubmitted, task=name, spec=spec(name, **changes))

    def plan(
        self, plan: str, *changes: TaskChange, trigger: Trigger = Trigger.TASK_SUBMITTED, **fields: Any
    ) -> Recorded:
        response = fields.pop("response", Response.RECONFIGURE)
        return self.add(
            PlanDecided, plan=plan, trigger=trigger, cause="cause", response=response, changes=list(changes), **fields
        )

    def moved(self, plan: str, task: str, phase: str, generation: int, **fields: Any) -> Recorded:
        fields = {"started_at": self.time(), **fields}
        return self.add(StateMoved, plan=plan, task=task, phase=phase, generation=generation, **fields)

    def progress(
        self, task: str, step: int, step_s: float, *, generation: int = 1, workers: int = 4, **fields: Any
    ) -> Recorded:
        about = {"task": task, "generation": generation, "step": step, "workers": workers}
        return self.add(TaskProgressed, **about, step_s=step_s, loss=2.5, **fields)

    def error(self, incident: str, occurred: float, **fields: Any) -> Recorded:
        fields = {
            "kind": ErrorKind.PROCESS_EXIT,
            "severity": Severity.SEV2,
            "method": Method.PROCESS_SUPERVISION,
            "detected_at": self.time(),
            **fields,
        }
        return self.add(ErrorDetected, incident=incident, occurred_at=self.time(occurred), **fields)

    # The story that most tests begin with: one task trains on four workers of two nodes from second 10 on.
    def running(self, name: str = "gpt", *, step_s: float = 1.0) -> Story:
        workers = ["n0/0", "n0/1", "n1/0", "n1/1"]
        self.at(0).cluster()
        self.node("n0")
        self.node("n1")
        self.at(1).submit(name)
        change = TaskChange(
            task=name,
            reason="submitted",
            action="move",
            from_generation=0,
            prepare=workers,
            target=stage(1, workers, source="initial"),
        )
        self.at(2).plan("start", change)
        self.at(5).moved("start", name, "prepared", 1)
        sources = dict.fromkeys(workers, "initial")
        pids = {worker: 200 + index for index, worker in enumerate(workers)}
        self.at(10).moved("start", name, "restored", 1, step=1, sources=sources, pids=pids, complete=True)
        self.at(20).progress(name, 11, step_s)
        return self

    # Worker n1/1's process dies at second 100 and is started again.
    def process_exit(self, incident: str = "i1", plan: str = "p1", name: str = "gpt") -> Story:
        survivors = ["n0/0", "n0/1", "n1/0"]
        self.at(100.5).error(incident, 100, task=name, node="n1", worker="n1/1", rank=3, generation=1, step=90)
        self.at(101).plan(plan, restart(name), trigger=Trigger.ERROR, response=Response.RESTART, incident=incident)
        self.at(101.2).moved(plan, name, "held", 1, incident=incident)
        own = dict.fromkeys(survivors, "own")
        self.at(103).moved(plan, name, "resumed", 2, incident=incident, step=91, sources=own)
        return self

    def process_restored(self, incident: str = "i1", plan: str = "p1", name: str = "gpt") -> Story:
        self.at(106).moved(plan, name, "drained", 2, incident=incident, step=94)
        sources = {"n0/0": "own", "n0/1": "own", "n1/0": "own", "n1/1": "live"}
        self.at(108).moved(
            plan, name, "restored", 3, incident=incident, step=95, sources=sources, pids={"n1/1": 300}, complete=True
        )
        return self


def restart(name: str = "gpt") -> TaskChange:
    survivors = ["n0/0", "n0/1", "n1/0"]
    return TaskChange(
        task=name,
        reason="a process ended",
        action="move",
        from_generation=1,
        survivors=survivors,
        failed=["n1/1"],
        hold=True,
        interrupted=stage(2, survivors, kind="interrupted"),
        prepare=["n1/1"],
        target=stage(3, [*survivors, "n1/1"]),
    )


@dataclass
class Server:
    """A gateway on a free port."""

    url: str
    http: httpx.AsyncClient
    journal: Journal
    data: Path
    """A text file that a task can train on."""

    def spec(self, name: str = "gpt", **changes: Any) -> dict[str, Any]:
        return spec_dict(name, **{"data": str(self.data), **changes})

    async def append(self, kind: type[Any], /, **fields: Any) -> Recorded:
        """Append an event as another service would."""
        fields = {"event_id": str(uuid.uuid4()), "occurred_at": datetime.now(UTC), **fields}
        (recorded,) = await self.journal.append([kind(**_of_present_decider(kind, fields))])
        return recorded

    async def projected(self, position: int) -> None:
        """Wait until the gateway has folded ``position``."""
        await until(lambda: self._reached(position))

    async def join(self, *nodes: str) -> None:
        """Have nodes of one worker join."""
        for node in nodes:
            recorded = await self.append(
                NodeJoined, node=node, incarnation="one", agent_pid=4, domain="default", workers=[f"{node}/0"]
            )
        await self.projected(recorded.position)

    async def _reached(self, position: int) -> bool:
        checks = {check["name"]: check["detail"] for check in (await self.http.get("/readyz")).json()["checks"]}
        return int(checks["log"].rsplit(" ", 1)[1]) >= position


@contextmanager
def offline_gateway(run_dir: Path, records: Sequence[Recorded] = ()) -> Iterator[Gateway]:
    """Give a gateway over some records that has neither bus nor journal: for requests that use neither."""
    store = Store(f"sqlite:///{run_dir / 'projections.db'}")
    store.fold(records)
    missing: Any = None
    try:
        yield Gateway(Settings(run_dir=run_dir), missing, missing, store, Feed(store, missing), Live())
    finally:
        store.close()


_application = functools.cache(main.application)


def application() -> FastAPI:
    """Return the endpoints. FastAPI prepares their routes at the first request, which takes longer than most tests: all
    applications of the tests have the same ones."""
    made = copy.copy(_application())
    made.state, made.user_middleware, made.middleware_stack = State(), [], None
    return made


def prepared(gateway: Gateway) -> FastAPI:
    """Return the application over a gateway, its routes prepared."""
    with mock.patch.object(main, "application", application):
        return main.create_app(gateway)


def client_of(gateway: Gateway) -> httpx.AsyncClient:
    """Return a client of the application over a gateway, without a socket between them: it has a token."""
    return client_of_app(prepared(gateway), headers=bearer(gateway.settings))


def client_of_app(
    app: FastAPI, *, headers: dict[str, str] | None = None, base_url: str = "http://localhost"
) -> httpx.AsyncClient:
    """Return a client of an application, without a socket between them."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=base_url, headers=headers)


def bearer(settings: Settings, scope: Scope = Scope.OPERATE) -> dict[str, str]:
    """Make a token of a scope; return the header that has it."""
    token = tokens.add(settings.token_file, f"test-{uuid.uuid4().hex}", scope, datetime.now(UTC))
    return {"Authorization": f"Bearer {token}"}


@asynccontextmanager
async def serving(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """Run the real service in this event loop."""
    run_dir = settings.run_dir
    data = run_dir / "corpus.txt"
    data.write_text("the cat sat on the mat. " * 50)
    context = Context(settings, bus, journal, asyncio.Event(), "api")
    port_file = run_dir / "services" / "api.port"
    port_file.unlink(missing_ok=True)
    task = asyncio.create_task(main.serve(context))
    try:

        def started() -> bool:
            if task.done():
                task.result()
            return context.is_ready

        with mock.patch.object(main, "application", application):
            await until(started)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        # Without the certificates of all authorities, which take 25 ms to load: this is no TLS.
        async with httpx.AsyncClient(base_url=url, timeout=40, verify=False) as http:
            yield Server(url, http, journal, data)
    finally:
        task.cancel()
        await asyncio.wait({task})
