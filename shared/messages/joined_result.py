"""A result of several files, read as the one file that they make: safetensors, all tensors behind one header. Pure.

Ranks write a large result as several files of whole tensors, with an index (``unicron.checkpoint.export``). A client
that fetches it gets one file all the same: the joined header, and then the data of all files, which lie as they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, NonNegativeInt, TypeAdapter

HEADER_BYTES = 16 << 20
"""Largest header, and index, that is read: a user's processes write them. Chosen: enough for 100,000 tensors."""

LENGTH = struct.Struct("<Q")
"""The number before a header: its length."""

_ALIGNMENT_BYTES = 8
"""The header's length is a multiple of this (the format's rule)."""


class _Tensor(BaseModel):
    dtype: str
    shape: list[NonNegativeInt]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


class _Index(BaseModel):
    weight_map: dict[str, str]


_TENSORS = TypeAdapter(dict[str, _Tensor])


class Part(NamedTuple):
    """One of the files."""

    name: str
    version: str
    """A text that changes when the file is changed."""
    data_begin: int
    """The place in the file at which its tensors' numbers begin, behind the header."""
    data_bytes: int


class JoinedResult(NamedTuple):
    """The files as one."""

    header: bytes
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the one file."""
        return len(self.header) + sum(part.data_bytes for part in self.parts)

    def spans(self, offset: int, limit: int) -> Iterator[tuple[Part | None, int, int]]:
        """Yield where a range of the one file lies: in which part (None: the header), from where on, and how long."""
        begin = 0
        pieces = ((part, part.data_begin, part.data_bytes) for part in self.parts)
        for part, skipped, length in [(None, 0, len(self.header)), *pieces]:
            first, end = max(offset, begin), min(offset + limit, begin + length)
            if first < end:
                yield part, skipped + first - begin, end - first
            begin += length


def names_in(index: bytes) -> list[str]:
    """Return the files that an index lists, in their order.

    Raises:
        ValueError: the text is no index of such a result.
    """
    names = sorted(set(_Index.model_validate_json(index).weight_map.values()))
    count = len(names)
    if not names or names != [f"parameters-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]:
        raise ValueError("the index lists other files than those of one result")
    return names


def join(files: Sequence[tuple[str, str, int, bytes]]) -> JoinedResult:
    """Return files as one.

    Args:
        files: name, version, size in bytes and header (without its length) of each, in their order.

    Raises:
        ValueError: a header is not one of the format, or does not describe its file.
    """
    tensors: dict[str, dict[str, Any]] = {}
    parts: list[Part] = []
    begin = 0
    for name, version, size_bytes, header in files:
        data_begin = LENGTH.size + len(header)
        data_bytes = size_bytes - data_begin
        for key, tensor in _TENSORS.validate_json(header).items():
            first, end = tensor.data_offsets
            if key in tensors or not first <= end <= data_bytes:
                raise ValueError(f"{name}: its header does not describe it")
            tensors[key] = tensor.model_dump() | {"data_offsets": [begin + first, begin + end]}
        parts.append(Part(name, version, data_begin, data_bytes))
        begin += data_bytes
    encoded = json.dumps(tensors, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    return JoinedResult(LENGTH.pack(len(encoded)) + encoded, tuple(parts))
