"""Which paths on the nodes a submission may name (``input_dirs``).

A script is code, and data is read, with the rights of the task's processes. Who operates the cluster may name any path;
who may only submit, those below the directories that the operator names. What links there lead to, the nodes check
(``CheckInputs.directories``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from services.api.access.access import Actor
from shared.service.tokens import Scope
from shared.tasks.specification import TaskSpec, refused

LOCAL_SCHEMES = frozenset({"file", "local"})
"""Schemes of fsspec for the machine's own files."""


def directories(actor: Actor, allowed: Sequence[Path]) -> list[Path] | None:
    """Return the directories below which a submission's paths have to be; None: any path is allowed."""
    return None if actor.scope.includes(Scope.OPERATE) else list(allowed)


def check_paths(spec: TaskSpec, actor: Actor, allowed: Sequence[Path]) -> None:
    """Refuse a specification that names a path which its actor may not use.

    Args:
        spec: with absolute paths.
        actor: who submits it.
        allowed: the setting.

    Raises:
        InvalidInput: with field, value and what is allowed.
    """
    below = directories(actor, allowed)
    if below is None:
        return
    where = ", ".join(map(str, below)) or "none: the operator names some with UNICRON_INPUT_DIRS"
    text = f"{actor.name} may name paths below these directories only: {where}"
    if wrong := [(field, path, text) for field, path in _paths(spec) if not _is_below(path, below)]:
        raise refused(wrong)


def _paths(spec: TaskSpec) -> Iterator[tuple[str, str]]:
    """Yield field and value of each path in a specification."""
    yield "data", spec.data
    if spec.script is not None:
        yield "script", spec.script
    if spec.python is not None:
        yield "python", spec.python
    place = spec.checkpoint
    if place.directory is not None:
        yield "checkpoint.directory", place.directory
    if place.url is not None and urlsplit(place.url).scheme in LOCAL_SCHEMES:
        yield "checkpoint.url", urlsplit(place.url).path


def _is_below(path: str, allowed: Sequence[Path]) -> bool:
    normal = Path(os.path.normpath(path))
    return any(normal.is_relative_to(directory) for directory in allowed)
