"""The projections in their database: the fold writes them, requests read them.

One transaction writes the views together with the position up to which the log has been folded. One transaction, too,
reads all views of one answer, so that they are of one position even if the fold goes on meanwhile. Tables:
``services/api/tables.py``; the fold itself: ``services/api/projections``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, cast

from sqlalchemy import Engine, event, func, text
from sqlalchemy import create_engine as sqlalchemy_engine
from sqlalchemy.engine import make_url
from sqlmodel import Session, SQLModel, col, select

from services.api.projections.evolve import evolve
from services.api.tables import CLUSTER, INCIDENTS, NODES, PLANS, SPANS, TASKS, Kind, PositionRow, Tables, V
from services.api.views import SCHEMA_VERSION, Views
from shared.errors import NotFound
from shared.events import Recorded
from shared.log.driver_errors import database_errors
from shared.log.schema import with_timeouts

_BUSY_TIMEOUT_MS = 10_000
"""How long SQLite waits for another process's lock; the fold's transactions take milliseconds."""

_WHAT = "projections"


class _TableMap(MutableMapping[str, V]):
    """A table as the mapping that the fold reads and writes, inside one transaction."""

    def __init__(self, session: Session, kind: Kind[V]) -> None:
        self._session = session
        self._kind = kind
        self._read: dict[str, V] = {}

    def __getitem__(self, key: str) -> V:
        if key not in self._read:
            row = self._session.get(self._kind.row, key)
            if row is None:
                raise KeyError(key)
            self._read[key] = self._kind.view.model_validate_json(row.document)
        return self._read[key]

    def __setitem__(self, key: str, view: V) -> None:
        self._read[key] = view
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


class ViewReader:
    """Reads views inside one transaction: all of them are of the same position of the log."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, kind: Kind[V], key: str) -> V | None:
        """Return a view by its key, or None."""
        row = self._session.get(kind.row, key)
        return kind.view.model_validate_json(row.document) if row else None

    def find(self, kind: Kind[V], key: str) -> V:
        """Return a view by its key.

        Raises:
            NotFound: there is none.
        """
        view = self.get(kind, key)
        if view is None:
            raise NotFound(f"no {kind.noun} {key!r}")
        return view

    def page(
        self, kind: Kind[V], *, after: int = 0, limit: int | None = None, states: Sequence[str] = (), task: str = ""
    ) -> list[V]:
        """Return views in the order of their positions.

        Args:
            kind: of the views.
            after: only views behind this position.
            limit: most views to return; None: all.
            states: only views in one of these states; empty: in any.
            task: only views that concern this task; empty: all.
        """
        row = kind.row
        query = select(row.document).where(col(row.position) > after).order_by(col(row.position)).limit(limit)
        if states:
            query = query.where(col(row.state).in_(states))
        if task:
            query = query.where(col(row.tasks).contains(f"/{task}/", autoescape=True))
        return [kind.view.model_validate_json(document) for document in self._session.exec(query)]

    def count(self, kind: Kind[V], state: str) -> int:
        """Return how many views are in a state."""
        row = kind.row
        return self._session.exec(select(func.count()).select_from(row).where(col(row.state) == state)).one()


class Store:
    """The projections in SQLite or PostgreSQL; safe to use from threads.

    Args:
        url: SQLAlchemy URL.

    Raises:
        Unavailable: the database does not answer.
    """

    def __init__(self, url: str) -> None:
        self._sqlite = url.startswith("sqlite")
        self._engine: Engine
        if self._sqlite:
            self._engine = sqlalchemy_engine(url, connect_args={"check_same_thread": False})
            event.listen(self._engine, "connect", _set_pragmas)
        else:
            self._engine = sqlalchemy_engine(with_timeouts(make_url(url)), pool_pre_ping=True)
        with database_errors(_WHAT):
            self._create()

    def _create(self) -> None:
        """Make the tables; those of another version of the fold are dropped and folded again from the log."""
        metadata = Tables.metadata
        metadata.create_all(self._engine, tables=[_table(PositionRow)])
        with Session(self._engine) as session:
            row = session.exec(select(PositionRow)).first()
        if row is not None and row.schema_version != SCHEMA_VERSION:
            self.reset()
        metadata.create_all(self._engine)

    def reset(self) -> None:
        """Drop everything; the next fold starts at position 0."""
        with database_errors(_WHAT):
            Tables.metadata.drop_all(self._engine)
            Tables.metadata.create_all(self._engine)

    def position(self) -> int:
        """Return the position up to which the log has been folded."""
        return self.head()[0]

    def head(self) -> tuple[int, str]:
        """Return the position up to which the log has been folded, and the hash of its record."""
        with database_errors(_WHAT), Session(self._engine) as session:
            row = session.get(PositionRow, 1)
            return (row.position, row.head) if row else (0, "")

    def fold(self, records: Sequence[Recorded]) -> int:
        """Fold records into the tables and save the position, in one transaction; return the position.

        Records at or below the saved position are skipped, so a repeated delivery has no effect.
        """
        with database_errors(_WHAT), Session(self._engine) as session, session.begin():
            row = session.get(PositionRow, 1)
            position = row.position if row else 0
            head = row.head if row else ""
            views = Views(
                tasks=_TableMap(session, TASKS),
                incidents=_TableMap(session, INCIDENTS),
                plans=_TableMap(session, PLANS),
                nodes=_TableMap(session, NODES),
                cluster=_TableMap(session, CLUSTER),
                spans=_TableMap(session, SPANS),
            )
            for recorded in records:
                if recorded.position > position:
                    evolve(views, recorded)
                    position, head = recorded.position, recorded.hash
            session.merge(PositionRow(id=1, schema_version=SCHEMA_VERSION, position=position, head=head))
        return position

    @contextlib.contextmanager
    def reading(self) -> Iterator[ViewReader]:
        """Give a reader of the views at the present position; records folded later do not change what it reads.

        Raises:
            Unavailable: the database does not answer.
        """
        with database_errors(_WHAT), Session(self._engine) as session:
            if self._sqlite:
                session.execute(text("BEGIN"))  # the driver begins a transaction for writes only
            else:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield ViewReader(session)

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()


def _table(model: type[SQLModel]) -> Any:
    return cast(Any, model).__table__


def _set_pragmas(connection: Any, _record: Any) -> None:
    """Let readers not wait for the fold (WAL); what a power cut loses (NORMAL) is folded again from the log."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    cursor.close()
