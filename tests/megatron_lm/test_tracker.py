"""Megatron-LM's tracker of its newest checkpoint is only ever moved to one that is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.errors import DamagedCheckpoint
from unicron.megatron_lm import tracker

NAME = "latest_checkpointed_iteration.txt"


METADATA = '{"sharded_backend": "torch_dist", "common_backend": "torch"}'
"""As core 0.16 to 0.18 write it."""


def checkpoint(folder: Path, iteration: int, *, without: str = "", metadata: str = METADATA) -> Path:
    """Write what looks like a distributed checkpoint; return its folder."""
    made = folder / f"iter_{iteration:07d}"
    made.mkdir()
    for name in {".metadata", "common.pt", "metadata.json", "__0_0.distcp"} - {without}:
        (made / name).write_text(metadata if name == "metadata.json" else "x")
    return made


def move(folder: Path, iteration: int) -> None:
    """Move the tracker as Megatron-LM does."""
    opened = tracker.opening(open, lambda path: path.endswith(NAME), lambda i: str(folder / f"iter_{i:07d}"))
    with opened(str(folder / NAME), "w") as file:
        file.write(str(iteration))


def test_the_tracker_moves_to_a_complete_checkpoint_and_to_no_other(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    move(tmp_path, 2)
    assert (tmp_path / NAME).read_text() == "2"
    for iteration, without in ((4, "common.pt"), (6, ".metadata")):
        checkpoint(tmp_path, iteration, without=without)
        with pytest.raises(DamagedCheckpoint, match=without.replace(".", r"\.")):
            move(tmp_path, iteration)
        assert (tmp_path / NAME).read_text() == "2"
    checkpoint(tmp_path, 10, without="common.pt", metadata='{"sharded_backend": "torch_dist"}')  # core 0.19
    move(tmp_path, 10)
    assert (tmp_path / NAME).read_text() == "10"
    move(tmp_path, 2)
    with pytest.raises(DamagedCheckpoint, match="there is no checkpoint"):
        move(tmp_path, 8)
    assert (tmp_path / NAME).read_text() == "2"


def test_a_process_that_ends_while_it_writes_leaves_the_tracker_as_it_is(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    move(tmp_path, 2)
    opened = tracker.opening(open, lambda path: path.endswith(NAME), lambda i: str(tmp_path / f"iter_{i:07d}"))
    file = opened(str(tmp_path / NAME), "w").__enter__()
    file.write("4")
    file.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert (tmp_path / NAME).read_text() == "2"


def test_what_a_broken_attempt_has_left_is_put_aside(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 4, without=".metadata")
    tracker.put_aside(made)
    assert not made.exists()
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("unfinished-iter_0000004-")
    tracker.put_aside(made)


def test_a_tracker_names_one_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / NAME
    assert not tracker.names(path, 2)
    checkpoint(tmp_path, 2)
    move(tmp_path, 2)
    assert (tracker.names(path, 2), tracker.names(path, 4)) == (True, False)
