"""The agent's snapshot folders: deleted when no rank can need them, and not before."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from services.agent.files.rank_users import RankUsers
from services.agent.files.snapshot_folders import SnapshotFolders, node_folder


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


def test_snapshots_without_a_process_of_their_task_stay_and_are_reported(tmp_path: Path) -> None:
    """They may be all that there is of its newest steps: the detector knows when that is not so any more."""
    folders = filled(tmp_path, "a", "b")
    for _ in range(2):
        folders.look({"a"})
        assert folders.kept == {"b": 4}
    folders.look({"a", "b"})
    assert folders.kept == {}
    folders.look(())
    assert folders.kept == {"a": 4, "b": 4}
    assert names(tmp_path) == {"a", "b"}
    folders.forget("b")
    folders.look(())
    assert folders.kept == {"a": 4}


def test_forgetting_a_task_and_leaving(tmp_path: Path) -> None:
    folders = filled(tmp_path / "node", "a", "b")
    folders.forget("a")
    folders.forget("never-seen")
    assert names(tmp_path / "node") == {"b"}
    folders.close()
    folders.look(())
    assert folders.kept == {}
    assert not names(tmp_path)


def test_a_folder_that_something_else_has_removed_is_made_anew(tmp_path: Path) -> None:
    folders = filled(tmp_path / "node", "a", "b")
    shutil.rmtree(tmp_path / "node")
    folders.restore({"a"})
    assert names(tmp_path / "node") == {"a"}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folders.folder, folders.of_task("a"))] == [0o711, 0o700]
