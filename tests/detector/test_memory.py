"""The agent's folder of in-memory copies: deleted when nobody can need it, and not before."""

from __future__ import annotations

from pathlib import Path

from services.detector.memory import LINGER_S, TaskMemory, node_folder


def filled(folder: Path, *tasks: str) -> TaskMemory:
    """Return the memory of a node on which tasks have left copies."""
    memory = TaskMemory(folder)
    for task in tasks:
        memory.of_task(task).mkdir(parents=True)
        (memory.of_task(task) / "1-0-0.copy").write_bytes(b"copy")
    return memory


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_nodes_folder_is_its_own_and_its_next_agents(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, tmp_path / "run", "n0")
    assert folder == node_folder(tmp_path, tmp_path / "run" / ".." / "run", "n0")
    assert len({folder, node_folder(tmp_path, tmp_path / "run", "n1"), node_folder(tmp_path, tmp_path, "n0")}) == 3
    assert folder.parent == tmp_path


def test_copies_outlive_their_task_s_processes_for_a_while(tmp_path: Path) -> None:
    memory = filled(tmp_path, "a", "b")
    memory.sweep({"a", "b"}, 0.0)
    memory.sweep({"a"}, 1.0)
    memory.sweep({"a"}, LINGER_S)
    assert names(tmp_path) == {"a", "b"}
    memory.sweep({"a"}, LINGER_S + 1.0)
    assert names(tmp_path) == {"a"}


def test_a_task_that_came_back_starts_its_time_anew(tmp_path: Path) -> None:
    memory = filled(tmp_path, "a")
    for at_s, present in ((0.0, set[str]()), (LINGER_S - 1, {"a"}), (LINGER_S + 1, set[str]()), (2 * LINGER_S, set())):
        memory.sweep(present, at_s)
        assert names(tmp_path) == {"a"}


def test_forgetting_a_task_and_leaving(tmp_path: Path) -> None:
    memory = filled(tmp_path / "node", "a", "b")
    memory.forget("a")
    memory.forget("never-seen")
    assert names(tmp_path / "node") == {"b"}
    memory.close()
    memory.sweep((), 0.0)
    assert not names(tmp_path)
