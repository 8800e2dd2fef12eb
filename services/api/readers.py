"""Reading of the views, inside one transaction.

Lists are read by keyset: each query finds its first row by an index, and reads no more rows than it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from services.api.tables import KEYS, Kind, PlanRow, V, table_of
from services.api.views import PlanView
from shared.errors import NotFound


class ViewReader:
    """Reads views inside one transaction: all of them are of the same position of the log."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def get(self, kind: Kind[V], key: str) -> V | None:
        """Return a view by its key, or None."""
        return self.several(kind, [key]).get(key)

    def several(self, kind: Kind[V], keys: Iterable[str]) -> dict[str, V]:
        """Return views by their keys; those that there are."""
        table, wanted = table_of(kind.row), sorted({*keys})
        found: dict[str, V] = {}
        for start in range(0, len(wanted), KEYS):
            query = select(table.c.key, table.c.document).where(table.c.key.in_(wanted[start : start + KEYS]))
            for key, document in self.connection.execute(query):
                found[key] = kind.view.model_validate_json(document)
        return found

    def find(self, kind: Kind[V], key: str) -> V:
        """Return a view by its key.

        Raises:
            NotFound: there is none.
        """
        view = self.get(kind, key)
        if view is None:
            raise NotFound(f"no {kind.noun} {key!r}")
        return view

    def next_solved(self, position: int) -> datetime | None:
        """Return when the first plan of the solver behind a position was decided; None: there is none."""
        table = table_of(PlanRow)
        query = select(table.c.document).where(table.c.solved, table.c.position > position)
        document = self.connection.scalar(query.order_by(table.c.position).limit(1))
        return None if document is None else PlanView.model_validate_json(document).decided_at

    def page(
        self, kind: Kind[V], *, after: int = 0, limit: int | None = None, states: Sequence[str] = (), task: str = ""
    ) -> list[V]:
        """Return views in the order of their positions.

        Args:
            kind: of the views.
            after: only views behind this position.
            limit: most views to return; None: all.
            states: only views in one of these states; empty: in any.
            task: only views that concern this task, of a kind that is listed by task; empty: all.
        """
        table = table_of(kind.row)
        if task:
            assert kind.link is not None
            link = table_of(kind.link)
            listed, document = link, table.c.document
            base = select(link.c.position, document).join(table, table.c.key == link.c.key).where(link.c.task == task)
        else:
            listed = table
            base = select(table.c.position, table.c.document)
        rows: list[Any] = []
        # One query for each state: the rows of several states are in order only within each. A list of all states by
        # task asks for each state too, so that one index serves both.
        for state in sorted(states) or (kind.states if task else (None,)):
            query = base.where(listed.c.position > after).order_by(listed.c.position, listed.c.key).limit(limit)
            rows += self.connection.execute(query if state is None else query.where(listed.c.state == state)).all()
        rows.sort(key=lambda row: int(row.position))
        return [kind.view.model_validate_json(row.document) for row in rows[:limit]]
