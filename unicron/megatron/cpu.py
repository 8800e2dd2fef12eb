"""Changes to torch and megatron-core 0.16 with which Megatron runs on a machine without a CUDA device.

megatron-core assumes CUDA in a few dozen places; the comments in ``enable`` name them. ``enable`` does nothing on a
machine with a CUDA device, and nothing when it is called again. It must be called before Megatron's training modules
are used. It does not initialise CUDA, so a process may be forked after it.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

_enabled = False


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tensor constructor that takes the device ``cuda`` for ``cpu``."""

    @functools.wraps(function)
    def construct(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return construct


def _enable_sequence_parallel_norms() -> None:
    """Let torch's norms take a part of the sequence: Megatron asserts otherwise, and marks only Apex's parameters."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    wrapped: Any = WrappedTorchNorm
    original = wrapped.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = original(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    wrapped.__new__ = new


def found() -> bool:
    """Return whether megatron-core can be imported.

    The megatron-core of a script's own folder is found only once the script runs.
    """
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def enable() -> None:
    """Make megatron-core, where it is found, run on the CPU if there is no CUDA device."""
    global _enabled
    if _enabled or not found():
        return
    _enabled = True
    if torch.cuda.is_available():
        return
    # The start of torch.compile takes seconds in each process and saves nothing at these sizes on a CPU.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    cuda: Any = torch.cuda
    cpu = torch.device("cpu")
    # Buffers, pipeline receives, masks and mappings are allocated on torch.cuda.current_device().
    cuda.current_device = lambda: cpu
    # Pipeline communication and checkpoint staging wait for the device.
    cuda.synchronize = lambda device=None: None
    # The tracker of random states saves and sets the CUDA generator; its counterpart on a CPU is the default generator.
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    # The schedules, the optimizer and clipping construct small tensors with the literal device 'cuda'.
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Tied embeddings of a pipeline move their weight with .cuda().
    tensor_type: Any = torch.Tensor
    tensor_type.cuda = lambda self, *args, **kwargs: self
    # Gradient clipping asserts that the type is 'torch.cuda.FloatTensor'.
    original_type = tensor_type.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        if isinstance(result, str) and result.startswith("torch.") and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    tensor_type.type = type_
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # The tracker warns when the CPU generator is used inside its context; here that generator is the tracked one.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    _enable_sequence_parallel_norms()
