"""Tables of the projections, and how each kind of view is stored in one.

``services/api/store/projection_store.py`` and the modules beside it read and write them. A view is a JSON document
under its key, beside the columns that lists are ordered and filtered by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel
from sqlalchemy import BigInteger, Index, Integer
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from services.api import present
from services.api.live import LiveState
from shared.costs.claim_times import plan_times, span_times
from shared.costs.service_levels import healthy_flop, progress_flop
from shared.costs.span_claims import NODE_SPANS, Window
from shared.interface.models import Task
from shared.model import Model
from shared.tasks.specification import ENDED
from shared.views.documents import (
    SCHEMA_VERSION,
    ClusterView,
    IncidentView,
    NodeView,
    PlanState,
    PlanView,
    SpanView,
    TaskView,
)
from shared.views.observed_views import SlowdownView
from shared.views.task_parts import AttemptView

PREFIX = f"api{SCHEMA_VERSION}_"
"""Before the name of each table: apis of two versions have tables of their own in one database during an upgrade."""


_LISTED = {"list": "position", "states": "state position"}
"""The indexes of views that are listed, also by state."""

_TIMED = {**_LISTED, "times": "time_s position"}
"""Those of views that are listed by time, too."""

_OF_TASK = {"list": "task state position"}


def _indexes(table: str, **columns: str) -> tuple[Index, ...]:
    """Return the indexes of a table. ``columns``: those of each, separated by blanks, by the end of its name."""
    return tuple(Index(f"{PREFIX}{table}_{name}", *each.split()) for name, each in columns.items())


class Tables(SQLModel, registry=registry()):
    """Base of the tables: metadata of their own, so that dropping them never touches another part's tables."""


_POSITION = BigInteger().with_variant(Integer, "sqlite")
"""Type of a position, as in the log: of 64 bits, and the cursors that lists are asked for are of the same range."""


class Row(Tables):
    """A document under its key. ``position`` orders lists; ``state`` filters them.

    ``shown``: the item of the list as the interface shows it, in JSON, where that follows from the document alone;
    empty where it does not. It comes before the document, which SQLite then need not read.
    """

    key: str = Field(primary_key=True)
    position: int = Field(sa_type=_POSITION)
    state: str = ""
    shown: str = ""
    document: str


class Link(Tables):
    """A task that a document concerns, with the columns by which the documents of one task are listed."""

    key: str = Field(primary_key=True)
    task: str = Field(primary_key=True)
    position: int = Field(sa_type=_POSITION)
    state: str


class TaskRow(Row, table=True):
    """Tasks."""

    __tablename__ = f"{PREFIX}tasks"
    __table_args__ = _indexes("tasks", **_TIMED, flop="flop weighted_flop")

    time_s: float
    """When it was submitted, seconds since the epoch."""
    flop: float
    weighted_flop: float


class AttemptRow(Row, table=True):
    """Earlier submissions of names."""

    __tablename__ = f"{PREFIX}attempts"


class IncidentRow(Row, table=True):
    """Incidents."""

    __tablename__ = f"{PREFIX}incidents"
    __table_args__ = _indexes("incidents", **_TIMED)

    time_s: float
    """When it was detected, seconds since the epoch."""
    other_answers: str
    """JSON of ``OtherAnswers``."""


class IncidentTask(Link, table=True):
    """Tasks of incidents."""

    __tablename__ = f"{PREFIX}incident_tasks"
    __table_args__ = _indexes("incident_tasks", **_OF_TASK)


class PlanRow(Row, table=True):
    """Plans."""

    __tablename__ = f"{PREFIX}plans"
    __table_args__ = _indexes("plans", **_TIMED, claims="reach_s start_s", solved="solved position")

    time_s: float
    """When it was decided, seconds since the epoch."""
    start_s: float
    reach_s: float
    """From when, and up to when, it has claims (``shared/costs/claim_times.py``)."""
    solved: bool


class PlanTask(Link, table=True):
    """Tasks of plans."""

    __tablename__ = f"{PREFIX}plan_tasks"
    __table_args__ = _indexes("plan_tasks", **_OF_TASK)


