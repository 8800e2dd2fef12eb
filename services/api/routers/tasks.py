"""``/v1/tasks``: submitting, listing, showing and stopping tasks, their output, and earlier submissions of a name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response, status
from fastapi.responses import StreamingResponse

from services.api import present
from services.api.access.access import Submitter, Who
from services.api.gateway import Api, Gateway, as_text
from services.api.output.logs import LEAST_BYTES, LastLines, Line, OutputReader, json_line, plain_line
from services.api.output.owners import FileOwners, file_owners
from services.api.output.search import FileSearch, Missing
from services.api.requests import task_requests
from services.api.route_parts import conditional
from services.api.route_parts.bodies import SMALL_BODY_BYTES, decoded, described, options, parsed_json, read_body
from services.api.route_parts.parameters import (
    CHANGE,
    CONDITIONAL,
    NAMED,
    PROBLEMS,
    TAGGED,
    AskedPart,
    AskedSubmission,
    Cursor,
    Limit,
    MostPoints,
    TaskName,
    page_json,
    submission_number,
)
from services.api.store.readers import ViewReader
from services.api.store.tables import ATTEMPTS, DELETED, TASKS
from shared.bus.messages import Time
from shared.errors import InvalidInput, NotFound
from shared.events.union import TaskProgressed
from shared.interface.models import Attempt, Page, ProgressPoint, StopOptions, Stopping, Task, TaskChange, TaskProgress
from shared.projections.requests import attempt_of
from shared.tasks.specification import ENDED, MAX_SPEC_BYTES, TaskSpec, TaskState, load_spec, parse_spec
from shared.views.documents import TaskView
from shared.views.task_parts import attempt_key

router = APIRouter(prefix="/v1/tasks", tags=["tasks"], responses=PROBLEMS)

OTHERS_PER_POINT = 2
"""Events of a task's stream that are read for each point of its course: most of them say how far it has come."""

