"""Checkpoints on storage: complete or not counted, with checksums, the newest few kept.

    <root>/generation-<g>/[checkpoints/]step-<n>/manifest.json
    <root>/generation-<g>/[checkpoints/]step-<n>/part-<rank>-<k>.safetensors

A checkpoint counts once it has its manifest, which is written last: nothing is renamed, so an object store will do. The
manifest lists every file with its size, its checksum and the chunks of the state in it, so damage that comes later is
found. Everything is JSON or safetensors: reading a checkpoint runs no code that is in it.
"""

from __future__ import annotations

import glob
import json
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from unicron.checkpoint import storage
from unicron.errors import DamagedCheckpoint
from unicron.state.chunks import StateChunk

MANIFEST = "manifest.json"
"""Name of the manifest. Its checksums (XXH3) find accidental damage, not a forgery."""

FORMAT = 2
"""The format of a checkpoint. Format 1 had pickles, which run code when they are read. So another format is refused."""

_GENERATION = re.compile(r"generation-(\d+)")
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """One file of a checkpoint, in the format safetensors."""

    bytes: int
    checksum: str
    """Checksum of the file, in hexadecimal."""
    chunks: dict[str, StateChunk]
    """Name of the tensor in the file -> the chunk of the state that it contains, flat."""

    def document(self) -> dict[str, Any]:
        """Return the file's entry as JSON values."""
        return {"bytes": self.bytes, "xxh3": self.checksum, "chunks": {k: list(c) for k, c in self.chunks.items()}}

    @classmethod
    def of(cls, document: Any) -> PartFile:
        """Return the file that a JSON document describes.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it describes nothing of this kind.
        """
        chunks = {str(name): _chunk(*fields) for name, fields in document["chunks"].items()}
        return cls(bytes=int(document["bytes"]), checksum=str(document["xxh3"]), chunks=chunks)


