"""Task specifications as a program or a user gives them: a file, a mapping, or the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import InvalidInput
from shared.tasks.specification import MAX_SPEC_BYTES, TaskSpec, load_spec, parse_spec

Given = TaskSpec | Mapping[str, Any] | str | os.PathLike[str]
"""A specification, its fields, or the path of its file (YAML)."""


def specification(given: Given) -> TaskSpec:
    """Return a specification with absolute paths: relative ones are taken from its file's folder, or else from here.

    Raises:
        InvalidInput: the file cannot be read, or the specification is refused.
    """
    if isinstance(given, TaskSpec):
        return with_absolute_paths(given, Path.cwd())
    if isinstance(given, Mapping):
        return with_absolute_paths(parse_spec(dict(given)), Path.cwd())
    file = Path(given)
    return with_absolute_paths(load_spec(text_of(file)), Path.cwd() if str(file) == "-" else file.parent)


def text_of(file: Path) -> str:
    """Return the text of a file; ``-`` is standard input.

    Raises:
        InvalidInput: it cannot be read, or is no UTF-8 text.
    """
    try:
        if str(file) == "-":
            return sys.stdin.read(MAX_SPEC_BYTES + 1)
        with open(file, encoding="utf-8") as stream:
            return stream.read(MAX_SPEC_BYTES + 1)
    except OSError as err:
        raise InvalidInput(f"cannot read {file}: {err.strerror or err}") from err
    except UnicodeDecodeError as err:
        raise InvalidInput(f"{file} is not UTF-8 text: {err}") from err


def with_absolute_paths(spec: TaskSpec, folder: Path) -> TaskSpec:
    """Return the specification with every relative path taken from ``folder``, but those in code that comes along."""
    folder = folder.resolve()
    directory = spec.checkpoint.directory
    place = {"directory": None if directory is None else str(folder / directory)}
    changes: dict[str, Any] = {"checkpoint": spec.checkpoint.model_copy(update=place)}
    if spec.code is None:
        changes |= {"data": str(folder / spec.data), "script": spec.script and str(folder / spec.script)}
    return spec.model_copy(update=changes)


def as_body(spec: TaskSpec) -> dict[str, Any]:
    """Return a specification as the JSON of a submission."""
    return spec.model_dump(mode="json", by_alias=True)
