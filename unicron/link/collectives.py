"""The collectives of the training thread: when a hold breaks them off, and how they are waited for.

The training thread blocks in collectives without Python code that could check for a hold. It says where it may
(``enter``, ``leave``); meanwhile ``unicron.link.breaker`` breaks off what is held, except the groups of a replica that
can finish its micro-batches (``unicron.link.sparing``).

Where a backend does its collectives on a device (``unicron.backend``), the host is ahead of what has been done, and a
collective that is aborted ends without an error and leaves garbage. So what the training thread does is provisional: it
counts once the work up to a ``Mark`` behind it has ended, if that was before an abort began.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from unicron.backend import Backend, Mark
from unicron.errors import Interrupted
from unicron.link.breaker import BREAK_AGAIN_S, Breakable, Breaker, BreakMethod
from unicron.link.sparing import Sparing
from unicron.link.waiting import has_ended

DEVICE_POLL_S = 0.001
"""Pause between two looks at whether the device has done a rank's last micro-batch. Chosen: short beside a
micro-batch."""

STUCK_S = 0.3
"""How long after its sockets were shut a collective is given up. Measured: a collective ends within 20 ms of that,
except about 1 of 100 under stress whose failure gloo does not pass on, and which waits until its time-out."""


class Collectives(ABC):
    """The part of ``AgentLink`` that handles collectives; the rest handles messages."""

    def __init__(self, changed: threading.Condition) -> None:
        """Start outside of any generation.

        Args:
            changed: guards the attributes that both threads use, and is notified of their changes.
        """
        self._changed = changed
        self._sparing = Sparing()
        self._breaker = Breaker(changed, self.is_held, self._spares, self._before_abort)
        self._marks: list[Mark] = []
        """Marks of this generation about which it is not known yet whether they count."""
        self._shared_aborted = self._replica_aborted = False
        """Whether collectives of this generation are aborted, or about to be: those of several replicas; those inside
        this one."""
        self.abandoned: list[Any] = []
        """Collectives of this generation that were given up: its groups may not be destroyed before they end."""

    @property
    @abstractmethod
    def supervised(self) -> bool:
        """Whether there is an agent that can hold a generation."""

    @property
    @abstractmethod
    def generation(self) -> int:
        """The generation joined last; 0 before the first."""

    @abstractmethod
    def is_held(self) -> bool:
        """Return whether the generation of this process is held."""

    def check(self) -> None:
        """Leave the step if the generation is held, unless the hold spares this rank's replica.

        Raises:
            Interrupted: the generation is held.
        """
        if self.is_held() and not self._spares():
            raise Interrupted(f"generation {self.generation} is held")

    def _spares(self) -> bool:
        with self._changed:
            return self._sparing.spares(time.monotonic())

    def enter(self, *, computes: bool = False) -> None:
        """Note that the training thread may block on its peers from here on: only then are collectives broken off.

        Args:
            computes: whether it computes micro-batches, until ``end_passes`` or ``leave``.
        """
        with self._changed:
            if computes:
                self._sparing.begin_passes(time.monotonic())
            self._breaker.enter()

    def wait_in_passes(self, *, for_others: bool) -> None:
        """Note whether the passes wait for collectives with other replicas, where these are done on a device."""
        self._sparing.waits_for_others = for_others and self.aborts_without_error

    def finish_micro_batch(self) -> None:
        """Note that a micro-batch is finished."""
        # The time is set without the lock, which costs more than this does: a hold meanwhile sets nearly the same time.
        self._sparing.finish_micro_batch(time.monotonic())

    def end_passes(self) -> None:
        """Note that this rank computes no more micro-batches in this step; leave the step if the generation is held.

        Raises:
            Interrupted: the generation is held.
        """
        with self._changed:
            self.check()
            if self.is_held():
                self._finish_passes()
                raise Interrupted(f"generation {self.generation} is held; this rank's micro-batches are finished")
            self._sparing.end_passes()

    def _finish_passes(self) -> None:
        """Note that this rank's micro-batches of a held generation are done: on a device once the device is done.

        It is called with the lock, which others get while this waits: they may find that the replica is stuck.

        Raises:
            Interrupted: the replica is broken off meanwhile.
        """
        mark = self.mark()
        while not self.counts(mark):
            self._changed.wait(DEVICE_POLL_S)
            self.check()
        self._sparing.finished = True

    def leave(self, *, failed: bool = False) -> None:
        """Note that the training thread does not wait for its peers any more; wait until no communicator is aborted.

        Args:
            failed: whether it leaves a step because of an error. Peers of its replica that the hold spares may wait for
                it, so the groups of the replica are broken off, unless it has finished its micro-batches.
        """
        with self._changed:
            self._breaker.leave()
            self._sparing.end_passes()
            replica = failed and self._sparing.has_peers and not self._sparing.finished
            # On a device what comes next would wait behind collectives that never end; an abort of some of them, too.
            shared = failed and self.aborts_without_error and (replica or self.is_held())
        if (replica or shared) and self.supervised:
            self._breaker.break_off(shared=shared, replica=replica or (shared and not self._sparing.finished))
        if shared and self._backend is not None:
            self._backend.synchronize()

    def set_break_method(self, method: BreakMethod, replica: Collection[int] = ()) -> None:
        """Set how the collectives of this generation are broken off.

        Args:
            method: how.
            replica: the ranks of this rank's replica, once the groups are made.
        """
        with self._changed:
            self._breaker.set_method(method)
            self._sparing.set_replica(replica)
            self._marks, self._shared_aborted, self._replica_aborted = [], False, False

    @property
    def _backend(self) -> Backend | None:
        """The backend of this generation's groups, if collectives can be broken off and the groups are made."""
        return self._breaker.method.backend if self.supervised else None

    @property
    def waits_in_slices(self) -> bool:
        """Whether collectives are waited for in slices."""
        return self._backend is not None and self._backend.waits_in_slices

    @property
    def aborts_without_error(self) -> bool:
        """Whether collectives that are aborted end without an error, with garbage for a result."""
        return self._backend is not None and self._backend.aborts

    # Work that is done on a device, and counts later.

    def mark(self) -> Mark | None:
        """Return a mark behind what the training thread has issued so far; None: all of it counts already.

        Raises:
            Interrupted: the replica's collectives are aborted, so what was issued may have used garbage.
        """
        mark = self._backend.mark() if self._backend is not None else None
        if mark is None:
            return None
        with self._changed:
            if self._replica_aborted:
                raise Interrupted(f"generation {self.generation} is held, and this replica is broken off")
            if self._shared_aborted:
                mark.before_shared = False
            self._marks = [one for one in self._marks if not (self._counts_shared(one) and self._counts(one))]
            self._marks.append(mark)
        return mark

    def counts(self, mark: Mark | None, *, shared: bool = False) -> bool:
        """Return, without waiting, whether what was issued before a mark has ended, and used no garbage.

        Args:
            mark: the mark.
            shared: whether the work has used collectives of several replicas; otherwise only those inside the replica.
        """
        with self._changed:
            return mark is None or (self._counts_shared(mark) if shared else self._counts(mark))

    @property
    def has_garbage(self) -> bool:
        """Return whether an abort inside the replica may have spoilt the sums of the passes up to the newest mark."""
        with self._changed:
            return self._replica_aborted and any(mark.before_replica is False for mark in self._marks)

    @staticmethod
    def _counts_shared(mark: Mark) -> bool:
        if mark.before_shared is None and mark.is_reached():
            mark.before_shared = True
        return bool(mark.before_shared)

    @staticmethod
    def _counts(mark: Mark) -> bool:
        if mark.before_replica is None and mark.is_reached():
            mark.before_replica = True
        return bool(mark.before_replica)

    def _before_abort(self, part: Breakable) -> None:
        """Note what counts although communicators are about to be aborted. It is called with the lock."""
        if part is self._breaker.method.replica:
            for mark in self._marks:
                mark.before_replica = self._counts(mark)
            self._replica_aborted = True
        else:
            for mark in self._marks:
                mark.before_shared = self._counts_shared(mark)
            self._shared_aborted = True

    def check_update(self) -> None:
        """Leave the step before an update that may use garbage, such as the norm of gradients.

        Raises:
            Interrupted: the generation is held, where collectives are aborted without an error.
        """
        if self._backend is not None and self._backend.aborts:
            self._backend.synchronize_stream()
            if self.is_held():
                raise Interrupted(f"generation {self.generation} is held")

    def wait(self, work: Any, *, of_replica: bool = False) -> None:
        """Wait for a collective (torch's ``Work``) until it ends, or until it does not end though it is broken off.

        Args:
            work: the collective.
            of_replica: whether a group of the replica may have to do it, which a hold may spare.

        Raises:
            RuntimeError: the collective failed.
            Interrupted: the generation is held, and the collective has not ended ``STUCK_S`` after its sockets were
                shut; or, where collectives are aborted without an error, the generation is held.
        """
        if not self.waits_in_slices:
            work.wait()
            if self._backend is not None:
                self._backend.synchronize_stream()
                self.check()
            return
        while not has_ended(work):
            broken_at_s = self._breaker.replica_broken_at_s if of_replica else self._breaker.broken_at_s
            if self.is_held() and broken_at_s is not None and time.monotonic() - broken_at_s > STUCK_S:
                self.abandoned.append(work)
                raise Interrupted(f"generation {self.generation} is held; a collective of it does not end")

    def has_ended(self, work: Any) -> bool:
        """Return whether a collective of several replicas has ended well, without waiting for it.

        Args:
            work: the collective (torch's ``Work``).

        Raises:
            RuntimeError: the collective failed.
            Interrupted: it has ended, and the generation is held: it may have been broken off.
        """
        if not work.is_completed():
            return False
        if self.supervised and self.is_held():  # this is so also where the hold spares the replica's own collectives
            raise Interrupted(f"generation {self.generation} is held")
        self.wait(work)
        return True

    def break_off(self, works: list[Any]) -> None:
        """Break off collectives of a generation that this process has left, so that none of them writes any more.

        Args:
            works: the collectives, of groups of several replicas. Collectives that do not end in ``STUCK_S`` are
                ``abandoned``.
        """
        # A process that leaves a generation that is not held has peers that may still wait for what it has sent.
        aborts = self.aborts_without_error and self.is_held()
        if self.supervised and (works or aborts):
            self._breaker.break_off(shared=True, replica=aborts and not self._sparing.finished)
            limit_s = time.monotonic() + STUCK_S
            # Their results are worth nothing, so neither are their errors, which a wait would raise.
            while time.monotonic() < limit_s and not all(work.is_completed() for work in works):
                time.sleep(BREAK_AGAIN_S)
        self.abandoned += [work for work in works if not work.is_completed()]

    def synchronize(self) -> None:
        """Wait for the device where collectives are aborted without an error; leave the step if they may have been.

        Results of collectives may be used only after this.

        Raises:
            Interrupted: the generation is held.
            RuntimeError: something failed on the device.
        """
        if self._backend is not None and self._backend.aborts:
            self._backend.synchronize()
            self.check()
