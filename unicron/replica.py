"""One rank's training state, and the gradients of the step it is in.

Gradients of finished micro-batches are held in float64, apart from the buffers that backward passes write to: a
half-done micro-batch is thrown away by not adding it, a broken all-reduce leaves the sum untouched (it works on a
copy), and the sum does not depend, after the cast to float32, on who computed what and in which order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from unicron.agreement import ASSIGNED, DONE, FREE
from unicron.errors import NonFiniteValue

Wait = Callable[[Any], None]
"""Waits for a collective (torch's Work) and raises what it raised."""

EMPTY_DIGEST = bytes(32)
"""The sample digest before the first update."""


def chain(digest: bytes, ids: list[int]) -> bytes:
    """Return the digest after one more update: sha256(digest, sample ids in order as little-endian int64)."""
    return hashlib.sha256(digest + b"".join(i.to_bytes(8, "little", signed=True) for i in ids)).digest()


@dataclass(slots=True)
class Partial:
    """The step in progress: which micro-batches are this rank's, and what the finished ones gave."""

    step: int
    assigned: list[int]
    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)

    def states(self, micro_batches: int) -> list[int]:
        """Return the agreement's code of each micro-batch."""
        states = [FREE] * micro_batches
        for k in self.assigned:
            states[k] = ASSIGNED
        for k in self.samples:
            states[k] = DONE
        return states


class Replica:
    """A model, its optimizer, and how far they have come.

    ``model`` is Megatron's DistributedDataParallel (gradients in its flat buffers) or any module (gradients in
    ``.grad``, which must not be set to None).
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        """Args: model, optimizer: as built for this rank's layout; no state is held yet."""
        self.model = model
        self.optimizer = optimizer
        self.applied = -1
        """Updates applied to the state held; -1: none is held."""
        self.digest = EMPTY_DIGEST
        self.partial: Partial | None = None
        self._gradients = _gradient_buffers(model)
        size = sum(g.numel() for g in self._gradients)
        self._sum = torch.zeros(size, dtype=torch.float64, device=self._gradients[0].device)

    def hold(self, step: int, digest: bytes) -> None:
        """Declare that the parameters and optimizer are those after ``step`` updates."""
        self.applied, self.digest = step, digest
        self.discard()

    def forget(self) -> None:
        """Declare that no usable state is held."""
        self.applied = -1
        self.discard()

    # The step in progress.

    def discard(self) -> None:
        """Throw away what the step in progress has accumulated."""
        self.partial = None
        self._sum.zero_()
        self.clear_gradients()

    def begin(self, step: int, assigned: list[int], finished: frozenset[int] = frozenset()) -> Partial:
        """Begin a step, or go on with it with other micro-batches; what is not in ``finished`` is not held."""
        if self.partial is None or self.partial.step != step or set(self.partial.samples) != set(finished):
            self.discard()
            self.partial = Partial(step=step, assigned=assigned)
        self.partial.assigned = assigned
        return self.partial

    def clear_gradients(self) -> None:
        """Zero the buffers that backward passes write to."""
        for gradient in self._gradients:
            gradient.zero_()
        for parameter in self.model.parameters():
            if hasattr(parameter, "main_grad"):
                # Megatron's optimizer leaves main_grad here; a backward pass would add to it once more.
                parameter.grad = None

    def commit(self, finished: dict[int, float], samples: dict[int, list[int]]) -> None:
        """Add the gradients of finished micro-batches (already scaled by 1/M) to the sum.

        Raises:
            NonFiniteValue: a loss is not finite.
        """
        assert self.partial is not None
        for k, loss in finished.items():
            if not math.isfinite(loss):
                raise NonFiniteValue(f"loss {loss} in micro-batch {k} of step {self.partial.step}")
        for gradient, part in self._parts(self._sum):
            part.add_(gradient.reshape(-1))
        self.clear_gradients()
        self.partial.losses.update(finished)
        self.partial.samples.update(samples)

    def reduce(self, group: Any, wait: Wait) -> None:
        """Put the sum over all ranks of ``group`` into the gradient buffers; the rank's own sum is kept.

        Raises:
            NonFiniteValue: this rank's gradients are not finite (its peers see a broken collective).
        """
        assert self.partial is not None
        if not torch.isfinite(self._sum.sum()):
            raise NonFiniteValue(f"gradient in step {self.partial.step}")
        total = self._sum.clone()
        wait(dist.all_reduce(total, group=group, async_op=True))
        for gradient, part in self._parts(total):
            gradient.copy_(part.reshape(gradient.shape))

    def applied_update(self, ids: list[int]) -> None:
        """Record that the optimizer has applied the step in progress, with the samples of the whole batch."""
        self.applied += 1
        self.digest = chain(self.digest, ids)
        self.discard()

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for gradient in self._gradients:
            yield gradient, flat[start : start + gradient.numel()]
            start += gradient.numel()

    # The state.

    def take(self, source: int, step: int, group: Any, wait: Wait) -> None:
        """Take part in the broadcast of a state from global rank ``source`` to the other ranks of ``group``."""
        giver = dist.get_rank() == source
        optimizer = torch_optimizer(self.optimizer)
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        keys = [
            [(k, tuple(v.shape), v.dtype) for k, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
            for p in parameters
        ]
        meta: list[Any] = [(keys, self.digest) if giver else None]
        dist.broadcast_object_list(meta, src=source, group=group)
        keys, digest = meta[0]
        if not giver:
            self.forget()
            for parameter, entries in zip(parameters, keys, strict=True):
                optimizer.state[parameter] = {
                    k: torch.zeros(shape, dtype=dtype, device="cpu" if not shape else parameter.device)
                    for k, shape, dtype in entries
                }
        tensors = [p.data for p in self.model.parameters()]
        tensors += [optimizer.state[p][k] for p, entries in zip(parameters, keys, strict=True) for k, _, _ in entries]
        _broadcast(tensors, source, group, wait)
        if not giver:
            self.hold(step, digest)


def _broadcast(tensors: list[torch.Tensor], source: int, group: Any, wait: Wait) -> None:
    """Broadcast tensors in place, flattened into one for each dtype."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        chosen = [t for t in tensors if t.dtype == dtype]
        device = next(t.device for t in chosen if t.dim()) if any(t.dim() for t in chosen) else chosen[0].device
        flat = torch.cat([t.reshape(-1).to(device) for t in chosen])
        wait(dist.broadcast(flat, src=source, group=group, async_op=True))
        start = 0
        for tensor in chosen:
            tensor.copy_(flat[start : start + tensor.numel()].reshape(tensor.shape))
            start += tensor.numel()


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside Megatron's wrappers."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _gradient_buffers(model: Any) -> list[torch.Tensor]:
    """Return the tensors that a backward pass adds gradients to."""
    buffers = getattr(model, "buffers", None)
    if isinstance(buffers, list):  # Megatron's DistributedDataParallel
        return [b.grad_data for b in buffers + list(getattr(model, "expert_parallel_buffers", []))]
    gradients = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    return gradients
