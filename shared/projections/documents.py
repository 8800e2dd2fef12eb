"""Changes of single documents: fields of a task, of a plan's impact on a task, and the end of a plan for a task."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from shared.views.documents import PlanState, Views


def change_task(views: Views, name: str, **changes: Any) -> None:
    """Change fields of a task, if it is known."""
    task = views.tasks.get(name)
    if task is not None:
        views.tasks[name] = task.model_copy(update=changes)


def change_impact(views: Views, plan: str, task: str, **changes: Any) -> None:
    """Change fields of a plan's impact on a task, if both are known."""
    view = views.plans.get(plan)
    if view is not None and task in view.impacts:
        impact = view.impacts[task].model_copy(update=changes)
        views.plans[plan] = view.model_copy(update={"impacts": {**view.impacts, task: impact}})


def close_plan(views: Views, plan: str, task: str, at: datetime, *, superseded_by: str = "") -> None:
    """Note that a plan is done with a task; with the last task the plan is done."""
    view = views.plans.get(plan)
    if view is None or task not in view.outstanding:
        return
    outstanding = [name for name in view.outstanding if name != task]
    impact = view.impacts[task].model_copy(update={"closed_at": at})
    changes: dict[str, Any] = {"outstanding": outstanding, "impacts": {**view.impacts, task: impact}}
    if superseded_by:
        changes["superseded_by"] = superseded_by
    if not outstanding and view.state is PlanState.OUTSTANDING:
        changes["state"] = PlanState.SUPERSEDED if superseded_by or view.superseded_by else PlanState.DONE
    views.plans[plan] = view.model_copy(update=changes)