_REPEATED: dict[int | str, dict[str, Any]] = {200: {"model": Task, "description": "the task of an earlier submission"}}


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    responses=CHANGE | _REPEATED,
    openapi_extra=described(TaskSpec, required=True, yaml=True),
)
async def submit(
    request: Request,
    response: Response,
    api: Api,
    who: Submitter,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Task:
    """Submit a task. With an ``Idempotency-Key``, the same submission again returns the task it made (200)."""
    body = await read_body(request, MAX_SPEC_BYTES)
    # In a thread: YAML of the largest size that is allowed can take seconds.
    spec = await asyncio.to_thread(_parse, body, request.headers.get("content-type", ""))
    view, new = await api.submit(spec, who, key=idempotency_key or "")
    if not new:
        response.status_code = status.HTTP_200_OK
    response.headers["Location"] = f"/v1/tasks/{view.name}"
    return _tagged(api, view, response)


def _parse(body: bytes, content_type: str) -> TaskSpec:
    """Return the specification in a body: YAML if the content type says so, else JSON."""
    try:
        return load_spec(decoded(body)) if "yaml" in content_type.lower() else parse_spec(parsed_json(body))
    except RecursionError as err:
        raise InvalidInput("the body is nested too deeply") from err


@router.get("", response_model=Page[Task])
async def tasks(
    api: Api,
    part: AskedPart,
    state: Annotated[list[TaskState] | None, Query(description="only these states")] = None,
    deleted: Annotated[bool, Query(description="those that were deleted, and no others")] = False,
    ranks: Annotated[bool, Query(description="false: `ranks` is empty; a large task has thousands")] = True,
) -> Response:
    """List tasks in the order of their submission; ``since`` and ``until`` are of the time of the latest one."""
    live = api.live.state()
    if deleted and state:
        raise _not_with_deleted(state)

    def answer(views: ViewReader) -> str:
        found = views.rows(
            TASKS,
            "shown",
            states=[DELETED] if deleted else [value.value for value in state or []],
            without="" if deleted or state else DELETED,
            **part.arguments(),
        )
        going_on = views.several(TASKS, [row.key for row in found if not row.shown])
        items = [row.shown or as_text(present.task(going_on[row.key], live, ranks=ranks)) for row in found]
        return page_json(items, [row.position for row in found], part.limit)

    return await api.answer(answer)


def _not_with_deleted(states: list[TaskState]) -> InvalidInput:
    problem = "not together with deleted, which is a state of its own"
    return InvalidInput.of("state", states[0].value, problem, f"state: {problem}")


def _tagged(api: Gateway, view: TaskView, response: Response) -> Task:
    """Return a task as the interface shows it, with its tag in the headers of the response."""
    shown = task_requests.shown(api, view)
    response.headers["ETag"] = task_requests.tag_of(shown, view)
    return shown


@router.get("/{name}", response_model=Task, responses=NAMED | TAGGED)
async def task(name: TaskName, api: Api, if_none_match: conditional.IfNoneMatch = "") -> Response:
    """Show a task, also one that was deleted."""
    view = await api.task(name)
    return conditional.answer(as_text(task_requests.shown(api, view)), if_none_match, view.revision)


@router.patch(
    "/{name}", responses=CHANGE | CONDITIONAL, openapi_extra=described(TaskChange, required=True, merge_patch=True)
)
async def change(
    name: TaskName,
    request: Request,
    response: Response,
    api: Api,
    who: Submitter,
    if_match: conditional.IfMatch = "",
) -> Task:
    """Give a task that has not ended another weight, or other limits of its workers. The planner plans anew at once.

    The weight is the priority. ``max`` null lifts the limit.
    """
    body = await read_body(request, SMALL_BODY_BYTES)
    view = await task_requests.change(api, name, who, task_requests.patch_of(parsed_json(body)), if_match)
    return _tagged(api, view, response)


@router.delete("/{name}", responses=CHANGE | CONDITIONAL)
async def delete(
    name: TaskName, response: Response, api: Api, who: Submitter, if_match: conditional.IfMatch = ""
) -> Task:
    """List a task that has ended no more. Its events stay in the log, its checkpoints and its output on storage.

    A later submission of the name is listed again, and goes on from the newest checkpoint, if there is one.
    """
    return _tagged(api, await task_requests.delete(api, name, who, if_match), response)


@router.post("/{name}/resume", status_code=status.HTTP_201_CREATED, responses=CHANGE)
async def resume(name: TaskName, response: Response, api: Api, who: Submitter) -> Task:
    """Submit the last specification of a task again that was stopped or has failed: it goes on from its checkpoint.

    So does one whose script has ended with steps left.

    A task that has not ended and waits after failures (``wait``) is tried again at once.
    """
    view = await task_requests.resume(api, name, who)
    response.headers["Location"] = f"/v1/tasks/{view.name}"
    return _tagged(api, view, response)


@router.post(
    "/{name}/stop",
    status_code=status.HTTP_202_ACCEPTED,
    responses=CHANGE | CONDITIONAL,
    openapi_extra=described(StopOptions),
)
async def stop(
    name: TaskName,
    api: Api,
    who: Submitter,
    asked: Annotated[StopOptions, Depends(options(StopOptions))],
    if_match: conditional.IfMatch = "",
) -> Stopping:
    """Stop a task after its present step, with a checkpoint from which a later submission of the name resumes.

    A task whose checkpoint cannot be written trains on, and shows why (``stop_refused``), unless ``lose_steps`` is set.
    With ``at_once`` its processes are ended without a checkpoint, also where an earlier request to stop waits for one.
    """
    view = await task_requests.stop(api, name, who, if_match, lose_steps=asked.lose_steps, at_once=asked.at_once)
    return Stopping(name=view.name, state=view.state, reason=view.reason)


_OUTPUT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the output",
        "content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/x-ndjson")},
    }
}


