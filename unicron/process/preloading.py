"""The threads of a process that imports what its forked children need.

A fork copies the thread that asks for it, and the locks that other threads have taken: a child waits for ever for what
no thread of its own will release. So the fork server has one thread. Imports start other threads: ``QUIET`` keeps the
known ones from starting, and ``ThreadWatch`` names the others and the modules that have started them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, MutableMapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, Self

TASKS = Path("/proc/self/task")
"""Linux has an entry here for each thread of a process, native ones included."""

QUIET = {
    # OpenBLAS has its threads from the moment that it is loaded: numpy and scipy have copies of their own.
    "OPENBLAS_NUM_THREADS": "1",
    # numexpr starts OMP_NUM_THREADS threads as it is imported, unless this says otherwise.
    "NUMEXPR_NUM_THREADS": "1",
    # torch's compiler has a process, and a thread that reads from it, where there is triton: some versions start them
    # as the compiler is imported, which Megatron's decorators do. With this both begin with the first compilation, in
    # the child that needs them.
    "TORCH_WARM_POOL": "0",
    # As torch 2.11's compiler is imported it asks whether there is a device, to choose how it times kernels; the
    # driver's library (NVML) has a thread from then on. With this it asks when it times a kernel, in the child.
    "TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER": "0",
    # Arrow's allocator, which pandas loads, has a thread that gives memory back; calls of Arrow do that as well.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Variables that keep libraries from starting threads as they are imported. Children have them too: what they keep from
starting does not survive a fork."""

_LOADERS = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
"""Loaders of which each module has one of its own."""


def keep_quiet(variables: MutableMapping[str, str]) -> None:
    """Set, in an environment, the variables that keep libraries from starting threads; before they are imported."""
    variables.update(QUIET)
    # OpenMP's threads begin with the first loop that has them, not with an import: more are the user's business.
    variables.setdefault("OMP_NUM_THREADS", "1")


class StartedThread(NamedTuple):
    """A thread beside the main one.

    ``name``: Python's, or else that of the kernel, which a native thread has from its process unless it gave itself
    another one. ``module``: the module whose import started it; empty: not known.
    """

    name: str
    module: str

    def __str__(self) -> str:
        """Return what is known of the thread, in words."""
        return f"{self.name!r}, started by the import of {self.module}" if self.module else repr(self.name)


class ThreadWatch(MetaPathFinder):
    """Notes which module's import starts which threads, from ``with`` on until its end.

    A thread is charged to the innermost module that was being imported. ``import`` finds the same as without the watch.
    """

    def __init__(self) -> None:
        self._known = set(_ids())
        self._modules: dict[str, str] = {}
        self._importing: list[str] = []
        """Modules that are being imported, the innermost last."""

    def __enter__(self) -> Self:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module as the other finders do, and have its import watched."""
        self._note()  # the importing module has started these threads until here
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def started(self) -> list[StartedThread]:
        """Return the threads that there are now beside the main one."""
        names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
        main = str(threading.main_thread().native_id)
        return [
            StartedThread(names.get(number) or _kernel_name(number), self._modules.get(number, ""))
            for number in _ids()
            if number != main
        ]

    def _watch(self, loader: Any) -> None:
        if type(loader) not in _LOADERS:
            return
        create, execute = loader.create_module, loader.exec_module

        # A library is loaded, with what it starts by itself, as the module is created.
        def create_module(spec: ModuleSpec) -> ModuleType | None:
            vars(loader).pop("create_module", None)  # code that looks at the loader later finds it as it was
            with self._during(spec.name):
                module: ModuleType | None = create(spec)
                return module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            with self._during(module.__name__):
                execute(module)

        loader.create_module, loader.exec_module = create_module, exec_module

    @contextlib.contextmanager
    def _during(self, module: str) -> Iterator[None]:
        """Charge the threads that start meanwhile to a module, except those of modules that it imports."""
        self._importing.append(module)
        try:
            yield
        finally:
            self._note()
            self._importing.pop()

    def _note(self) -> None:
        """Charge the threads that are new to the innermost module."""
        # There are thousands of modules. The number of links costs a tenth of the list, and is two more than threads.
        if os.stat(TASKS).st_nlink == len(self._known) + 2:
            return
        now = set(_ids())
        module = self._importing[-1] if self._importing else ""
        self._modules |= dict.fromkeys(now - self._known, module)
        self._known = now


def warning(started: list[StartedThread]) -> str:
    """Return what to say about threads beside the main one; empty: there are none."""
    if not started:
        return ""
    count = f"{len(started) + 1} threads after preloading, where a fork copies one"
    advice = "; processes forked now may hang at a lock that another thread had. Known means against such threads: "
    return f"{count}: {'; '.join(map(str, started))}{advice}{', '.join(f'{k}={v}' for k, v in QUIET.items())}"


def _ids() -> list[str]:
    return sorted(os.listdir(TASKS), key=int)


def _kernel_name(number: str) -> str:
    name = ""
    with contextlib.suppress(OSError):
        name = (TASKS / number / "comm").read_text().strip()
    return name or f"thread {number}"
