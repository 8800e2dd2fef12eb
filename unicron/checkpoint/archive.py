"""Folders of checkpoints on storage: complete or absent, with checksums, the newest few kept.

    <root>/generation-<g>/[checkpoints/]step-<n>/             published
    <root>/generation-<g>/[checkpoints/].step-<n>.partial/    being written

A folder gets its final name once it is complete. Its manifest lists every file with size and checksum, so damage that
comes later is found. The contents of the files are the business of ``unicron.checkpoint.writer`` and ``reader``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from unicron.errors import DamagedCheckpoint

MANIFEST = "manifest.json"
"""Name of the manifest, which is written last. Its checksums (XXH3) find accidental damage, not a forgery."""

READ_BYTES = 1 << 20
"""Bytes read at once for a checksum. Chosen: enough to make system calls rare, little enough for a CPU's caches."""

_GENERATION = re.compile(r"generation-(\d+)")
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a published checkpoint."""

    step: int
    """Updates applied to the state."""
    digest: str
    """Of the samples of those updates, in hexadecimal."""
    files: dict[str, tuple[int, str]]
    """File name -> size in bytes, and checksum in hexadecimal."""


def partial_path(path: Path) -> Path:
    """Return the path under which the checkpoint ``path`` is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


def checksum(path: Path) -> tuple[int, str]:
    """Return a file's size in bytes and its checksum in hexadecimal."""
    size, hasher = 0, xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            hasher.update(chunk)
    return size, hasher.hexdigest()


def publish(path: Path, manifest: Manifest) -> None:
    """Give a checkpoint, all files of which are written, its manifest and its final name; both survive a power cut."""
    partial = partial_path(path)
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"step": manifest.step, "digest": manifest.digest, "files": manifest.files}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        DamagedCheckpoint: there is no manifest, or it cannot be read.
    """
    try:
        data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in data["files"].items()}
        return Manifest(step=int(data["step"]), digest=str(data["digest"]), files=files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise DamagedCheckpoint(f"{path}: no manifest that can be read ({type(err).__name__})") from err


def verify(path: Path, index: int = 0, of: int = 1) -> Manifest:
    """Check the files of a checkpoint against its manifest, and return the manifest.

    Args:
        path: the checkpoint.
        index: which of ``of`` equal shares of the files is checked: each rank checks one share.
        of: how many shares there are.

    Raises:
        DamagedCheckpoint: a file is missing, or was changed after it was written.
    """
    manifest = read(path)
    for name in sorted(manifest.files)[index::of]:
        try:
            found = checksum(path / name)
        except OSError as err:
            raise DamagedCheckpoint(f"{path}: {name}: {err.strerror}") from err
        if found != manifest.files[name]:
            raise DamagedCheckpoint(f"{path}: {name} is not what was written")
    return manifest


def _number(pattern: re.Pattern[str], name: str) -> int:
    """Return the number in a folder's name; -1 if the name does not match the pattern."""
    match = pattern.fullmatch(name)
    return int(match[1]) if match else -1


def _siblings_pattern(path: Path) -> tuple[Path, str]:
    """Return the folder of all generations of a checkpoint's task, and the pattern of checkpoints' parents in it."""
    for parent in path.parents:
        if _number(_GENERATION, parent.name) >= 0:
            return parent.parent, str(Path("generation-*") / path.relative_to(parent).parent)
    return path.parent, "."


def generation(path: Path) -> int:
    """Return the generation that wrote a checkpoint; 0 if its path does not name one."""
    return max((_number(_GENERATION, part) for part in path.parts), default=0)


def step(path: Path) -> int:
    """Return the step in a checkpoint's name; -1 if the name is not a checkpoint's."""
    return _number(_STEP, path.name)


def published(path: Path) -> list[Path]:
    """Return all published checkpoints of one task, the newest step first, and of one step the newest generation.

    Args:
        path: a checkpoint of the task, present or to be written.
    """
    root, pattern = _siblings_pattern(path)
    found = [p for p in root.glob(f"{pattern}/step-*") if step(p) >= 0 and (p / MANIFEST).is_file()]
    return sorted(found, key=lambda p: (step(p), generation(p)), reverse=True)


def retire(path: Path, keep: int, protected: Iterable[Path]) -> list[Path]:
    """Delete the old published checkpoints of a task; return the deleted ones.

    A checkpoint counts once its event is in the log, which may be after it is published. Until then the checkpoint that
    the generation started from counts.

    Args:
        path: a checkpoint of the task.
        keep: how many steps stay: the newest ones, at least 2. A step that a later generation wrote again is one step.
        protected: checkpoints that stay too: the one that the generation started from.
    """
    spared = {p.resolve() for p in protected}
    steps = sorted({step(p) for p in published(path)}, reverse=True)[: max(2, keep)]
    retired = [p for p in published(path) if step(p) not in steps and p.resolve() not in spared]
    for old in retired:
        # The manifest first: a folder without a manifest does not count, so a half-deleted checkpoint is never read.
        (old / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
    return retired


def clean(path: Path, before: int) -> list[Path]:
    """Delete the unfinished checkpoints of generations older than ``before``; return their paths.

    Args:
        path: a checkpoint of the task.
        before: the present generation.
    """
    root, pattern = _siblings_pattern(path)
    unfinished = [p for p in root.glob(f"{pattern}/.step-*.partial") if generation(p) < before]
    for old in unfinished:
        shutil.rmtree(old, ignore_errors=True)
    return unfinished
