"""The lease of this process's service (``shared.log.lease``): waited for, taken, moved on, given back.

``shared.service.runner`` stands by until ``seek`` returns True, and decides for as long as the lease is held. A thread
of its own moves the counter on, so that no work of the service delays it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from shared.bus.outages import LOG, LOG_ROOM
from shared.errors import LeaseLost, Unavailable, UnicronError
from shared.log.journal import Journal
from shared.log.lease import Lease, LeaseWatch
from shared.machine import process_names
from shared.service.changes import Changes

RENEWALS = 4
"""How often a holder moves the counter on within ``lease_s``: three renewals in a row may be late or fail."""

LOOKS = 10
"""How often an instance that stands by looks at the lease within ``lease_s``: it acts a tenth of that late at most."""


class LeaseKeeper:
    """The lease of one service, as this process sees it.

    ``seen``: as it was read last; None: nobody has ever held it.

    Args:
        journal: of this process. Its appends need the lease from then on.
        service: the service's name.
        lease_s: how long the counter stands still before another instance takes the lease.
    """

    def __init__(self, journal: Journal, service: str, lease_s: float) -> None:
        self.service, self.look_s = service, lease_s / LOOKS
        self.seen: Lease | None = None
        self._journal, self._lease_s = journal, lease_s
        self._watch = LeaseWatch(lease_s)
        self._alone_until_s = float("-inf")
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._changes = Changes()
        self._error: Exception | None = None

    @property
    def token(self) -> int:
        """The token of this process; 0: it does not hold the lease."""
        return self._journal.lease.token if self._journal.lease is not None else 0

    @property
    def is_held(self) -> bool:
        """Whether no other instance can have the lease at this moment (``confirmed`` waits for it)."""
        return self._error is None and time.monotonic() < self._alone_until_s

    @property
    def waits_for(self) -> str:
        """Who has the lease, for people."""
        if self.seen is None or not self.seen.holder:
            return f"no {self.service} is active yet"
        holder = process_names.shown(self.seen.holder)
        return f"{holder} is the active {self.service} (token {self.seen.token}); this one stands by and takes over"

    async def seek(self) -> bool:
        """Look at the lease, and take it if it may be taken; return whether this process holds it now.

        It may be taken when it stands still, or when its holder has ended for certain.
        """
        journal, log = self._journal, self._journal.log
        self.seen = (await journal.outages.outlast(LOG, log.leases)).get(self.service)
        seen, now_s = self.seen, time.monotonic()
        has_ended = seen is not None and process_names.is_known_to_have_ended(seen.holder)
        if not self._watch.may_take(seen, now_s) and not has_ended:
            return False
        own = process_names.process_name()
        taken = await journal.outages.outlast(LOG_ROOM, lambda: log.take_lease(self.service, own, seen))
        if taken is None:
            return False
        journal.lease = taken
        self._alone_until_s = now_s + self._lease_s
        threading.Thread(target=self._keep_renewing, args=(taken,), name="lease", daemon=True).start()
        return True

    async def kept(self) -> None:
        """Wait until the lease is lost, which is raised.

        Raises:
            LeaseLost: another instance has it.
        """
        await self._changes.until(lambda: self._error is not None)
        assert self._error is not None
        raise self._error

    async def confirmed(self) -> None:
        """Return once no other instance can have the lease at this moment.

        That is at once, unless this process was suspended, has lacked the processor or has not reached the database for
        as long as a lease lasts. So also what nothing refuses, because it needs no append, comes from one instance.

        Raises:
            LeaseLost: another instance has the lease.
        """
        await self._changes.until(lambda: self._error is not None or self.is_held)
        if self._error is not None:
            raise self._error

    async def give_back(self) -> None:
        """Give the lease back, if this process holds it: another instance takes it at once."""
        self._stopped.set()
        lost, lease = self._error, self._journal.lease
        self._error = lost or LeaseLost(f"this {self.service} has given the lease back")
        self._changes.notify()
        if lease is not None and lost is None and time.monotonic() < self._alone_until_s:
            with contextlib.suppress(UnicronError):
                await asyncio.to_thread(self._journal.log.release_lease, lease)

    def _keep_renewing(self, lease: Lease) -> None:
        while not self._stopped.wait(self._lease_s / RENEWALS):
            began_s = time.monotonic()
            try:
                self._journal.log.renew_lease(lease, self._journal.handled)
            except Unavailable:
                continue  # the database is away; where others reach it, one of them takes over
            except Exception as err:
                self._error = err
            else:
                self._alone_until_s = began_s + self._lease_s
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._changes.notify)
            if self._error is not None:
                return
