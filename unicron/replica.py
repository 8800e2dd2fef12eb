"""One rank's training state, and the step it is in.

What is held of a step survives the loss of peers: the gradients of finished micro-batches (``unicron.gradients``), the
buckets that are already reduced, and, once agreed, the account of losses and samples.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from unicron import gradients, model, movement, pieces
from unicron.agreement import ASSIGNED, DONE, FREE, Shard
from unicron.buffers import Buffers
from unicron.errors import NonFiniteValue, WrongLoop
from unicron.movement import Holding, Settled
from unicron.pieces import Part
from unicron.runtime import Wait

BEFORE, WITHIN, AFTER = 0, 1, 2
"""Where an update of the parameters is: not begun, in the midst of it, done by this rank's optimizer."""

EMPTY_DIGEST = bytes(32)
"""The sample digest before the first update."""


def chain(digest: bytes, ids: list[int]) -> bytes:
    """Return the digest after one more update: sha256(digest, sample ids in order as little-endian int64)."""
    return hashlib.sha256(digest + b"".join(i.to_bytes(8, "little", signed=True) for i in ids)).digest()


@dataclass(frozen=True, slots=True)
class Account:
    """What the ranks agree on before they reduce: every micro-batch of the step was computed exactly once."""

    loss: float
    """Mean over the micro-batches, added up in their order."""
    ids: list[int]
    """Samples, in the order of the micro-batches."""


@dataclass(slots=True)
class Partial:
    """The step in progress: which micro-batches are this rank's, what the finished ones gave, what is reduced."""

    step: int
    work: list[int]
    """The micro-batches that this rank's replica computes, since the members last agreed."""
    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Of the micro-batches whose gradients are in the sums."""
    counted: frozenset[int] = frozenset()
    """Micro-batches that some rank of the shard had counted when they agreed: computed again for other shards only."""
    computed: set[int] = field(default_factory=set)
    """Those of the work that are done."""
    generation: int = 0
    """The one in which the members last agreed on this step."""
    account: Account | None = None
    reduced: int = 0
    """Buckets, from the first, that hold the total over the whole batch."""

    def states(self, micro_batches: int) -> list[int]:
        """Return the agreement's code of each micro-batch."""
        states = [FREE] * micro_batches
        for k in self.work:
            states[k] = ASSIGNED
        for k in self.samples:
            states[k] = DONE
        return states

    def remaining(self) -> list[int]:
        """Return the rank's micro-batches that are still to be computed."""
        return [k for k in self.work if k not in self.computed]


