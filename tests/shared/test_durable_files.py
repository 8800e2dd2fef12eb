"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.machine.durable_files import replace_file


def test_a_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for parts in ((b"one",), (b"two ", b"parts")):
        replace_file(path, *parts, mode=0o640)
        assert path.read_bytes() == b"".join(parts)
        assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["file"]


def test_a_failure_leaves_the_earlier_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, b"earlier", mode=0o600)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"later", mode=0o600)
    assert path.read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["file"]
