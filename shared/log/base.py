"""The base: where a log's table begins that was cut over behind archived segments.

A table that was never cut begins at position 1 (``START``). A later one (``cutover``) has two small tables beside it:
``log_base`` has one row, the last archived event; ``log_base_streams`` has the version of each stream there. Chain,
positions, times and stream versions go on from them. Triggers refuse every change of both (``guards``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import sqlalchemy as sa

from shared.errors import Corrupt
from shared.model import canonical_json

FIRST_HASH = "0" * 64
"""``previous_hash`` of the first row of a log."""

_METADATA = sa.MetaData()

BASE_TABLE = sa.Table(
    "log_base",
    _METADATA,
    sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
    sa.Column("hash", sa.Text, nullable=False),
    sa.Column("recorded_at", sa.Text, nullable=False),
    sa.Column("segments", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
)

STREAMS_TABLE = sa.Table(
    "log_base_streams",
    _METADATA,
    sa.Column("stream", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)

TABLES = (BASE_TABLE, STREAMS_TABLE)


class Base(NamedTuple):
    """The place behind which a table begins.

    ``position``, ``hash``, ``recorded_at``: those of the last event before it. ``versions``: the version of each stream
    there. ``segments``: the folder that has those events, as it was when the log was cut; empty: the log was never cut.
    """

    position: int = 0
    hash: str = FIRST_HASH
    recorded_at: str = ""
    versions: Mapping[str, int] = MappingProxyType({})
    segments: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether events lie before the table."""
        return self.position > 0

    def sha256(self) -> str:
        """Return the digest of all that the chain goes on from; the folder is no part of it."""
        values = [self.position, self.hash, self.recorded_at, dict(self.versions)]
        return hashlib.sha256(canonical_json(values).encode()).hexdigest()


START = Base()
"""The place before the first event of all."""


def create_base(connection: sa.Connection, base: Base) -> None:
    """Create the tables of a base, with their rows."""
    for table in TABLES:
        table.create(connection)
    connection.execute(
        sa.insert(BASE_TABLE).values(
            position=base.position,
            hash=base.hash,
            recorded_at=base.recorded_at,
            segments=base.segments,
            sha256=base.sha256(),
        )
    )
    if base.versions:
        rows = [{"stream": stream, "version": version} for stream, version in sorted(base.versions.items())]
        connection.execute(sa.insert(STREAMS_TABLE), rows)


def read_base(connection: sa.Connection) -> Base:
    """Return the base of the log in a database.

    Raises:
        Corrupt: its tables do not have what ``create_base`` has written.
    """
    inspector = sa.inspect(connection)
    if not inspector.has_table(BASE_TABLE.name):
        return START
    rows = connection.execute(sa.select(BASE_TABLE)).all()
    if len(rows) != 1 or not inspector.has_table(STREAMS_TABLE.name):
        raise Corrupt("the base of the log (tables log_base, log_base_streams) was changed: it has no row, or several")
    row = rows[0]
    versions = {stream: version for stream, version in connection.execute(sa.select(STREAMS_TABLE))}
    numbers, texts = [row.position, *versions.values()], [row.hash, row.recorded_at, row.segments, *versions]
    if not all(isinstance(each, int) for each in numbers) or not all(isinstance(each, str) for each in texts):
        raise Corrupt(
            "the base of the log (tables log_base, log_base_streams) was changed: it has another type of value"
        )
    return Base(row.position, row.hash, row.recorded_at, versions, row.segments)


def base_problem(connection: sa.Connection, base: Base) -> str:
    """Return what is wrong with a log's base, in words; empty if nothing is."""
    if not base.is_cut:
        return ""
    stored = connection.scalar(sa.select(BASE_TABLE.c.sha256))
    if stored == base.sha256():
        return ""
    return (
        f"position {base.position}: the base of the log, which was cut there, does not have its digest: it was changed"
    )
