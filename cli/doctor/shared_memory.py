"""Settings of this machine that clear the place of in-memory copies, behind the back of the agent.

systemd-logind removes the files of a user in ``/dev/shm`` at the user's last logout (``RemoveIPC``, logind.conf(5)),
and systemd-tmpfiles what its configuration names (tmpfiles.d(5)). Both only where systemd runs the machine.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path

FIRST_USER = 1000
"""The first id of an ordinary user: ``RemoveIPC`` spares system users (SYS_UID_MAX is 999 in login.defs)."""

SHARED_MEMORY = "/dev/shm"

_PLACES = ("etc", "run", "usr/lib")
"""Where systemd looks for its configuration; the first place that has a file of a name counts."""

_REMOVES, _AGES, _SPARES = "DRr", "dDevqQCm", "xX"
"""Types of lines of tmpfiles.d: those that remove, those that clean by age, and those that exempt."""

_AGE_FIELD = 5


def clearers(root: Path, place: str, uid: int, user: str) -> list[str]:
    """Return which settings clear a place, in words; none where systemd does not run the machine.

    Args:
        root: of the file system.
        place: of in-memory copies.
        uid: under which the agent runs. Users of tasks' own never log in.
        user: its name; empty: it has none.
    """
    if not (root / "run/systemd/system").is_dir():
        return []
    return [*_of_logind(root, place, uid, user), *_of_tmpfiles(root, place)]


def _of_logind(root: Path, place: str, uid: int, user: str) -> Iterator[str]:
    if uid < FIRST_USER or not Path(place).is_relative_to(SHARED_MEMORY):
        return
    if user and (root / "var/lib/systemd/linger" / user).exists():
        return  # the user is never logged out
    value, where = "yes", "the default of systemd-logind"
    for path in [root / "etc/systemd/logind.conf", *_configuration(root, "systemd/logind.conf.d")]:
        for line in _lines(path):
            name, _, given = line.partition("=")
            if name.strip() == "RemoveIPC":
                value, where = given.strip().lower(), f"/{path.relative_to(root)}"
    if value in ("yes", "true", "1", "on", "y", "t"):
        yield f"RemoveIPC=yes ({where}) at the last logout of user {user or uid}"


def _of_tmpfiles(root: Path, place: str) -> Iterator[str]:
    lines = [(path, line.split()) for path in _configuration(root, "tmpfiles.d") for line in _lines(path)]
    if any(fields[0][0] in _SPARES and _covers(fields[1], place) for _, fields in lines if len(fields) > 1):
        return
    for path, fields in lines:
        if len(fields) < 2 or not _covers(fields[1], place) or "!" in fields[0]:  # "!": only as the machine starts
            continue
        kind, age = fields[0][0], fields[_AGE_FIELD] if len(fields) > _AGE_FIELD else "-"
        if kind in _REMOVES or (kind in _AGES and age != "-"):
            yield f"'{' '.join(fields)}' in /{path.relative_to(root)}"


def _covers(pattern: str, place: str) -> bool:
    """Return whether a path of tmpfiles.d is the place, above it, or a pattern of what the agent makes in it."""
    ours = [Path(place), *Path(place).parents, Path(place) / "unicron-0"]
    return any(fnmatch.fnmatch(str(path), pattern.rstrip("/")) for path in ours)


def _configuration(root: Path, folder: str) -> list[Path]:
    """Return the files of a folder of configuration, in the order in which they count."""
    found: dict[str, Path] = {}
    for above in _PLACES:
        for path in (root / above / folder).glob("*.conf"):
            found.setdefault(path.name, path)
    return [found[name] for name in sorted(found)]


def _lines(path: Path) -> list[str]:
    """Return the lines of a file that say something; none of a file that is not there or may not be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip() and line.strip()[0] not in "#;["]
