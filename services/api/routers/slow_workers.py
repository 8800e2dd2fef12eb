"""``/v1/slow-workers``: slowdowns of workers, past and present, each with its post-mortem."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from services.api.gateway import Api
from services.api.postmortem.model import SlowWorkerPostMortem
from services.api.postmortem.slow import KnownSlowdown, known_slowdown, slow_post_mortem
from services.api.route_parts import conditional, postmortem_pages
from services.api.route_parts.lists import shown_rows
from services.api.route_parts.parameters import NAMED, PROBLEMS, TAGGED, AskedPart, Id, TaskFilter
from services.api.store.readers import ViewReader
from services.api.store.tables import SLOWDOWNS
from shared.interface.models import Page, SlowWorker
from shared.model import utc_now
from shared.views.documents import ClusterView

router = APIRouter(prefix="/v1/slow-workers", tags=["slow workers"], responses=PROBLEMS)


@router.get("", response_model=Page[SlowWorker])
async def slow_workers(
    api: Api,
    part: AskedPart,
    task: TaskFilter = None,
    state: Annotated[Literal["open", "closed"] | None, Query(description="open: still slow")] = None,
) -> Response:
    """List slowdowns of workers in the order in which they were found; ``since`` and ``until`` are of that time."""
    return await shown_rows(api, SLOWDOWNS, part, task=task, states=[state] if state else [])


@router.get("/{slowdown}", response_model=SlowWorker, responses=NAMED | TAGGED)
async def one(slowdown: Id, api: Api, if_none_match: conditional.IfNoneMatch = "") -> Response:
    """Show a slowdown of a worker."""
    text = await api.read(lambda views: str(views.row(SLOWDOWNS, slowdown, "shown").shown))
    return conditional.answer(text, if_none_match)


@router.get(
    "/{slowdown}/postmortem",
    response_model=None,
    responses=NAMED | postmortem_pages.described(SlowWorkerPostMortem),
)
async def postmortem(slowdown: Id, api: Api, output: postmortem_pages.Output = "json") -> Response:
    """Show the post-mortem of a slow worker: what was measured, what was decided and why, and what it cost."""
    as_of = utc_now()

    def read(views: ViewReader) -> tuple[KnownSlowdown, ClusterView]:
        return known_slowdown(views, slowdown), api.cluster(views)

    found, cluster = await api.read(read)
    made = await asyncio.to_thread(slow_post_mortem, found, api.journal.log, cluster, as_of)
    return postmortem_pages.answer(made, output)
