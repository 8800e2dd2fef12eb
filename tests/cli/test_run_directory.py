"""The folder that a stack writes to: on which file systems its lock keeps other machines out."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from cli.here import LOCK
from cli.stack import run_directory
from cli.stack.file_system import Mount, mount_of, without_locks
from cli.stack.run_directory import RunDirectory
from shared.errors import Conflict, InvalidInput, Unavailable

MOUNTS = r"""
/dev/vda / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,vers=4.2,hard,sec=sys,clientaddr=10.0.0.7,local_lock=none,addr=10.0.0.1 0 0
server:/old /home/old\040files nfs rw,vers=3,hard,nolock,local_lock=all,mountaddr=10.0.0.1 0 0
auto /scratch autofs rw 0 0
10.0.0.2@o2ib:/fs /scratch lustre rw,flock,lazystatfs 0 0
""".strip()
"""As ``/proc/self/mounts`` has it; an automounter's place is hidden by what it has mounted."""


@pytest.mark.parametrize(
    ("path", "at", "kind"),
    [("/root/run", "/", "ext4"), ("/home/me/run", "/home", "nfs4"), ("/homes/run", "/", "ext4"),
     ("/home/old files/run", "/home/old files", "nfs"), ("/scratch", "/scratch", "lustre")],
)  # fmt: skip
def test_a_path_is_on_the_nearest_file_system(path: str, at: str, kind: str) -> None:
    found = mount_of(path, MOUNTS)
    assert found is not None
    assert found[:2] == (at, kind)
    assert mount_of(path, "") is None


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("ext4", "rw", ""),
        ("nfs4", "rw,local_lock=none", ""),
        ("nfs", "rw,vers=3,local_lock=none", ""),
        ("nfs", "rw,vers=3,nolock,local_lock=all", "with the option nolock of nfs a lock counts on one machine alone"),
        ("nfs4", "rw,local_lock=flock", "with the option local_lock=flock of nfs4 a lock counts on one machine alone"),
        ("lustre", "rw,flock", ""),
        ("lustre", "rw,localflock", "with the option localflock of lustre a lock counts on one machine alone"),
        ("cifs", "rw,nobrl", "with the option nobrl of cifs a lock counts on one machine alone"),
        ("fuse.sshfs", "rw", "fuse.sshfs has no locks that count on other machines"),
    ],
)
def test_where_a_lock_does_not_keep_other_machines_out(kind: str, options: str, said: str) -> None:
    assert without_locks(Mount("/home", kind, tuple(options.split(",")))) == said


def test_a_log_in_a_file_is_refused_where_locks_count_on_one_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"server:/home {tmp_path} nfs rw,vers=3,nolock 0 0\n")
    monkeypatch.setattr(run_directory, "MOUNTS", table)
    with pytest.raises(InvalidInput, match=rf"is on {tmp_path}: with the option nolock .*UNICRON_LOG_URL"):
        RunDirectory(tmp_path / "run").acquire()
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("UNICRON_LOG_URL", "postgresql://db/unicron")
    with RunDirectory(tmp_path / "run"), pytest.raises(Conflict, match=r"in use by the process with pid \d+ on \S+;"):
        RunDirectory(tmp_path / "run").acquire()


def test_a_folder_that_takes_no_locks_is_not_said_to_be_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # Lustre without the option flock

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(Unavailable, match=r"cannot be locked \(Function not implemented\); mount it with locks"):
        RunDirectory(tmp_path).acquire()


def test_a_command_that_looks_for_a_stack_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK).touch()
    looking = (tmp_path / LOCK).open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("cli.stack.run_directory.time.sleep", lambda _: looking.close())  # it has seen enough
    with RunDirectory(tmp_path):
        assert looking.closed
