"""Running a user's script with ``pretrain()`` replaced."""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def run_script(
    target: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    replace: Callable[[], None] | None = None,
) -> None:
    """Run a script of Megatron-LM's, or one like them, as ``python target arguments`` does.

    Args:
        target: the script's path; or the module, which is run as ``python -m`` does.
        arguments: the script's.
        is_module: whether ``target`` is a module.
        replace: puts an adapter in the place of a ``pretrain()``; None: of Megatron-LM's.

    Raises:
        SeamDiffers: the owner's training module is not as the adapter needs it; nothing is started.
    """
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
    else:
        target = str(Path(target).resolve())
        sys.path.insert(0, str(Path(target).parent))
    sys.argv = [target, *arguments]
    (replace or replace_pretrain)()
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def replace_pretrain() -> None:
    """Put the adapter in the place of ``megatron.training.pretrain``, which a script imports afterwards.

    Raises:
        SeamDiffers: Megatron-LM's training module is not as the adapter needs it; nothing is replaced.
    """
    # This is done before Megatron-LM is imported, whose modules read it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from unicron.megatron import cpu

    cpu.enable()
    from unicron.megatron_lm import seams
    from unicron.megatron_lm.reports import averaging

    seams.check()
    import megatron.training
    import megatron.training.training

    # A script imports this function by its name, as it does pretrain().
    owner, name = seams.BY_NAME["average_losses_across_data_parallel_group"].place()
    setattr(owner, name, averaging(getattr(owner, name)))
    pretrain = _replacement(megatron.training.training.pretrain)
    megatron.training.pretrain = megatron.training.training.pretrain = pretrain


def _replacement(pretrain: Callable[..., None]) -> Callable[..., None]:
    """Return what takes the place of Megatron-LM's ``pretrain()``, and have its parser check what a script is given.

    The new one takes the same parameters, trains through failures, and raises ``InvalidSpec`` where an argument is
    refused, and ``UnsupportedModel`` where the model would train to a wrong result.
    """
    from megatron.training import arguments, global_vars

    from unicron.megatron_lm import settings
    from unicron.megatron_lm.pretraining import Pretraining

    arguments.parse_args = settings.checking(arguments.parse_args)
    write_tensorboard = global_vars._set_tensorboard_writer
    global_vars._set_tensorboard_writer = lambda args: None  # this is called before there are ranks
    signature = inspect.signature(pretrain)

    @functools.wraps(pretrain)
    def healed(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        Pretraining(SimpleNamespace(**call.arguments), write_tensorboard).train()

    return healed
