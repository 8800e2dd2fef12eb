"""The archive of a folder's files: a POSIX tar (ustar) in one canonical form, so that equal folders have one digest.

It has regular files and links, in the order of their names, without times and owners; whether the owner may run a file
is all that is left of its mode. Links stay in the folder. What is not in this form is refused before anything else
reads it.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from shared.errors import InvalidInput
from shared.tasks.code import MOST_BYTES, MOST_FILES, Code, is_inside

_BLOCK = tarfile.BLOCKSIZE

_PATH_RULE = "has too long a path (255 bytes at most, 100 of them its name), or a link's target of more than 100 bytes"
"""What this form of tar has room for."""


class Member(NamedTuple):
    """A file or a link. ``link``: its target; empty: it is a file. ``begin``: where its content is in the archive."""

    name: str
    size_bytes: int = 0
    runnable: bool = False
    link: str = ""
    begin: int = 0


def pack(folder: Path, names: Iterable[str]) -> bytes:
    """Return the archive of files and links of a folder.

    Args:
        folder: the folder.
        names: their paths below it.

    Raises:
        InvalidInput: one can be in no archive, or they are too large or too many.
        OSError: one cannot be read.
    """
    archive = io.BytesIO()
    for count, name in enumerate(sorted({*names}, key=os.fsencode), 1):
        if count > MOST_FILES:
            raise _refused(f"more than {MOST_FILES} files")
        path = folder / name
        if path.is_symlink():
            content, member = b"", Member(name, link=os.readlink(path))
        else:
            content = _content(path, MOST_BYTES - archive.tell())
            member = Member(name, len(content), os.access(path, os.X_OK))
        if problem := _problem(member):
            raise _refused(f"{name!r} {problem}")
        archive.write(_header(member) + content + bytes(-len(content) % _BLOCK))
    archive.write(bytes(_end(archive.tell()) - archive.tell()))
    if archive.tell() > MOST_BYTES:
        raise _refused(f"larger than {MOST_BYTES} bytes")
    return archive.getvalue()


def code_of(archive: bytes) -> Code:
    """Return what a specification says of an archive.

    Raises:
        InvalidInput: it is no archive in this form.
    """
    files = sum(1 for _ in members(archive))
    return Code(digest=hashlib.sha256(archive).hexdigest(), size_bytes=len(archive), files=files)


def members(archive: bytes) -> Iterator[Member]:
    """Yield the members of an archive.

    Raises:
        InvalidInput: it is no archive in this form; what was yielded before is no reason to trust it.
    """
    if len(archive) > MOST_BYTES:
        raise _refused(f"larger than {MOST_BYTES} bytes")
    seen: set[str] = set()
    before, at = b"", 0
    while any(block := archive[at : at + _BLOCK]):
        member = _member(block, at + _BLOCK)
        content_end = member.begin + member.size_bytes
        at = content_end + -content_end % _BLOCK
        name = member.name.encode()
        if at > len(archive) or any(archive[content_end:at]):
            raise _refused(f"{member.name!r} is cut off")
        if name <= before:
            raise _refused(f"{member.name!r} is there twice, or not in its order")
        if any(str(above) in seen for above in Path(member.name).parents):
            raise _refused(f"{member.name!r} is below a file or a link")
        if len(seen) == MOST_FILES:
            raise _refused(f"more than {MOST_FILES} files")
        before = name
        seen.add(member.name)
        yield member
    if not seen:
        raise _refused("no files")
    if len(archive) != _end(at) or any(archive[at:]):
        raise _refused("something behind the last file")


def unpack(archive: bytes, folder: Path) -> None:
    """Write the files of an archive to a folder that is not there yet, which nobody may change then.

    The group of the folder may read them, as others may: who must not is kept away by the folder above.

    Raises:
        InvalidInput: it is no archive in this form.
        OSError: a file cannot be written.
    """
    found = [*members(archive)]
    folder.mkdir(mode=0o700)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        tar.extractall(folder, filter="data")
    for member in found:
        if not member.link:
            os.chmod(folder / member.name, 0o555 if member.runnable else 0o444)
    for place, _, _ in os.walk(folder, topdown=False):
        os.chmod(place, 0o555)


def leaves(name: str, link: str) -> bool:
    """Return whether a link may lead out of the folder.

    ``..`` may only be at the beginning: behind the name of another link it leads from where that one leads to.

    Args:
        name: the link's own path.
        link: its target.
    """
    parts = link.split("/")
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return link.startswith("/") or ".." in parts[up:] or up > name.count("/")


def _content(path: Path, most_bytes: int) -> bytes:
    if not path.is_file():
        raise _refused(f"{path.name!r} is neither a file nor a link")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _refused(f"larger than {MOST_BYTES} bytes")
    return content


def _member(block: bytes, begin: int) -> Member:
    """Return the member of a header; every header in this form is one that ``_header`` makes."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        runnable = bool(info.mode & 0o100) and not info.linkname
        member = Member(info.name, info.size, runnable, info.linkname, begin)
        if not _problem(member) and not (info.linkname and info.size) and _header(member) == block:
            return member
    except (tarfile.TarError, ValueError):
        pass
    raise _refused(f"a header at byte {begin - _BLOCK} that is not in its form, or a path that leaves the folder")


def _header(member: Member) -> bytes:
    info = tarfile.TarInfo(member.name)
    info.size, info.mode = member.size_bytes, 0o755 if member.runnable else 0o644
    if member.link:
        info.type, info.linkname = tarfile.SYMTYPE, member.link
    return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")


def _problem(member: Member) -> str:
    """Return why there is no such member; empty: there may be."""
    name = member.name
    if not is_inside(name) or not name or any(part in ("", ".") for part in name.split("/")):
        return "leaves the folder, or is no path below it"
    try:
        _header(member)
    except UnicodeEncodeError:
        return "has a name that is no Unicode text"
    except ValueError:
        return _PATH_RULE
    if member.link and leaves(name, member.link):
        return f"is a link that leaves the folder, to {member.link!r}"
    return ""


def _end(size_bytes: int) -> int:
    """Return the size of an archive whose members take so many bytes: two empty blocks follow, up to a whole record."""
    least = size_bytes + 2 * _BLOCK
    return least + -least % tarfile.RECORDSIZE


def _refused(problem: str) -> InvalidInput:
    return InvalidInput.of("code", None, problem, f"the code cannot come along: {problem}")
