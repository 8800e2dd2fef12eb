"""Running a user's script with megatron-bridge's ``pretrain()`` replaced."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from unicron.megatron_lm import script


def replace_pretrain(by: Callable[..., None] | None = None) -> None:
    """Put the adapter in the place of ``megatron.bridge.training.pretrain.pretrain``, which a script imports later.

    Args:
        by: another function in its place; None: the adapter.

    Raises:
        SeamDiffers: megatron-bridge is not as the adapter needs it; nothing is replaced.
    """
    # Before megatron-core is imported, whose modules read it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from unicron.megatron import cpu

    cpu.enable()
    from unicron.bridge import seams

    seams.check()
    import megatron.bridge.training.pretrain as entry
    from megatron.bridge.training import config, finetune

    def of_one_replica(container: Any) -> None:
        container.data_parallel_size = 1
        if container.comm_overlap is not None:
            container.comm_overlap.data_parallel_size = 2  # no more is asked than whether there are several

    # The batch is the task's, however many replicas there are: with one, megatron-bridge counts micro-batches as we do.
    config.ConfigContainer.get_data_parallel_size = lambda container, world_size: 1
    config.ConfigContainer.set_data_parallel_size = of_one_replica
    entry.pretrain = finetune.pretrain = by or _replacement(entry.pretrain)


run_script = functools.partial(script.run_script, replace=replace_pretrain)
"""Run a script, or one like them, as ``python target arguments`` does (``unicron.megatron_lm.script``)."""


def _replacement(pretrain: Callable[..., None]) -> Callable[..., None]:
    """Return what takes the place of megatron-bridge's ``pretrain()``.

    It takes the same parameters, trains through failures, and raises ``InvalidSpec`` where a setting is refused, and
    ``UnsupportedModel`` where the model would train to a wrong result.
    """
    from unicron.bridge.pretraining import Pretraining

    signature = inspect.signature(pretrain)

    @functools.wraps(pretrain)
    def healed(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        Pretraining(**call.arguments).train()

    return healed
