"""Datasets are read without waiting for peers: rank 0 makes indices, the others load them once they are there."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy
import pytest

from unicron.megatron_lm import datasets

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 30.0


class Unwritable:
    """What cannot be pickled."""

    def __reduce__(self) -> str:
        raise RuntimeError("this is no part of a file")


def test_others_wait_for_the_files_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "PAUSE_S", 0.01)
    monkeypatch.setattr(datasets, "HEARTBEAT_S", 0.01)
    index, waits, beats = tmp_path / "index.npy", threading.Event(), threading.Event()
    found: list[tuple[list[int], None, None]] = []

    def load() -> tuple[list[int], None, None]:
        try:
            return numpy.load(index).tolist(), None, None
        except FileNotFoundError:
            waits.set()
            raise

    def other() -> None:
        found.append(datasets.read(load, rank=1, limit_s=LIMIT_S, heartbeat=beats.set))

    thread = threading.Thread(target=other)
    thread.start()
    assert waits.wait(LIMIT_S)
    beats.clear()
    assert beats.wait(LIMIT_S), "it reports that it is at work while it waits"
    numpy.save(index, numpy.arange(3))
    thread.join(LIMIT_S)
    assert found == [([0, 1, 2], None, None)]


@pytest.mark.parametrize(("rank", "limit_s"), [(0, LIMIT_S), (1, 0.0)])
def test_a_file_that_is_not_there_is_an_error(rank: int, limit_s: float, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        datasets.read(lambda: numpy.load(tmp_path / "index.npy"), rank=rank, limit_s=limit_s, heartbeat=lambda: None)


@pytest.mark.parametrize("name", ["index.npy", "index"])
def test_no_file_is_there_before_it_is_whole(name: str, tmp_path: Path) -> None:
    """A process that is killed while it writes leaves another name."""

    def build() -> tuple[int, ...]:
        with pytest.raises(RuntimeError, match="no part of a file"):
            numpy.save(tmp_path / name, numpy.array([b"x" * 4096, Unwritable()], dtype=object))
        assert not list(tmp_path.iterdir())
        numpy.save(tmp_path / name, numpy.arange(4))
        return (1,)

    stock = numpy.save
    assert datasets.read(build, rank=0, limit_s=LIMIT_S, heartbeat=lambda: None) == (1,)
    assert numpy.save is stock
    assert [path.name for path in tmp_path.iterdir()] == ["index.npy"]
    assert numpy.load(tmp_path / "index.npy").tolist() == [0, 1, 2, 3]
