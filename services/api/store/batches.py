"""A batch of the fold: views are read once, changed in memory, and written at once.

``services/api/store/projection_store.py`` folds records into a ``Batch`` inside one transaction. Views that a batch has
read or written stay in memory for the next one, so that following the log reads nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from functools import cache
from typing import Any, Generic

from sqlalchemy import Connection, bindparam, select

from services.api.store.parsed_views import ParsedViews
from services.api.store.tables import (
    ATTEMPTS,
    CLUSTER,
    INCIDENTS,
    KEYS,
    NODES,
    PLANS,
    SLOWDOWNS,
    SPANS,
    TASKS,
    Kind,
    V,
    insert_into,
    table_of,
)
from shared.events.union import PlanDecided, Recorded
from shared.views.documents import Views

_KEPT = 4_000
"""Views of each kind that stay in memory, some kilobytes each: those of all nodes of a large cluster, and of the last
hour where much changes. What is not among them is read again, all of a batch in one query."""


class CachedTable(MutableMapping[str, V], Generic[V]):
    """A table as the mapping that the fold reads and writes. ``begin`` gives it the connection of a transaction."""

    def __init__(self, kind: Kind[V], parsed: ParsedViews) -> None:
        self.kind = kind
        self._parsed = parsed
        self._table = table_of(kind.row)
        self._by_key = select(self._table.c.document).where(self._table.c.key == bindparam("key"))
        self._connection: Connection | None = None
        self._known: dict[str, V | None] = {}
        """Views by key; None: the table has none."""
        self.changed: dict[str, V | None] = {}
        """By key, the views that this batch has changed, as they were before; None: new."""

    def begin(self, connection: Connection) -> None:
        """Begin a batch."""
        self._connection = connection
        self.changed = {}

    def forget(self) -> None:
        """Forget every view: what the table has is not known any more."""
        self._known = {}
        self.changed = {}

    def __getitem__(self, key: str) -> V:
        if key not in self._known:
            assert self._connection is not None
            document = self._connection.execute(self._by_key, {"key": key}).scalar()
            self._known[key] = None if document is None else self._parsed.view(self.kind, key, document)
        view = self._known[key]
        if view is None:
            raise KeyError(key)
        return view

    def __setitem__(self, key: str, view: V) -> None:
        if key not in self.changed:
            self.changed[key] = self._known.get(key)  # the fold looks before it replaces a view
        self._known[key] = view

    def __delitem__(self, key: str) -> None:
        raise NotImplementedError("views are never deleted")

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError("the fold finds views by their keys only")

    def __len__(self) -> int:
        raise NotImplementedError("the fold finds views by their keys only")

    def fetch(self, keys: Iterable[str]) -> None:
        """Read the views of several keys in one query."""
        assert self._connection is not None
        missing = sorted({key for key in keys if key not in self._known})
        for start in range(0, len(missing), KEYS):
            part = missing[start : start + KEYS]
            self._known.update(dict.fromkeys(part))
            query = select(self._table.c.key, self._table.c.document).where(self._table.c.key.in_(part))
            for key, document in self._connection.execute(query):
                self._known[key] = self._parsed.view(self.kind, key, document)

    def several(self, keys: Iterable[str]) -> dict[str, V]:
        """Return views by their keys; those that there are."""
        wanted = sorted({*keys})
        self.fetch(wanted)
        return {key: view for key in wanted if (view := self._known[key]) is not None}

    def changes(self) -> list[tuple[V | None, V]]:
        """Return the views that the batch has changed, each as it was before (None: new) and as it is."""
        return [(before, self[key]) for key, before in self.changed.items()]

    def write(self) -> None:
        """Write the views that have changed, each once."""
        assert self._connection is not None
        if not self.changed:
            return
        views = [(key, self[key]) for key in self.changed]
        rows = [self.kind.columns(key, view) for key, view in views]
        upsert(self._connection, self._table, rows)
        for row, (key, view) in zip(rows, views, strict=True):
            self._parsed.add(self.kind, key, row["document"], view)  # who reads it next need not parse it
        if self.kind.link is not None:
            links = [link for key, view in views if self._moved(key, view) for link in self.kind.links(key, view)]
            upsert(self._connection, table_of(self.kind.link), links)

    def _moved(self, key: str, view: V) -> bool:
        """Return whether a view has other tasks, or another state, than its links say."""
        before, kind = self.changed[key], self.kind
        return before is None or kind.state(before) != kind.state(view) or kind.tasks(before) != kind.tasks(view)

    def end(self) -> None:
        """End the batch, once it is committed: of too many views, the older half is forgotten."""
        if len(self._known) > _KEPT:
            self._known = dict(list(self._known.items())[-_KEPT // 2 :])
        self.changed = {}
        self._connection = None


class Batch:
    """All tables of views, as the fold works with them."""

    def __init__(self, parsed: ParsedViews) -> None:
        self.tasks, self.incidents = CachedTable(TASKS, parsed), CachedTable(INCIDENTS, parsed)
        self.plans, self.nodes = CachedTable(PLANS, parsed), CachedTable(NODES, parsed)
        self.spans, self.cluster = CachedTable(SPANS, parsed), CachedTable(CLUSTER, parsed)
        self.attempts, self.slowdowns = CachedTable(ATTEMPTS, parsed), CachedTable(SLOWDOWNS, parsed)
        self._tables: tuple[CachedTable[Any], ...] = (
            self.tasks,
            self.incidents,
            self.plans,
            self.nodes,
            self.spans,
            self.cluster,
            self.attempts,
            self.slowdowns,
        )
        self._by_kind: dict[str, CachedTable[Any]] = {table.kind.noun: table for table in self._tables}
        self.views = Views(
            tasks=self.tasks,
            incidents=self.incidents,
            plans=self.plans,
            nodes=self.nodes,
            cluster=self.cluster,
            spans=self.spans,
            attempts=self.attempts,
            slowdowns=self.slowdowns,
        )

    def begin(self, connection: Connection, records: Iterable[Recorded]) -> None:
        """Begin a transaction; read the views that the records name."""
        for table in self._tables:
            table.begin(connection)
        keys = _Keys()
        for recorded in records:
            keys.add(recorded)
        self.tasks.fetch(keys.tasks)
        self.incidents.fetch(keys.incidents)
        self.plans.fetch(keys.plans)
        self.nodes.fetch(keys.nodes)

    def several(self, kind: Kind[V], keys: Iterable[str]) -> dict[str, V]:
        """Return views of a kind by their keys; those that there are."""
        return self._by_kind[kind.noun].several(keys)

    def write(self) -> None:
        """Write all that has changed."""
        for table in self._tables:
            table.write()

    def end(self) -> None:
        """End the transaction, once it is committed."""
        for table in self._tables:
            table.end()

    def forget(self) -> None:
        """Forget every view: the transaction has failed, or another process has folded."""
        for table in self._tables:
            table.forget()


class _Keys:
    """Keys of the views that records name. Views that are not among them are read one by one."""

    def __init__(self) -> None:
        self.tasks: set[str] = set()
        self.incidents: set[str] = set()
        self.plans: set[str] = set()
        self.nodes: set[str] = set()

    def add(self, recorded: Recorded) -> None:
        event = recorded.event
        fields = vars(event)
        for name, found in (
            ("task", self.tasks),
            ("incident", self.incidents),
            ("plan", self.plans),
            ("node", self.nodes),
        ):
            if value := fields.get(name):
                found.add(value)
        if isinstance(event, PlanDecided):
            self.plans.update(event.supersedes)
            self.tasks.update(change.task for change in event.changes)
            self.tasks.update(event.queued)


def upsert(connection: Connection, table: Any, rows: list[dict[str, Any]]) -> None:
    """Insert rows, all of which have the same columns, or replace those of the same primary key: one statement."""
    if rows:
        connection.execute(_upsert(connection.dialect.name, table, tuple(rows[0])), rows)


@cache
def _upsert(dialect: str, table: Any, columns: tuple[str, ...]) -> Any:
    """Return the statement, which takes as long to make as some rows take to write."""
    keys = [column.name for column in table.primary_key]
    insert = insert_into(dialect, table)
    changes = {name: insert.excluded[name] for name in columns if name not in keys}
    return insert.on_conflict_do_update(index_elements=keys, set_=changes)
