"""In-memory copies of a task's state as files in shared memory: whole, or not there.

A copy is one rank's part of the state of one step. It is written in place into one of two slots, so a reader must be
able to tell a torn one: the header is marked invalid first and valid last, and holds a checksum over everything.

    header   magic, valid, checksum, step, generation, rank, world size, digest, sizes
    meta     JSON: the task's identity, and for each piece of state its fields and where it begins
    payload  the values, each piece aligned
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from unicron.errors import TornCopy

_HEADER = struct.Struct("<8sI16sqqII32sQQ")
_MAGIC = b"unicron1"
Hasher = xxhash.xxh3_128
"""Takes the checksum in a twentieth of the time of zlib's CRC-32 (0.09 against 2.1 ms for 5 MB, by timeit), which cost
training more than the copying did. It finds what hardware does by accident and is no protection from intent."""

ALIGNMENT_BYTES = 64
"""Of the payload and of each piece in it: a cache line, and a multiple of every number's size."""

_VALID = struct.Struct("<I")
_VALID_AT = len(_MAGIC)
_NAME = re.compile(r"(\d+)-(\d+)-[01]\.copy")


def aligned(size: int) -> int:
    """Return a size in bytes, rounded up to ``ALIGNMENT_BYTES``."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def name(generation: int, rank: int, slot: int) -> str:
    """Return the file name of one of the two slots of a rank's copies."""
    return f"{generation}-{rank}-{slot}.copy"


def is_name(text: str) -> bool:
    """Return whether a text is a copy's file name, and no path to elsewhere."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What every copy of one rank in one generation has in common.

    ``pieces``: (fields of the piece, size in bytes) in the order of the payload. ``identity``: of the task's
    specification; a copy of another one is never used.
    """

    generation: int
    rank: int
    world_size: int
    identity: str
    pieces: tuple[tuple[tuple[Any, ...], int], ...]

    def offsets(self) -> list[int]:
        """Return where each piece begins in the payload."""
        offsets, at = [], 0
        for _, size in self.pieces:
            offsets.append(at)
            at += aligned(size)
        return offsets

    @property
    def payload_bytes(self) -> int:
        """Size of the payload."""
        return sum(aligned(size) for _, size in self.pieces)

    def meta(self) -> bytes:
        """Return the JSON between header and payload, padded so that the payload is aligned."""
        listed = [[*fields, size] for fields, size in self.pieces]
        text = json.dumps({"identity": self.identity, "pieces": listed}, separators=(",", ":")).encode()
        return text + b" " * (aligned(_HEADER.size + len(text)) - _HEADER.size - len(text))


class Slot:
    """One of the two files that a rank's copies go to in turn."""

    def __init__(self, path: Path, layout: Layout) -> None:
        """Make the file.

        Raises:
            OSError: there is no room in shared memory.
        """
        self._layout, meta = layout, layout.meta()
        self._meta_bytes = len(meta)
        self.path = path
        start = _HEADER.size + len(meta)
        self._map = allocate(path, start + layout.payload_bytes)
        self._map[_HEADER.size : start] = meta
        self.content = memoryview(self._map)
        self.payload = self.content[start:]
        self.begin()

    def begin(self) -> None:
        """Declare what the slot holds torn: it is about to be overwritten."""
        _VALID.pack_into(self._map, _VALID_AT, 0)
        self._hasher, self._hashed = Hasher(), _HEADER.size

    @property
    def is_whole(self) -> bool:
        """Whether it holds a whole copy."""
        return bool(_VALID.unpack_from(self._map, _VALID_AT)[0])

    def written(self, stop: int) -> None:
        """Take note that the payload is there up to a byte: it is hashed while the processor's caches have it."""
        stop += len(self.content) - len(self.payload)
        self._hasher.update(self.content[self._hashed : stop])  # gives up the interpreter's lock
        self._hashed = stop

    def seal(self, step: int, digest: bytes) -> None:
        """Declare the payload whole."""
        layout = self._layout
        self.written(len(self.payload))
        rest = (step, layout.generation, layout.rank, layout.world_size, digest, self._meta_bytes, len(self.payload))
        _HEADER.pack_into(self._map, 0, _MAGIC, 0, _checksum(self._hasher, rest), *rest)
        _VALID.pack_into(self._map, _VALID_AT, 1)