class NodeRow(Row, table=True):
    """Nodes."""

    __tablename__ = f"{PREFIX}nodes"
    __table_args__ = _indexes("nodes", **_LISTED)


class SlowdownRow(Row, table=True):
    """Slowdowns of workers."""

    __tablename__ = f"{PREFIX}slowdowns"
    __table_args__ = _indexes("slowdowns", **_TIMED)

    time_s: float
    """When it was found, seconds since the epoch."""


class SlowdownTask(Link, table=True):
    """Tasks of slowdowns."""

    __tablename__ = f"{PREFIX}slowdown_tasks"
    __table_args__ = _indexes("slowdown_tasks", **_OF_TASK)


class SpanRow(Row, table=True):
    """Spans of nodes and tasks."""

    __tablename__ = f"{PREFIX}spans"
    # With the columns that WAF over time adds up: it then reads no row of the table.
    __table_args__ = _indexes(
        "spans", list="position", claims="reach_s start_s end_s achieved_flop healthy_flop", starts="start_s"
    )

    start_s: float
    end_s: float
    reach_s: float
    """Up to when it has claims: mostly its end, which is infinite while it lasts."""
    allocated: bool
    """Whether workers of a node are allocated in it."""
    achieved_flop: float
    """Of progress that has ended: the weighted FLOP of its steps."""
    healthy_flop: float
    """Of a healthy line that has ended: the weighted FLOP below it."""


class ClusterRow(Row, table=True):
    """One row: the cluster's parameters."""

    __tablename__ = f"{PREFIX}cluster"


class PositionRow(Tables, table=True):
    """One row: how far the log has been folded."""

    __tablename__ = f"{PREFIX}position"

    id: int = Field(primary_key=True)
    position: int = Field(sa_type=_POSITION)
    head: str
    """Hash of the record at ``position``: shows whether this is still the same log."""
    settled_s: float
    """Up to when worker-seconds are settled (``SettledRow``), in seconds since the epoch."""
    merged_s: float
    """Up to when the settled times of a day have become one."""
    latest_s: float
    """The latest time that a span begins or ends."""
    achieved_flop: str
    """Weighted FLOP of all progress that has ended: an integer, as text."""


class Amounts(Tables):
    """Amounts of a key, as ``shared/costs/settlement.py`` names them (``COLUMNS``)."""

    dimension: str = Field(primary_key=True)
    key: str = Field(primary_key=True)
    detection: float
    transition: float
    planned: float
    recompute: float
    lost: float
    sub_healthy: float
    unscheduled: float
    idle: float
    training: float
    worker_s: float
    lost_flop: float
    allocated_worker_s: float
    held_worker_s: float
    by_task_worker_s: float
    by_incident_worker_s: float
    healthy_flop: float
    trained_s: float


class SettledRow(Amounts, table=True):
    """Amounts of settled times that meet, none of which goes beyond a day of UTC; the first begins infinitely early."""

    __tablename__ = f"{PREFIX}settled"
    __table_args__ = _indexes("settled", times="start_s")

    start_s: float = Field(primary_key=True)
    end_s: float


class TotalRow(Amounts, table=True):
    """Amounts of all settled times together."""

    __tablename__ = f"{PREFIX}settled_totals"
    __table_args__ = _indexes("settled_totals", costliest="dimension worker_s")


V = TypeVar("V", bound=Model)

KEYS = 500
"""Keys of one query: older versions of SQLite allow 999 parameters."""


