"""What stock Megatron-LM needs on a machine without CUDA, beyond ``unicron.megatron.cpu``; for tests alone."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


class _Stream:
    """Stands for streams and events: everything is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, other: Any) -> None: ...

    def record_event(self, *args: Any) -> _Stream:
        return _Stream()

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _Device:
    total_memory, multi_processor_count, major, minor, name = 1 << 34, 1, 9, 0, "cpu"


def _without_triton() -> None:
    """Stand for a module that imports triton."""
    module: Any = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None
    module.is_batch_invariant_mode_enabled = lambda: False
    module.set_batch_invariant_mode = lambda *args, **kwargs: contextlib.nullcontext()
    sys.modules[module.__name__] = module


def apply() -> None:
    """Change torch and Megatron-LM."""
    _without_triton()
    import torch

    from unicron.megatron import cpu

    cpu.enable()
    cuda: Any = torch.cuda
    cuda.device_count, cuda.set_device = lambda: 1, lambda device: None  # gates Megatron's groups and its RNG tracker
    present = _Stream()
    cuda.Stream = cuda.Event = _Stream  # DistributedDataParallel is built on a stream of its own
    cuda.current_stream, cuda.stream = lambda *args, **kwargs: present, lambda stream: contextlib.nullcontext()
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self
    for name in ("rand", "randn", "randint", "empty_like", "zeros_like", "ones_like", "randperm"):
        setattr(torch, name, cpu._on_cpu(getattr(torch, name)))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.get_device_properties, cuda.get_device_capability = lambda *a, **k: _Device, lambda *a, **k: (9, 0)
    cuda.get_device_name = lambda *a, **k: "cpu"
    cuda.reset_peak_memory_stats = cuda.empty_cache = lambda *args, **kwargs: None

    import megatron.core.datasets.utils as datasets
    import megatron.training as training
    import megatron.training.initialize as initialize

    with contextlib.suppress(ImportError):  # core 0.17 has none
        import megatron.legacy.fused_kernels as kernels

        kernels.load = lambda args: None  # calls nvcc
    datasets.compile_helpers = lambda: None  # the wheel has them compiled
    stock = initialize.initialize_megatron

    def initialize_megatron(
        extra_args_provider: Any = None, args_defaults: Any = None, ignore_unknown_args: bool = False,
        allow_no_cuda: bool = True, skip_mpu_initialization: bool = False, get_embedding_ranks: Any = None,
        get_position_embedding_ranks: Any = None, parsed_args: Any = None, store: Any = None,
    ) -> Any:  # fmt: skip
        given = locals() | {"allow_no_cuda": True, "args_defaults": args_defaults or {}}
        return stock(**{name: value for name, value in given.items() if name != "stock"})

    initialize.initialize_megatron = initialize_megatron
    training.initialize_megatron = training.training.initialize_megatron = initialize_megatron
    import queue

    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer

    made: queue.Queue[Any] = queue.Queue()
    # A process is spawned for it, which imports the script anew, without these changes.
    writer._get_write_results_queue = lambda: made
