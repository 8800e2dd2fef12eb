"""The identity of this process (``unicron.join.identity``): its code, settings, data and libraries.

Everything is looked at when the process starts, and a file once: what was loaded stays what it is, whatever becomes of
the file. So a process that has trained for days still says what it trains with.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unicron.join.identity import Identity
from unicron.protocol import environment

LIBRARIES = (
    *("torch", "numpy", "megatron.core", "transformer_engine", "flash_attn", "apex", "triton", "xformers"),
    *("deepspeed", "bitsandbytes"),
)
"""Modules of libraries that compute; those that the process has loaded are compared. This library is not among them:
while a cluster is upgraded, ranks of one version of it train beside those of another."""

SHOWN_CHARACTERS = 16
"""Number of characters of a file's hash that are compared and shown: 64 bits."""

SAMPLES = 16
"""Number of places of a large file that are hashed, evenly apart, its beginning and its end included. Chosen: a look at
a file of terabytes on a disk that seeks in 10 ms takes 0.2 s."""

SAMPLE_BYTES = 1 << 16
"""Bytes at each place. A file that is not larger than all of these together is hashed as a whole."""

MAX_CODE_BYTES = 64 << 20
"""Largest file of code that is hashed. A larger one, such as a library with kernels for many devices, counts by its
size."""


class OwnIdentity:
    """The identity of this process."""

    def __init__(self, settings: Mapping[str, object], data: str = "") -> None:
        """Look at the process as it starts.

        Args:
            settings: the task's, as the process uses them.
            data: the data that the task's specification names; empty: none.
        """
        self._fields = {f"setting/{name}": str(value) for name, value in settings.items()}
        self._fields |= {f"version/{name}": value for name, value in _versions()}
        if data:
            self._fields |= {f"data/{name}": value for name, value in data_fields(data)}
        self._looked_at: set[str] = set()
        """Names of modules that were looked at."""
        self._count = 0
        self.note()

    def note(self) -> None:
        """Look at the modules that were imported since the last call; if there are none, this costs nothing."""
        if len(sys.modules) == self._count:
            return
        self._count = len(sys.modules)
        for name in sys.modules.keys() - self._looked_at - _of_others:
            self._looked_at.add(name)
            path = _file(name)
            if path and (value := code_value(path)):
                self._fields[f"code/{os.path.basename(path) if name == '__main__' else name}"] = value

    @property
    def fields(self) -> Identity:
        """The identity of the process now."""
        self.note()
        return self._fields


NOT_SETTINGS = frozenset(
    {
        "name",
        "data",
        "script",
        "checkpoint",
        "code",
        "weight",
        "workers",
        "env",
        "secrets",
        "max_restarts",
        "finish_timeout_s",
        "progress_timeout_s",
    }
)
"""Fields of a specification on which the computation does not depend, or of which the thing that they name is
compared."""


def of_task(settings: Mapping[str, object]) -> OwnIdentity:
    """Return the identity of this process, which trains the task that its environment names.

    Args:
        settings: as the training uses them.
    """
    task: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # the error is reported by whatever needs the specification
        task = json.loads(Path(environment.text(environment.SPEC)).read_text(encoding="utf-8"))
    named = {name: value for name, value in task.items() if name not in NOT_SETTINGS}
    return OwnIdentity({**dict(_flat(named)), **settings}, environment.placed(str(task.get("data", ""))))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the fields of a specification by their names in the document."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            yield name, str(version)
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if cuda is not None:
        yield "cuda", str(cuda)


_of_others: set[str] = set()
"""Names of modules that are no code of a task: those that are imported before processes are forked."""


def note_preloaded() -> None:
    """Note the modules that there are, so that forked processes need not look at thousands of them."""
    _of_others.update(name for name in list(sys.modules) if name != "__main__" and not _file(name))


_PACKAGES = ("unicron", "unicron_client")

_BESIDE = Path(__file__).resolve().parents[2]

_NOT_OWN = tuple(f"{folder}{os.sep}" for folder in (os.path.dirname(os.__file__), *map(_BESIDE.joinpath, _PACKAGES)))
"""Folders of Python's own modules, of this library, and of the client that stands beside it."""

_INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages that were installed, in whatever environment."""


@functools.cache
def _has_packages(folder: str) -> bool:
    """Return whether packages were installed in a folder of the import path, whatever its name (pip's ``--target``)."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder or os.curdir))
    except OSError:
        return False


def _is_installed(path: str) -> bool:
    if any(folder in path for folder in _INSTALLED):
        return True
    return any(entry and path.startswith(entry + os.sep) and _has_packages(entry) for entry in sys.path)


def _file(name: str) -> str:
    """Return the file of a module that is a task's own code; empty: it is not, or has no file."""
    path = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
    if not isinstance(path, str) or path.startswith(_NOT_OWN) or _is_installed(path):
        return ""
    return path


def code_value(path: str) -> str:
    """Return the value of a file of code; empty: it cannot be read, as one inside an archive."""
    try:
        size = os.stat(path).st_size
        if size > MAX_CODE_BYTES:
            return f"{size} bytes"
        with open(path, "rb") as file:
            return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:SHOWN_CHARACTERS]}"
    except OSError:
        return ""


def data_fields(data: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of a task's data, by name: its size, and a hash of its index or of samples.

    The times of the files are left out: copies of one file on several nodes have different ones.

    Args:
        data: the prefix of an indexed dataset, one of its files, or a file. A file that is not there, or may not be
            read, yields nothing: its reader reports that.
    """
    given = Path(data)
    prefix = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
    index, contents = prefix.with_name(f"{prefix.name}.idx"), prefix.with_name(f"{prefix.name}.bin")
    for path in (index, contents) if index.is_file() and contents.is_file() else (given,):
        try:
            yield path.name, _data_value(path)
        except OSError:
            continue


def _data_value(path: Path) -> str:
    size = path.stat().st_size
    whole = size <= (SAMPLES + 2) * SAMPLE_BYTES
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        if whole:
            hashed.update(file.read())
        else:
            for number in range(SAMPLES + 2):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES + 1))
                hashed.update(file.read(SAMPLE_BYTES))
    return f"{size} bytes, sha256 {'' if whole else 'of samples '}{hashed.hexdigest()[:SHOWN_CHARACTERS]}"