@router.get("/{name}/logs", response_class=StreamingResponse, responses=NAMED | _OUTPUT)
async def logs(
    name: TaskName,
    api: Api,
    who: Who,
    rank: Annotated[int | None, Query(ge=0, le=1_000_000, description="only the worker of this rank")] = None,
    follow: Annotated[bool, Query(description="wait for more until the task ends")] = False,
    since: Annotated[Time | None, Query(description="only what was printed from then on, to within 6 s")] = None,
    tail: Annotated[
        int | None,
        Query(ge=0, le=1_000_000, description="of what there is already: only the last so many lines of each worker"),
    ] = None,
    newest_bytes: Annotated[
        int | None,
        Query(
            ge=LEAST_BYTES,
            le=1 << 30,
            description="while following: of each half second's output only so much, the newest; says what is left out",
        ),
    ] = None,
    accept: Annotated[str, Header()] = "text/plain",
) -> StreamingResponse:
    """Stream the output of the task's ranks: text, or with ``Accept: application/x-ndjson`` an object for each line.

    It is for the task's owner and operators. The output is read from the nodes that have it. Where one does not
    answer, its part is left out, and the stream says so: in a line that begins with ``unicron:``, or in an object
    with ``workers``, ``node`` and ``problem``.
    """
    view = await api.task(name)
    who.require_to_read_output(view.owner, name)
    as_json = "ndjson" in accept
    if rank is not None and rank not in {member.rank for member in view.members}:
        known = sorted(member.rank for member in view.members)
        raise NotFound(f"task {name!r} has no rank {rank}; its ranks: {known}", field="rank", value=rank)
    since_s = since.timestamp() if since is not None else None
    last = LastLines(tail, view.generation) if tail is not None else None
    history = True

    async def owners() -> FileOwners:
        nonlocal history
        found = await api.read(lambda views: file_owners(views, view.name, rank, history=history))
        history = False  # later plans are seen as they come
        return found

    async def going_on() -> bool:
        if not follow or api.feed.closed:
            return False
        return (await api.task(view.name)).state not in ENDED

    if newest_bytes is None:
        search = FileSearch(view.name, api.own_files, api.node_files)
    else:  # the page asks like this: all of its readers share what the machines answer
        shared = api.followed.of
        search = FileSearch(view.name, shared(api.own_files), lambda node: shared(api.node_files(node)))
    reader = OutputReader(view.name, search, owners, since_s, last, newest_bytes)
    write = json_line if as_json else partial(plain_line, named=rank is None)
    text = _text(reader.read(going_on=going_on), write)
    return StreamingResponse(text, media_type="application/x-ndjson" if as_json else "text/plain")


async def _text(
    reading: AsyncGenerator[Sequence[Line | Missing]], write: Callable[[Line | Missing], str]
) -> AsyncIterator[str]:
    async with aclosing(reading) as parts:
        async for part in parts:
            if part:
                yield "".join(map(write, part))


@router.get("/{name}/attempts", response_model=Page[Attempt], responses=NAMED)
async def attempts(name: TaskName, api: Api, limit: Limit = 100, cursor: Cursor = 0) -> Response:
    """List the submissions of the name in their order, what became of each, and the present one last."""
    live = api.live.state()

    def answer(views: ViewReader) -> str:
        task = views.find(TASKS, name)
        numbers = range(cursor + 1, min(cursor + limit + 1, task.attempt) + 1)
        earlier = views.several(ATTEMPTS, [attempt_key(name, number) for number in numbers if number < task.attempt])
        found = [earlier[attempt_key(name, n)] if n < task.attempt else attempt_of(task) for n in numbers]
        now = present.task(task, live)
        items = [as_text(present.attempt(one, now if one.number == task.attempt else None)) for one in found]
        return page_json(items, list(numbers), limit)

    return await api.answer(answer)


@router.get("/{name}/progress", responses=NAMED)
async def progress(
    name: TaskName,
    api: Api,
    attempt: AskedSubmission = None,
    points: MostPoints = 400,
) -> TaskProgress:
    """Show how a submission has trained: steps, losses and step times, evenly thinned out over its events.

    What was archived is left out.
    """

    def bounds(views: ViewReader) -> tuple[int, int, int | None]:
        task = views.find(TASKS, name)
        number = submission_number(task, attempt)
        begin, *following = (
            task.position if n == task.attempt else views.find(ATTEMPTS, attempt_key(name, n)).position
            for n in range(number, min(number + 1, task.attempt) + 1)
        )
        return number, begin, following[0] if following else None

    number, begin, end = await api.read(bounds)
    log = api.journal.log
    found = await asyncio.to_thread(log.sampled, f"task/{name}", OTHERS_PER_POINT * points, after=begin, before=end)
    said = [record.event for record in found if isinstance(record.event, TaskProgressed)]
    every = max(1, math.ceil(len(said) / points))
    chosen = said[::-1][::every][::-1]  # the newest is always among them
    return TaskProgress(
        attempt=number,
        points=[
            ProgressPoint(
                at=e.occurred_at, step=e.step, generation=e.generation, workers=e.workers, step_s=e.step_s, loss=e.loss
            )
            for e in chosen
        ],
    )
