"""What there is to tell somebody: what events of the log begin, what holds at a moment, and what is over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from services.api import present
from services.api.gateway import Gateway
from services.api.notices.notice import Notice, Subject, notice
from services.api.postmortem import standing
from services.api.postmortem.gather import Known, known, lateness
from services.api.routers import health
from services.api.store.readers import ViewReader
from services.api.store.tables import INCIDENTS, NODES, TASKS
from shared.events.union import ErrorDetected, Recorded, TaskFailed
from shared.model import utc_now
from shared.tasks.specification import ENDED, TaskState
from shared.views.documents import IncidentView, NodeState, NodeView, TaskView

TYPES = ["error.detected", "task.failed"]
"""The types of events that begin a trouble. All else is seen in what holds at a moment."""

DEGRADED_S = 30.0
"""How long a part of the control plane may be away before somebody is called: a service that is started again takes
seconds, and until then nothing is lost that waits."""

NEVER_HEALED_S = 600.0
"""Age at which an open incident counts as stuck where none of its kind was healed before: no median says what is usual.
"""

_GOING_ON = sorted(state.value for state in TaskState if state not in ENDED)


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
                return self._incident(api, views, Subject(topic="incident", name=view.id), at, resolved=False)
            if event.repeats is None:
                return None
            again = Subject(topic="incident", name=view.id, occurrence=event.event_id)
            return self._incident(api, views, again, at, resolved=False, type="incident.reopened")

        return await api.read(read)

    async def present(self, api: Gateway) -> dict[str, Notice]:
        """Return what holds now, by the keys of its subjects: all topics that no event begins."""
        at = utc_now()

        def read(views: ViewReader) -> list[Notice]:
            tasks = views.page(TASKS, states=_GOING_ON)
            nodes = views.page(NODES, states=[NodeState.ISOLATED.value])
            open_ = [view for view in views.page(INCIDENTS, states=["open"]) if _is_stuck(api, views, view, at)]
            stuck = (
                Subject(topic="incident-stuck", name=view.id, occurrence=str(len(view.attempts))) for view in open_
            )
            return [
                *(self._incident(api, views, subject, at, resolved=False) for subject in stuck),
                *(self._task_waits(view, at) for view in tasks if _waits(view)),
                *(self._isolated(view, at) for view in nodes),
            ]

        return {one.subject.key: one for one in await api.read(read)} | await self.degraded(api)

    async def degraded(self, api: Gateway) -> dict[str, Notice]:
        """Return whether parts of the control plane are away, as ``present`` does; this needs no database."""
        parts = [text for text in await health.troubles(api) if not text.startswith("nodes: ")]
        if api.live.state().reachability.cut_off_since is not None:
            parts.append("cut off from all nodes: nothing is replaced")
        if not parts:
            self._away_since = None
            return {}
        self._away_since = self._away_since or (time.monotonic(), utc_now().isoformat(timespec="seconds"))
        since_s, since = self._away_since
        if time.monotonic() - since_s < DEGRADED_S:
            return {}
        found = notice(
            Subject(topic="control-plane"),
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
        return {found.subject.key: found}

    async def over(self, api: Gateway, subject: Subject, now: Mapping[str, Notice]) -> Notice | None:
        """Return that a trouble is over; None: it is not. ``now``: as ``present`` returns it."""
        if subject.key in now:
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
            return self._incident(api, views, subject, at, resolved=True)

        return await api.read(read)

    def _over(self, subject: Subject, at: datetime) -> Notice:
        name = subject.name
        text, data = {
            "task-failed": (f"task {name} goes on, or was deleted", {"task": name}),
            "task-waiting": (f"task {name} waits no more", {"task": name}),
            "node-isolated": (f"node {name} is isolated no more", {"node": name}),
            "control-plane": ("all parts of the control plane work again", {}),
        }[subject.topic]
        return notice(subject, summary=text, link=self._link(), data=data, at=at, resolved=True)

    def _incident(
        self, api: Gateway, views: ViewReader, subject: Subject, at: datetime, *, resolved: bool, type: str = ""
    ) -> Notice:
        cluster = api.cluster(views)
        found = known(views, subject.name, cluster, at)
        cost = {**found.incident.cost.model_dump(), "currency": cluster.currency}
        to_do = [] if resolved else standing.todo(found.incident, found.node, found.short, (), found.waits)
        return notice(
            subject,
            summary=standing.headline(found.incident, found.short, None, at),
            link=self._link("incidents", subject.name, "postmortem?format=html"),
            data={**facts_of(found), "cost": cost, "to_do": to_do},
            at=at,
            resolved=resolved,
            type=type,
        )

    def _task_failed(self, event: TaskFailed, position: int, at: datetime) -> Notice:
        return notice(
            Subject(topic="task-failed", name=event.task, occurrence=event.event_id),
            summary=f"task {event.task} failed at step {event.step}: {event.reason}",
            link=self._link("incidents", event.incident, "postmortem?format=html") if event.incident else self._link(),
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

    def _task_waits(self, view: TaskView, at: datetime) -> Notice:
        failure = view.checkpoint_failure
        unwritten = failure is not None and _unwritten(view)
        reason = failure.reason if failure is not None and unwritten else view.wait.reason if view.wait else ""
        step = failure.step if failure is not None and unwritten else view.step
        todo = f"mend its cause, then `unicron resume {view.name}`"
        return notice(
            Subject(topic="task-waiting", name=view.name, occurrence=view.submission_id),
            summary=f"task {view.name} waits at step {step} until somebody acts: {reason}",
            link=self._link(),
            data={"task": view.name, "reason": reason, "step": step, "to_do": [todo]},
            at=at,
            resolved=False,
        )

    def _isolated(self, view: NodeView, at: datetime) -> Notice:
        return notice(
            Subject(topic="node-isolated", name=view.name),
            summary=f"node {view.name} is isolated{f': {view.reason}' if view.reason else ''}",
            link=self._link(),
            data={
                "node": view.name,
                "reason": view.reason,
                "to_do": [f"mend its cause, then `unicron return {view.name}`"],
            },
            at=at,
            resolved=False,
        )

    def _link(self, kind: str = "", name: str = "", rest: str = "") -> str:
        """Return where people read more: a page of a thing, or the live page."""
        return f"{self._server}/v1/{kind}/{quote(name, safe='')}/{rest}" if kind else f"{self._server}/"


def facts_of(found: Known) -> dict[str, Any]:
    """Return what a notice says of an incident besides its cost. ``cause``: the kind of the error."""
    names = {"id", "position", "severity", "task", "tasks", "node", "worker", "plans"}
    names |= {"occurred_at", "detected_at", "restored_at", "closed_at", "failed_tasks"}
    facts = found.view.model_dump(mode="json", include=names)
    return {"incident": facts.pop("id"), "cause": found.view.kind.value, **facts}


def _is_stuck(api: Gateway, views: ViewReader, view: IncidentView, now: datetime) -> bool:
    usual_s, late_s = lateness(api.cluster(views), present.incident_facts(view), now)
    if usual_s is None:
        return (now - view.occurred_at).total_seconds() >= NEVER_HEALED_S
    return late_s is not None


def _waits(view: TaskView) -> bool:
    """Return whether a task starts again only once somebody acts."""
    return _unwritten(view) or (view.wait is not None and view.wait.until is None)


def _unwritten(view: TaskView) -> bool:
    """Return whether a task whose steps are all done cannot write its result.

    A checkpoint that cannot be written in the midst of training is no trouble: a later one is written by itself.
    """
    return view.checkpoint_failure is not None and view.checkpoint_failure.step >= view.spec.steps
