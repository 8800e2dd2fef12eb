"""Where the code that comes along with tasks is kept: ``code.db`` beside an SQLite log, or the log's PostgreSQL.

So every api has it, and a backup of the database too. An archive is kept once, in pieces as agents ask for them, with
those who have sent it: to send it is to have it, so they may use and read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from sqlalchemy import Connection, MetaData, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlmodel import Field as Column
from sqlmodel import SQLModel

from services.api.store.shared_tables import SharedTables
from shared.messages.node_files import CHUNK_BYTES
from shared.tasks.code import Code

_METADATA = MetaData()


class _CodeRow(SQLModel, table=True):
    __tablename__ = "code"
    metadata = _METADATA

    digest: str = Column(primary_key=True)
    size_bytes: int
    files: int
    used_s: float


class _SenderRow(SQLModel, table=True):
    __tablename__ = "code_senders"
    metadata = _METADATA

    digest: str = Column(primary_key=True)
    actor: str = Column(primary_key=True)


class _PieceRow(SQLModel, table=True):
    __tablename__ = "code_pieces"
    metadata = _METADATA

    digest: str = Column(primary_key=True)
    number: int = Column(primary_key=True)
    content: bytes


_CODE, _SENDERS, _PIECES = (_METADATA.tables[name] for name in ("code", "code_senders", "code_pieces"))


class Kept(NamedTuple):
    """An archive that is kept, and who has sent it."""

    code: Code
    senders: frozenset[str]


class CodeStore:
    """The archives of all tasks, in SQLite or PostgreSQL; its methods block.

    Args:
        url: SQLAlchemy URL.
        clock: returns the time in seconds since the epoch; all apis have about the same one.

    Raises:
        Unavailable: from each method, where the database does not answer.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self._tables, self._clock = SharedTables(url, _METADATA, "the code of tasks", private=True), clock

    def put(self, code: Code, archive: bytes, actor: str) -> bool:
        """Keep an archive, or note that this actor has sent it, too; return whether it is new."""

        def write(connection: Connection) -> bool:
            new = _used(connection, code.digest, self._clock()) == 0
            if new:
                connection.execute(insert(_CODE).values(**code.model_dump(), used_s=self._clock()))
                begins = range(0, len(archive), CHUNK_BYTES)
                for number, begin in enumerate(begins):
                    content = archive[begin : begin + CHUNK_BYTES]
                    connection.execute(insert(_PIECES).values(digest=code.digest, number=number, content=content))
            sender = {"digest": code.digest, "actor": actor}
            if connection.execute(select(_SENDERS).filter_by(**sender)).first() is None:
                connection.execute(insert(_SENDERS).values(**sender))
            return new

        try:
            return self._tables.run(write)
        except IntegrityError:  # the same was sent to another api at the same time
            return self._tables.run(write)

    def kept(self, digest: str) -> Kept | None:
        """Return what is kept under a digest; None: nothing."""

        def read(connection: Connection) -> Kept | None:
            row = connection.execute(select(_CODE).where(_CODE.c.digest == digest)).first()
            senders = connection.scalars(select(_SENDERS.c.actor).where(_SENDERS.c.digest == digest))
            if row is None:
                return None
            code = Code(digest=row.digest, size_bytes=row.size_bytes, files=row.files)
            return Kept(code, frozenset(senders))

        return self._tables.run(read)

    def use(self, digest: str) -> bool:
        """Note that an archive is used now, so that it is not removed for a while; return whether there is one."""
        return self._tables.run(lambda connection: _used(connection, digest, self._clock()) > 0)

    def piece(self, digest: str, offset: int) -> bytes | None:
        """Return what is kept from an offset on, as much as a reply has; None: there is no such archive, or offset."""
        number, begin = divmod(offset, CHUNK_BYTES)
        query = select(_PIECES.c.content).where(_PIECES.c.digest == digest, _PIECES.c.number == number)
        content = self._tables.run(lambda connection: connection.scalar(query))
        return None if content is None else bytes(content)[begin:]

    def sent_bytes(self, actor: str) -> int:
        """Return the size of all archives that an actor has sent and that are kept."""
        query = select(func.sum(_CODE.c.size_bytes)).join(_SENDERS, _SENDERS.c.digest == _CODE.c.digest)
        return self._tables.run(lambda connection: connection.scalar(query.where(_SENDERS.c.actor == actor)) or 0)

    def unused(self, age_s: float) -> set[str]:
        """Return the digests of what was not used for so long."""
        query = select(_CODE.c.digest).where(_CODE.c.used_s < self._clock() - age_s)
        return self._tables.run(lambda connection: {*connection.scalars(query)})

    def remove(self, digests: Collection[str], age_s: float) -> None:
        """Remove archives, unless they were used within this time."""
        oldest_s = self._clock() - age_s

        def write(connection: Connection) -> None:
            for digest in digests:
                old = delete(_CODE).where(_CODE.c.digest == digest, _CODE.c.used_s < oldest_s)
                if connection.execute(old).rowcount:
                    for table in (_SENDERS, _PIECES):
                        connection.execute(delete(table).where(table.c.digest == digest))

        self._tables.run(write)

    def close(self) -> None:
        """Close the connections."""
        self._tables.close()


def _used(connection: Connection, digest: str, now_s: float) -> int:
    return connection.execute(update(_CODE).where(_CODE.c.digest == digest).values(used_s=now_s)).rowcount
