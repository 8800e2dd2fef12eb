"""Leases: which instance of a service decides; a small table beside the log, and the judge of a lease.

A service has one lease. The instance that holds it moves its counter on, and each of its appends names its token
(``writing``), which is refused once another instance has taken the lease with a higher one. An instance that stands by
takes the lease when the counter has stood still for ``lease_s`` by its own monotonic clock: clocks of two machines are
never compared.

Whoever holds a lease and moved it on at time t of its own clock is alone until t + ``lease_s``: another instance has
seen that counter later than t, and waits as long from then on.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import sqlalchemy as sa

RATE_WINDOW_S = 600.0
"""Time for which a takeover counts towards the limit of their rate."""

MOST_DOUBLINGS = 4
"""A lease that changes hands again and again stands still for at most 16 times ``lease_s`` before it is taken."""

_INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")

LEASES = sa.Table(
    "log_leases",
    sa.MetaData(),
    sa.Column("service", sa.Text, primary_key=True),
    sa.Column("token", _INTEGER, nullable=False),
    sa.Column("counter", _INTEGER, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("handled", _INTEGER, nullable=False),
)


class Lease(NamedTuple):
    """The lease of a service, as it was read or taken.

    ``token``: higher with each taking. ``counter``: moved on by the holder. ``holder``: the process that holds it
    (``shared.machine.process_names``); empty: it was given back. ``handled``: position of the log up to which holders
    have handled it.
    """

    service: str
    token: int
    counter: int = 0
    holder: str = ""
    handled: int = 0

    @property
    def moved(self) -> tuple[int, int]:
        """What changes whenever a holder has shown that it lives."""
        return self.token, self.counter


class LeaseWatch:
    """Judges by one clock whether a lease may be taken. Pure: readings of the clock come in.

    Time counts only between looks that are at most half of ``lease_s`` apart: in a longer one this process, its machine
    or the database stood still, and what a holder did meanwhile is not known.

    Each change of the holder that was seen within ``RATE_WINDOW_S`` doubles the time for which the counter has to stand
    still: instances that are too slow to hold a lease do not take it from one another all the time.

    Args:
        lease_s: how long the counter stands still before the lease may be taken.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: Lease | None = None
        self._since_s = self._looked_s = 0.0
        self._changes: deque[float] = deque()

    def may_take(self, seen: Lease | None, now_s: float) -> bool:
        """Return whether the lease may be taken.

        Args:
            seen: the lease as it was just read; None: nobody has ever held it.
            now_s: a reading of a monotonic clock, taken after the lease was read.
        """
        if seen is None or not seen.holder:
            return True
        before, self._seen = self._seen, seen
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if before is None or before.moved != seen.moved or gap_s > self._lease_s / 2:
            self._since_s = now_s
            if before is not None and before.token != seen.token:
                self._changes.append(now_s)
        while self._changes and self._changes[0] < now_s - RATE_WINDOW_S:
            self._changes.popleft()
        doublings = min(len(self._changes), MOST_DOUBLINGS)
        return now_s - self._since_s >= self._lease_s * (1 << doublings)


def read_leases(connection: sa.Connection) -> dict[str, Lease]:
    """Return the leases by service; none where no service has ever taken one."""
    if not sa.inspect(connection).has_table(LEASES.name):
        return {}
    return {row.service: Lease(*row) for row in connection.execute(sa.select(LEASES))}


def take(connection: sa.Connection, service: str, holder: str, seen: Lease | None, least: int) -> Lease | None:
    """Take a lease that has not moved since it was read; return None if it has.

    Args:
        connection: has the writer's lock of the log.
        service: whose lease it is.
        holder: the process that takes it.
        seen: the lease as it was read; None: there was none.
        least: the least token. A log that was restored from a backup has an older lease, and agents refuse its token.
    """
    LEASES.create(connection, checkfirst=True)
    found = read_leases(connection).get(service)
    if (found and found.moved) != (seen and seen.moved):
        return None
    if found is None:
        taken = Lease(service, least, 0, holder)
        connection.execute(sa.insert(LEASES).values(taken._asdict()))
    else:
        taken = Lease(service, max(found.token + 1, least), 0, holder, found.handled)
        connection.execute(sa.update(LEASES).where(LEASES.c.service == service).values(taken._asdict()))
    return taken


RENEW = """UPDATE log_leases SET counter = counter + 1, handled = CASE WHEN {0} > handled THEN {0} ELSE handled END
    WHERE service = {0} AND token = {0}"""
"""Moves a counter on; {0}: the driver's mark of a parameter: handled, handled, service, token."""

TOKENS = "SELECT service, token FROM log_leases"
