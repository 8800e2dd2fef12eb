"""The tables of the projections, and the fold into them: views and position in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from sqlalchemy import Engine, event, func
from sqlalchemy import create_engine as sqlalchemy_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import registry
from sqlmodel import Field, Session, SQLModel, col, select

from services.api.projections import evolve
from services.api.views import (
    SCHEMA_VERSION,
    ClusterView,
    IncidentView,
    NodeView,
    PlanView,
    TaskView,
    Views,
)
from shared.errors import Unavailable
from shared.events import Recorded
from shared.model import Model

_BUSY_TIMEOUT_MS = 10_000
"""How long SQLite waits for another process's lock; the fold's transactions take milliseconds."""


class _Tables(SQLModel, registry=registry()):
    """Base of the tables: metadata of their own, so that dropping them never touches another part's tables."""


class _Row(_Tables):
    """A document under its key. ``position`` orders lists; ``state`` and ``tasks`` filter them."""

    key: str = Field(primary_key=True)
    position: int = Field(index=True)
    state: str = Field(default="", index=True)
    tasks: str = ""
    """Names between slashes (``/a/b/``): a name has none, so ``/a/`` finds it."""
    document: str


class TaskRow(_Row, table=True):
    """Tasks."""

    __tablename__ = "api_tasks"


class IncidentRow(_Row, table=True):
    """Incidents."""

    __tablename__ = "api_incidents"


class PlanRow(_Row, table=True):
    """Plans."""

    __tablename__ = "api_plans"


class NodeRow(_Row, table=True):
    """Nodes."""

    __tablename__ = "api_nodes"


class ClusterRow(_Row, table=True):
    """One row: the cluster's parameters."""

    __tablename__ = "api_cluster"


class PositionRow(_Tables, table=True):
    """One row: how far the log has been folded, and by which version of the fold."""

    __tablename__ = "api_position"

    id: int = Field(primary_key=True)
    schema_version: int
    position: int
    head: str
    """Hash of the record at ``position``: shows whether this is still the same log."""


V = TypeVar("V", bound=Model)


@dataclass(frozen=True)
class _Kind(Generic[V]):
    """How a view is stored."""

    row: type[_Row]
    view: type[V]
    state: Callable[[V], str]
    tasks: Callable[[V], list[str]]


TASKS = _Kind(TaskRow, TaskView, lambda v: v.state.value, lambda v: [v.name])
INCIDENTS = _Kind(IncidentRow, IncidentView, lambda v: "closed" if v.restored_at else "open", lambda v: v.tasks)
PLANS = _Kind(PlanRow, PlanView, lambda v: v.state.value, lambda v: sorted({*v.impacts, *v.queued}))
NODES = _Kind(NodeRow, NodeView, lambda v: v.state, lambda v: [])
CLUSTER = _Kind(ClusterRow, ClusterView, lambda v: "", lambda v: [])


