"""``/v1/incidents``: faults, the plans that answered them, and their costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Response, status

from services.api.access.access import Submitter
from services.api.gateway import Api, Gateway, as_text
from services.api.last_output import last_output
from services.api.postmortem.gather import Known, known, lateness, post_mortem
from services.api.postmortem.model import PostMortem
from services.api.requests import incident_requests
from services.api.route_parts import conditional, postmortem_pages
from services.api.route_parts.bodies import described, options
from services.api.route_parts.parameters import CHANGE, NAMED, PROBLEMS, TAGGED, AskedPart, Id, TaskFilter, page_json
from services.api.routers import health
from services.api.store.accounts import Accounts
from services.api.store.readers import ViewReader
from services.api.store.tables import INCIDENTS
from shared.costs.counterfactuals import counterfactuals
from shared.costs.report import incident_cost
from shared.interface.models import Incident, IncidentAmounts, IncidentFacts, NoteRequest, Page
from shared.model import utc_now
from shared.views.documents import ClusterView
from shared.views.incident_parts import OtherAnswers

router = APIRouter(prefix="/v1/incidents", tags=["incidents"], responses=PROBLEMS)

_COLUMNS = ("shown", "other_answers", "state")


def _shown(api: Gateway, views: ViewReader, found: Sequence[Any], now: datetime) -> list[str]:
    """Return the JSON of incidents with their costs, and what other answers would have cost. ``found``: their rows."""
    cluster = api.cluster(views)
    accounts, price = Accounts(views, now), cluster.price_per_worker_hour
    amounts = accounts.incidents(row.key for row in found)
    items = []
    for row in found:
        cost = incident_cost(amounts.get(row.key), price)
        others = OtherAnswers.model_validate_json(row.other_answers)
        models = counterfactuals(others, cost, views.next_solved, now)
        usual = late = None
        if row.state == "open":
            usual, late = lateness(cluster, IncidentFacts.model_validate_json(row.shown), now)
        changing = IncidentAmounts(cost=cost, counterfactuals=models, usual_s=usual, stuck_s=late)
        items.append(f"{row.shown[:-1]},{as_text(changing)[1:]}")  # one object of both
    return items


@router.get("", response_model=Page[Incident])
async def incidents(
    api: Api,
    part: AskedPart,
    task: TaskFilter = None,
    state: Annotated[Literal["open", "closed"] | None, Query(description="closed: back at planned strength")] = None,
) -> Response:
    """List incidents in the order in which they were detected; ``since`` and ``until`` are of the time of detection."""
    as_of = utc_now()

    def answer(views: ViewReader) -> str:
        states = [state] if state else []
        found = views.rows(INCIDENTS, *_COLUMNS, states=states, task=task or "", **part.arguments())
        items = _shown(api, views, found[: part.limit], as_of)
        return page_json(items, [row.position for row in found], part.limit)

    return await api.answer(answer)


@router.get("/{incident}", response_model=Incident, responses=NAMED | TAGGED)
async def one(incident: Id, api: Api, if_none_match: conditional.IfNoneMatch = "") -> Response:
    """Show an incident."""
    return conditional.answer(await _one(api, incident), if_none_match)


async def _one(api: Gateway, incident: str) -> str:
    as_of = utc_now()

    def answer(views: ViewReader) -> str:
        (shown,) = _shown(api, views, [views.row(INCIDENTS, incident, *_COLUMNS)], as_of)
        return shown

    return await api.read(answer)


@router.post(
    "/{incident}/notes",
    status_code=status.HTTP_201_CREATED,
    response_model=Incident,
    responses=CHANGE,
    openapi_extra=described(NoteRequest, required=True),
)
async def note(
    incident: Id, api: Api, who: Submitter, asked: Annotated[NoteRequest, Depends(options(NoteRequest, required=True))]
) -> Response:
    """Add a note to an incident, for everybody who looks at it."""
    await incident_requests.note(api, incident, who, asked.text)
    text = await _one(api, incident)
    return Response(text, status_code=status.HTTP_201_CREATED, media_type="application/json")


@router.post("/{incident}/acknowledge", response_model=Incident, responses=CHANGE)
async def acknowledge(incident: Id, api: Api, who: Submitter) -> Response:
    """Say that somebody takes care of an incident. Once somebody does, a further request changes nothing."""
    await incident_requests.acknowledge(api, incident, who)
    return Response(await _one(api, incident), media_type="application/json")


@router.get("/{incident}/postmortem", response_model=None, responses=NAMED | postmortem_pages.described(PostMortem))
async def postmortem(incident: Id, api: Api, output: postmortem_pages.Output = "json") -> Response:
    """Show the post-mortem of an incident: its course, the decisions with their reasons, its cost, others like it."""
    as_of = utc_now()

    def read(views: ViewReader) -> tuple[Known, ClusterView]:
        cluster = api.cluster(views)
        return known(views, incident, cluster, as_of), cluster

    found, cluster = await api.read(read)
    away = await health.parts_away(api) if found.incident.closed_at is None else []
    made = await asyncio.to_thread(post_mortem, found, api.journal.log, cluster, as_of, away)
    if "last_output" not in made.evidence:
        outputs, missing = await last_output(made.failed, api.own_files, api.node_files)
        made = made.model_copy(update={"outputs": outputs, "left_out": [*made.left_out, *missing]})
    return postmortem_pages.answer(made, output)
