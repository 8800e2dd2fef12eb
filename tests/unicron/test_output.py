"""Output of a training process on a disk without room: printing never fails, and it shows that something is missing."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from unicron.process import output


def test_what_finds_no_room_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    full, path = os.open("/dev/full", os.O_WRONLY), tmp_path / "output"
    file = output.LenientOutput(full)
    try:
        assert file.write(b"lost\n") == 5
        assert file.write(memoryview(b"lost too\n")) == 9
        roomy = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(roomy, full)
        os.close(roomy)
        assert file.write(b"there\n") == 6
        assert file.write(b"again\n") == 6
    finally:
        os.close(full)
    assert path.read_text() == "\nunicron: 14 bytes of output are left out: no room\nthere\nagain\n"


def test_other_errors_of_a_write_are_raised(tmp_path: Path) -> None:
    readable = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            output.LenientOutput(readable).write(b"text")
    finally:
        os.close(readable)


def test_printing_into_a_full_disk_does_not_end_a_process() -> None:
    """In a child process, whose descriptors are the test's to change."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, 1)
            os.dup2(full, 2)
            output.protect()
            print("text", flush=True)
            print("\udcff", file=sys.stderr, flush=True)  # as in a file name that is not UTF-8
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
