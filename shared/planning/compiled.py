"""The kernels as plain Python, or compiled by numba. Both are the same functions, so their results are the same.

Plain Python solves small problems, and a process that has only small problems never loads numba. The first larger
problem loads numba, which takes about a second, and the compiled kernels, which ``cache_directory`` has once
``shared.planning.preparation`` has compiled them: that takes tens of seconds, for each version and kind of processor.
No fault may wait for it, so until then plain Python solves all but the largest problems. Without numba (extra ``fast``)
it solves those, too, 20 to 110 times slower (docs/planner.md).
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
import threading
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

from shared.planning.kernels import arrays, objective, optimum, relaxation, search

logger = logging.getLogger(__name__)

PLAIN_WORK = 20_000
"""Items times workers up to which plain Python solves a problem, in some tens of ms, while nothing is compiled."""

PLAIN_UNTIL_COMPILED = 20_000_000
"""The same bound while compiling would come first: half of the work of 4,096 workers and 64 tasks, which take 0.5 s
(``python -m benchmarks.plain_kernels``)."""

_lock = threading.Lock()
_patient = threading.Event()
_modules = (arrays, objective, relaxation, search, optimum)
# The key includes the constants and types that the functions refer to.
_sources = {name: value for module in _modules for name, value in vars(module).items()}
plain = SimpleNamespace(**_sources)
"""The kernels as plain Python."""


def namespace(work: int) -> Any:
    """Return the kernels for a problem of this work: plain Python for a small one while nothing is loaded.

    A larger one is solved in plain Python, too, while nothing is compiled; all are where numba is not installed.
    """
    if _compiled.cache_info().currsize == 0 and (
        work <= PLAIN_WORK or not can_compile() or (work <= _plain_until() and not is_prepared())
    ):
        return plain
    return compiled()


@cache
def can_compile() -> bool:
    """Return whether numba is installed; say so once if it is not."""
    if importlib.util.find_spec("numba") is not None:
        return True
    logger.warning("numba is not installed: large problems are solved slowly (pip install 'unicron-cluster[fast]')")
    return False


def load() -> None:
    """Load the compiled kernels now, if numba is installed.

    A process that is to solve many small problems calls this.
    """
    if can_compile():
        compiled()


def compile_when_large() -> None:
    """Have the first larger problem compile.

    A process that solves thousands of problems while nobody waits calls this.
    """
    _patient.set()


def _plain_until() -> int:
    return PLAIN_WORK if _patient.is_set() else PLAIN_UNTIL_COMPILED


def is_prepared() -> bool:
    """Return whether loading the compiled kernels takes no compiling."""
    return _marker().exists()


def note_prepared() -> None:
    """Note that all kernels are compiled (``shared.planning.preparation``)."""
    marker = _marker()
    marker.parent.mkdir(mode=0o700, exist_ok=True)
    marker.touch()


def _marker() -> Path:
    return cache_directory() / _version() / "complete"


def compiled() -> Any:
    """Return the compiled kernels. They release the interpreter's lock while they run."""
    with _lock:
        return _compiled()


@cache
def _compiled() -> Any:
    """Compile copies of the kernels that call one another. The plain functions stay as they are."""
    import numba

    if not os.environ.get("NUMBA_CACHE_DIR"):
        numba.config.CACHE_DIR = str(cache_directory() / _version())  # type: ignore[attr-defined]  # defined by numba at run time
    own = dict(_sources)
    for name, function in _sources.items():
        if isinstance(function, FunctionType):
            own[name] = numba.njit(cache=True, nogil=True)(FunctionType(function.__code__, own, name))
    return SimpleNamespace(**own)


@cache
def _version() -> str:
    """Return a digest of all kernels. Numba's own cache looks only at the file of a function, not at its callees."""
    text = b"".join(Path(module.__file__ or "").read_bytes() for module in _modules)
    return hashlib.sha256(text).hexdigest()[:16]


def cache_directory() -> Path:
    """Return the folder of the compiled code: in the user's cache folder, or else a temporary one.

    It is not beside the sources, which may be read-only or belong to another user. Code that is loaded from a folder
    can be replaced by everyone who can write to it, so the folder belongs to the user alone. ``NUMBA_CACHE_DIR``
    overrides it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for folder in (Path(base) / "unicron" / "numba", Path(tempfile.gettempdir()) / f"unicron-numba-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="unicron-numba-"))
