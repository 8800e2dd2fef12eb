"""``/v1/tasks/{name}/faults`` and ``/v1/nodes/{name}/faults``: faults that are injected, as a test."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, status

from services.api.access.access import Operator
from services.api.gateway import Api
from services.api.requests import fault_requests
from services.api.route_parts.bodies import described, options
from services.api.route_parts.parameters import CHANGE, PROBLEMS, NodeName, TaskName
from shared.interface.models import InjectedFault, NodeFault, RankFault

router = APIRouter(prefix="/v1", tags=["faults"], responses=PROBLEMS)

Key = Annotated[str | None, Header(min_length=1, max_length=255)]


@router.post(
    "/tasks/{name}/faults",
    status_code=status.HTTP_202_ACCEPTED,
    responses=CHANGE,
    openapi_extra=described(RankFault, required=True),
)
async def inject_rank(
    name: TaskName,
    api: Api,
    who: Operator,
    asked: Annotated[RankFault, Depends(options(RankFault))],
    idempotency_key: Key = None,
) -> InjectedFault:
    """Have a fault happen in a rank, if the setting `fault_injection` is on.

    With an `Idempotency-Key`, the same request again returns the fault of the first one.
    """
    return await fault_requests.of_rank(api, name, who, asked, idempotency_key or "")


@router.post(
    "/nodes/{name}/faults",
    status_code=status.HTTP_202_ACCEPTED,
    responses=CHANGE,
    openapi_extra=described(NodeFault, required=True),
)
async def inject_node(
    name: NodeName,
    api: Api,
    who: Operator,
    asked: Annotated[NodeFault, Depends(options(NodeFault))],
    idempotency_key: Key = None,
) -> InjectedFault:
    """Have a fault happen on a node, if the setting `fault_injection` is on."""
    return await fault_requests.of_node(api, name, who, asked, idempotency_key or "")
