"""The gather of a distributed optimizer's updated parameters beside the next step's first forward pass.

Each data-parallel rank's optimizer updates one range of every bucket of parameters (see
``unicron.megatron.bucket_groups``). All gathers are launched as the step ends, on every rank and in one order, so that
no rank waits for what another one does next; Megatron's hooks wait for a bucket group before a module uses it. Until
all gathers have ended only the rank's own ranges count: what a broken gather leaves in the other ranges is worth
nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from unicron import backend
from unicron.megatron.bucket_groups import bucket_groups, group_of, overlaps_gather, own_parameters, replace_gather
from unicron.torch_names import all_gather_single


class ParameterGather:
    """Gathers the parameters of one model after each update."""

    def __init__(self, model: Any) -> None:
        """Take the gather over from Megatron's DistributedDataParallel."""
        self._groups = bucket_groups(model)
        self.before: Callable[[int], None] = lambda number: None
        """Called before a bucket group is waited for, with the number of groups waited for so far; used by fault
        injection."""
        self.pending = False
        """Whether this rank has updated its own ranges, and does not know yet that it has all others."""
        self.waited_s = 0.0
        """For how long the passes have waited for gathers so far; waits of a device's stream do not count."""
        self._aborts = backend.current().aborts
        self._works: list[list[Any]] | None = None
        """For each bucket group, the gathers that are not yet waited for; None: they are not launched."""
        self._has_ended: Callable[[], bool] | None = None
        """Whether the gathers have ended well, on a device; None: not all are waited for, or nothing tells."""
        for number, group in enumerate(self._groups):
            replace_gather(group, partial(self._wait, number))

    @classmethod
    def of(cls, model: Any) -> ParameterGather | None:
        """Return the object that gathers the parameters of a model; None: the optimizer's step gathers them."""
        return cls(model) if overlaps_gather(model) else None

    def updated(self, *_: Any) -> None:
        """Note that the optimizer has updated this rank's ranges; the arguments are those of torch's hooks."""
        self.pending = True

    def launch(self) -> None:
        """Begin to gather, unless that is done already.

        Raises:
            RuntimeError: a collective broke.
        """
        if not self.pending or self._works is not None:
            return
        self._works, self._has_ended = [[] for _ in self._groups], None
        # The forward pass uses the last bucket first.
        for number in reversed(range(len(self._groups))):
            group = group_of(self._groups[number])
            if group.size() > 1:
                for whole, own in own_parameters(self._groups[number]):
                    self._works[number].append(all_gather_single(whole, own, group=group, async_op=True))

    def _wait(self, number: int) -> None:
        """Wait until the parameters of a bucket group are gathered (on a device: have its stream wait).

        Raises:
            RuntimeError: a collective broke.
            Interrupted: the generation is held, and the collective does not end.
        """
        if not self.pending:
            return
        self.launch()
        assert self._works is not None
        if self._works[number]:
            self.before(sum(not works for works in self._works))
            began_s = time.perf_counter()
            for work in self._works[number]:
                work.wait()
            self.waited_s += time.perf_counter() - began_s
            self._works[number] = []
            if not self._aborts:
                self.settle()

    @property
    def is_waited_for(self) -> bool:
        """Whether all gathers are waited for, which on a device does not mean that they have ended well."""
        return self._works is not None and not any(self._works)

    def settle_once(self, has_ended: Callable[[], bool]) -> None:
        """Note how to tell whether the gathers have ended well, once all are waited for; if they have, note that.

        Args:
            has_ended: whether what was issued up to now has ended well.
        """
        if not self.is_waited_for:
            return
        self._has_ended = self._has_ended or has_ended
        if self._has_ended():
            self.settle()

    def complete(self) -> None:
        """Wait until all parameters are gathered; ``settle`` or ``settle_once`` comes next.

        Raises:
            RuntimeError: a collective broke.
            Interrupted: the generation is held, and a collective does not end.
        """
        for number in reversed(range(len(self._groups))):
            self._wait(number)

    def settle(self) -> None:
        """Note that what was waited for has ended well, which on a device is known once the device is done."""
        if self.is_waited_for:
            self.pending, self._works, self._has_ended = False, None, None

    def finish(self, synchronize: Callable[[], None]) -> None:
        """Wait until the parameters that other ranks have updated have arrived on this one.

        Args:
            synchronize: waits for the device.

        Raises:
            RuntimeError, Interrupted: as ``complete``.
        """
        self.complete()
        synchronize()
        self.settle()

    def give_up(self) -> list[Any]:
        """Leave the generation; return the collectives that may never end.

        The parameters that they would have brought are ``pending``.

        On a device nothing tells a gather that has ended from one that was aborted, unless all were waited for.
        """
        if self._has_ended is not None and self._has_ended():
            self.settle()
        unfinished = [work for works in self._works or () for work in works]
        if self._works is not None and not self._aborts and all(work.is_completed() for work in unfinished):
            with contextlib.suppress(RuntimeError):
                for work in unfinished:
                    work.wait()
                self.pending = False
        self._works, self._has_ended = None, None
        return unfinished
