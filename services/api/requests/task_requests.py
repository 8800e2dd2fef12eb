"""What a user asks of a task that exists: a change of its weight or limits, a stop, a resumption, a deletion.

Each request is one event of the task's stream. A request that the task answers already changes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from services.api import present
from services.api.access.access import Actor
from services.api.gateway import Gateway, as_text
from services.api.route_parts.conditional import check_revision, etag
from shared.errors import Conflict, InvalidInput
from shared.events.union import TaskChanged, TaskDeleted, TaskResumeRequested, TaskStopRequested
from shared.interface.models import Task
from shared.model import utc_now
from shared.tasks.specification import ENDED, IS, TaskSpec, TaskState, parse_spec, refused
from shared.views.documents import TaskView

CHANGEABLE = {"weight": (), "workers": ("min", "max")}
"""Fields of a specification that a task may change while it goes on, with those of their own."""

TaskRequest = TaskChanged | TaskDeleted | TaskResumeRequested | TaskStopRequested

Judge = Callable[[TaskView], TaskRequest | None]
"""Returns the event that a request on a task in this state makes; None if there is nothing to do."""


async def change(api: Gateway, name: str, who: Actor, patch: Mapping[str, Any], if_match: str) -> TaskView:
    """Give a task another weight, or other limits of its workers.

    Args:
        api: the gateway.
        name: of the task.
        who: asks for it.
        patch: JSON merge patch (RFC 7396) of the specification.
        if_match: the request's header; empty: none.

    Raises:
        NotFound: there is no such task.
        Forbidden: it is somebody else's.
        Conflict: it has ended.
        PreconditionFailed: it is not as the client has read it.
        InvalidInput: with a field, its value and what is allowed.
    """
    _check_fields(patch)

    def judge(task: TaskView) -> TaskRequest | None:
        _check_goes_on(task)
        spec = changed_spec(task.spec, patch)
        if (spec.weight, spec.workers) == (task.spec.weight, task.spec.workers):
            return None
        return TaskChanged(
            event_id=str(uuid.uuid4()),
            occurred_at=utc_now(),
            task=name,
            weight=spec.weight,
            min_workers=spec.workers.min,
            max_workers=spec.workers.max,
            requested_by=who.name,
        )

    return await _request(api, name, who, if_match, judge)


async def stop(
    api: Gateway, name: str, who: Actor, if_match: str, *, lose_steps: bool = False, at_once: bool = False
) -> TaskView:
    """Stop a task. A further request changes nothing, unless the task may now lose more steps before it has stopped.

    Args:
        api: the gateway.
        name: of the task.
        who: asks for it.
        if_match: the request's header; empty: none.
        lose_steps: whether the task is to stop also if its state cannot be saved.
        at_once: whether its processes are to end without a checkpoint; they then lose steps.

    Raises:
        NotFound, Forbidden, Conflict, PreconditionFailed: as ``change``.
    """

    def judge(task: TaskView) -> TaskRequest | None:
        asked = task.at_once if at_once else task.lose_steps or not lose_steps
        if task.state is TaskState.STOPPED or (task.state is TaskState.STOPPING and asked):
            return None
        _check_goes_on(task)
        return TaskStopRequested(
            event_id=str(uuid.uuid4()),
            occurred_at=utc_now(),
            task=name,
            lose_steps=lose_steps or at_once,
            at_once=at_once,
            actor=who.name,
        )

    return await _request(api, name, who, if_match, judge)


async def delete(api: Gateway, name: str, who: Actor, if_match: str) -> TaskView:
    """List a task that has ended no more. Arguments and errors are those of ``change``; here it has to have ended."""

    def judge(task: TaskView) -> TaskRequest | None:
        if task.state not in ENDED:
            raise Conflict(f"task {name!r} {IS[task.state]}: stop it first", state=task.state.value)
        if task.deleted_at is not None:
            return None
        return TaskDeleted(event_id=str(uuid.uuid4()), occurred_at=utc_now(), task=name, actor=who.name)

    return await _request(api, name, who, if_match, judge)


async def resume(api: Gateway, name: str, who: Actor) -> TaskView:
    """Submit a task's last specification again, under its name: it goes on from its newest checkpoint.

    A task that has not ended and waits after failures is tried again at once.

    Raises:
        NotFound: there is no such task.
        Forbidden: it is somebody else's.
        Conflict: it has not ended and does not wait, or has done all its steps.
        InvalidInput: a node that is ready cannot use its files any more.
    """
    task = await api.task(name)
    who.require_own(task.owner, f"task {name!r}")
    if task.wait is not None and task.state not in (*ENDED, TaskState.STOPPING):
        return await _request(api, name, who, "", lambda waiting: _try_again(waiting, who))
    if not task.may_go_on:
        why = "it has done all its steps" if task.state is TaskState.SUCCEEDED else "it has not ended"
        text = f"task {name!r} {IS[task.state]}: {why}; what was stopped, has failed or waits after failures can be"
        raise Conflict(f"{text} resumed", state=task.state.value)
    view, _ = await api.submit(task.spec, who, resumes=True)
    return view


def _try_again(task: TaskView, who: Actor) -> TaskResumeRequested | None:
    """Return the request to try a task again at once; None: it does not wait any more."""
    if task.wait is None:
        return None
    return TaskResumeRequested(event_id=str(uuid.uuid4()), occurred_at=utc_now(), task=task.name, actor=who.name)


def changed_spec(spec: TaskSpec, patch: Mapping[str, Any]) -> TaskSpec:
    """Return a specification with the changes of a merge patch.

    Raises:
        InvalidInput: with one entry for each field that is wrong, as at submission.
    """
    fields = spec.model_dump(mode="json", by_alias=True)
    for name, value in patch.items():
        both = isinstance(value, dict) and isinstance(fields[name], dict)
        fields[name] = {**fields[name], **value} if both else value
    return parse_spec(fields)


def _check_fields(patch: Mapping[str, Any]) -> None:
    """Refuse a change of anything else.

    Raises:
        InvalidInput: with one entry for each field.
    """
    allowed = "weight, workers.min, workers.max"
    found = []
    for name, value in patch.items():
        if name == "priority":
            found.append((name, value, "unknown field: the weight is the priority; set weight"))
        elif name not in CHANGEABLE:
            what = "cannot be changed" if name in TaskSpec.model_fields else "unknown field"
            found.append((name, value, f"{what}; allowed: {allowed}"))
        elif isinstance(value, dict):
            others = {inner: given for inner, given in value.items() if inner not in CHANGEABLE[name]}
            found += [
                (f"{name}.{inner}", given, f"unknown field; allowed: {allowed}") for inner, given in others.items()
            ]
    if found:
        raise refused(found)


async def _request(api: Gateway, name: str, who: Actor, if_match: str, judge: Judge) -> TaskView:
    """Append the event that ``judge`` returns for the task's present state; return the task after it."""

    async def judged(task: TaskView) -> TaskRequest | None:
        who.require_own(task.owner, f"task {name!r}")
        _check_revision(api, if_match, task)
        return judge(task)

    return await api.changed(lambda: api.task(name), judged, f"task {name!r}")


def _check_goes_on(task: TaskView) -> None:
    """Refuse a request on a task that has ended."""
    if task.state in ENDED:
        raise Conflict(f"task {task.name!r} has ended: {task.state.value}", state=task.state.value)


def _check_revision(api: Gateway, if_match: str, task: TaskView) -> None:
    """Refuse a change of a task that is not as the client has read it (``conditional.check_revision``)."""
    check_revision(if_match, task, lambda: tag_of(shown(api, task), task))


def shown(api: Gateway, task: TaskView) -> Task:
    """Return a task as the interface shows it now. Only the event loop may call this."""
    return present.task(task, api.live.state())


def tag_of(answer: Task, task: TaskView) -> str:
    """Return the tag of a task as it is shown."""
    return etag(as_text(answer), task.revision)


def patch_of(body: Any) -> dict[str, Any]:
    """Return the merge patch in a body.

    Raises:
        InvalidInput: it is no JSON object.
    """
    if not isinstance(body, dict):
        raise InvalidInput(f"a change is a JSON object of fields, not {type(body).__name__}")
    return body
