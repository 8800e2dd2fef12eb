"""Resources that a process lacks where its own call failed: descriptors, memory, room on a file system, threads, ports.

Such an error may be an exception of Python, or text from torch, gloo or NCCL, often in the words of a failed
connection. But it says which process is to blame: the one whose call it was, and not the peer to which it was
connecting.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from typing import NamedTuple

OPEN_FILES, MACHINE_FILES, MEMORY, ROOM, THREADS, PORTS = (
    "open files",
    "open files of the machine",
    "memory",
    "room",
    "threads",
    "ports",
)
"""Names of resources, for people."""

_BY_NUMBER = {
    errno.EMFILE: OPEN_FILES,
    errno.ENFILE: MACHINE_FILES,
    errno.ENOMEM: MEMORY,
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EAGAIN: THREADS,
    errno.EADDRINUSE: PORTS,
}
"""Errors of system calls. ``EAGAIN`` reaches a script only from those that start a process or a thread."""

_BY_TEXT = (
    (re.compile(r"Too many open files in system"), MACHINE_FILES),
    (re.compile(r"Too many open files|\bEMFILE\b"), OPEN_FILES),
    (re.compile(r"can't start new thread|Resource temporarily unavailable|\bEAGAIN\b"), THREADS),
    (re.compile(r"Cannot allocate memory|can't allocate memory|std::bad_alloc|\bENOMEM\b"), MEMORY),
    (re.compile(r"No space left on device|Disk quota exceeded|\bENOSPC\b"), ROOM),
    (re.compile(r"Address already in use|\bEADDRINUSE\b"), PORTS),
)
"""The lacks in glibc's words (``strerror``), by which libraries in native code report them."""

_OF_PEERS = re.compile(r"by peer|Connection (refused|reset|timed out)|Timed out waiting|Broken pipe")
"""Texts of native code about a peer that was lost. Any other text may hide that a descriptor was lacking: gloo without
one says that it cannot resolve an address of its own."""

_NO_LIMIT = "unlimited"

RAISED_OPEN_FILES = 65_536
"""Number to which a process raises its limit of descriptors, as far as it may, where it needs more than it may have."""


class Lack(NamedTuple):
    """A resource that a process lacks. ``limit``: how much of it there may be, in words; empty: not known."""

    resource: str
    limit: str

    def __str__(self) -> str:
        """Return a sentence for the reader of an incident."""
        return f"this process lacks {self.resource}" + (f": {self.limit}" if self.limit else "")


def lack_of(error: BaseException) -> Lack | None:
    """Return what the process that raised an error lacks; None if the error shows nothing of the kind.

    Looking needs neither a descriptor nor a thread, of which there may be none left.
    """
    for one in _chain(error):
        path = ""
        if isinstance(one, OSError):
            found = _BY_NUMBER.get(one.errno or 0)
            path = one.filename if isinstance(one.filename, str) else ""
        elif isinstance(one, MemoryError):
            found = MEMORY
        elif isinstance(one, RuntimeError | ImportError):
            text = str(one)
            found = next((name for pattern, name in _BY_TEXT if pattern.search(text)), None)
            if found is None and isinstance(one, RuntimeError) and not _OF_PEERS.search(text) and _has_no_descriptor():
                found = OPEN_FILES
            if found is MEMORY and "CUDA" in text:
                found = None  # memory of a device is another matter
        else:
            found = None
        if found is not None:
            return Lack(found, _limit(found, path))
    return None


def need_open_files(more: int, what: str) -> None:
    """Raise the limit of this process's descriptors, if what it has and what it is about to open need that.

    Args:
        more: the number that it is about to open.
        what: what for, for the reader of an incident.

    Raises:
        OSError: it may not have as many, also with the highest limit that it may set (``EMFILE``).
    """
    has = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or has + more <= soft:
        return
    raised = max(has + more, RAISED_OPEN_FILES)
    allowed = raised if hard == resource.RLIM_INFINITY else min(hard, raised)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if has + more > allowed:
        raise OSError(errno.EMFILE, f"{what}: {more} open files beside the {has} that there are")


def _has_no_descriptor() -> bool:
    """Return whether this process can open nothing more."""
    try:
        os.close(os.dup(0))
    except OSError as err:
        return err.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it follows from, the innermost last."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [one.__cause__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def _limit(name: str, path: str) -> str:
    """Return how much there may be of a resource, as far as the kernel says so without a descriptor."""
    if name is OPEN_FILES:
        return f"{_soft(resource.RLIMIT_NOFILE)} at most (RLIMIT_NOFILE)"
    if name is THREADS:
        return f"{_soft(resource.RLIMIT_NPROC)} of its user at most (RLIMIT_NPROC), or the control group's pids.max"
    if name is MEMORY:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        address_space = _soft(resource.RLIMIT_AS)
        said = f"; {address_space} bytes at most (RLIMIT_AS)" if address_space != _NO_LIMIT else ""
        return f"the machine has {total} bytes{said}, and the control group may have a limit (memory.max)"
    if name is ROOM:
        return _room(path)
    return ""


def _soft(number: int) -> str:
    soft, _ = resource.getrlimit(number)
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else str(soft)


def _room(path: str) -> str:
    """Return the file system's answer for a path, which may not exist yet."""
    folder = path
    while folder:
        try:
            found = os.statvfs(folder)
        except OSError:
            parent = os.path.dirname(folder)
            folder = parent if parent != folder else ""
            continue
        return f"{found.f_bavail * found.f_frsize} of {found.f_blocks * found.f_frsize} bytes free below {folder}"
    return ""
