"""Checkpoint folders on disk: complete or absent, checked against their checksums, the newest few kept.

    <root>/generation-<g>/[checkpoints/]step-<n>/             published
    <root>/generation-<g>/[checkpoints/].step-<n>.partial/    being written

A folder with its final name has been complete once: its manifest names every file with size and checksum. What the
files hold is ``unicron.checkpoint``'s affair.
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
"""Written last. Its checksums (XXH3) find what disks do by accident; they are no protection from intent."""

CHUNK_BYTES = 1 << 20
"""Read at once for a checksum: large beside a system call, small beside the caches."""

_GENERATION = re.compile(r"generation-(\d+)")
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published checkpoint holds: ``files`` maps a name to its size in bytes and its checksum."""

    step: int
    digest: str
    files: dict[str, tuple[int, str]]


def torso(path: Path) -> Path:
    """Return the name under which a checkpoint is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


def checksum(path: Path) -> tuple[int, str]:
    """Return a file's size in bytes and its checksum in hexadecimal."""
    size, hasher = 0, xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            hasher.update(chunk)
    return size, hasher.hexdigest()


def publish(path: Path, manifest: Manifest) -> None:
    """Give a checkpoint whose parts are all written its manifest and its final name; both survive a power cut."""
    partial = torso(path)
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
        DamagedCheckpoint: there is none, or it is not one.
    """
    try:
        data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(size), str(found)) for name, (size, found) in data["files"].items()}
        return Manifest(step=int(data["step"]), digest=str(data["digest"]), files=files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise DamagedCheckpoint(f"{path}: no manifest that can be read ({type(err).__name__})") from err


def verify(path: Path, share: int = 0, of: int = 1) -> Manifest:
    """Check every ``of``-th file of a checkpoint, from file ``share`` on, against the manifest, and return that.

    Raises:
        DamagedCheckpoint: a file is missing, or is not what was written.
    """
    manifest = read(path)
    for name in sorted(manifest.files)[share::of]:
        try:
            found = checksum(path / name)
        except OSError as err:
            raise DamagedCheckpoint(f"{path}: {name}: {err.strerror}") from err
        if found != manifest.files[name]:
            raise DamagedCheckpoint(f"{path}: {name} is not what was written")
    return manifest


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else -1


def _place(path: Path) -> tuple[Path, str]:
    """Return the folder that holds all generations of a checkpoint's task, and the pattern of checkpoints in it."""
    for parent in path.parents:
        if _number(_GENERATION, parent.name) >= 0:
            return parent.parent, str(Path("generation-*") / path.relative_to(parent).parent)
    return path.parent, "."


def generation(path: Path) -> int:
    """Return the generation that wrote a checkpoint; 0 where folders do not say."""
    return max((_number(_GENERATION, part) for part in path.parts), default=0)


def step(path: Path) -> int:
    """Return the step in a checkpoint's name, -1 if it is no checkpoint's."""
    return _number(_STEP, path.name)


def published(path: Path) -> list[Path]:
    """Return all published checkpoints of the task that ``path`` is (or will be) one of, the newest step first.

    Of one step written twice the later generation's comes first.
    """
    root, pattern = _place(path)
    found = [p for p in root.glob(f"{pattern}/step-*") if step(p) >= 0 and (p / MANIFEST).is_file()]
    return sorted(found, key=lambda p: (step(p), generation(p)), reverse=True)


def retire(path: Path, keep: int, protected: Iterable[Path]) -> list[Path]:
    """Delete all published checkpoints of a task but the newest ``keep`` and ``protected``; return the deleted.

    A checkpoint counts once the log names it, which may be later than it is published: that is why the one a
    generation started from is to be protected, and why ``keep`` is never taken as less than 2.
    """
    spared = {p.resolve() for p in protected}
    # Two newest of *steps*: a step written again by a later generation is one checkpoint, not two.
    steps = sorted({step(p) for p in published(path)}, reverse=True)[: max(2, keep)]
    gone = [p for p in published(path) if step(p) not in steps and p.resolve() not in spared]
    for old in gone:
        # Without its manifest it is no checkpoint any more: one half deleted is never taken for whole.
        (old / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
    return gone


def clean(path: Path, before: int) -> list[Path]:
    """Delete what generations older than ``before`` left unfinished; return it."""
    root, pattern = _place(path)
    left = [p for p in root.glob(f"{pattern}/.step-*.partial") if generation(p) < before]
    for old in left:
        shutil.rmtree(old, ignore_errors=True)
    return left
