"""The reduction of a step's gradients beside its last backward pass: when it may begin, and what an error does.

Megatron's hooks report each gradient that a backward pass adds. Once the last pass of the step has added the last
gradient of one of Megatron's bucket groups (``unicron.megatron.bucket_groups``), the group is *complete*, and what lies
in it can be sent:

    ShardReduction    with the distributed optimizer, out of place (``unicron.gradients.shards``)
    BucketReduction   without, bucket by bucket in the place of the sums (``unicron.gradients.bucket_reduction``)

No error leaves a hook: a backward pass that is interrupted would leave sums that nobody can use. The first error is
kept, nothing more is sent, and the error is raised when the step is reduced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from unicron.accounting import PartialStep
from unicron.errors import WrongLoop
from unicron.link.waiting import Wait
from unicron.megatron.bucket_groups import bucket_groups, replace_reduction


class Hooks(NamedTuple):
    """What the step has to do beside the reduction."""

    before: Callable[[int], None] = lambda number: None
    """Called before a bucket group or bucket is sent, with its number; an error keeps it from being sent."""
    has_ended: Callable[[Any], bool] = lambda work: False
    """Returns, without waiting, whether a collective has ended; raises its error."""
    done: Callable[[int], None] = lambda count: None
    """Called with the number of buckets that are reduced, whenever one more is, outside of the passes."""


class OverlappedReduction(ABC):
    """Reduces the gradients of one model, in a fixed order, in one step after the other.

    The order is the same on all ranks: also a rank that computes nothing in a resumed step, or that does not know yet
    when its bucket groups are complete, sends in it.
    """

    keeps_sums: ClassVar[bool]
    """Whether the local sums stay as they are until the update. Otherwise totals take the place of sums."""
    portion = 1.0
    """The type as in ``Accumulator``."""

    def __init__(self, model: Any) -> None:
        """Take the reduction over from Megatron's DistributedDataParallel.

        Args:
            model: as ``build`` returned it, and checked (``unicron.megatron.supported``).
        """
        self._groups = bucket_groups(model)
        self._expected: list[Counter[torch.nn.Parameter]] = []
        """Number of gradients that one micro-batch adds to each parameter, for each group; empty: not known yet."""
        self._counts: list[Counter[torch.nn.Parameter]] = []
        self._left: list[int] = []
        """Number of gradients that the announced passes have still to add, for each group."""
        self._passes = 0
        self._hooks = Hooks()
        self._error: Exception | None = None
        for number, group in enumerate(self._groups):
            replace_reduction(group, partial(self._added, number))

    # Attributes of one step.

    def reset(self) -> None:
        """Forget what was received and sent of the step."""
        self._counts, self._left, self._passes = [], [], 0
        self._error = None

    @abstractmethod
    def give_up(self) -> list[Any]:
        """Leave the generation; return the collectives that were sent and not waited for. They may never end."""

    def announce(self, passes: int, step: PartialStep, hooks: Hooks) -> None:
        """Note which backward passes come next.

        Args:
            passes: their number, if they are the step's last on this rank; 0: others follow.
            step: the step in progress.
            hooks: see ``Hooks``.
        """
        self._passes, self._hooks = passes, hooks
        if passes:
            self._counts = [Counter() for _ in self._groups]
            self._left = [passes * sum(expected.values()) for expected in self._expected]

    def launch_rest(self, step: PartialStep, wait: Wait, hooks: Hooks, in_flight: int) -> None:
        """Send what no backward pass has sent.

        Args:
            step: the step in progress.
            wait: waits for a collective.
            hooks: see ``Hooks``.
            in_flight: number of copies of buckets that are sent before the first is waited for.

        Raises:
            Exception: something could not be sent or was not received, now or in a backward pass.
            WrongLoop: a backward pass has added to gradients that were already sent.
        """
        self._learn()
        self._passes, self._hooks = 0, hooks
        if self._error is not None:
            raise self._error
        self._send_rest(step, wait, in_flight)

    @abstractmethod
    def complete(self, wait: Wait) -> None:
        """Wait for what is under way, and write the totals, also of exchanges, into the gradient buffers.

        The other ranks know the step's account when this is called.

        Raises:
            RuntimeError: a collective broke.
        """

    def restore(self) -> bool:
        """Put the local sums back in their place, if totals are there; return whether they were."""
        return False

    def own_gradients(self) -> list[torch.Tensor] | None:
        """Return the gradients that only this rank's optimizer reads; None: all ranks' optimizers read all."""
        return None

    # The hooks call the methods below.

    @abstractmethod
    def _is_sent(self, number: int) -> bool:
        """Return whether gradients of a bucket group are sent."""

    @abstractmethod
    def _advance(self) -> None:
        """Send what is complete, and receive what has come; called in backward passes. This must not wait."""

    @abstractmethod
    def _send_rest(self, step: PartialStep, wait: Wait, in_flight: int) -> None:
        """Send what no backward pass has sent; the arguments are those of ``launch_rest``."""

    def _added(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Count a gradient, and send and receive what is possible by then."""
        if self._is_sent(number):
            self._error = self._error or WrongLoop(
                "a backward pass has added to gradients that are already sent: in each micro-batch the same parameters "
                "must get their gradients equally often"
            )
        if not self._passes:
            return
        self._counts[number][parameter] += 1
        if self._expected and self._error is None:
            self._left[number] -= 1
            try:
                self._advance()
            except Exception as error:
                self._error = error

    def _is_complete(self, number: int) -> bool:
        """Return whether no gradient of a bucket group is missing."""
        if not self._passes or not self._expected or self._left[number]:
            return False
        counts = self._counts[number]
        return all(counts[p] == n * self._passes for p, n in self._expected[number].items())

    def _learn(self) -> None:
        """Note how many gradients one micro-batch adds, from the passes that were announced."""
        if not self._passes or self._expected:
            return
        all_have_gradients = all(
            len(counts) == len(group.params) for counts, group in zip(self._counts, self._groups, strict=True)
        )
        if all_have_gradients and not any(n % self._passes for counts in self._counts for n in counts.values()):
            self._expected = [Counter({p: n // self._passes for p, n in counts.items()}) for counts in self._counts]
