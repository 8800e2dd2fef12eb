"""What the files that a specification names prove about the task: refused at submission, before anything is started.

``gateway.py`` calls ``check`` with absolute paths of files that exist. The rules are those of the built-in trainer
(``unicron/trainer/data.py``), which the control plane does not import.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from shared.tasks import BYTE_VOCABULARY, TaskSpec, refused

INDEX_HEADER = b"MMIDIDX\x00\x00"
"""The first bytes of every index of an indexed dataset (megatron-core, ``indexed_dataset.py``)."""

CHUNK_BYTES = 1 << 20
"""How much of a text is read at a time, in search of a character that is no white space."""

MAX_SCRIPT_BYTES = 1 << 20
"""A longer script is not compiled at submission: training loops are far shorter."""


def check(spec: TaskSpec) -> None:
    """Refuse a task that cannot run with the files that it names.

    Raises:
        InvalidInput: with the fields concerned, their values and what is allowed.
    """
    try:
        found = list(_script_problems(Path(spec.script)) if spec.script is not None else _data_problems(spec))
    except OSError:
        return  # the ranks may be able to read what this server cannot
    if found:
        raise refused(found)


def _data_problems(spec: TaskSpec) -> Iterator[tuple[str, object, str]]:
    """Yield field, value and problem of data that the built-in trainer cannot train on."""
    data = Path(spec.data)
    prefix = data.with_suffix("") if data.suffix in (".bin", ".idx") else data
    index = prefix.with_name(prefix.name + ".idx")
    if index.is_file() and prefix.with_name(prefix.name + ".bin").is_file():
        with index.open("rb") as file:
            if file.read(len(INDEX_HEADER)) != INDEX_HEADER:
                yield "data", spec.data, f"{index.name} is no index of an indexed dataset of megatron-core"
        return
    if _is_blank(data):
        yield "data", spec.data, "the file has nothing but white space; allowed: a text, or an indexed dataset"
    if spec.model.vocabulary < BYTE_VOCABULARY:
        what = f"must be at least {BYTE_VOCABULARY} for a text: one token for each byte, one for the end of a document"
        yield "model.vocabulary", spec.model.vocabulary, what


def _is_blank(text: Path) -> bool:
    """Return whether a file has nothing but white space."""
    with text.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            if chunk.strip():
                return False
    return True


def _script_problems(script: Path) -> Iterator[tuple[str, object, str]]:
    """Yield field, value and problem of a script that is not Python. The script is compiled, and not run."""
    if script.stat().st_size > MAX_SCRIPT_BYTES:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as err:  # ValueError: null bytes, before Python 3.11.4
        yield "script", str(script), f"not a Python file: {type(err).__name__}: {err}"
    except (RecursionError, MemoryError):
        return  # too deep for this process; the ranks report it if it is too deep for them
