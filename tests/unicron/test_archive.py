"""Checkpoint folders: damage is found, the newest are kept, unfinished ones of older generations are deleted."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.checkpoint import archive
from unicron.checkpoint.archive import Manifest
from unicron.errors import DamagedCheckpoint


def write(path: Path, *sizes: int) -> Path:
    """Publish a checkpoint with files of these sizes."""
    partial = archive.partial_path(path)
    partial.mkdir(parents=True)
    for index, size in enumerate(sizes or (10,)):
        (partial / f"file-{index}").write_bytes(random.Random(index).randbytes(size))
    files = {p.name: archive.checksum(p) for p in partial.iterdir()}
    archive.publish(path, Manifest(step=archive.step(path), digest="ab", files=files))
    return path


def test_a_checkpoint_has_its_name_only_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "generation-3" / "step-7"
    archive.partial_path(path).mkdir(parents=True)
    with pytest.raises(DamagedCheckpoint):
        archive.read(path)
    archive.partial_path(path).rmdir()
    write(path, 0, 5, 3 << 20)
    assert archive.verify(path).step == 7
    assert [p.name for p in path.parent.iterdir()] == ["step-7"]


@settings(max_examples=40, deadline=None)  # files are synced
@given(st.data())
def test_every_damage_is_found_by_the_rank_whose_share_it_is_in(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sizes = data.draw(st.lists(st.integers(1, 2000), min_size=1, max_size=5))
        path = write(Path(folder) / "step-1", *sizes)
        index = data.draw(st.integers(0, len(sizes) - 1))
        file = path / f"file-{index}"
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


@pytest.mark.parametrize("content", ["", "[]", "{", '{"step": 1}', '{"step": 1, "digest": "", "files": {"a": 1}}'])
def test_a_manifest_that_cannot_be_read(content: str, tmp_path: Path) -> None:
    (write(tmp_path / "step-1") / archive.MANIFEST).write_text(content)
    with pytest.raises(DamagedCheckpoint):
        archive.read(tmp_path / "step-1")


places = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=8, unique=True)


@settings(max_examples=40, deadline=None)
@given(places, st.integers(1, 4), st.booleans(), st.data())
def test_the_newest_steps_and_the_protected_stay(
    written: list[tuple[int, int]], keep: int, nested: bool, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def place(generation: int, step: int) -> Path:
            root = Path(folder) / f"generation-{generation}"
            return (root / "checkpoints" if nested else root) / f"step-{step}"

        paths = {pair: write(place(*pair)) for pair in written}
        protected = data.draw(st.sampled_from(written))
        order = archive.published(paths[written[0]])
        assert order == [paths[p] for p in sorted(written, key=lambda p: (p[1], p[0]), reverse=True)]
        archive.retire(paths[written[0]], keep, [paths[protected]])
        newest = sorted({step for _, step in written}, reverse=True)[: max(2, keep)]
        left = {pair for pair in written if pair[1] in newest or pair == protected}
        assert set(archive.published(paths[written[0]])) == {paths[pair] for pair in left}


def test_unfinished_checkpoints_of_older_generations_are_deleted(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        archive.partial_path(tmp_path / f"generation-{number}" / "checkpoints" / "step-5").mkdir(parents=True)
        write(tmp_path / f"generation-{number}" / "checkpoints" / "step-4")
    path = tmp_path / "generation-3" / "checkpoints" / "step-9"
    assert {archive.generation(p) for p in archive.clean(path, before=3)} == {1, 2}
    assert archive.partial_path(path.with_name("step-5")).is_dir()
    assert len(archive.published(path)) == 3
