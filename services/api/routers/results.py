"""``/v1/tasks/{name}/result``: the parameters of a finished task."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, status
from fastapi.responses import StreamingResponse

from services.api.gateway import Api, Gateway
from services.api.output.node_files import FileSource
from services.api.output.results import ResultFile, find_result, headers, read_result, wanted_range
from services.api.route_parts.parameters import NAMED, PROBLEMS, TaskName, problems
from services.api.store.tables import NODES, TASKS
from shared.names import is_name

router = APIRouter(prefix="/v1/tasks", tags=["tasks"], responses=PROBLEMS)

MEDIA_TYPE = "application/octet-stream"

_BINARY = {"type": "string", "format": "binary"}

_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "the parameters, a safetensors file", "content": {MEDIA_TYPE: {"schema": _BINARY}}},
    206: {"description": "a part of it", "content": {MEDIA_TYPE: {"schema": _BINARY}}},
}


@router.get("/{name}/result", response_class=StreamingResponse, responses=_CONTENT | NAMED | problems(416))
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
