"""Tables of the projections, and how each kind of view is stored in one.

``services/api/store.py`` reads and writes them. A view is a JSON document under its key, beside the columns that lists
are ordered and filtered by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from services.api.views import ClusterView, IncidentView, NodeView, PlanView, SpanView, TaskView
from shared.model import Model


class Tables(SQLModel, registry=registry()):
    """Base of the tables: metadata of their own, so that dropping them never touches another part's tables."""


class Row(Tables):
    """A document under its key. ``position`` orders lists; ``state`` and ``tasks`` filter them."""

    key: str = Field(primary_key=True)
    position: int = Field(index=True)
    state: str = Field(default="", index=True)
    tasks: str = ""
    """Names between slashes (``/a/b/``): a name has none, so ``/a/`` finds it."""
    document: str


class TaskRow(Row, table=True):
    """Tasks."""

    __tablename__ = "api_tasks"


class IncidentRow(Row, table=True):
    """Incidents."""

    __tablename__ = "api_incidents"


class PlanRow(Row, table=True):
    """Plans."""

    __tablename__ = "api_plans"


class NodeRow(Row, table=True):
    """Nodes."""

    __tablename__ = "api_nodes"


class SpanRow(Row, table=True):
    """Spans of nodes and tasks."""

    __tablename__ = "api_spans"


class ClusterRow(Row, table=True):
    """One row: the cluster's parameters."""

    __tablename__ = "api_cluster"


class PositionRow(Tables, table=True):
    """One row: how far the log has been folded, and by which version of the fold."""

    __tablename__ = "api_position"

    id: int = Field(primary_key=True)
    schema_version: int
    position: int
    head: str
    """Hash of the record at ``position``: shows whether this is still the same log."""


V = TypeVar("V", bound=Model)


@dataclass(frozen=True)
class Kind(Generic[V]):
    """How a kind of view is stored. ``noun``: what error messages call a view, before its key."""

    row: type[Row]
    view: type[V]
    noun: str
    state: Callable[[V], str]
    tasks: Callable[[V], list[str]]


TASKS = Kind(TaskRow, TaskView, "task named", lambda v: v.state.value, lambda v: [v.name])
INCIDENTS = Kind(
    IncidentRow, IncidentView, "incident", lambda v: "closed" if v.restored_at else "open", lambda v: v.tasks
)
PLANS = Kind(PlanRow, PlanView, "plan", lambda v: v.state.value, lambda v: sorted({*v.impacts, *v.queued}))
NODES = Kind(NodeRow, NodeView, "node named", lambda v: v.state.value, lambda v: [])
SPANS = Kind(SpanRow, SpanView, "span", lambda v: "closed" if v.end else "open", lambda v: [v.task] if v.task else [])
CLUSTER = Kind(ClusterRow, ClusterView, "cluster", lambda v: "", lambda v: [])
