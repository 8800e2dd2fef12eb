"""An agent beside libraries of other versions: one version apart they work together, else the refusal names both."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.agent.agent import Agent
from services.agent.machine.interpreters import probe
from services.agent.versions import agreed
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.service.metrics import version
from shared.settings.model import Settings
from tests.agent.kit import HERE, SPEC, WORKERS, Driver, supervision
from unicron.protocol.messages import decode, encode
from unicron.protocol.versions import OLDEST, VERSION

ROOT = Path(__file__).parents[2]
SPOKEN = f"{OLDEST} to {VERSION}"

WAITS = """
from unicron.link.agent_link import AgentLink
AgentLink().next_generation(0)
"""
"""A script that attaches to the agent, and waits."""

WITHOUT_TORCH = (sys.executable, "-P", "-m", "unicron.forkserver", "--no-preload")


@pytest.fixture
def python_with(tmp_path: Path) -> Callable[[int], str]:
    """Returns a Python whose library speaks another newest version of the protocol, and the one before."""

    def make(newest: int) -> str:
        folder = tmp_path / f"library-{newest}"
        shutil.copytree(ROOT / "unicron", folder / "unicron", ignore=shutil.ignore_patterns("__pycache__"))
        module = folder / "unicron" / "protocol" / "versions.py"
        text = module.read_text()
        assert f"\nVERSION = {VERSION}\n" in text
        module.write_text(text.replace(f"\nVERSION = {VERSION}\n", f"\nVERSION = {newest}\n"))
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexport PYTHONPATH="{folder}"\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        return str(python)

    return make


@pytest.fixture
async def agent(settings: Settings, bus: Bus) -> AsyncIterator[Agent]:
    """A running agent, whose fork servers are those that ship."""
    async with supervision(settings, WITHOUT_TORCH) as inherited:
        started = Agent(settings, bus, HERE, WORKERS, "0" * 32, inherited)
        try:
            await started.start()
            yield started
        finally:
            await started.stop()


@pytest.mark.slow
async def test_a_library_one_version_apart_works_and_another_is_refused(
    agent: Agent, bus: Bus, tmp_path: Path, python_with: Callable[[int], str]
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    driver = Driver(bus)
    for generation, (worker, newest) in enumerate(zip(driver.workers, (VERSION - 1, VERSION + 1), strict=True), 1):
        spec = {**SPEC, "script": str(script), "python": python_with(newest)}
        prepared = await driver.ask("prepare", generation, workers=[worker], spec=spec)
        assert prepared.ok, prepared
    for newest, older in ((VERSION - 2, "library there"), (VERSION + 2, "agent")):
        python = python_with(newest)
        said = f"speaks protocol {newest - 1} to {newest}; the node agent, unicron-cluster {version()}, speaks {SPOKEN}"
        spec = {**SPEC, "name": "refused", "script": str(script), "python": python}
        with pytest.raises(Unavailable, match=rf"unicron 0\S+ {said}: install a newer {older}"):
            await probe(python)
        with pytest.raises(Unavailable, match=rf"no fork server in {python}: the fork server: unicron 0\S+ {said}"):
            await agent._fork_servers.current(python)


@pytest.mark.parametrize(
    ("oldest", "newest", "common"),
    [(VERSION, VERSION + 1, VERSION), (OLDEST, VERSION, VERSION), (OLDEST - 1, OLDEST, OLDEST), (OLDEST, None, OLDEST)],
)
def test_the_newest_version_that_both_speak_is_used(oldest: int, newest: int | None, common: int) -> None:
    assert agreed("n0/0", oldest, newest, "0.1.0") == common


def test_the_messages_of_the_version_before_are_read() -> None:
    """Recorded when that version was the newest: what an older side says, and what it reads of what this one says."""
    lines = (ROOT / "tests" / "versions" / f"protocol-{OLDEST}.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) > 20
    for line in lines:
        assert json.loads(line).items() <= json.loads(encode(decode(line))).items()
