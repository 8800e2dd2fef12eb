"""The file system that has the run directory: whether its locks count on every machine that sees it. Pure.

The log is an SQLite file there, which processes of one machine alone may open. The lock of the run directory sees to
that, and SQLite's own locks keep these processes from damaging the file (https://www.sqlite.org/faq.html#q5).
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LOCAL_LOCKS: dict[str, re.Pattern[str]] = {
    "nfs": re.compile(r"nolock|local_lock=(?!none)\w+"),
    "nfs4": re.compile(r"local_lock=(?!none)\w+"),
    "lustre": re.compile(r"localflock|noflock"),
    "cifs": re.compile(r"nobrl"),
    "smb3": re.compile(r"nobrl"),
}
"""Kind of a file system -> options with which a lock counts on one machine: nfs(5), mount.lustre(8), mount.cifs(8)."""

_NO_LOCKS = frozenset(
    {"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.rclone", "fuse.mountpoint-s3", "fuse.blobfuse2"}
)
"""Kinds that know no lock of another machine's."""


class Mount(NamedTuple):
    """A mounted file system: where, of which kind, with which options."""

    at: str
    kind: str
    options: tuple[str, ...]


def mount_of(path: str, mounts: str) -> Mount | None:
    """Return the file system that a path is on; None: the table does not say.

    Args:
        path: absolute, without links.
        mounts: the table of mounted file systems, as ``/proc/self/mounts`` has it (proc_mounts(5)).
    """
    found = None
    for line in mounts.splitlines():
        _, at, kind, options = (_unescaped(field) for field in line.split(" ")[:4])
        if path == at or path.startswith(f"{at.rstrip('/')}/"):
            if found is None or len(at) >= len(found.at):  # the last one of a place hides those before
                found = Mount(at, kind, tuple(options.split(",")))
    return found


def without_locks(mount: Mount) -> str:
    """Return why locks on a file system do not keep other machines out; empty: nothing is known against them."""
    if mount.kind in _NO_LOCKS:
        return f"{mount.kind} has no locks that count on other machines"
    pattern = _LOCAL_LOCKS.get(mount.kind)
    local = [option for option in mount.options if pattern is not None and pattern.fullmatch(option)]
    return f"with the option {local[0]} of {mount.kind} a lock counts on one machine alone" if local else ""


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
