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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from services.api import submitted_files
from services.api.feed import Feed
from services.api.live import Live
from services.api.store import Store, ViewReader
from services.api.tables import CLUSTER, TASKS
from services.api.views import ClusterView, TaskView
from shared.bus import Bus
from shared.errors import Conflict, InvalidInput
from shared.events import TaskStopRequested, TaskSubmitted, derived_id
from shared.log.journal import Journal
from shared.model import utc_now
from shared.settings import Settings
from shared.tasks import ENDED, TaskSpec, TaskState, refused

READ_YOUR_WRITES_S = 10.0
"""How long an answer to a write waits for the projections. They follow within milliseconds; a busy disk may take
seconds."""

_ATTEMPTS = 5
"""How often a command is tried in all, where other events of its task are logged at the same time."""

_REUSABLE = frozenset({TaskState.STOPPED, TaskState.FAILED})
"""States of an earlier task whose name (and checkpoint) a new submission takes over."""

T = TypeVar("T")


@dataclass
class Gateway:
    """What requests work with. Only the event loop may use ``feed`` and ``live``."""

    settings: Settings
    bus: Bus
    journal: Journal
    store: Store
    feed: Feed
    live: Live

    async def read(self, query: Callable[[ViewReader], T]) -> T:
        """Return what ``query`` finds in the projections.

        ``query`` runs in a thread, inside one transaction. It may use nothing that the event loop changes.
        """

        def run() -> T:
            with self.store.reading() as views:
                return query(views)

        # These threads are not those of asyncio.to_thread, which the fold uses: reads never keep the fold waiting.
        return await run_in_threadpool(run)

    async def task(self, name: str) -> TaskView:
        """Return a task by its name.

        Raises:
            NotFound: there is none.
        """
        return await self.read(lambda views: views.find(TASKS, name))

    def cluster(self, views: ViewReader) -> ClusterView:
        """Return the cluster's parameters: those of the log, or the settings while the log has none."""
        return views.get(CLUSTER, "cluster") or ClusterView(
            price_per_worker_hour=self.settings.price_per_worker_hour, currency=self.settings.currency
        )

    async def submit(self, spec: TaskSpec, *, key: str = "", now: datetime | None = None) -> tuple[TaskView, bool]:
        """Log a submission; return the task, and whether this call submitted it.

        Args:
            spec: what to run; relative paths are taken from the server's working directory.
            key: idempotency key; a further call with the same key returns the task of the first one.
            now: the time of the event; None: the present.

        Raises:
            InvalidInput: a path does not exist, or the earlier task's checkpoint does not fit.
            Conflict: the name is in use, or the key was used for something else.
        """
        spec = await asyncio.to_thread(with_paths, spec)
        event_id = derived_id(f"idempotency/{key}", "api") if key else str(uuid.uuid4())
        for _ in range(_ATTEMPTS):
            known = await self.read(lambda views: views.get(TASKS, spec.name))
            if known is not None and known.submission_id == event_id:
                if known.spec != spec:
                    raise Conflict(f"idempotency key {key!r} was used for another specification of {spec.name!r}")
                return known, False
            checkpoint, step = resumable(known, spec)
            event = TaskSubmitted(
                event_id=event_id,
                occurred_at=now or utc_now(),
                task=spec.name,
                spec=spec,
                checkpoint=checkpoint,
                step=step,
            )
            version = known.version if known is not None else 0
            try:
                (recorded,) = await self.journal.append([event], expected={event.stream: version})
            except Conflict:
                await self.catch_up()
                continue
            self.live.forget(spec.name)
            await self.feed.reach(recorded.position, timeout_s=READ_YOUR_WRITES_S)
            return await self.task(spec.name), True
        raise Conflict(
            f"task {spec.name!r} keeps changing (or the idempotency key was used for another task); try again"
        )

    async def stop(self, name: str) -> TaskView:
        """Log the request to stop a task; a further request changes nothing.

        Raises:
            NotFound: there is no such task.
            Conflict: the task has ended.
        """
        for _ in range(_ATTEMPTS):
            task = await self.task(name)
            if task.state is TaskState.STOPPING:
                return task
            if task.state in ENDED:
                raise Conflict(f"task {name!r} has ended: {task.state.value}", state=task.state.value)
            event = TaskStopRequested(event_id=str(uuid.uuid4()), occurred_at=utc_now(), task=name)
            try:
                (recorded,) = await self.journal.append([event], expected={event.stream: task.version})
            except Conflict:
                await self.catch_up()
                continue
            await self.feed.reach(recorded.position, timeout_s=READ_YOUR_WRITES_S)
            return await self.task(name)
        raise Conflict(f"task {name!r} keeps changing; try again")

    async def catch_up(self) -> None:
        """Wait until the projections contain the event because of which an append was refused."""
        position = await asyncio.to_thread(self.journal.log.last_position)
        await self.feed.reach(position, timeout_s=READ_YOUR_WRITES_S)


