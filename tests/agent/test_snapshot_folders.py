"""The agent's snapshot folders: deleted when no rank can need them, and not before."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from services.agent.files.rank_users import RankUsers
from services.agent.files.snapshot_folders import LINGER_S, SnapshotFolders, node_folder


def filled(folder: Path, *tasks: str) -> SnapshotFolders:
    """Return the folders of a node on which tasks have left snapshots."""
    folders = SnapshotFolders(folder, RankUsers(""))
    for task in tasks:
        folders.of_task(task).mkdir(parents=True)
        (folders.of_task(task) / "1-0-0.copy").write_bytes(b"copy")
    return folders


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_nodes_folder_is_its_own_and_its_next_agents(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, tmp_path / "run", "n0")
    assert folder == node_folder(tmp_path, tmp_path / "run" / ".." / "run", "n0")
    assert len({folder, node_folder(tmp_path, tmp_path / "run", "n1"), node_folder(tmp_path, tmp_path, "n0")}) == 3
    assert folder.parent == tmp_path


def test_snapshots_outlive_the_processes_of_their_task_for_a_while(tmp_path: Path) -> None:
    folders = filled(tmp_path, "a", "b")
    folders.sweep({"a", "b"}, 0.0)
    folders.sweep({"a"}, 1.0)
    folders.sweep({"a"}, LINGER_S)
    assert names(tmp_path) == {"a", "b"}
    folders.sweep({"a"}, LINGER_S + 1.0)
    assert names(tmp_path) == {"a"}


def test_a_task_that_came_back_starts_its_time_anew(tmp_path: Path) -> None:
    folders = filled(tmp_path, "a")
    for at_s, present in ((0.0, set[str]()), (LINGER_S - 1, {"a"}), (LINGER_S + 1, set[str]()), (2 * LINGER_S, set())):
        folders.sweep(present, at_s)
        assert names(tmp_path) == {"a"}


def test_forgetting_a_task_and_leaving(tmp_path: Path) -> None:
    folders = filled(tmp_path / "node", "a", "b")
    folders.forget("a")
    folders.forget("never-seen")
    assert names(tmp_path / "node") == {"b"}
    folders.close()
    folders.sweep((), 0.0)
    assert not names(tmp_path)


def test_a_folder_that_something_else_has_removed_is_made_anew(tmp_path: Path) -> None:
    folders = filled(tmp_path / "node", "a", "b")
    shutil.rmtree(tmp_path / "node")
    folders.restore({"a"})
    assert names(tmp_path / "node") == {"a"}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folders.folder, folders.of_task("a"))] == [0o711, 0o700]
