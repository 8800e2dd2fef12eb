"""The kernels as plain Python or compiled by numba: the same functions, so the same results.

Plain Python answers small problems at once, and a process that has only such never loads numba. The first larger
problem loads it: about a second, and the time to compile (tens of seconds) once for each version and kind of
processor, since the result is kept in ``cache_directory``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

from shared.planning.kernels import arrays, optimum, relaxation, search, worths

PLAIN_WORK = 20_000
"""Items times workers up to which plain Python is used while nothing is compiled yet: some tens of milliseconds."""

_lock = threading.Lock()
_modules = (arrays, worths, relaxation, search, optimum)
_sources = {name: value for module in _modules for name, value in vars(module).items()}
plain = SimpleNamespace(**_sources)
"""The kernels as they are written."""


def namespace(work: int) -> Any:
    """Return the kernels for a problem of this much work: compiled, unless it is small and nothing is loaded yet."""
    if work <= PLAIN_WORK and _compiled.cache_info().currsize == 0:
        return plain
    return compiled()


def compiled() -> Any:
    """Return the kernels compiled. They give up the interpreter's lock while they run."""
    with _lock:
        return _compiled()


@cache
def _compiled() -> Any:
    """Compile copies of the kernels that call one another: the plain ones stay as they are."""
    import numba

    if not os.environ.get("NUMBA_CACHE_DIR"):
        numba.config.CACHE_DIR = str(cache_directory() / _version())  # type: ignore[attr-defined]  # defined by numba at run time
    own = dict(_sources)
    for name, function in _sources.items():
        if isinstance(function, FunctionType):
            own[name] = numba.njit(cache=True, nogil=True)(FunctionType(function.__code__, own, name))
    return SimpleNamespace(**own)


def _version() -> str:
    """Return what the compiled code follows from: numba looks at a function's own file only, not at those it calls."""
    text = b"".join(Path(module.__file__ or "").read_bytes() for module in _modules)
    return hashlib.sha256(text).hexdigest()[:16]


def cache_directory() -> Path:
    """Return where compiled code is kept: the user's cache folder, or else a temporary one.

    Not beside the sources, which may be read-only or someone else's. Loading code from a folder means trusting who can
    write to it, so it belongs to the user alone. ``NUMBA_CACHE_DIR`` overrides.
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
