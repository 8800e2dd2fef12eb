"""The files of one rank's part of a checkpoint, in the format safetensors: chunks of the state, flat.

The format is that of https://github.com/huggingface/safetensors#format. Its library reads the files. This module writes
the files itself, since the library copies every tensor while it has the interpreter's lock, which delays training.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Protocol

import safetensors
import safetensors.torch
import torch
import xxhash

from unicron.checkpoint import storage
from unicron.checkpoint.archive import PartFile
from unicron.errors import UnicronError
from unicron.state.chunks import StateChunk, dtype_of, name_of

FILE_BYTES = 256 << 20
"""Size at which a further file begins. Chosen: a reader of an object store has one file in memory; far larger than what
a request costs."""

_ALIGNMENT_BYTES = 8
"""The header's length is a multiple of this, so that numbers in a mapped file are aligned (the format's rule)."""

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Torch's name of a type of numbers -> the format's."""

Chunks = Mapping[StateChunk, torch.Tensor]
"""Chunks of the state and their values, flat, in the memory of the CPU."""


class _Writable(Protocol):
    """The target to which bytes are written."""

    def write(self, content: Any, /) -> Any:
        """Write bytes."""


class _Hashed:
    """A file that is hashed while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hasher, self.bytes = file, xxhash.xxh3_128(), 0

    def write(self, content: Any) -> None:
        """Write bytes."""
        view = memoryview(content)
        self._hasher.update(view)
        self._file.write(view)
        self.bytes += view.nbytes

    def checksum(self) -> str:
        """Return the checksum of what was written, in hexadecimal."""
        return self._hasher.hexdigest()


def write(location: str, rank: int, chunks: Chunks) -> dict[str, PartFile]:
    """Write a rank's part of a checkpoint; return its files, by name.

    Args:
        location: the checkpoint's.
        rank: the rank.
        chunks: the part.

    Raises:
        OSError: a file cannot be written.
        UnicronError: the format has no such type of numbers.
    """
    files: dict[str, PartFile] = {}
    for number, group in enumerate(_groups(chunks)):
        name = f"part-{rank}-{number}.safetensors"
        files[name] = _write_file(f"{location}/{name}", group)
    return files


def _groups(chunks: Chunks) -> Iterator[dict[str, tuple[StateChunk, torch.Tensor]]]:
    """Yield the chunks of one file after the other, each by the name of its tensor."""
    group: dict[str, tuple[StateChunk, torch.Tensor]] = {}
    size = 0
    for index, (chunk, values) in enumerate(chunks.items()):
        if group and size + chunk.bytes > FILE_BYTES:
            yield group
            group, size = {}, 0
        group[f"{index}/{chunk.key}"] = (chunk, values)
        size += chunk.bytes
    if group:
        yield group


def _write_file(location: str, group: dict[str, tuple[StateChunk, torch.Tensor]]) -> PartFile:
    written: list[_Hashed] = []

    def fill(file: IO[bytes]) -> None:
        hashed = _Hashed(file)
        written.append(hashed)
        write_tensors(hashed, {name: values for name, (_, values) in group.items()})

    storage.write(location, fill)
    chunks = {name: chunk for name, (chunk, _) in group.items()}
    return PartFile(bytes=written[0].bytes, checksum=written[0].checksum(), chunks=chunks)


def write_tensors(file: _Writable, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file, in their order.

    Args:
        file: the file to write to.
        tensors: contiguous, in the memory of the CPU.

    Raises:
        OSError: the file cannot be written.
        UnicronError: the format has no such type of numbers.
    """
    write_header(file, {name: (name_of(values.dtype), tuple(values.shape)) for name, values in tensors.items()})
    for values in tensors.values():
        write_values(file, values)


def write_header(file: _Writable, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write the header that comes before the tensors, which follow in this order.

    Args:
        file: the file to write to.
        tensors: name of a tensor -> its type of numbers, as torch names it, and its shape.

    Raises:
        OSError: the file cannot be written.
        UnicronError: the format has no such type of numbers.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        check_type(name, dtype)
        start, end = end, end + math.prod(shape) * dtype_of(dtype).itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    file.write(struct.pack("<Q", len(encoded)))
    file.write(encoded)


def check_type(name: str, dtype: str) -> None:
    """Check that the format has a tensor's type of numbers.

    Raises:
        UnicronError: the format does not have it.
    """
    if dtype not in _DTYPES:
        raise UnicronError(f"{name}: numbers of type {dtype} cannot be saved")


def write_values(file: _Writable, values: torch.Tensor) -> None:
    """Write the numbers of a tensor, which is contiguous and in the memory of the CPU.

    Raises:
        OSError: the file cannot be written.
    """
    file.write(values.reshape(-1).view(torch.uint8).numpy())


@contextlib.contextmanager
def reading(location: str) -> Iterator[Callable[[str], torch.Tensor]]:
    """Open a file; yield a function that returns a tensor of it by name.

    Raises:
        OSError: the file cannot be read.
    """
    with storage.local_copy(location) as found:
        if isinstance(found, bytes):
            tensors = safetensors.torch.load(found)
            yield tensors.__getitem__
        else:
            with safetensors.safe_open(found, framework="pt") as file:
                yield file.get_tensor


def record_of(rank: int) -> str:
    """Return the name of the file in which a rank tells rank 0 what it has written, for the manifest."""
    return f"part-{rank}.json"


def write_record(location: str, rank: int, files: Mapping[str, PartFile]) -> None:
    """Tell rank 0 that a rank's part is written.

    Raises:
        OSError: the record cannot be written.
    """
    document = {name: file.document() for name, file in files.items()}
    storage.write_whole(f"{location}/{record_of(rank)}", json.dumps(document, separators=(",", ":")).encode())


def read_record(location: str, rank: int) -> dict[str, PartFile]:
    """Return what a rank has written.

    Raises:
        OSError: there is no record that can be read.
    """
    document = json.loads(storage.read(f"{location}/{record_of(rank)}"))
    return {str(name): PartFile.of(file) for name, file in document.items()}
