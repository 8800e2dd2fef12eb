"""``/v1/tasks/{name}/attempts``: the submissions of a task's name."""

from __future__ import annotations

from fastapi import APIRouter, Response

from services.api import present
from services.api.gateway import Api, as_text
from services.api.interface.models import Attempt, Page
from services.api.projections.requests import attempt_of
from services.api.routing.parameters import NAMED, PROBLEMS, Cursor, Limit, TaskName, page_json
from services.api.store.readers import ViewReader
from services.api.store.tables import ATTEMPTS, TASKS
from services.api.views.task_parts import attempt_key

router = APIRouter(prefix="/v1/tasks", tags=["tasks"], responses=PROBLEMS)


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
