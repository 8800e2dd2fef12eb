"""The specification that an agent writes for ranks: left alone where it is the same, and refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.agent.files.rank_users import RankUsers
from services.agent.files.task_files import TaskFiles
from shared.errors import Unavailable
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC


def test_a_specification_that_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    """So a rank can be started again on a disk that is full."""
    files, spec = TaskFiles(tmp_path, "n0", RankUsers("")), parse_spec(SPEC)
    path = files.write_spec("gpt", spec)
    before = path.stat()
    assert files.write_spec("gpt", spec) == path
    assert path.stat() == before
    changed = parse_spec({**SPEC, "steps": spec.steps + 1})
    files.write_spec("gpt", changed)
    assert path.read_text() == changed.model_dump_json(by_alias=True)
    assert [p.name for p in path.parent.iterdir() if p.is_file()] == ["spec.json"]


def test_a_specification_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "tasks").touch()
    with pytest.raises(Unavailable, match=r"the specification cannot be written to .*: Not a directory"):
        TaskFiles(tmp_path, "n0", RankUsers("")).write_spec("gpt", parse_spec(SPEC))
