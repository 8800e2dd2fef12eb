"""What there is to tell somebody: what events of the log begin, what holds at a moment, and what is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import quote

from services.api import present
from services.api.gateway import Gateway
from services.api.live import LiveState
from services.api.notices.notice import Notice, Subject, notice
from services.api.postmortem import standing
from services.api.postmortem.gather import Known, known, lateness
from services.api.routers import health
from services.api.store.readers import ViewReader
from services.api.store.tables import INCIDENTS, NODES, SPANS, TASKS
from shared.events.union import ErrorDetected, Recorded, TaskFailed
from shared.model import utc_now
from shared.tasks.specification import GOING_ON, TaskState
from shared.views.documents import NodeState, NodeView, TaskView

TYPES = ["error.detected", "task.failed"]
"""The types of events that begin a trouble. All else is seen in what holds at a moment."""

DEGRADED_S = 30.0
"""How long a part of the control plane may be away before somebody is called: a service that is started again takes
seconds, and until then nothing is lost that waits."""


@dataclass
class Present:
    """What holds at a moment: the keys of all of it, and notices of what a receiver was not told of yet."""

    keys: set[str] = field(default_factory=set)
    new: list[Notice] = field(default_factory=list)

    def add(self, subject: Subject, said: Container[str], write: Callable[[Subject], Notice]) -> None:
        """Take note of what holds; ``write`` makes the notice, which takes more than the look."""
        self.keys.add(subject.key)
        if subject.key not in said:
            self.new.append(write(subject))


class Looker:
    """Looks for troubles, with the moment since when parts of the control plane are away.

    Args:
        server: address of the api, for links.
    """

    def __init__(self, server: str) -> None:
        self._server = server.rstrip("/")
        self._away_since: tuple[float, str] | None = None
        """The monotonic time since when a part is away, and the time in words."""

    async def begun(self, api: Gateway, record: Recorded) -> Notice | None:
        """Return what an event begins; None: nothing, as for an escalation or an error of an incident that is open."""
        event, at = record.event, utc_now()

        def read(views: ViewReader) -> Notice | None:
            if isinstance(event, TaskFailed):
                return self._task_failed(event, record.position, at)
            assert isinstance(event, ErrorDetected)
            view = views.get(INCIDENTS, event.incident)
            if view is None:
                return None
            if view.position == record.position:
                return self._incident(api, views, Subject(topic="incident", name=view.id), at=at, resolved=False)
            if event.repeats is None:
                return None
            again = Subject(topic="incident", name=view.id, occurrence=event.event_id)
            return self._incident(api, views, again, at=at, resolved=False, type="incident.reopened")

        return await api.read(read)

    async def present(self, api: Gateway, said: Container[str]) -> Present:
        """Return what holds now of all topics that no event begins. ``said``: keys of what the receiver knows."""
        at, live = utc_now(), api.live.state(watched=False)

        def read(views: ViewReader) -> Present:
            cluster = api.cluster(views)
            found = Present()
            for incident in views.page(INCIDENTS, states=["open"]):
                if lateness(cluster, incident, at)[1] is not None:
                    stuck = Subject(topic="incident-stuck", name=incident.id, occurrence=str(len(incident.attempts)))
                    found.add(stuck, said, partial(self._incident, api, views, at=at, resolved=False))
            for task in views.page(TASKS, states=GOING_ON):
                if why := _waits(task, live):
                    waits = Subject(topic="task-waiting", name=task.name, occurrence=task.submission_id)
                    found.add(waits, said, partial(self._task_waits, task, why, at))
            for node in views.page(NODES, states=[NodeState.ISOLATED.value]):
                isolated = Subject(topic="node-isolated", name=node.name)
                found.add(isolated, said, partial(self._isolated, views, node, at))
            return found

        found = await api.read(read)
        degraded = await self.degraded(api, said)
        return Present({*found.keys, *degraded.keys}, [*found.new, *degraded.new])

    async def degraded(self, api: Gateway, said: Container[str]) -> Present:
        """Return whether parts of the control plane are away, as ``present`` does; this needs no database."""
        parts = await health.parts_away(api, besides="nodes")
        if api.live.state(watched=False).reachability.cut_off_since is not None:
            parts.append("cut off from all nodes: nothing is replaced")
        if not parts:
            self._away_since = None
            return Present()
        self._away_since = self._away_since or (time.monotonic(), utc_now().isoformat(timespec="seconds"))
        since_s, since = self._away_since
        found = Present()
        if time.monotonic() - since_s >= DEGRADED_S:
            found.add(Subject(topic="control-plane"), said, partial(self._degraded, parts, since))
        return found

    async def over(self, api: Gateway, subject: Subject, holding: Container[str]) -> Notice | None:
        """Return that a trouble is over; None: it is not. ``holding``: keys of what holds."""
        if subject.key in holding:
            return None
        at = utc_now()
        if subject.topic not in ("incident", "incident-stuck", "task-failed"):
            return self._over(subject, at)

        def read(views: ViewReader) -> Notice | None:
            if subject.topic == "task-failed":
                task = views.get(TASKS, subject.name)
                lasts = task is not None and task.state is TaskState.FAILED and task.deleted_at is None
                return None if lasts else self._over(subject, at)
            view = views.get(INCIDENTS, subject.name)
            if view is None or (subject.topic == "incident" and view.closed_at is None):
                return None
            return self._incident(api, views, subject, at=at, resolved=True)

        return await api.read(read)

    def _over(self, subject: Subject, at: datetime) -> Notice:
        name = subject.name
        text, data = {
            "task-failed": (f"task {name} goes on, or was deleted", {"task": name}),
            "task-waiting": (f"task {name} waits no more", {"task": name}),
            "node-isolated": (f"node {name} is isolated no more", {"node": name}),
            "control-plane": ("all parts of the control plane work again", {}),
        }[subject.topic]
        link = self._task_page(name) if "task" in data else self._link()
        return notice(subject, summary=text, link=link, data=data, at=at, resolved=True)

    def _incident(
        self, api: Gateway, views: ViewReader, subject: Subject, *, at: datetime, resolved: bool, type: str = ""
    ) -> Notice:
        cluster = api.cluster(views)
        found = known(views, subject.name, cluster, at)
        cost = {**found.incident.cost.model_dump(), "currency": cluster.currency}
        to_do = [] if resolved else standing.todo(found.incident, found.node, found.short, (), found.waits)
        return notice(
            subject,
            summary=standing.headline(found.incident, found.short, None, at),
            link=self._post_mortem(subject.name),
            data={**facts_of(found), "cost": cost, "to_do": to_do},
            at=at,
            resolved=resolved,
            type=type,
        )

    def _task_failed(self, event: TaskFailed, position: int, at: datetime) -> Notice:
        return notice(
            Subject(topic="task-failed", name=event.task, occurrence=event.event_id),
            summary=f"task {event.task} failed at step {event.step}: {event.reason}",
            link=self._post_mortem(event.incident) if event.incident else self._task_page(event.task),
            data={
                "task": event.task,
                "reason": event.reason,
                "step": event.step,
                "incident": event.incident or None,
                "position": position,
                "occurred_at": event.occurred_at.isoformat(),
                "to_do": [f"mend its cause, then `unicron resume {event.task}`"],
            },
            at=at,
            resolved=False,
        )

    def _task_waits(self, view: TaskView, reason: str, at: datetime, subject: Subject) -> Notice:
        return notice(
            subject,
            summary=f"task {view.name} waits at step {view.step} until somebody acts: {reason}",
            link=self._task_page(view.name),
            data={
                "task": view.name,
                "reason": reason,
                "step": view.step,
                "to_do": [f"mend its cause, then `unicron resume {view.name}`"],
            },
            at=at,
            resolved=False,
        )

    def _degraded(self, parts: list[str], since: str, subject: Subject) -> Notice:
        return notice(
            subject,
            summary=f"part of the control plane is away since {since}, and the next fault may not be healed: "
            + "; ".join(parts),
            link=self._link(),
            data={
                "parts": parts,
                "since": since,
                "to_do": ["`unicron status` says which part is away; start it again"],
            },
            at=utc_now(),
            resolved=False,
        )

    def _isolated(self, views: ViewReader, view: NodeView, at: datetime, subject: Subject) -> Notice:
        span = views.get(SPANS, view.span) if view.span else None
        return notice(
            subject,
            summary=f"node {view.name} is isolated{f': {view.reason}' if view.reason else ''}",
            link=self._post_mortem(span.incident) if span is not None and span.incident else self._link(),
            data={
                "node": view.name,
                "reason": view.reason,
                "to_do": [f"mend its cause, then `unicron return {view.name}`"],
            },
            at=at,
            resolved=False,
        )

    def _link(self, path: str = "") -> str:
        """Return where people read more: a page of the server, by itself the live page."""
        return f"{self._server}/{path}"

    def _post_mortem(self, incident: str) -> str:
        return self._link(f"v1/incidents/{quote(incident, safe='')}/postmortem?format=html")

    def _task_page(self, task: str) -> str:
        return self._link(f"tasks/{quote(task, safe='')}")


def facts_of(found: Known) -> dict[str, Any]:
    """Return what a notice says of an incident besides its cost. ``cause``: the kind of the error."""
    names = {"id", "position", "severity", "task", "tasks", "node", "worker", "plans"}
    names |= {"occurred_at", "detected_at", "restored_at", "closed_at", "failed_tasks"}
    facts = found.view.model_dump(mode="json", include=names)
    return {"incident": facts.pop("id"), "cause": found.view.kind.value, **facts}


def _waits(view: TaskView, live: LiveState) -> str:
    """Return why a task starts again, or ends, only once somebody acts; empty: it waits for nobody."""
    if view.wait is not None and view.wait.until is None:
        return view.wait.reason
    return present.waits_for_storage(view, live)