def resumable(known: TaskView | None, spec: TaskSpec) -> tuple[str, int]:
    """Return the checkpoint that a submission resumes from, and its step; ``("", 0)`` for a new start.

    Args:
        known: the earlier task of the same name; None if there is none.
        spec: the submitted specification.

    Raises:
        Conflict: the name is in use.
        InvalidInput: the checkpoint is of another model, or has as many steps as the specification or more.
    """
    if known is None:
        return "", 0
    if known.state not in _REUSABLE:
        raise Conflict(
            f"name {spec.name!r} is in use by a task that is {known.state.value}; "
            "a name is free again when its task was stopped or has failed",
            field="name",
            value=spec.name,
            state=known.state.value,
        )
    if not known.checkpoint:
        return "", 0
    if known.spec.model != spec.model:
        raise _refused("model", "...", f"must be that of the checkpoint {spec.name!r} goes on from; take another name")
    if spec.steps <= known.checkpoint_step:
        raise _refused("steps", spec.steps, f"must be above {known.checkpoint_step}, the step of its checkpoint")
    return known.checkpoint, known.checkpoint_step


def with_paths(spec: TaskSpec) -> TaskSpec:
    """Return the specification with absolute paths.

    Raises:
        InvalidInput: ``data`` or ``script`` is not there, or proves that the task cannot run.
    """
    data = Path(os.path.abspath(spec.data))
    indexed = data.with_name(data.name + ".bin"), data.with_name(data.name + ".idx")
    try:
        found = data.is_file() or all(path.is_file() for path in indexed)
        empty = data.is_file() and data.stat().st_size == 0
    except (OSError, ValueError) as err:  # a name too long, a null byte
        raise _refused("data", spec.data, f"not a usable path: {err}") from err
    if not found or empty:
        problem = (
            "the file is empty" if empty else f"there is no such file, nor {indexed[0].name} with {indexed[1].name}"
        )
        raise _refused("data", spec.data, f"{problem}; allowed: a text file, or the prefix of an indexed dataset")
    changes: dict[str, object] = {"data": str(data)}
    if spec.script is not None:
        script = Path(os.path.abspath(spec.script))
        if not script.is_file():
            raise _refused("script", spec.script, "there is no such file")
        changes["script"] = str(script)
    if spec.checkpoint.directory is not None:
        directory = os.path.abspath(spec.checkpoint.directory)
        changes["checkpoint"] = spec.checkpoint.model_copy(update={"directory": directory})
    spec = spec.model_copy(update=changes)
    submitted_files.check(spec)
    return spec


def _refused(field: str, value: object, problem: str) -> InvalidInput:
    return refused([(field, value, problem)])


async def get_gateway(request: Request) -> Gateway:
    """Return the gateway of the application that answers this request (FastAPI dependency)."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


Api = Annotated[Gateway, Depends(get_gateway)]
"""Type of the parameter by which an endpoint gets the gateway."""