class Replica:
    """A model, its optimizer, and how far they have come.

    ``model`` is Megatron's DistributedDataParallel or any module; its gradients are this library's from here on
    (``unicron.buffers``).
    """

    def __init__(
        self, model: Any, optimizer: Any, *, micro_batches: int = 1, exact: bool = False, parallel: bool = False
    ) -> None:
        """Take what was built for this rank's layout; no state is held yet.

        Args:
            model: the rank's shard of the model.
            optimizer: its optimizer.
            micro_batches: in one step, over all replicas.
            exact: whether results may depend on nothing but the tensor-parallel size.
            parallel: whether the model is split over ranks, so that a peer's loss can break a backward pass.
        """
        self.model = model
        self.optimizer = optimizer
        self.applied = -1
        """Updates applied to the state held; -1: none is held."""
        self.digest = EMPTY_DIGEST
        self.place: tuple[int, ...] = ()
        """What it was built for: see ``generation.place``."""
        self.ahead = False
        """Whether a distributed optimizer has applied one update more to its own part, not yet gathered by all."""
        self.partial: Partial | None = None
        self.exact = exact
        self._buffers = Buffers(model, optimizer)
        self.sums = self._buffers.accumulator(micro_batches, exact=exact, parallel=parallel)
        cuda = any(parameter.is_cuda for parameter in model.parameters())
        self._doubtful = cuda and (parallel or pieces.is_sharded(model))
        """Whether an update may have used what an aborted collective left, without an error that tells of it."""
        self._update = [BEFORE]
        update = self._update  # not self: the optimizer must not keep the replica alive
        for one in pieces.torch_optimizers(optimizer):
            one.register_step_pre_hook(lambda *_: update.__setitem__(0, WITHIN))
            one.register_step_post_hook(lambda *_: update.__setitem__(0, AFTER))

    @functools.cached_property
    def parts(self) -> list[Part]:
        """The parameters and persistent buffers of this rank; see ``unicron.pieces``."""
        return pieces.parts(self.model, self.optimizer)

    def hold(self, step: int, digest: bytes) -> None:
        """Declare that the parameters and optimizer are those after ``step`` updates."""
        self.applied, self.digest, self.ahead = step, digest, False
        self._update[0] = BEFORE
        self.discard()

    def forget(self) -> None:
        """Declare that no usable state is held."""
        self.applied, self.ahead = -1, False
        self._update[0] = BEFORE
        self.discard()

    # The step in progress.

    def discard(self) -> None:
        """Throw away what the step in progress has accumulated."""
        self.partial = None
        self._buffers.release()
        self.sums.clear()

    def begin(self, step: int, work: list[int], generation: int) -> None:
        """Begin a step."""
        self.discard()
        self.partial = Partial(step=step, work=work, generation=generation)

    def resume(self, step: int, shard: Shard, rank: int, work: tuple[int, ...]) -> None:
        """Go on with an interrupted step: keep what counts of what this rank holds, drop the rest.

        The reduced buckets that it lacks come next, by ``give``.
        """
        held, have, kept = self.partial, shard.have[rank], shard.kept[rank]
        if held is None or held.step != step or held.reduced > have:
            # Of reduced buckets that do not count, this rank's own sums are gone.
            account = held.account if held is not None and held.step == step else None
            self.begin(step, [], shard.generation)
            assert self.partial is not None
            self.partial.account = account
        elif set(held.samples) != kept:
            self.sums.clear_from(have)
            held.losses, held.samples = {}, {}
        partial = self.partial
        assert partial is not None
        self.clear_gradients()
        partial.generation = shard.generation
        partial.work, partial.counted, partial.computed = list(work), shard.counted, set()

    def give(self, shard: Shard, group: Any, wait: Wait) -> None:
        """Bring the reduced buckets from their holder to the ranks of ``group`` that lack some."""
        partial = self.partial
        assert partial is not None
        for bucket in range(min(shard.have.values()), shard.reduced):
            total = self.sums.load(bucket)
            wait(dist.broadcast(total, src=shard.source, group=group, async_op=True))
            if bucket == partial.reduced:
                self.sums.store(bucket, total)
                partial.reduced = bucket + 1
        if partial.remaining():
            self.sums.keep(partial.reduced)

    def interrupted(self, *, computing: bool) -> None:
        """Put in order what a failure has left.

        Args:
            computing: whether it came while the loop was at work, rather than this library.
        """
        if self._update[0] == AFTER and self._doubtful:
            self.forget()
        elif self._update[0] == AFTER and pieces.is_sharded(self.model):
            # This rank's part is updated; the parameters of the others' may not have come, or not all.
            assert self.partial is not None
            assert self.partial.account is not None
            self.digest = chain(self.digest, self.partial.account.ids)
            self.ahead = True
            self.discard()
        elif self._update[0] == AFTER:
            self.applied_update()  # what failed came after it: a user's own collective, say
        elif self._update[0] == WITHIN:
            self.forget()  # the parameters may be half updated
        elif computing and self.partial is not None:
            self._buffers.release()
            if not self.sums.rewind():
                self.discard()

    def clear_gradients(self) -> None:
        """Forget what backward passes have added for a micro-batch that is not committed."""
        self._buffers.release()
        self.sums.rewind()

    def commit(self, finished: dict[int, float], samples: dict[int, list[int]]) -> None:
        """Count micro-batches as done: their gradients (already scaled by 1/M) are in the buffers.

        Raises:
            NonFiniteValue: a loss is not finite or, in exact mode, a gradient.
            WrongLoop: several at once, where they must be told apart; or gradients are elsewhere.
        """
        partial = self.partial
        assert partial is not None
        self._buffers.check()
        for k, loss in finished.items():
            if not math.isfinite(loss):
                raise NonFiniteValue(f"loss {loss} in micro-batch {k} of step {partial.step}")
        counted = [k for k in samples if k in partial.counted]
        if len(samples) > 1 and (self.exact or counted):
            raise WrongLoop("micro-batches must be committed one at a time: see unicron.model.each_backward")
        if counted:
            self.sums.drop()
        else:
            try:
                self.sums.add(partial.reduced)
            except NonFiniteValue as error:
                raise NonFiniteValue(f"{error}, in micro-batches {list(samples)} of step {partial.step}") from None
            partial.losses.update(finished)
            partial.samples.update(samples)
        partial.computed.update(samples)

    def reduce(
        self,
        group: Any,
        wait: Wait,
        *,
        before: Callable[[int], None],
        done: Callable[[int], None],
        broken: Callable[[list[Any]], None],
        in_flight: int,
    ) -> None:
        """Reduce what is not yet reduced over ``group``, and put the totals into the gradient buffers.

        Raises:
            NonFiniteValue: this rank's gradients are not finite (its peers see a broken collective).
            RuntimeError: a collective broke.
            WrongLoop: gradients are elsewhere.
        """
        partial = self.partial
        assert partial is not None
        self._buffers.check()
        try:
            self.sums.check_finite(partial.reduced)
        except NonFiniteValue as error:
            raise NonFiniteValue(f"{error} in step {partial.step}") from None

        def reduced(count: int) -> None:
            partial.reduced = count
            done(count)

        gradients.reduce(
            self.sums,
            partial.reduced,
            group,
            wait,
            before=before,
            done=reduced,
            broken=broken,
            in_flight=in_flight,
        )
        ends = model.tied_group(self.model)

        def exchange(total: torch.Tensor) -> None:
            wait(dist.all_reduce(total, group=ends, async_op=True))

        self.sums.finish(exchange if ends is not None else None)

    def check_begins(self) -> None:
        """Check that no update has been applied outside of a step.

        Raises:
            WrongLoop: one has.
        """
        if self._update[0] != BEFORE:
            raise WrongLoop("optimizer.step() was called outside of a step: call it inside, after step.reduce()")

    def check_applied(self) -> None:
        """Check that the optimizer has applied the step in progress.

        Raises:
            WrongLoop: it has not.
        """
        assert self.partial is not None
        if self._update[0] != AFTER:
            raise WrongLoop(f"step {self.partial.step} ended without run.optimizer.step()")

    def applied_update(self) -> None:
        """Record that the optimizer has applied the step in progress."""
        assert self.partial is not None
        assert self.partial.account is not None
        self.applied += 1
        self.digest = chain(self.digest, self.partial.account.ids)
        self._update[0] = BEFORE
        self.discard()

    # The state.

    @property
    def version(self) -> int:
        """Updates applied to what is held, by all ranks or at least by this one; -1: nothing is held."""
        return self.applied + self.ahead

    def adopt(self, other: Replica) -> None:
        """Go on with the interrupted step of another replica of the same shard, at the same state."""
        for bucket in range(self.sums.buckets):
            self.sums.store(bucket, other.sums.load(bucket))
        self.partial, other.partial = other.partial, None

    def take(
        self,
        settled: Settled,
        wait: Wait,
        *,
        stays: bool = False,
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Take the state that the members agreed on.

        Args:
            settled: what they agreed on; something has to move.
            wait: waits for a collective.
            stays: whether what this replica holds is of that state, and stays where it is.
            before: called before each round of the movement, with its number.

        Raises:
            RuntimeError: a member was lost meanwhile; unless it ``stays``, nothing is held then.
        """
        assert settled.agreed is not None
        if not stays:
            self.forget()  # while it is half taken it counts as none
            pieces.allocate(self, settled.agreed.needed[dist.get_rank()])
        movement.carry_out(settled, pieces.pieces(self), wait, before)
        if not stays:
            pieces.count_steps(self.optimizer, settled.version)
        if not stays or self.ahead:
            self.hold(settled.version, settled.digest)

    def holdings(self) -> list[Holding]:
        """Return the state that is held, for others to take: nothing, one step's, or a part of one step's."""
        if self.applied < 0:
            return []
        if all(part.main is None for part in self.parts):
            return []  # without a part in the optimizer it cannot tell what that keeps
        return [Holding(self.version, self.digest, pieces.updated(self) if self.ahead else pieces.pieces(self))]