def _checksum(hasher: Hasher, rest: tuple[Any, ...]) -> bytes:
    """Return a copy's checksum: over meta, payload and the header's fields after the checksum."""
    hasher.update(_HEADER.pack(_MAGIC, 0, b"", *rest))
    return hasher.digest()


def allocate(path: Path, size: int) -> mmap.mmap:
    """Map a file of a size, new or overwritten, whose memory is reserved: writing to it cannot fail later.

    Raises:
        OSError: there is no room.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        # Without it a full file system shows when the memory is written to, and ends the process (SIGBUS).
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


HEADER_BYTES = _HEADER.size
"""Who receives a copy writes these last: until then what is there is torn."""


def tear(mapping: mmap.mmap) -> None:
    """Mark what a mapped file holds as torn."""
    _VALID.pack_into(mapping, _VALID_AT, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A whole copy. ``pieces``: the fields of each piece -> its bytes, writable without effect on the file."""

    path: Path
    step: int
    generation: int
    rank: int
    world_size: int
    digest: str
    identity: str
    pieces: Mapping[tuple[Any, ...], memoryview]


def read(path: Path) -> Copy:
    """Read and check a copy.

    Raises:
        TornCopy: it is not whole, or not what was written.
    """
    try:
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        magic, valid, checksum, step, generation, rank, world_size, digest, meta_bytes, payload_bytes = (
            _HEADER.unpack_from(mapping)
        )
        start = _HEADER.size + meta_bytes
        if magic != _MAGIC or valid != 1 or len(mapping) != start + payload_bytes:
            raise TornCopy(f"{path}: torn")
        view = memoryview(mapping)
        rest = (step, generation, rank, world_size, digest, meta_bytes, payload_bytes)
        hasher = Hasher()
        hasher.update(view[_HEADER.size :])
        if _checksum(hasher, rest) != checksum:
            raise TornCopy(f"{path}: not what was written")
        data = json.loads(bytes(view[_HEADER.size : start]))
        pieces: dict[tuple[Any, ...], memoryview] = {}
        at = start
        for *fields, size in data["pieces"]:
            pieces[tuple(tuple(f) if isinstance(f, list) else f for f in fields)] = view[at : at + size]
            at += aligned(size)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as err:
        raise TornCopy(f"{path}: {type(err).__name__}: {err}") from err
    return Copy(
        path=path,
        step=step,
        generation=generation,
        rank=rank,
        world_size=world_size,
        digest=digest.hex(),
        identity=data["identity"],
        pieces=pieces,
    )


def held(folder: Path, identity: str, before: int, *, index: int = 0, of: int = 1) -> tuple[list[Copy], list[str]]:
    """Return the whole copies in a folder of a task's generations before one, and why others are not used.

    Args:
        folder: of the node.
        identity: the task's.
        before: the generation.
        index: which share of the files is read, of ``of``: each is read, and checked, by one of the node's ranks.
        of: how many shares there are.
    """
    found: list[Copy] = []
    refused: list[str] = []
    for path in sorted(folder.glob("*.copy"))[index::of]:
        try:
            copy = read(path)
        except TornCopy as err:
            refused.append(str(err))
            continue
        if copy.identity == identity and copy.generation < before:
            found.append(copy)
    return found, refused


def partners(places: Sequence[tuple[str, str]]) -> list[int | None]:
    """Return for each rank the one that keeps a second copy of its part.

    It is in another failure domain where there is one, else on another node, else nobody: no single failure domain
    (or node) then holds all copies of a part. Ranks are chosen evenly, the next ones first.

    Args:
        places: (node, failure domain) of each rank.
    """
    given = [0] * len(places)
    answer: list[int | None] = []
    for rank, (node, domain) in enumerate(places):
        others = [r for r, (_, d) in enumerate(places) if d != domain]
        others = others or [r for r, (n, _) in enumerate(places) if n != node]
        chosen = min(others, key=lambda r: (given[r], (r - rank) % len(places)), default=None)
        if chosen is not None:
            given[chosen] += 1
        answer.append(chosen)
    return answer


def remove(folder: Path, before: int) -> None:
    """Delete the copies of generations before one."""
    for path in folder.glob("*.copy"):
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) < before:
            path.unlink(missing_ok=True)
