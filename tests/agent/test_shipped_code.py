"""Ranks of an agent find the code that has come along with their task, which goes with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.agent.agent import Agent
from services.agent.files.shipped_code import NOT_ALLOWED
from shared.bus.connection import Bus
from shared.messages.node_files import CHUNK_BYTES, CODE, FilesAnswer, FilesReply, ReadCode, failed
from shared.settings.model import Settings
from shared.tasks.code_archive import code_of, pack
from tests.agent.kit import SPEC, Driver
from tests.condition import until


@pytest.fixture(params=[True, False], ids=["allowed", "not allowed"])
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """Those of a node whose operator allows such code, or does not."""
    return settings.model_copy(update={"allow_shipped_code": request.param})


async def test_a_rank_is_told_where_its_code_is_or_why_it_is_refused(
    settings: Settings, bus: Bus, agent: Agent, driver: Driver, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print()")
    archive = pack(tmp_path, ["train.py"])
    code = code_of(archive)

    async def serve(request: ReadCode) -> FilesAnswer:
        return FilesReply(), archive[request.offset : request.offset + CHUNK_BYTES]

    await bus.serve(CODE, serve, refuse=failed)
    shipped = {"script": "train.py", "data": "train.py", "code": code.model_dump()}
    prepared = await driver.ask("prepare", 1, workers=["n0/0"], spec=SPEC | shipped | {"env": {"BEHAVIOUR": "code"}})
    assert prepared.ok, prepared
    task = settings.run_dir / "tasks" / "gpt"
    folder = task / "code" / "n0" / code.digest
    said = f"code: {folder if settings.allow_shipped_code else NOT_ALLOWED}\n"
    await until(lambda: said in (task / "output" / "1-n0-0.log").read_text())
    assert (folder / "train.py").exists() == settings.allow_shipped_code
    assert '"script":"train.py"' in (task / "spec.json").read_text()
    assert (await driver.ask("release", 2, workers=["n0/0"], all_workers=True)).ok
    await until(lambda: not folder.parent.exists())
