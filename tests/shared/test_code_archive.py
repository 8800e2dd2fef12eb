"""Archives of the code that comes along: one for each folder, and nothing in them that leaves it."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidInput
from shared.tasks.code import MOST_BYTES, is_inside
from shared.tasks.code_archive import code_of, leaves, members, pack, unpack

NAMES = st.text("abé. -", min_size=1, max_size=8).filter(lambda text: text not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
TREES = st.dictionaries(PATHS, st.tuples(st.binary(max_size=1500), st.booleans()), min_size=1, max_size=8).filter(
    lambda tree: not any(other.startswith(f"{name}/") for name in tree for other in tree)
)
"""Files of a folder: path -> content, and whether it may be run. No file has the path of another one's folder."""


def write(folder: Path, tree: dict[str, tuple[bytes, bool]]) -> None:
    for name, (content, runnable) in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if runnable else 0o640)


def release(folder: Path) -> None:
    """Let the files of an unpacked archive be deleted."""
    for place, _, _ in os.walk(folder):
        os.chmod(place, 0o700)


@given(tree=TREES)
def test_what_is_unpacked_is_what_was_packed_and_nobody_may_write_it(tree: dict[str, tuple[bytes, bool]]) -> None:
    with TemporaryDirectory() as there:
        source, target = Path(there, "source"), Path(there, "target")
        write(source, tree)
        archive = pack(source, tree)
        unpack(archive, target)
        found = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
        assert {name: (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for name, path in found.items()} == tree
        assert not any(path.stat().st_mode & 0o222 for path in (target, *target.rglob("*")))
        assert code_of(archive).files == len(tree)
        release(target)


@given(tree=TREES, order=st.randoms(use_true_random=False))
def test_equal_folders_have_equal_digests_and_others_have_others(
    tree: dict[str, tuple[bytes, bool]], order: object
) -> None:
    with TemporaryDirectory() as there:
        one, other = Path(there, "one"), Path(there, "other")
        write(one, tree)
        names = [*tree]
        order.shuffle(names)  # type: ignore[attr-defined]
        write(other, {name: tree[name] for name in names})
        for path in other.rglob("*"):
            os.utime(path, (1, 1))
        digest = code_of(pack(one, tree)).digest
        assert code_of(pack(other, names)).digest == digest
        (changed, (content, runnable)) = next(iter(tree.items()))
        write(other, {changed: (content + b"\n", runnable)})
        assert code_of(pack(other, names)).digest != digest
        write(other, {changed: (content, not runnable)})
        assert code_of(pack(other, names)).digest != digest


Change = Callable[[tarfile.TarInfo], None]


def tar(*files: tuple[str, bytes], change: Change = lambda _: None, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Return an archive as ``pack`` makes it but for a change of each member."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def of(**fields: object) -> Change:
    def change(info: tarfile.TarInfo) -> None:
        for name, value in fields.items():
            setattr(info, name, value)

    return change


GOOD = tar(("a", b"x"), ("b", b"y"))

LINK = {"type": tarfile.SYMTYPE, "size": 0}

REFUSED = {
    "not an archive": b"x" * 10_240,
    "empty": b"",
    "no files": bytes(10_240),
    "an absolute name": tar(("/a", b"x")),
    "a name that leaves": tar(("../a", b"x")),
    "a name that leaves in the middle": tar(("a/../../b", b"x")),
    "two names of one file": tar(("./a", b"x")),
    "a folder": tar(("a/", b""), change=of(type=tarfile.DIRTYPE)),
    "a device": tar(("a", b""), change=of(type=tarfile.CHRTYPE)),
    "a block device": tar(("a", b""), change=of(type=tarfile.BLKTYPE)),
    "a pipe": tar(("a", b""), change=of(type=tarfile.FIFOTYPE)),
    "a hard link": tar(("a", b""), change=of(type=tarfile.LNKTYPE, linkname="/etc/passwd")),
    "an absolute link": tar(("a", b""), change=of(**LINK, linkname="/etc/passwd")),
    "a link that leaves": tar(("d/a", b""), change=of(**LINK, linkname="../../etc/passwd")),
    "a link through another one": tar(("d/a", b""), change=of(**LINK, linkname="other/..")),
    "a link with content": tar(("a", b"x"), change=of(type=tarfile.SYMTYPE, linkname="b")),
    "the same name twice": tar(("a", b"x"), ("a", b"y")),
    "another order": tar(("b", b"x"), ("a", b"y")),
    "a file below a file": tar(("a", b"x"), ("a/b", b"y")),
    "an owner": tar(("a", b"x"), change=of(uname="root")),
    "a time": tar(("a", b"x"), change=of(mtime=1)),
    "a mode": tar(("a", b"x"), change=of(mode=0o4755)),
    "another form": tar(("a", b"x"), change=of(uname="é"), form=tarfile.PAX_FORMAT),
    "a long name of GNU's": tar(("a" * 300, b"x"), form=tarfile.GNU_FORMAT),
    "cut off": GOOD[:1024],
    "no end": GOOD[:2048],
    "something behind the end": GOOD + bytes(512),
    "something in the padding": GOOD[:600] + b"!" + GOOD[601:],
    "too large": bytes(MOST_BYTES + 1),
}


@pytest.mark.parametrize("archive", REFUSED.values(), ids=REFUSED)
def test_what_is_in_another_form_is_refused_and_nothing_of_it_written(archive: bytes, tmp_path: Path) -> None:
    assert [member.name for member in members(GOOD)] == ["a", "b"]
    with pytest.raises(InvalidInput, match="the code cannot come along"):
        unpack(archive, tmp_path / "there")
    assert [*tmp_path.iterdir()] == []


@given(at=st.integers(0, len(GOOD) - 1), value=st.integers(1, 255))
def test_a_changed_byte_is_another_archive_or_none(at: int, value: int) -> None:
    changed = GOOD[:at] + bytes([GOOD[at] ^ value]) + GOOD[at + 1 :]
    try:
        assert code_of(changed).digest != code_of(GOOD).digest
    except InvalidInput:
        pass


def test_a_link_that_stays_comes_along_and_one_that_leaves_does_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source, {"lib/model.py": (b"x", False), "train.py": (b"y", False)})
    (source / "lib" / "main.py").symlink_to("../train.py")
    (source / "both").symlink_to("lib")
    archive = pack(source, ["lib/model.py", "lib/main.py", "both", "train.py"])
    unpack(archive, tmp_path / "target")
    assert (tmp_path / "target" / "lib" / "main.py").read_bytes() == b"y"
    assert (tmp_path / "target" / "both" / "model.py").read_bytes() == b"x"
    assert stat.S_ISLNK((tmp_path / "target" / "both").lstat().st_mode)
    (source / "out").symlink_to("../secret")
    with pytest.raises(InvalidInput, match=r"'out' is a link that leaves the folder, to '../secret'"):
        pack(source, ["train.py", "out"])
    release(tmp_path / "target")


PARTS = st.lists(st.sampled_from(["..", ".", "a", "b", "l", "m"]), min_size=1, max_size=5).map("/".join)


@given(links=st.dictionaries(st.sampled_from(["l", "m", "a/l", "a/m", "a/b/l"]), PARTS, min_size=1))
def test_links_that_may_come_along_lead_nowhere_outside(links: dict[str, str]) -> None:
    with TemporaryDirectory() as there:
        folder = Path(os.path.realpath(there), "one", "two", "folder")
        (folder / "a" / "b").mkdir(parents=True)
        for name, target in links.items():
            if not leaves(name, target):
                (folder / name).symlink_to(target)
        for name in links:
            try:
                assert (folder / name).resolve().is_relative_to(folder)
            except (OSError, RuntimeError):
                pass  # a circle leads nowhere


def test_what_has_no_room_or_is_no_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a" * 120: (b"x", False)})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(MOST_BYTES))
    for name, what in (("a" * 120, "too long"), ("pipe", "neither a file nor a link"), ("large", "larger than")):
        with pytest.raises(InvalidInput, match=what):
            pack(tmp_path, [name])


@pytest.mark.parametrize(
    ("path", "inside"), [("a/b", True), ("", True), ("/a", False), ("a/../b", False), ("..", False)]
)
def test_paths_that_stay(path: str, inside: bool) -> None:
    assert is_inside(path) is inside
