"""``/v1/plans``: plans, with the problem and the alternatives of each decision."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.api import present
from services.api.gateway import Api, as_text
from services.api.plan_text import explain
from services.api.route_parts import conditional
from services.api.route_parts.lists import shown_rows
from services.api.route_parts.parameters import NAMED, PROBLEMS, TAGGED, AskedPart, Id, TaskFilter
from services.api.store.tables import PLANS
from shared.errors import Corrupt
from shared.events.union import PlanDecided
from shared.interface.models import Page, PlanDetail, PlanSummary
from shared.views.documents import PlanState

router = APIRouter(prefix="/v1/plans", tags=["plans"], responses=PROBLEMS)


@router.get("", response_model=Page[PlanSummary])
async def plans(
    api: Api,
    part: AskedPart,
    task: TaskFilter = None,
    state: Annotated[list[PlanState] | None, Query(description="only these states")] = None,
) -> Response:
    """List plans in the order in which they were decided; ``since`` and ``until`` are of that time."""
    states = [value.value for value in state or []]
    return await shown_rows(api, PLANS, part, task=task, states=states)


@router.get("/{plan}", response_model=PlanDetail, responses=NAMED | TAGGED)
async def one(plan: Id, api: Api, if_none_match: conditional.IfNoneMatch = "") -> Response:
    """Show a plan: the decision in words, its milestones, and the event with the problem and the alternatives."""
    view = await api.read(lambda views: views.find(PLANS, plan))
    records = await asyncio.to_thread(api.journal.log.read, after=view.position - 1, limit=1)
    if not records or not isinstance(event := records[0].event, PlanDecided) or event.plan != plan:
        raise Corrupt(f"position {view.position} of the log does not contain plan {plan}")
    detail = PlanDetail(
        **present.plan_summary(view).model_dump(),
        words=explain(event),
        inputs_sha256=event.inputs_sha256,
        milestones=view.milestones,
        event=event.model_dump(mode="json", by_alias=True),
    )
    return conditional.answer(as_text(detail), if_none_match)
