"""What each receiver has been sent, and whose turn it is to send: one row for each receiver, which all apis share.

The rows are beside an SQLite log (``notices.db``), or in the log's PostgreSQL: whichever api runs goes on where another
has stopped, and of several one sends. The sender counts its row's ``beat`` up, and with it writes what it has sent; the
others watch the beat by their own clocks (those of two machines are never compared) and take a turn whose beat has
stood still for ``LEASE_S``. What such a takeover repeats is one notice at most, under the same id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field
from sqlalchemy import Connection, MetaData, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlmodel import Field as Column
from sqlmodel import SQLModel

from services.api.notices.notice import Subject
from services.api.store.shared_tables import SharedTables
from shared.model import Model


class Sent(Model):
    """What a receiver was sent.

    Attributes:
        position: of the log, up to which all was announced.
        open: troubles that were announced and are not over, by their keys.
        ended: how many troubles were said to be over. It tells notices of a trouble that comes again from the earlier
            ones, which have the same key.
    """

    position: int
    open: dict[str, Subject] = Field(default_factory=dict)
    ended: int = 0

    def at(self, position: int) -> Sent:
        """Return the same up to another position."""
        return self.model_copy(update={"position": position})

    def opened(self, subject: Subject) -> Sent:
        """Return it with one more trouble."""
        return self.model_copy(update={"open": {**self.open, subject.key: subject}})

    def closed(self, subject: Subject) -> Sent:
        """Return it without a trouble that is over."""
        others = {key: one for key, one in self.open.items() if key != subject.key}
        return self.model_copy(update={"open": others, "ended": self.ended + 1})


class Turn(NamedTuple):
    """Who sends to a receiver. ``sender``: id of the process; empty: nobody. ``beat``: how often it has written."""

    sender: str
    beat: int
    sent: Sent


class _Row(SQLModel, table=True):
    __tablename__ = "notice_receivers"
    metadata = MetaData()

    receiver: str = Column(primary_key=True)
    sender: str
    beat: int
    sent: str


_TABLE = _Row.__table__  # type: ignore[attr-defined]


class Queues:
    """The rows, in SQLite or PostgreSQL; its methods block.

    Args:
        url: SQLAlchemy URL.

    Raises:
        Unavailable: from each method, where the database does not answer.
    """

    def __init__(self, url: str) -> None:
        self._tables = SharedTables(url, _TABLE.metadata, "what receivers of notices were sent")

    def turn(self, receiver: str) -> Turn | None:
        """Return who sends to a receiver; None: nobody ever has."""
        query = select(_TABLE.c.sender, _TABLE.c.beat, _TABLE.c.sent).where(_TABLE.c.receiver == receiver)

        def read(connection: Connection) -> Turn | None:
            row = connection.execute(query).first()
            return None if row is None else Turn(row.sender, row.beat, Sent.model_validate_json(row.sent))

        return self._tables.run(read)

    def begin(self, receiver: str, sender: str, sent: Sent) -> bool:
        """Take the first turn of a receiver; return whether nobody was quicker."""
        row = {"receiver": receiver, "sender": sender, "beat": 0, "sent": sent.model_dump_json()}
        try:
            self._tables.run(lambda connection: connection.execute(insert(_TABLE).values(row)))
        except IntegrityError:
            return False
        return True

    def take(self, receiver: str, sender: str, before: Turn) -> bool:
        """Take a turn from whom had it; return whether the row is still as it was seen."""
        as_seen = (_TABLE.c.sender == before.sender) & (_TABLE.c.beat == before.beat)
        return self._update(receiver, as_seen, {"sender": sender})

    def beat(self, receiver: str, sender: str, sent: Sent) -> bool:
        """Say that the sender lives, and what it has sent; return whether it has the turn."""
        return self._update(receiver, _TABLE.c.sender == sender, {"sent": sent.model_dump_json()})

    def leave(self, receiver: str, sender: str) -> None:
        """Give up a turn, so that another process need not wait for it."""
        self._update(receiver, _TABLE.c.sender == sender, {"sender": ""})

    def close(self) -> None:
        """Close the connections."""
        self._tables.close()

    def _update(self, receiver: str, condition: Any, values: dict[str, str]) -> bool:
        changed = update(_TABLE).where(_TABLE.c.receiver == receiver, condition)
        changed = changed.values(**values, beat=_TABLE.c.beat + 1)
        return self._tables.run(lambda connection: connection.execute(changed).rowcount == 1)