def _chunk(key: str, global_shape: Any, offset: Any, shape: Any, start: int, stop: int, dtype: str) -> StateChunk:
    return StateChunk(
        key=str(key),
        global_shape=tuple(int(n) for n in global_shape),
        offset=tuple(int(n) for n in offset),
        shape=tuple(int(n) for n in shape),
        start=int(start),
        stop=int(stop),
        dtype=str(dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a published checkpoint."""

    step: int
    """Updates applied to the state."""
    digest: str
    """Digest of the samples of those updates, in hexadecimal."""
    files: dict[str, PartFile]
    """Name of a file -> the file."""
    order_samples: int = 0
    """The number of samples of which the order was drawn; 0: it is not known, as in a script's own loop."""


def publish(location: str, manifest: Manifest) -> None:
    """Give a checkpoint whose files are all written its manifest.

    Raises:
        OSError: the manifest cannot be written.
    """
    files = {name: file.document() for name, file in manifest.files.items()}
    document = {"format": FORMAT, "step": manifest.step, "digest": manifest.digest, "files": files}
    if manifest.order_samples:
        document["order_samples"] = manifest.order_samples
    storage.write_whole(f"{location}/{MANIFEST}", json.dumps(document, separators=(",", ":")).encode())


def read(location: str) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        DamagedCheckpoint: there is no manifest, it cannot be read, or it is of a format that is not read.
    """
    try:
        data = json.loads(storage.read(f"{location}/{MANIFEST}"))
        found = data.get("format", 1)
        if found != FORMAT:
            raise DamagedCheckpoint(
                f"{location}: written in format {found}, by another version of Unicron; this one reads format {FORMAT}"
            )
        files = {str(name): PartFile.of(file) for name, file in data["files"].items()}
        order = int(data.get("order_samples", 0))
        return Manifest(step=int(data["step"]), digest=str(data["digest"]), files=files, order_samples=order)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise DamagedCheckpoint(f"{location}: no manifest that can be read ({type(err).__name__})") from err


def verify(location: str, index: int = 0, of: int = 1) -> Manifest:
    """Check the files of a checkpoint against its manifest, and return the manifest.

    Args:
        location: the checkpoint.
        index: which of ``of`` equal shares of the files is checked: each rank checks one share.
        of: how many shares there are.

    Raises:
        DamagedCheckpoint: a file is missing, or was changed after it was written.
    """
    manifest = read(location)
    for name in sorted(manifest.files)[index::of]:
        try:
            found = storage.checksum(f"{location}/{name}")
        except OSError as err:
            raise DamagedCheckpoint(f"{location}: {name}: {err.strerror or err}") from err
        if found != (manifest.files[name].bytes, manifest.files[name].checksum):
            raise DamagedCheckpoint(f"{location}: {name} is not what was written")
    return manifest


def _number(pattern: re.Pattern[str], name: str) -> int:
    """Return the number in a folder's name; -1 if the name does not match the pattern."""
    match = pattern.fullmatch(name)
    return int(match[1]) if match else -1


def _pattern(location: str) -> str:
    """Return the pattern of the folders of all checkpoints of a checkpoint's task, of all generations."""
    inner: list[str] = []
    outer = posixpath.dirname(location)
    while outer not in ("", "/"):
        outer, name = posixpath.split(outer)
        if _number(_GENERATION, name) >= 0:
            return posixpath.join(glob.escape(outer), "generation-*", *inner, "step-*")
        if not name:
            break  # the two slashes of a URL
        inner.insert(0, name)
    return posixpath.join(glob.escape(posixpath.dirname(location)), "step-*")


def generation(location: str) -> int:
    """Return the generation that wrote a checkpoint; 0 if its location does not name one."""
    return max((_number(_GENERATION, part) for part in location.split("/")), default=0)


def step(location: str) -> int:
    """Return the step in a checkpoint's name; -1 if the name is not a checkpoint's."""
    return _number(_STEP, posixpath.basename(location))


def published(location: str) -> list[str]:
    """Return all published checkpoints of one task, the newest step first, and of one step the newest generation.

    Args:
        location: a checkpoint of the task, present or to be written.
    """
    found = [posixpath.dirname(name) for name in storage.matching(f"{_pattern(location)}/{MANIFEST}")]
    return sorted((p for p in found if step(p) >= 0), key=lambda p: (step(p), generation(p)), reverse=True)


def looks_whole(location: str) -> bool:
    """Return whether a checkpoint's manifest can be read and its files have their sizes; the contents are not read.

    Raises:
        OSError: the checkpoint's place cannot be read.
    """
    try:
        manifest = read(location)
    except DamagedCheckpoint:
        return False
    found = storage.sizes(location)
    return all(found.get(name) == file.bytes for name, file in manifest.files.items())


def retire(location: str, keep: int, protected: Iterable[str]) -> list[str]:
    """Delete the old published checkpoints of a task; return the deleted ones.

    A checkpoint counts once its event is in the log, which may be after it is published. Until then the checkpoint that
    the generation started from counts.

    Args:
        location: a checkpoint of the task.
        keep: how many steps stay: the newest ones, at least 2. A step that a later generation wrote again is one step,
            and a step without a checkpoint that looks whole does not count.
        protected: checkpoints that stay too: the one that the generation started from.
    """
    spared = {storage.canonical(p) for p in protected}
    present = published(location)
    whole: set[int] = set()
    for one in present:  # the newest come first
        if len(whole) < max(2, keep) and step(one) not in whole and looks_whole(one):
            whole.add(step(one))
    # If there are fewer whole checkpoints than are to be kept, none is deleted.
    oldest = min(whole) if len(whole) == max(2, keep) else 0
    retired = [p for p in present if step(p) < oldest and storage.canonical(p) not in spared]
    for old in retired:
        # The manifest first: a folder without a manifest does not count, so a half-deleted checkpoint is never read.
        storage.delete(f"{old}/{MANIFEST}")
        storage.delete(old)
    return retired


def clean(location: str, before: int) -> list[str]:
    """Delete the unfinished checkpoints of generations older than ``before``; return their locations.

    Args:
        location: a checkpoint of the task.
        before: the present generation.
    """
    complete = set(published(location))
    listed = storage.matching(_pattern(location))
    unfinished = [p for p in listed if step(p) >= 0 and generation(p) < before and p not in complete]
    for old in unfinished:
        storage.delete(old)
    return unfinished
