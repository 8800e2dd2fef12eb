"""``unicron doctor`` names the settings that clear the place of in-memory copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.doctor.shared_memory import clearers


def found(root: Path, *, place: str = "/dev/shm", uid: int = 1000) -> list[str]:
    return clearers(root, place, uid, "ann")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    return tmp_path


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_logind_removes_the_files_of_a_user_who_logs_out(root: Path) -> None:
    assert found(root) == ["RemoveIPC=yes (the default of systemd-logind) at the last logout of user ann"]
    assert found(root, uid=999) == found(root, place="/mnt/memory") == []
    put(root, "etc/systemd/logind.conf", "[Login]\n#RemoveIPC=no\nRemoveIPC = no\n")
    assert found(root) == []
    put(root, "usr/lib/systemd/logind.conf.d/9.conf", "[Login]\nRemoveIPC=true\n")
    assert found(root) == ["RemoveIPC=yes (/usr/lib/systemd/logind.conf.d/9.conf) at the last logout of user ann"]
    put(root, "etc/systemd/logind.conf.d/9.conf", "")
    assert found(root) == []


def test_a_user_who_lingers_is_never_logged_out(root: Path) -> None:
    put(root, "var/lib/systemd/linger/ann", "")
    assert found(root) == []


@pytest.mark.parametrize(
    ("line", "clears"),
    [
        ("D /dev/shm 1777 root root -", True),
        ("d /dev/shm 1777 root root 10d", True),
        ("R /dev/shm/unicron-*", True),
        ("e /dev/* - - - 1h", True),
        ("d /dev/shm 1777 root root -", False),
        ("R! /dev/shm/*", False),
        ("R /dev/shm/other-*", False),
        ("# R /dev/shm/*", False),
        ("D /tmp 1777 root root 10d", False),
    ],
)
def test_lines_of_tmpfiles(line: str, clears: bool, root: Path) -> None:
    put(root, "etc/tmpfiles.d/a.conf", f"{line}\n")
    assert found(root, uid=0) == ([f"'{line}' in /etc/tmpfiles.d/a.conf"] if clears else [])
    put(root, "usr/lib/tmpfiles.d/b.conf", "x /dev/shm/unicron-*\n")
    assert found(root, uid=0) == [], "the agent's folders are exempted"


def test_without_systemd_nothing_is_cleared(tmp_path: Path) -> None:
    assert clearers(tmp_path, "/dev/shm", 1000, "ann") == []
