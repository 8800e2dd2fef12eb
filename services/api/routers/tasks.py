"""``/v1/tasks``: submitting, listing, showing and stopping tasks, and their output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response, status
from fastapi.responses import StreamingResponse

from services.api import present
from services.api.access import Submitter
from services.api.gateway import Api, Gateway, as_text
from services.api.logs import OutputReader, json_line, plain_line
from services.api.models import Page, StopOptions, Stopping, Task
from services.api.output_owners import OutputOwners, output_owners
from services.api.output_search import OutputSearch
from services.api.readers import ViewReader
from services.api.routers.bodies import described, options, read_body
from services.api.routers.parameters import CHANGE, NAMED, PROBLEMS, Cursor, Limit, Order, TaskName, page_json
from services.api.tables import TASKS
from shared.errors import InvalidInput, NotFound
from shared.messages import Time
from shared.tasks import ENDED, MAX_SPEC_BYTES, TaskSpec, TaskState, load_spec, parse_spec

router = APIRouter(prefix="/v1/tasks", tags=["tasks"], responses=PROBLEMS)

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
    return present.task(view, api.live.state())


def _parse(body: bytes, content_type: str) -> TaskSpec:
    """Return the specification in a body: YAML if the content type says so, else JSON."""
    try:
        text = body.decode()
        return load_spec(text) if "yaml" in content_type.lower() else parse_spec(json.loads(text))
    except UnicodeDecodeError as err:
        raise InvalidInput(f"the body is not UTF-8: {err}") from err
    except RecursionError as err:
        raise InvalidInput("the body is nested too deeply") from err
    except ValueError as err:
        raise InvalidInput(f"the body is not JSON: {err}; for YAML set Content-Type: application/yaml") from err


@router.get("", response_model=Page[Task])
async def tasks(
    api: Api,
    limit: Limit = 100,
    cursor: Cursor = 0,
    order: Order = "oldest",
    state: Annotated[list[TaskState] | None, Query(description="only these states")] = None,
) -> Response:
    """List tasks in the order of their submission."""
    live = api.live.state()

    def answer(views: ViewReader) -> str:
        states = [value.value for value in state or []]
        found = views.rows(TASKS, "shown", after=cursor, limit=limit + 1, states=states, newest=order == "newest")
        going_on = views.several(TASKS, [row.key for row in found if not row.shown])
        items = [row.shown or as_text(present.task(going_on[row.key], live)) for row in found]
        return page_json(items, [row.position for row in found], limit)

    return await api.answer(answer)


@router.get("/{name}", responses=NAMED)
async def task(name: TaskName, api: Api) -> Task:
    """Show a task."""
    live = api.live.state()
    return await api.read(lambda views: present.task(views.find(TASKS, name), live))


@router.post(
    "/{name}/stop",
    status_code=status.HTTP_202_ACCEPTED,
    responses=CHANGE,
    openapi_extra=described(StopOptions),
)
async def stop(
    name: TaskName, api: Api, who: Submitter, asked: Annotated[StopOptions, Depends(options(StopOptions))]
) -> Stopping:
    """Stop a task after its present step, with a checkpoint from which a later submission of the name resumes.

    A task whose checkpoint cannot be written trains on, and shows why (``stop_refused``), unless ``lose_steps`` is set.
    With ``at_once`` its processes are ended without a checkpoint, also where an earlier request to stop waits for one.
    """
    view = await api.stop(name, who, lose_steps=asked.lose_steps, at_once=asked.at_once)
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
    rank: Annotated[int | None, Query(ge=0, le=1_000_000, description="only the worker of this rank")] = None,
    follow: Annotated[bool, Query(description="wait for more until the task ends")] = False,
    since: Annotated[Time | None, Query(description="only what was printed from then on, to within 6 s")] = None,
    accept: Annotated[str, Header()] = "text/plain",
) -> StreamingResponse:
    """Stream the output of the task's ranks: text, or with ``Accept: application/x-ndjson`` an object for each line.

    The output is read from the nodes that have it. Where one does not answer, its part is left out, and the stream says
    so: in a line that begins with ``unicron:``, or in an object with ``workers``, ``node`` and ``problem``.
    """
    view = await api.task(name)
    as_json = "ndjson" in accept
    if rank is not None and rank not in {member.rank for member in view.members}:
        known = sorted(member.rank for member in view.members)
        raise NotFound(f"task {name!r} has no rank {rank}; its ranks: {known}", field="rank", value=rank)
    since_s = since.timestamp() if since is not None else None
    lines = _lines(api, view.name, rank, follow, as_json, since_s)
    return StreamingResponse(lines, media_type="application/x-ndjson" if as_json else "text/plain")


async def _lines(
    api: Gateway, name: str, rank: int | None, follow: bool, as_json: bool, since_s: float | None
) -> AsyncIterator[str]:
    history = True

    async def owners() -> OutputOwners:
        nonlocal history
        found = await api.read(lambda views: output_owners(views, name, rank, history=history))
        history = False  # later plans are seen as they come
        return found

    async def going_on() -> bool:
        if not follow or api.feed.closed:
            return False
        return (await api.task(name)).state not in ENDED

    reader = OutputReader(name, OutputSearch(name, api.own_files, api.node_files), owners, since_s)
    async with aclosing(reader.read(going_on=going_on)) as entries:
        async for entry in entries:
            yield json_line(entry) if as_json else plain_line(entry, named=rank is None)
