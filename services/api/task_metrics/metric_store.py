"""Where the metrics of tasks are kept: ``metrics.db`` beside an SQLite log, or tables in the log's PostgreSQL.

How far each rank's file has been read is written together with what was read, so no line is lost or comes twice.
Several apis may read the same files: a row of each task counts the changes, and what follows from an older state of it
is dropped and read again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pydantic import Field
from sqlalchemy import Connection, MetaData, delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlmodel import Field as Column
from sqlmodel import SQLModel

from services.api.store.shared_tables import SharedTables
from services.api.task_metrics.series import MOST_BYTES, Series, Submission, read_lines, thin_out
from shared.model import Model

_METADATA = MetaData()


class _TaskRow(SQLModel, table=True):
    __tablename__ = "metric_tasks"
    metadata = _METADATA

    task: str = Column(primary_key=True)
    changes: int
    state: str


class _SeriesRow(SQLModel, table=True):
    __tablename__ = "metric_series"
    metadata = _METADATA

    task: str = Column(primary_key=True)
    submission: int = Column(primary_key=True)
    name: str = Column(primary_key=True)
    points: bytes


_TASKS, _SERIES = _TaskRow.__table__, _SeriesRow.__table__  # type: ignore[attr-defined]


class State(Model):
    """How far a task's files have been read, and what its series do not say.

    Attributes:
        offsets: of each file, by generation and worker: ``3/n0/1``.
        firsts: of each submission by its number: ``Submission.firsts``.
        left_out: of each submission by its number: ``Submission.left_out``.
    """

    offsets: dict[str, int] = Field(default_factory=dict)
    firsts: dict[int, dict[int, int]] = Field(default_factory=dict)
    left_out: dict[int, int] = Field(default_factory=dict)


class Known(NamedTuple):
    """The state of a task; ``changes``: how often it was changed."""

    changes: int
    state: State


class NewLines(NamedTuple):
    """What was read of a file: whole lines. ``end``: the offset behind them."""

    generation: int
    worker: str
    data: bytes
    end: int


def file_key(generation: int, worker: str) -> str:
    """Return what tells a rank's file from the others of its task."""
    return f"{generation}/{worker}"


class MetricStore:
    """The metrics of all tasks, in SQLite or PostgreSQL; its methods block.

    Args:
        url: SQLAlchemy URL.

    Raises:
        Unavailable: from each method, where the database does not answer.
    """

    def __init__(self, url: str) -> None:
        self._tables = SharedTables(url, _METADATA, "the metrics of tasks")

    def known(self, task: str) -> Known:
        """Return how far a task's files have been read."""

        def read(connection: Connection) -> Known:
            row = connection.execute(select(_TASKS).where(_TASKS.c.task == task)).first()
            return Known(0, State()) if row is None else Known(row.changes, State.model_validate_json(row.state))

        return self._tables.run(read)

    def take(self, task: str, known: Known, new_lines: Sequence[NewLines], ends: Sequence[int]) -> None:
        """Take what was read, unless somebody else has changed the task's metrics since ``known``.

        Args:
            task: its name.
            known: the state from which on they were read.
            new_lines: what was read, in the order of the generations.
            ends: the newest generation of each earlier submission, in their order, none lower than the one before.
        """

        def write(connection: Connection) -> None:
            before = self._series(connection, task)
            state, found = known.state, _submissions(known.state, before)
            for lines in new_lines:
                number = 1 + bisect_left(ends, lines.generation)
                submission = found.setdefault(number, Submission())
                submission.take(lines.generation, list(read_lines(lines.data)))
            thin_out(found, MOST_BYTES)
            offsets = {file_key(lines.generation, lines.worker): lines.end for lines in new_lines}
            firsts = {number: one.firsts for number, one in found.items()}
            left_out = {number: one.left_out for number, one in found.items()}
            state = State(offsets=state.offsets | offsets, firsts=firsts, left_out=left_out)
            if self._change(connection, task, known.changes, state):
                self._write_series(connection, task, before, found)

        try:
            self._tables.run(write)
        except IntegrityError:
            pass  # another api has made the task's row in between

    def _change(self, connection: Connection, task: str, changes: int, state: State) -> bool:
        """Write a task's state; return whether it was as often changed as is known."""
        text = state.model_dump_json()
        if changes == 0:
            connection.execute(insert(_TASKS).values(task=task, changes=1, state=text))
            return True
        as_known = (_TASKS.c.task == task) & (_TASKS.c.changes == changes)
        changed = update(_TASKS).where(as_known).values(changes=changes + 1, state=text)
        return connection.execute(changed).rowcount == 1

    def _write_series(
        self,
        connection: Connection,
        task: str,
        before: Mapping[tuple[int, str], bytes],
        found: Mapping[int, Submission],
    ) -> None:
        after = {
            (number, name): series.to_bytes() for number, one in found.items() for name, series in one.series.items()
        }
        for number, name in [key for key in before if before[key] != after.get(key)]:
            one = (_SERIES.c.task == task) & (_SERIES.c.submission == number) & (_SERIES.c.name == name)
            connection.execute(delete(_SERIES).where(one))
        new = [
            {"task": task, "submission": number, "name": name, "points": points}
            for (number, name), points in after.items()
            if points != before.get((number, name))
        ]
        if new:
            connection.execute(insert(_SERIES), new)

    def names(self, task: str, submission: int) -> list[str]:
        """Return the names that a submission has logged, in order."""
        query = select(_SERIES.c.name).where(_SERIES.c.task == task, _SERIES.c.submission == submission)
        return sorted(self._tables.run(lambda connection: connection.execute(query).scalars().all()))

    def series(self, task: str, submission: int, names: Collection[str]) -> dict[str, Series]:
        """Return the values of some names of a submission, of those that it has logged."""
        wanted = (_SERIES.c.task == task) & (_SERIES.c.submission == submission) & _SERIES.c.name.in_(names)
        query = select(_SERIES.c.name, _SERIES.c.points).where(wanted)
        rows = self._tables.run(lambda connection: connection.execute(query).all())
        return {name: Series.from_bytes(points) for name, points in rows}

    def close(self) -> None:
        """Close the connections."""
        self._tables.close()

    def _series(self, connection: Connection, task: str) -> dict[tuple[int, str], bytes]:
        rows = connection.execute(select(_SERIES).where(_SERIES.c.task == task))
        return {(row.submission, row.name): row.points for row in rows}


def _submissions(state: State, series: Mapping[tuple[int, str], bytes]) -> dict[int, Submission]:
    """Return the submissions as they were stored."""
    found = {
        number: Submission({}, dict(firsts), state.left_out.get(number, 0)) for number, firsts in state.firsts.items()
    }
    for (number, name), points in series.items():
        # Another api may have added the submission since: then all of this is dropped.
        found.setdefault(number, Submission()).series[name] = Series.from_bytes(points)
    return found
