"""What megatron-bridge imports and no machine without CUDA has: modules that say nothing; for tests alone.

modelopt (NVIDIA's distillation and quantisation) and nvidia-resiliency-ext build for CUDA, or pull it in. The courses
tested here use nothing of them, but their modules are imported. ``datasets`` is large, and only read by what trains on
Hugging Face's data. Of Transformer Engine there must be nothing, since megatron-core looks whether it is there; so the
modules of megatron-bridge that need it, those of LoRA, are none either.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

ROOTS = ("modelopt", "nvidia_resiliency_ext", "datasets")
MODULES = ("megatron.bridge.peft.lora", "megatron.bridge.peft.lora_layers")


class _HasAll(type):
    def __getattr__(cls, name: str) -> Any:
        return _named(name)


class _Nothing(metaclass=_HasAll):
    """Stands for a class or function that nobody uses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return vars(_FUNCTIONS).get(name) or _named(name)


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _HasAll(name, (_Nothing,), {})


class _FUNCTIONS:
    """The functions that a training calls."""

    @staticmethod
    def get_tensor_shapes_adjust_fn_for_distillation(*args: Any, **kwargs: Any) -> None:
        """Return what a training without distillation has."""

    @staticmethod
    def save_sharded_modelopt_state(*args: Any, **kwargs: Any) -> None:
        """Save nothing: the model is not quantised."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of those, or below one of the roots."""
        if fullname.partition(".")[0] not in ROOTS and fullname not in MODULES:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make it."""
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def install() -> None:
    """Have the modules found."""
    sys.meta_path.insert(0, _Finder())
