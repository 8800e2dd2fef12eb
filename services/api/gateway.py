"""What the routers work with: store, feed, live state, journal and bus, and the two commands a user can give."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from services.api.feed import Feed
from services.api.live import Live
from services.api.store import CLUSTER, INCIDENTS, PLANS, TASKS, Store
from services.api.views import ClusterView, IncidentView, PlanView, TaskView
from shared.bus import Bus
from shared.errors import Conflict, InvalidInput, NotFound
from shared.events import TaskStopRequested, TaskSubmitted, derived_id
from shared.journal import Journal
from shared.model import utc_now
from shared.settings import Settings
from shared.tasks import ENDED, TaskSpec, TaskState

READ_YOUR_WRITES_S = 10.0
"""How long an answer to a write waits for the projections. They follow within milliseconds; a busy disk may take
seconds."""

_ATTEMPTS = 5
"""Times a command is decided again because its task's stream moved on meanwhile."""

_REUSABLE = frozenset({TaskState.STOPPED, TaskState.FAILED})
"""States of an earlier task whose name (and checkpoint) a new submission takes over."""


@dataclass
class Gateway:
    """Everything that answers requests."""

    settings: Settings
    bus: Bus
    journal: Journal
    store: Store
    feed: Feed
    live: Live

    def task(self, name: str) -> TaskView:
        """Return a task by its name.

        Raises:
            NotFound: there is none.
        """
        view = self.store.get(TASKS, name)
        if view is None:
            raise NotFound(f"no task named {name!r}")
        return view

    def incident(self, incident: str) -> IncidentView:
        """Return an incident by its id.

        Raises:
            NotFound: there is none.
        """
        view = self.store.get(INCIDENTS, incident)
        if view is None:
            raise NotFound(f"no incident {incident!r}")
        return view

    def plan(self, plan: str) -> PlanView:
        """Return a plan by its id.

        Raises:
            NotFound: there is none.
        """
        view = self.store.get(PLANS, plan)
        if view is None:
            raise NotFound(f"no plan {plan!r}")
        return view

    def cluster(self) -> ClusterView:
        """Return the cluster's parameters."""
        return self.store.get(CLUSTER, "cluster") or ClusterView(
            price_per_worker_hour=self.settings.price_per_worker_hour, currency=self.settings.currency
        )

    def history(self) -> tuple[Sequence[PlanView], Sequence[IncidentView]]:
        """Return all plans and incidents, which costs are worked out from."""
        return self.store.page(PLANS), self.store.page(INCIDENTS)

    async def submit(self, spec: TaskSpec, *, key: str = "", now: datetime | None = None) -> tuple[TaskView, bool]:
        """Log a submission; return the task and whether it is new.

        Args:
            spec: what to run; its paths are made absolute here, against the server's working directory.
            key: idempotency key; the same key again returns the task it made.
            now: the time, for tests.

        Raises:
            InvalidInput: a path does not exist, or the earlier task's checkpoint does not fit.
            Conflict: the name is in use, or the key was used for something else.
        """
        spec = with_paths(spec)
        event_id = derived_id(f"idempotency/{key}", "api") if key else str(uuid.uuid4())
        for _ in range(_ATTEMPTS):
            known = self.store.get(TASKS, spec.name)
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
            except Conflict as err:
                await self._catch_up(err)
                continue
            self.live.forget(spec.name)
            await self.feed.reach(recorded.position, timeout_s=READ_YOUR_WRITES_S)
            return self.task(spec.name), True
        raise Conflict(
            f"task {spec.name!r} keeps changing (or the idempotency key was used for another task); try again"
        )

    async def stop(self, name: str) -> TaskView:
        """Log that a task shall stop; asking again changes nothing.

        Raises:
            NotFound: no such task.
            Conflict: it has ended.
        """
        for _ in range(_ATTEMPTS):
            task = self.task(name)
            if task.state is TaskState.STOPPING:
                return task
            if task.state in ENDED:
                raise Conflict(f"task {name!r} has ended: {task.state.value}", state=task.state.value)
            event = TaskStopRequested(event_id=str(uuid.uuid4()), occurred_at=utc_now(), task=name)
            try:
                (recorded,) = await self.journal.append([event], expected={event.stream: task.version})
            except Conflict as err:
                await self._catch_up(err)
                continue
            await self.feed.reach(recorded.position, timeout_s=READ_YOUR_WRITES_S)
            return self.task(name)
        raise Conflict(f"task {name!r} keeps changing; try again")

    async def _catch_up(self, _reason: Conflict) -> None:
        """Wait for the projections to see what a refused append did not expect."""
        position = self.journal.log.last_position()
        await self.feed.reach(position, timeout_s=READ_YOUR_WRITES_S)


def resumable(known: TaskView | None, spec: TaskSpec) -> tuple[str, int]:
    """Return the checkpoint that a submission goes on from, with its step; ``("", 0)`` for a new start.

    Raises:
        Conflict: the name is in use.
        InvalidInput: the checkpoint is of another model, or has as many steps as are asked for.
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
    """Return the specification with absolute paths that exist.

    Raises:
        InvalidInput: ``data`` or ``script`` is not there.
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
    return spec.model_copy(update=changes)


def _refused(field: str, value: object, problem: str) -> InvalidInput:
    text = f"task specification refused: {field}: {problem} (given: {value!r})"
    return InvalidInput(text, [{"field": field, "value": value, "problem": problem}])


def get_gateway(request: Request) -> Gateway:
    """Return the gateway of the application that answers this request."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


Api = Annotated[Gateway, Depends(get_gateway)]