@dataclass(frozen=True, eq=False)
class Kind(Generic[V]):
    """How a kind of view is stored.

    ``noun``: what error messages call a view, before its key. ``tasks``, ``states``, ``link``: a view's tasks, all
    states, and the table of tasks, where views are listed by task. ``shown``: the view as the interface shows it, where
    that follows from the view alone.
    """

    row: type[Row]
    view: type[V]
    noun: str
    state: Callable[[V], str] = lambda _: ""
    tasks: Callable[[V], list[str]] = lambda _: []
    states: tuple[str, ...] = ()
    link: type[Link] | None = None
    more: Callable[[V], dict[str, Any]] = lambda _: {}
    """Further columns."""
    shown: Callable[[V], BaseModel | None] = lambda _: None

    def columns(self, key: str, view: V) -> dict[str, Any]:
        """Return the row of a view."""
        shown = self.shown(view)
        return {
            "key": key,
            "position": view.position,  # type: ignore[attr-defined]  # every view has one
            "state": self.state(view),
            "shown": "" if shown is None else shown.model_dump_json(by_alias=True),
            "document": view.model_dump_json(by_alias=True),
            **self.more(view),
        }

    def links(self, key: str, view: V) -> list[dict[str, Any]]:
        """Return the rows of the tasks that a view concerns."""
        place = {"key": key, "position": view.position, "state": self.state(view)}  # type: ignore[attr-defined]
        return [{**place, "task": task} for task in self.tasks(view)]


def _task_columns(view: TaskView) -> dict[str, Any]:
    flop, weighted_flop = view.flop(view.step), view.weighted_flop(view.step)
    return {"time_s": view.submitted_at.timestamp(), "flop": flop, "weighted_flop": weighted_flop}


def _plan_columns(view: PlanView) -> dict[str, Any]:
    start_s, reach_s = plan_times(view)
    return {"time_s": view.decided_at.timestamp(), "start_s": start_s, "reach_s": reach_s, "solved": view.solved}


def _span_columns(view: SpanView) -> dict[str, Any]:
    start_s, reach_s = span_times(view)
    return {
        "start_s": start_s,
        "end_s": math.inf if view.end is None else view.end.timestamp(),
        "reach_s": reach_s,
        "allocated": view.kind in NODE_SPANS and bool(view.workers),
        "achieved_flop": progress_flop(view),
        "healthy_flop": healthy_flop([view], Window(-math.inf, math.inf)) if view.end is not None else 0.0,
    }


def _shown_task(view: TaskView) -> Task | None:
    """Return a task that has ended: of the others heartbeats say more."""
    return present.task(view, LiveState()) if view.state in ENDED else None


DELETED = "deleted"
"""Of the column ``state``: a task that its user has deleted, whatever its state was."""


def _task_state(view: TaskView) -> str:
    return view.state.value if view.deleted_at is None else DELETED


TASKS = Kind(TaskRow, TaskView, "task named", _task_state, more=_task_columns, shown=_shown_task)
ATTEMPTS = Kind(AttemptRow, AttemptView, "attempt")
INCIDENTS = Kind(
    IncidentRow,
    IncidentView,
    "incident",
    lambda v: "closed" if v.closed_at else "open",
    lambda v: sorted({*v.tasks}),
    ("closed", "open"),
    IncidentTask,
    lambda v: {"time_s": v.detected_at.timestamp(), "other_answers": v.other_answers.model_dump_json()},
    present.incident_facts,
)
PLANS = Kind(
    PlanRow,
    PlanView,
    "plan",
    lambda v: v.state.value,
    lambda v: sorted({*v.impacts, *v.queued}),
    tuple(state.value for state in PlanState),
    PlanTask,
    _plan_columns,
    present.plan_summary,
)
NODES = Kind(NodeRow, NodeView, "node named", lambda v: v.state.value)
SLOWDOWNS = Kind(
    SlowdownRow,
    SlowdownView,
    "slow worker",
    lambda v: "closed" if v.ended_at else "open",
    lambda v: [v.task],
    ("closed", "open"),
    SlowdownTask,
    lambda v: {"time_s": v.found_at.timestamp()},
    present.slow_worker,
)
SPANS = Kind(SpanRow, SpanView, "span", lambda v: "closed" if v.end else "open", more=_span_columns)
CLUSTER = Kind(ClusterRow, ClusterView, "cluster")


def insert_into(dialect: str, table: Any) -> Any:
    """Return an INSERT with the conflict clause of a database, given the name of its dialect."""
    own: Any = sqlite if dialect == "sqlite" else postgresql
    return own.insert(table)


def table_of(model: type[SQLModel]) -> Any:
    """Return the table of a model, for statements without sessions."""
    return cast(Any, model).__table__
