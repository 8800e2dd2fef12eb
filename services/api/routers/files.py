"""Files of tasks: ``/v1/code/{digest}``, the code that comes along; ``/v1/tasks/{name}/result``, the parameters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response, status
from fastapi.responses import StreamingResponse

from services.api.access.access import Submitter, Who
from services.api.gateway import Api, Gateway
from services.api.output.node_files import FileSource
from services.api.output.results import ResultFile, find_result, headers, read_result, wanted_range
from services.api.route_parts.bodies import read_body
from services.api.route_parts.parameters import CHANGE, NAMED, PROBLEMS, TaskName, problems
from services.api.store.tables import NODES, TASKS
from shared.errors import TimeLimit
from shared.names import is_name
from shared.tasks.code import MOST_BYTES, Code

router = APIRouter(prefix="/v1", tags=["tasks"], responses=PROBLEMS)

MEDIA_TYPE = "application/octet-stream"

_BINARY = {"type": "string", "format": "binary"}

_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "the parameters, a safetensors file", "content": {MEDIA_TYPE: {"schema": _BINARY}}},
    206: {"description": "a part of it", "content": {MEDIA_TYPE: {"schema": _BINARY}}},
}


ARCHIVE = "application/x-tar"

SEND_LIMIT_S = 300.0
"""How long an archive may take to come: the largest takes as long at 1 Mbit/s."""

Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the archive, in hexadecimal")]

_ARCHIVE = {ARCHIVE: {"schema": _BINARY}}


@router.put(
    "/code/{digest}",
    status_code=status.HTTP_201_CREATED,
    responses=CHANGE | {200: {"model": Code, "description": "it is kept already"}},
    openapi_extra={"requestBody": {"required": True, "content": _ARCHIVE}},
)
async def send_code(digest: Digest, request: Request, response: Response, api: Api, who: Submitter) -> Code:
    """Send the code of tasks that are submitted next, as `unicron run --ship` does: an archive of 32 MiB at most.

    It is kept while a task names it that is not deleted, and for an hour. It is a tar (ustar) of regular files and
    of links that stay in their folder, in the order of their names; times, owners and groups are 0, modes 0644 or 0755.
    """

    async def body() -> bytes:
        async with asyncio.timeout(SEND_LIMIT_S):
            return await read_body(request, MOST_BYTES)

    try:
        code, new = await api.code.take(digest, body, who)
    except TimeoutError as err:
        raise TimeLimit(f"the archive has not come within {SEND_LIMIT_S:g} s") from err
    if not new:
        response.status_code = status.HTTP_200_OK
    return code


@router.get(
    "/code/{digest}",
    response_class=StreamingResponse,
    responses=NAMED | {200: {"description": "the archive", "content": _ARCHIVE}},
)
async def code(digest: Digest, api: Api, who: Who) -> StreamingResponse:
    """Send the code of a task, a tar archive, to those who have sent it, and to operators."""
    kept = await asyncio.to_thread(api.code.readable, digest, who)
    headers = {"ETag": f'"{digest}"', "Content-Length": str(kept.code.size_bytes)}
    return StreamingResponse(_pieces(api, kept.code), media_type=ARCHIVE, headers=headers)


async def _pieces(api: Gateway, kept: Code) -> AsyncIterator[bytes]:
    """Yield an archive. If it is removed meanwhile the connection is closed before the end."""
    offset = 0
    while offset < kept.size_bytes:
        piece = await asyncio.to_thread(api.code.store.piece, kept.digest, offset)
        if not piece:
            return
        offset += len(piece)
        yield piece


@router.get("/tasks/{name}/result", response_class=StreamingResponse, responses=_CONTENT | NAMED | problems(416))
async def result(
    name: TaskName,
    api: Api,
    range_: Annotated[str, Header(alias="Range", description="`bytes=N-`: from byte N on", max_length=100)] = "",
    if_range: Annotated[str, Header(description="the ETag of what the part is of", max_length=100)] = "",
) -> StreamingResponse:
    """Send the parameters of a task that has succeeded, from the node that wrote them.

    ``ETag`` is the SHA-256 of the file, in hexadecimal; ``Repr-Digest`` has it, too. A download that broke off goes on
    with ``Range``. The connection is closed before the end if the node is lost meanwhile, or the file was changed.
    """
    file = await _find(api, name)
    described = headers(file)
    part = wanted_range(range_, file.size_bytes) if not if_range or if_range == described["ETag"] else None
    first, end = part or (0, file.size_bytes)
    described["Content-Length"] = str(end - first)
    if part is not None:
        described["Content-Range"] = f"bytes {first}-{end - 1}/{file.size_bytes}"
    return StreamingResponse(
        read_result(file, first, end),
        status_code=status.HTTP_206_PARTIAL_CONTENT if part is not None else status.HTTP_200_OK,
        media_type=MEDIA_TYPE,
        headers=described,
    )


async def _find(api: Gateway, name: str) -> ResultFile:
    """Return the result of a task: of the node that wrote it, of this machine, or of another one."""
    task, nodes = await api.read(lambda views: (views.find(TASKS, name), views.page(NODES)))
    states = {node.name: node.state for node in nodes if is_name(node.name)}
    owner = task.result.node if task.result is not None else ""
    others = [node for node in sorted(states) if node != owner and states[node] != "lost"]
    sources: list[FileSource] = [
        *([api.node_files(owner)] if is_name(owner) else []),
        api.own_files,
        *(api.node_files(node) for node in others),
    ]
    return await find_result(task, sources, states.get(owner, ""))
