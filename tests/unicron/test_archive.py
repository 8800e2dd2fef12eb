"""Checkpoint folders: damage is found, the newest are kept, unfinished ones of older generations are deleted."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from unicron.checkpoint import archive, storage
from unicron.checkpoint.archive import Manifest, PartFile
from unicron.errors import DamagedCheckpoint
from unicron.state.chunks import undivided

CHUNK = undivided("parameter/a", (2, 3), "float32")


def write(location: str, *sizes: int, publish: bool = True) -> str:
    """Write a checkpoint with files of these sizes, and publish it."""
    files = {}
    for index, size in enumerate(sizes or (10,)):
        content = random.Random(index).randbytes(size)
        storage.write(f"{location}/file-{index}", functools.partial(storage.fill, content=content))
        size_bytes, checksum = storage.checksum(f"{location}/file-{index}")
        files[f"file-{index}"] = PartFile(bytes=size_bytes, checksum=checksum, chunks={"a": CHUNK})
    if publish:
        archive.publish(location, Manifest(step=archive.step(location), digest="ab", files=files))
    return location


def test_a_checkpoint_counts_only_once_it_is_complete(tmp_path: Path) -> None:
    location = write(f"{tmp_path}/a [b] *c/generation-3/step-7", 0, 5, 3 << 20, publish=False)
    assert archive.published(location) == []
    with pytest.raises(DamagedCheckpoint):
        archive.read(location)
    write(location, 0, 5, 3 << 20)
    manifest = archive.verify(location)
    assert (manifest.step, {file.chunks["a"] for file in manifest.files.values()}) == (7, {CHUNK})
    assert archive.published(location) == [location]
    assert sorted(p.name for p in Path(location).iterdir()) == ["file-0", "file-1", "file-2", archive.MANIFEST]


def test_a_checkpoint_of_the_first_format_is_refused_in_words(tmp_path: Path) -> None:
    """It was pickled: reading it would run what it contains."""
    location = write(f"{tmp_path}/step-1")
    Path(location, archive.MANIFEST).write_text('{"step": 1, "digest": "ab", "files": {"common.pt": [3, "ab"]}}')
    with pytest.raises(DamagedCheckpoint, match="format 1"):
        archive.read(location)


@settings(max_examples=examples(40), deadline=None)  # files are synced
@given(st.data())
def test_every_damage_is_found_by_the_rank_whose_share_it_is_in(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sizes = data.draw(st.lists(st.integers(1, 2000), min_size=1, max_size=5))
        path = write(f"{folder}/step-1", *sizes)
        index = data.draw(st.integers(0, len(sizes) - 1))
        file = Path(path, f"file-{index}")
        content = bytearray(file.read_bytes())
        match data.draw(st.sampled_from(["flip", "cut", "grow", "gone"])):
            case "flip":
                content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
                file.write_bytes(content)
            case "cut":
                file.write_bytes(content[:-1])
            case "grow":
                file.write_bytes(content + b"\0")
            case "gone":
                file.unlink()
        of = data.draw(st.integers(1, 4))
        found = []
        for rank in range(of):
            try:
                archive.verify(path, rank, of)
            except DamagedCheckpoint:
                found.append(rank)
        assert found == [index % of]


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"step": 1, "format": 2}', '{"step": 1, "digest": "", "files": {"a": 1}, "format": 2}']
)
def test_a_manifest_that_cannot_be_read(content: str, tmp_path: Path) -> None:
    location = write(f"{tmp_path}/step-1")
    Path(location, archive.MANIFEST).write_text(content)
    with pytest.raises(DamagedCheckpoint):
        archive.read(location)


places = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=8, unique=True)


@settings(max_examples=examples(40), deadline=None)
@given(places, st.integers(1, 4), st.booleans(), st.data())
def test_the_newest_steps_and_the_protected_stay(
    written: list[tuple[int, int]], keep: int, nested: bool, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def place(generation: int, step: int) -> str:
            return f"{folder}/generation-{generation}{'/checkpoints' if nested else ''}/step-{step}"

        paths = {pair: write(place(*pair)) for pair in written}
        protected = data.draw(st.sampled_from(written))
        order = archive.published(paths[written[0]])
        assert order == [paths[p] for p in sorted(written, key=lambda p: (p[1], p[0]), reverse=True)]
        archive.retire(paths[written[0]], keep, [paths[protected]])
        newest = sorted({step for _, step in written}, reverse=True)[: max(2, keep)]
        left = {pair for pair in written if pair[1] in newest or pair == protected}
        assert set(archive.published(paths[written[0]])) == {paths[pair] for pair in left}


@pytest.mark.parametrize("damage", ["manifest", "cut", "gone"])
def test_a_damaged_checkpoint_takes_no_place_of_a_whole_one(damage: str, tmp_path: Path) -> None:
    oldest, old, damaged, newest = [write(f"{tmp_path}/generation-1/checkpoints/step-{step}") for step in (1, 2, 3, 4)]
    match damage:
        case "manifest":
            Path(damaged, archive.MANIFEST).write_text("{")
        case "cut":
            Path(damaged, "file-0").write_bytes(b"")
        case "gone":
            Path(damaged, "file-0").unlink()
    assert archive.retire(newest, 2, []) == [oldest]
    assert archive.published(newest) == [newest, damaged, old]
    later = write(f"{tmp_path}/generation-1/checkpoints/step-5")
    assert archive.retire(later, 2, []) == [damaged, old]


def test_unfinished_checkpoints_of_older_generations_are_deleted(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write(f"{tmp_path}/generation-{number}/checkpoints/step-5", publish=False)
        write(f"{tmp_path}/generation-{number}/checkpoints/step-4")
    location = f"{tmp_path}/generation-3/checkpoints/step-9"
    assert {archive.generation(p) for p in archive.clean(location, before=3)} == {1, 2}
    assert len(list(tmp_path.glob("generation-*/checkpoints/step-5"))) == 1
    assert len(archive.published(location)) == 3
