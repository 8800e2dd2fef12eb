"""What requests work with: configuration, bus, log, projections and live state, and the two commands of a user.

The routers (``services/api/routers``) get the ``Gateway`` as a parameter of each endpoint.

One rule decides what runs where. Every endpoint is a coroutine on the event loop, and so is every dependency: FastAPI
would run a plain function in a thread, beside the event loop that changes what the function reads. Objects that change
(``Live``, ``Feed``) are used on the event loop only. A thread works on values that never change: views, log records,
``LiveState``. Databases and files are read in threads, explicitly: ``Gateway.read`` for the projections, in one
transaction for all views of one answer; ``asyncio.to_thread`` for the log and for files.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request, Response
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from services.api.access.access import Actor
from services.api.access.browser_sessions import BrowserSessions
from services.api.access.request_rates import RequestRates, reports_of_a_source
from services.api.http.computations import Computations
from services.api.live import Live
from services.api.output.node_files import NodeFiles, OwnFiles, SharedAnswers
from services.api.store.feed import Feed
from services.api.store.projection_store import Store, database_url
from services.api.store.readers import ViewReader
from services.api.store.tables import CLUSTER, NODES, TASKS
from services.api.submission.code_store import CodeStore
from services.api.submission.resumption import as_logged, check_free, resumed
from services.api.submission.shipped_code import ShippedCode
from services.api.submission.submission_keys import check_unused, other_specification
from services.api.submission.submitted_inputs import check_inputs, check_paths, directories
from services.api.task_metrics.collector import Collector
from services.api.task_metrics.metric_store import MetricStore
from shared.bus.connection import Bus
from shared.errors import Conflict, InvalidInput, Unavailable
from shared.events.union import Event, Recorded, TaskSubmitted, derived_id
from shared.log.journal import Journal
from shared.messages.node_files import PATH_CHARACTERS
from shared.model import utc_now
from shared.names import is_name
from shared.service.metrics import new_registry
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec, refused
from shared.views.documents import ClusterView, NodeView, TaskView

READ_YOUR_WRITES_S = 10.0
"""How long an answer to a write waits for the projections. They follow within milliseconds; a busy disk may take
seconds."""

APPEND_LIMIT_S = 5.0
"""How long a write waits for a log that goes away meanwhile: mostly long enough to learn whether it was recorded."""

_ATTEMPTS = 5
"""How often a command is tried in all, where other events of its task are logged at the same time."""

T = TypeVar("T")
V = TypeVar("V", TaskView, NodeView)


@dataclass
class Gateway:
    """What requests work with. Only the event loop may use ``feed`` and ``live``."""

    settings: Settings
    bus: Bus
    journal: Journal
    store: Store
    feed: Feed
    live: Live
    registry: CollectorRegistry = field(default_factory=new_registry)
    computations: Computations = field(default_factory=Computations)
    own_files: OwnFiles = field(init=False)
    """Files of tasks on this machine."""
    followed: SharedAnswers = field(default_factory=SharedAnswers)
    """What machines have answered to those who follow output."""
    code: ShippedCode = field(init=False)
    """The code that comes along with tasks."""
    metrics: Collector = field(init=False)
    """The metrics that scripts log."""
    sessions: BrowserSessions = field(init=False)
    reports: RequestRates = field(default_factory=reports_of_a_source)
    writable: asyncio.Task[None] | None = None
    """The newest check of whether the log can be written. It may wait long: there is never a second one beside it."""

    def __post_init__(self) -> None:
        self.own_files = OwnFiles(self.settings.run_dir)
        self.code = ShippedCode(CodeStore(database_url(self.settings, "code")), self.read)
        store = MetricStore(database_url(self.settings, "metrics"))
        self.metrics = Collector(store, self.read, self.own_files, self.node_files)
        self.sessions = BrowserSessions(self.settings.run_dir / "browser-sessions.json")

    def node_files(self, node: str) -> NodeFiles:
        """Return the files of tasks on a node."""
        return NodeFiles(self.bus, node)

    async def read(self, query: Callable[[ViewReader], T]) -> T:
        """Return what ``query`` finds in the projections.

        ``query`` runs in a thread, inside one transaction. It may use nothing that the event loop changes.
        """

        def run() -> T:
            with self.store.reading() as views:
                return query(views)

        # Not the threads of asyncio.to_thread, in which the store folds: reads never keep the fold waiting.
        return await run_in_threadpool(run)

    async def answer(self, query: Callable[[ViewReader], BaseModel | str]) -> Response:
        """Return as JSON what ``query`` finds in the projections (``read``), written in the query's thread too.

        FastAPI would look through a long list once more, and write it on the event loop.
        """
        return await self.read(lambda views: as_json(query(views)))

    async def task(self, name: str) -> TaskView:
        """Return a task by its name.

        Raises:
            NotFound: there is none.
        """
        return await self.read(lambda views: views.find(TASKS, name))

    def cluster(self, views: ViewReader) -> ClusterView:
        """Return the cluster's parameters: those of the log, or the settings while the log has none."""
        return views.get(CLUSTER, "cluster") or self.cluster_by_settings()

    def cluster_by_settings(self) -> ClusterView:
        """Return the cluster's parameters by this process's settings."""
        return ClusterView(price_per_worker_hour=self.settings.price_per_worker_hour, currency=self.settings.currency)

    async def submit(
        self, spec: TaskSpec, actor: Actor, *, key: str = "", resumes: bool = False, now: datetime | None = None
    ) -> tuple[TaskView, bool]:
        """Log a submission; return the task, and whether this call submitted it.

        Args:
            spec: what to run; relative paths are taken from the server's working directory.
            actor: who submits it, and owns the task.
            key: idempotency key; a further call with the same key returns the task of the first one.
            resumes: whether the earlier task of the name is to go on.
            now: the time of the event; None: the present.

        Raises:
            InvalidInput: a node cannot use a file, the actor may not name it, or the specification changes what a task
                that goes on from a checkpoint has to keep.
            Conflict: the name is in use, or the key was used for something else.
            Forbidden: the name, and the checkpoint that it goes on from, belong to somebody else.
        """
        spec = with_place(with_paths(spec), self.settings.checkpoint_url)
        allowed = self.settings.input_directories
        check_paths(spec, actor, allowed)
        if spec.code is not None:
            await asyncio.to_thread(self.code.name, spec.code, actor)
        event_id = derived_id(f"idempotency/{key}", "api") if key else str(uuid.uuid4())
        checked = False
        for attempt in range(_ATTEMPTS):
            known = await self.read(lambda views: views.get(TASKS, spec.name))
            if known is not None and known.submission_id == event_id:
                if known.spec != as_logged(spec, known.spec):
                    raise other_specification(key, known.spec, spec)
                return known, False
            if key and (known is not None or attempt > 0):  # refused: perhaps since the log has the event's id
                await asyncio.to_thread(check_unused, self.journal.log, key, event_id, spec)
            check_free(known)
            if known is not None:
                actor.require_own(known.owner, f"the earlier task {spec.name!r}")
            logged, checkpoint, step = resumed(known, spec)
            if not checked:
                await self._check_inputs(spec, directories(actor, allowed))
                checked = True
            event = TaskSubmitted(
                event_id=event_id,
                occurred_at=now or utc_now(),
                task=spec.name,
                spec=logged,
                checkpoint=checkpoint,
                step=step,
                resumes=resumes,
                actor=actor.name,
            )
            version = known.version if known is not None else 0
            try:
                await self.add(event, version)
            except Conflict:
                await self.catch_up()
                continue
            self.live.forget(spec.name)
            return await self.task(spec.name), True
        raise Conflict(f"task {spec.name!r} keeps changing; try again")

    async def _check_inputs(self, spec: TaskSpec, below: list[Path] | None) -> None:
        """Ask the nodes that are ready whether ranks there could use the files that a specification names.

        Args:
            spec: the specification.
            below: directories below which its paths have to be, wherever links lead; None: anywhere.

        Raises:
            InvalidInput: a node says no.
        """
        nodes = await self.read(lambda views: views.page(NODES, states=["ready"]))
        await check_inputs(spec, [self.node_files(node.name) for node in nodes if is_name(node.name)], below)

    async def append(self, event: Event, version: int | None) -> Recorded:
        """Append what a user asked for, if the stream has this version; None: whatever version it has.

        Raises:
            Conflict: it has another version.
            Unavailable: the log is away.
        """
        try:
            expected = {event.stream: version} if version is not None else None
            (recorded,) = await self.journal.append([event], expected=expected, limit_s=APPEND_LIMIT_S)
        except Unavailable as err:
            raise Unavailable(f"{err.detail}; the request may have been recorded: look before you repeat it") from err
        return recorded

    async def add(self, event: Event, version: int | None = None) -> None:
        """Append as ``append`` does, and wait until the projections have the event."""
        recorded = await self.append(event, version)
        await self.feed.reach(recorded.position, timeout_s=READ_YOUR_WRITES_S)

    async def changed(
        self, find: Callable[[], Awaitable[V]], judge: Callable[[V], Awaitable[Event | None]], what: str
    ) -> V:
        """Append the event that ``judge`` returns for the present state of a task or a node; return it after that.

        Args:
            find: reads the task or node.
            judge: raises an error where the change is refused; returns None where there is nothing to change.
            what: its name, for an error.

        Raises:
            Conflict: others change it all the time.
        """
        for _ in range(_ATTEMPTS):
            view = await find()
            if (event := await judge(view)) is None:
                return view
            try:
                await self.add(event, view.version)
            except Conflict:
                await self.catch_up()
            else:
                return await find()
        raise Conflict(f"{what} keeps changing; try again")

    async def catch_up(self) -> None:
        """Wait until the projections contain the event because of which an append was refused."""
        position = await asyncio.to_thread(self.journal.log.last_position)
        await self.feed.reach(position, timeout_s=READ_YOUR_WRITES_S)


