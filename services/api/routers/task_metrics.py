"""``/v1/tasks/{name}/metrics``: what the script of a task logs (``run.log``)."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from services.api.gateway import Api
from services.api.route_parts.parameters import (
    NAMED,
    PROBLEMS,
    AskedSubmission,
    MostPoints,
    TaskName,
    submission_number,
)
from services.api.task_metrics.series import MOST_NAMES, NAME_CHARACTERS
from shared.interface.models import MetricSeries, TaskMetrics

router = APIRouter(prefix="/v1/tasks", tags=["tasks"], responses=PROBLEMS)

_Names = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=NAME_CHARACTERS)]] | None,
    Query(alias="metric", max_length=MOST_NAMES, description="metrics whose values are shown"),
]


@router.get("/{name}/metrics", responses=NAMED)
async def metrics(
    name: TaskName, api: Api, asked: _Names = None, attempt: AskedSubmission = None, points: MostPoints = 400
) -> TaskMetrics:
    """Show what the script of a submission has logged: all names, and the values of the metrics that are asked for.

    Each step has one value: of several ranks that of the lowest, of several generations that of the newest.
    """
    number = submission_number(await api.task(name), attempt)
    silent = await api.metrics.refresh(name)
    store = api.metrics.store
    names, found, known = await asyncio.gather(
        asyncio.to_thread(store.names, name, number),
        asyncio.to_thread(store.series, name, number, asked or []),
        asyncio.to_thread(store.known, name),
    )
    series = []
    for one in [one for one in dict.fromkeys(asked or []) if one in found]:
        chosen = found[one].points(points)
        steps, values = [step for step, _ in chosen], [value for _, value in chosen]
        series.append(MetricSeries(name=one, every=found[one].every, steps=steps, values=values))
    left_out = known.state.left_out.get(number, 0)
    return TaskMetrics(attempt=number, names=names, series=series, left_out=left_out, silent=silent)
