"""Why a PostgreSQL server has refused a connection: the SQLSTATE, which libpq does not pass on.

libpq has the server's words only, in the server's language (``lc_messages``). So the connection is tried once more
while libpq records the messages of the protocol, where the code is: once for each text that a server answers with.
"""

from __future__ import annotations

import os
import re
import select
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn

TRY_S = 5.0
"""Time for that attempt. The attempt before it was answered within the time-out of a connection, which is shorter."""

TEXTS = 256
"""Most texts that are remembered: a server's few refusals, for several roles and databases."""

_CODE = re.compile(rb'^[^\t\n]*\tB\t\d+\tErrorResponse\t[^\n]*? C "([0-9A-Z]{5})"', re.MULTILINE)
"""An error of the server in libpq's record (``PQtrace``): time, direction, length, kind, fields."""

_known: dict[str, str | None] = {}


def sqlstate(error: Any) -> str | None:
    """Return the SQLSTATE with which a server has refused a connection.

    Args:
        error: the driver's error, raised by an attempt to connect.

    Returns:
        None if no server has answered, or the connection succeeds now.
    """
    failed, text = getattr(error, "pgconn", None), str(error)
    if failed is None:
        return None
    if text not in _known:
        if len(_known) >= TEXTS:
            _known.clear()
        connected, code = _ask({o.keyword.decode(): o.val.decode() for o in failed.info if o.val})
        if connected:
            return None
        _known[text] = code
    return _known[text]


def _ask(parameters: dict[str, str]) -> tuple[bool, str | None]:
    """Connect with libpq's parameters; return whether that succeeds, and the code of the server's last error."""
    from psycopg import pq
    from psycopg.conninfo import make_conninfo

    # In memory, since the record has the password's exchange, too.
    record = os.memfd_create("libpq-trace")
    try:
        connection = pq.PGconn.connect_start(make_conninfo(**parameters).encode())
        try:
            connection.trace(record)
            connected = _finish(connection)
            connection.untrace()
        finally:
            connection.finish()
        codes = _CODE.findall(os.pread(record, os.fstat(record).st_size, 0))
    finally:
        os.close(record)
    return connected, codes[-1].decode() if codes else None


def _finish(connection: PGconn) -> bool:
    """Bring an attempt to connect to its end, for at most ``TRY_S``; return whether it has succeeded."""
    from psycopg.pq import PollingStatus

    deadline_s = time.monotonic() + TRY_S
    while (status := connection.connect_poll()) not in (PollingStatus.OK, PollingStatus.FAILED):
        waits = [connection.socket]
        reading, writing = (waits, []) if status is PollingStatus.READING else ([], waits)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not any(select.select(reading, writing, [], left_s)):
            return False
    return status is PollingStatus.OK