class _TableMap(MutableMapping[str, V]):
    """A table as the mapping that the fold reads and writes, inside one transaction."""

    def __init__(self, session: Session, kind: _Kind[V]) -> None:
        self._session = session
        self._kind = kind
        self._seen: dict[str, V] = {}

    def __getitem__(self, key: str) -> V:
        if key not in self._seen:
            row = self._session.get(self._kind.row, key)
            if row is None:
                raise KeyError(key)
            self._seen[key] = self._kind.view.model_validate_json(row.document)
        return self._seen[key]

    def __setitem__(self, key: str, view: V) -> None:
        self._seen[key] = view
        self._session.merge(
            self._kind.row(
                key=key,
                position=view.position,  # type: ignore[attr-defined]  # every view has one
                state=self._kind.state(view),
                tasks="/" + "/".join(self._kind.tasks(view)) + "/",
                document=view.model_dump_json(by_alias=True),
            )
        )

    def __delitem__(self, key: str) -> None:
        raise NotImplementedError("views are never deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._session.exec(select(self._kind.row.key)).all())

    def __len__(self) -> int:
        return len(list(iter(self)))


class Store:
    """The projections in SQLite or PostgreSQL; safe to use from threads.

    Args:
        url: SQLAlchemy URL.

    Raises:
        Unavailable: the database does not answer.
    """

    def __init__(self, url: str) -> None:
        sqlite = url.startswith("sqlite")
        self._engine: Engine = sqlalchemy_engine(
            url, connect_args={"check_same_thread": False} if sqlite else {}, pool_pre_ping=not sqlite
        )
        if sqlite:
            event.listen(self._engine, "connect", _set_pragmas)
        with self._errors():
            self._create()

    def _create(self) -> None:
        """Make the tables; those of another version of the fold are dropped and folded again from the log."""
        metadata = _Tables.metadata
        metadata.create_all(self._engine, tables=[_table(PositionRow)])
        with Session(self._engine) as session:
            row = session.exec(select(PositionRow)).first()
        if row is not None and row.schema_version != SCHEMA_VERSION:
            self.reset()
        metadata.create_all(self._engine)

    def reset(self) -> None:
        """Drop everything; the next fold starts at position 0."""
        _Tables.metadata.drop_all(self._engine)
        _Tables.metadata.create_all(self._engine)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as err:
            raise Unavailable(f"the projections' database: {type(err).__name__}: {err}") from err

    def position(self) -> int:
        """Return the position up to which the log has been folded."""
        return self.head()[0]

    def head(self) -> tuple[int, str]:
        """Return that position and the hash of its record."""
        with self._errors(), Session(self._engine) as session:
            row = session.get(PositionRow, 1)
            return (row.position, row.head) if row else (0, "")

    def fold(self, records: Sequence[Recorded]) -> int:
        """Fold records into the tables and save the position, in one transaction; return the position.

        Records at or below the saved position are skipped, so a repeated delivery has no effect.
        """
        with self._errors(), Session(self._engine) as session, session.begin():
            row = session.get(PositionRow, 1)
            position = row.position if row else 0
            head = row.head if row else ""
            views = Views(
                tasks=_TableMap(session, TASKS),
                incidents=_TableMap(session, INCIDENTS),
                plans=_TableMap(session, PLANS),
                nodes=_TableMap(session, NODES),
                cluster=_TableMap(session, CLUSTER),
            )
            for recorded in records:
                if recorded.position > position:
                    evolve(views, recorded)
                    position, head = recorded.position, recorded.hash
            session.merge(PositionRow(id=1, schema_version=SCHEMA_VERSION, position=position, head=head))
        return position

    def get(self, kind: _Kind[V], key: str) -> V | None:
        """Return a view by its key."""
        with self._errors(), Session(self._engine) as session:
            row = session.get(kind.row, key)
            return kind.view.model_validate_json(row.document) if row else None

    def page(
        self, kind: _Kind[V], *, after: int = 0, limit: int | None = None, states: Sequence[str] = (), task: str = ""
    ) -> list[V]:
        """Return views in the order of their positions, behind ``after``, that match the filters."""
        row = kind.row
        query = select(row.document).where(col(row.position) > after).order_by(col(row.position)).limit(limit)
        if states:
            query = query.where(col(row.state).in_(states))
        if task:
            query = query.where(col(row.tasks).contains(f"/{task}/", autoescape=True))
        with self._errors(), Session(self._engine) as session:
            return [kind.view.model_validate_json(text) for text in session.exec(query)]

    def count(self, kind: _Kind[V], state: str) -> int:
        """Return how many views are in a state."""
        row = kind.row
        query = select(func.count()).select_from(row).where(col(row.state) == state)
        with self._errors(), Session(self._engine) as session:
            return session.exec(query).one()

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()


def _table(model: type[SQLModel]) -> Any:
    return cast(Any, model).__table__


def _set_pragmas(connection: Any, _record: Any) -> None:
    """WAL: readers do not wait for the fold. NORMAL: what a power cut takes away is folded again from the log."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    cursor.close()