def as_json(model: BaseModel | str) -> Response:
    """Return an answer of the interface, or its JSON, as the response that FastAPI would make of it."""
    content = model if isinstance(model, str) else as_text(model)
    return Response(content, media_type="application/json")


def as_text(model: BaseModel) -> str:
    """Return the JSON of an answer, or of a part of one."""
    return model.model_dump_json(by_alias=True)


def with_paths(spec: TaskSpec) -> TaskSpec:
    """Return the specification with absolute paths, but those in code that comes along.

    Whether files are there is the nodes' to say.

    Raises:
        InvalidInput: ``data`` or ``script`` can be no path on any machine.
    """
    given = {"data": spec.data} | ({"script": spec.script} if spec.script is not None else {})
    for name, path in given.items():
        if "\0" in path or len(path) > PATH_CHARACTERS:
            what = f"not a usable path: at most {PATH_CHARACTERS} characters, and no null byte"
            raise _refused(name, path, what)
    changes: dict[str, object] = {name: os.path.abspath(path) for name, path in given.items() if spec.code is None}
    if spec.checkpoint.directory is not None:
        directory = os.path.abspath(spec.checkpoint.directory)
        changes["checkpoint"] = spec.checkpoint.model_copy(update={"directory": directory})
    return spec.model_copy(update=changes)


def with_place(spec: TaskSpec, url: str) -> TaskSpec:
    """Return the specification with the cluster's place for checkpoints, where it names none of its own.

    Args:
        spec: the specification.
        url: of the cluster's place; empty: there is none.
    """
    if not url or spec.checkpoint.directory is not None or spec.checkpoint.url is not None:
        return spec
    place = spec.checkpoint.model_copy(update={"url": f"{url}/{spec.name}"})
    return spec.model_copy(update={"checkpoint": place})


def _refused(field: str, value: object, problem: str) -> InvalidInput:
    return refused([(field, value, problem)])


async def get_gateway(request: Request) -> Gateway:
    """Return the gateway of the application that answers this request (FastAPI dependency)."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


Api = Annotated[Gateway, Depends(get_gateway)]
"""Type of the parameter by which an endpoint gets the gateway."""
