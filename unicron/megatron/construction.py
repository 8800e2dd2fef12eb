"""The construction of a Megatron model and optimizer on one rank, without its peers.

``unicron.join.joining`` uses this: only members of a generation without a fitting model build one, so nothing in the
construction may wait for the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def without_collectives() -> Iterator[None]:
    """Replace the collectives that Megatron's constructors call by local functions.

    Megatron's optimizer gathers the keys of the parameter groups, which are the same on every rank of a GPT. The
    weights of tied embeddings are summed over the first and the last pipeline stage; the state that is received or
    initialised afterwards overwrites them.
    """
    distributed: Any = dist
    replaced = {name: getattr(dist, name) for name in ("all_gather_object", "all_reduce", "barrier")}

    def all_gather_object(into: list[Any], value: Any, group: Any = None) -> None:
        into[:] = [value] * len(into)

    distributed.all_gather_object = all_gather_object
    distributed.all_reduce = distributed.barrier = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(distributed, name, function)
