"""What stock Megatron-LM needs on a machine without CUDA, beyond ``unicron.megatron.cpu``; for tests alone."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import sys
import types
import typing
from typing import Any

import typing_extensions

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

FUSED_ADAM = "UNICRON_TEST_FUSED_ADAM"
"""Environment variable: whether optimizers are like Apex's and Transformer Engine's."""


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


def _fused_adam() -> None:
    """Stand for Apex's and Transformer Engine's Adam, without which stock loads no divided optimizer."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as divided
    import torch

    class FusedAdam(torch.optim.Optimizer):
        """Counts updates for each group, as those do."""

        def __init__(self, params: Any, adam_w_mode: bool = True, **defaults: Any) -> None:
            super().__init__(params, defaults)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Apply an update with decoupled weight decay."""
            for group in self.param_groups:
                (one, two), group["step"] = group["betas"], group.get("step", 0) + 1
                for p in (p for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    for name in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(name, torch.zeros_like(p))
                    state["exp_avg"].lerp_(p.grad, 1 - one)
                    state["exp_avg_sq"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
                    root = (state["exp_avg_sq"] / (1 - two ** group["step"])).sqrt_().add_(group["eps"])
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - one ** group["step"]))

    changed: Any = optimizers
    changed.Adam, changed.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    changed = divided
    changed.Adam = FusedAdam
    changed.HAVE_APEX_OR_TE = changed.USING_APEX_OPTIMIZER = True


def _without_triton() -> None:
    """Stand for a module that imports triton."""
    module: Any = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None
    module.is_batch_invariant_mode_enabled = lambda: False
    module.set_batch_invariant_mode = lambda *args, **kwargs: contextlib.nullcontext()
    sys.modules[module.__name__] = module


def _with_compiled_helpers() -> None:
    """Load the compiled helpers of datasets from the wheel where a checkout has none; their source is the same."""
    name = "megatron.core.datasets.helpers_cpp"
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return
    (file,) = (f for f in importlib.metadata.files("megatron-core") or () if f.match("helpers_cpp*.so"))
    spec = importlib.util.spec_from_file_location(name, file.locate())
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def core() -> None:
    """Change torch and megatron-core."""
    _without_triton()
    if not hasattr(typing, "override"):  # core 0.18 and later take it from there, which Python 3.11 does not have
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
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

    if os.environ.get(FUSED_ADAM):
        _fused_adam()
    import queue

    import megatron.core.datasets.utils as datasets
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    import megatron.core.pipeline_parallel.schedules as schedules

    # An interleaved pipeline gives the memory of what it sends back at once: a stream still has it, and gloo does not.
    schedules.deallocate_output_tensor = lambda *args: None
    schedules.custom_backward = torch.autograd.backward

    datasets.compile_helpers = _with_compiled_helpers
    _with_compiled_helpers()
    made: queue.Queue[Any] = queue.Queue()
    # A process is spawned for it, which imports the script anew, without these changes.
    for name in ("_get_write_results_queue", "get_write_results_queue"):  # until core 0.17, and later
        setattr(writer, name, lambda *args: made)


def apply() -> None:
    """Change torch and Megatron-LM."""
    core()
    import megatron.training as training
    import megatron.training.initialize as initialize

    with contextlib.suppress(ImportError):  # core 0.17 has none
        import megatron.legacy.fused_kernels as kernels

        kernels.load = lambda args: None  # calls nvcc
    stock = initialize.initialize_megatron

    @functools.wraps(stock)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs | {"allow_no_cuda": True})

    initialize.initialize_megatron = initialize_megatron
    training.initialize_megatron = training.training.initialize_megatron = initialize_megatron
