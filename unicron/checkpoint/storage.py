"""Files of checkpoints: in a directory, or below an fsspec URL. This is the one place that knows how they are reached.

A *location* is text: an absolute path, or a URL of a file system that fsspec knows.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

READ_BYTES = 1 << 20
"""Bytes read at once for a checksum. Chosen: enough to make system calls rare, little enough for a CPU's caches."""


S3_CONFIG = {"connect_timeout": 5.0, "read_timeout": 30.0, "retries": {"max_attempts": 3}}
"""Limits of botocore, seconds and attempts. Botocore's own (60 s, 5 attempts) are longer than a rank may stand still
when it waits for the checkpoint of a stop (``slow_region_timeout_s``, 120 s)."""


def is_url(location: str) -> bool:
    """Return whether a location is a URL, rather than a path."""
    return "://" in location


def opened(location: str) -> tuple[Any, str]:
    """Return the fsspec file system of a location, and its path there.

    Raises:
        ImportError: the file system's package is not installed.
        ValueError: there is no such file system.
    """
    # Other nodes write too: no listing may be older than the question.
    options: dict[str, Any] = {"use_listings_cache": False}
    if location.startswith("s3://"):
        options["config_kwargs"] = S3_CONFIG
    fs, path = fsspec.core.url_to_fs(location, **options)
    return fs, path


def write(location: str, filling: Callable[[IO[bytes]], None]) -> None:
    """Write a file; it survives a power cut once this returns.

    Args:
        location: the file's; the folder is made if need be.
        filling: writes the content.

    Raises:
        OSError: the file cannot be written.
    """
    fs, path = opened(location)
    is_local = isinstance(fs, LocalFileSystem)
    if is_local:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with fs.open(path, "wb") as file:
        filling(file)
        if is_local:
            file.flush()
            os.fsync(file.fileno())


def write_whole(location: str, content: bytes) -> None:
    """Write a small file that nobody ever sees in part.

    Raises:
        OSError: the file cannot be written.
    """
    fs, path = opened(location)
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(path, content)  # an object store shows an object once it is complete
        return
    write_aside(path, functools.partial(fill, content=content))


def write_aside(path: str, filling: Callable[[IO[bytes]], None]) -> None:
    """Write a local file that nobody ever sees in part; it survives a power cut once this returns.

    If the file cannot be written, nothing is left of it: on a full disk others need the room.

    Args:
        path: the file's; the folder is made if need be.
        filling: writes the content.

    Raises:
        OSError: the file cannot be written.
    """
    partial = f"{path}.partial"
    try:
        write(partial, filling)
        os.replace(partial, path)
    except BaseException:
        delete(partial)
        raise
    sync(os.path.dirname(path))


def fill(file: IO[bytes], content: bytes) -> None:
    """Write all of a file."""
    file.write(content)


def sync(path: str | Path) -> None:
    """Have the kernel write a local file, or the names of the files in a folder, to the disk.

    Raises:
        OSError: the kernel cannot.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(location: str) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read.
    """
    fs, path = opened(location)
    content: bytes = fs.cat_file(path)
    return content


@contextlib.contextmanager
def local_copy(location: str) -> Iterator[str | bytes]:
    """Yield the path of a local file, or the content of any other file.

    Raises:
        OSError: it cannot be read.
    """
    fs, path = opened(location)
    yield path if isinstance(fs, LocalFileSystem) else fs.cat_file(path)


def checksum(location: str) -> tuple[int, str]:
    """Return a file's size in bytes and its checksum (XXH3) in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    fs, path = opened(location)
    size, hasher = 0, xxhash.xxh3_128()
    with fs.open(path, "rb") as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            hasher.update(chunk)
    return size, hasher.hexdigest()


def sizes(location: str) -> dict[str, int]:
    """Return the files in a folder: name -> bytes. The mapping is empty if there is no such folder."""
    fs, path = opened(location)
    try:
        listed = fs.ls(path, detail=True)
    except FileNotFoundError:
        return {}
    return {posixpath.basename(file["name"]): int(file["size"]) for file in listed if file["type"] == "file"}


def matching(pattern: str) -> list[str]:
    """Return the locations of the files and folders that match a pattern, sorted."""
    fs, path = opened(pattern)
    found = [str(name) for name in fs.glob(path)]
    return sorted(fs.unstrip_protocol(name) if is_url(pattern) else name for name in found)


def delete(location: str) -> None:
    """Delete a file, or a folder with all that is in it; a failure leaves it where it is."""
    with contextlib.suppress(OSError):
        fs, path = opened(location)
        fs.rm(path, recursive=True)


def canonical(location: str) -> str:
    """Return a location in the form in which two names of one file are equal."""
    return location if is_url(location) else os.path.realpath(location)
