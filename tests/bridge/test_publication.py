"""The files that name the newest checkpoint are moved once it is complete, and before an older one is deleted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unicron.bridge.publication import Publication
from unicron.errors import DamagedCheckpoint

TRACKER, STATE = "latest_checkpointed_iteration.txt", "latest_train_state.pt"


def owner(cleaned: list[str]) -> Any:
    """Return a stand-in of megatron-bridge's module of checkpoints; what names the newest as it cleans is noted."""

    def train_state(checkpoints_path: str, prefix: str | None = None) -> str:
        return str(Path(checkpoints_path, "train_state.pt" if prefix is None else f"{prefix}_train_state.pt"))

    def clean(save_dir: str, leave_ckpt_num: int = 1) -> None:
        cleaned.append(Path(save_dir, TRACKER).read_text())

    return SimpleNamespace(
        get_checkpoint_train_state_filename=train_state,
        get_checkpoint_tracker_filename=lambda checkpoints_path: str(Path(checkpoints_path, TRACKER)),
        cleanup_old_non_persistent_checkpoint=clean,
    )


def save(checkpointing: Any, folder: Path, iteration: int, *, complete: bool = True) -> None:
    """Save as megatron-bridge does."""
    made = folder / f"iter_{iteration:07d}"
    made.mkdir(parents=True)
    for name in ("metadata.json", *((".metadata",) if complete else ())):
        (made / name).write_text("{}")
    Path(checkpointing.get_checkpoint_train_state_filename(str(made))).write_text(str(iteration))
    Path(checkpointing.get_checkpoint_train_state_filename(str(folder), prefix="latest")).write_text(str(iteration))
    Path(checkpointing.get_checkpoint_tracker_filename(str(folder))).write_text(str(iteration))


def test_the_newest_is_named_behind_its_last_file(tmp_path: Path) -> None:
    checkpointing = owner([])
    publication = Publication(checkpointing)
    with publication.saving(str(tmp_path / "iter_0000002")):
        save(checkpointing, tmp_path, 2)
        assert not (tmp_path / TRACKER).exists()
        assert not (tmp_path / STATE).exists()
        assert (tmp_path / "iter_0000002" / "train_state.pt").exists()
    assert (tmp_path / TRACKER).read_text() == (tmp_path / STATE).read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", TRACKER, STATE]
    assert checkpointing.get_checkpoint_tracker_filename(str(tmp_path)) == str(tmp_path / TRACKER)  # as it is read


def test_an_older_checkpoint_is_deleted_once_nothing_names_it(tmp_path: Path) -> None:
    cleaned: list[str] = []
    checkpointing = owner(cleaned)
    publication = Publication(checkpointing)
    for iteration in (2, 4):
        with publication.saving(str(tmp_path / f"iter_{iteration:07d}")):
            save(checkpointing, tmp_path, iteration)
            checkpointing.cleanup_old_non_persistent_checkpoint(str(tmp_path), leave_ckpt_num=1)
    assert cleaned == ["2", "4"]


def test_a_checkpoint_that_lacks_a_file_is_not_named(tmp_path: Path) -> None:
    checkpointing = owner([])
    publication = Publication(checkpointing)
    with (
        pytest.raises(DamagedCheckpoint, match=r"\.metadata is not there"),
        publication.saving(str(tmp_path / "iter_0000002")),
    ):
        save(checkpointing, tmp_path, 2, complete=False)
    assert not (tmp_path / TRACKER).exists()


def test_a_save_that_is_broken_off_names_nothing_and_what_is_read_later_is_no_file_aside(tmp_path: Path) -> None:
    checkpointing = owner([])
    publication = Publication(checkpointing)

    def broken_off() -> None:
        with publication.saving(str(tmp_path / "iter_0000002")):
            save(checkpointing, tmp_path, 2)
            raise KeyError

    with pytest.raises(KeyError):
        broken_off()
    assert not (tmp_path / TRACKER).exists()
    assert checkpointing.get_checkpoint_tracker_filename(str(tmp_path)) == str(tmp_path / TRACKER)
