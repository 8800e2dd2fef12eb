"""The agent with the fork server that ships: real training processes, imported ahead and forked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from services.agent.agent import Agent
from services.agent.supervisor import FORK_SERVER
from shared.bus.connection import Bus
from shared.settings.model import Settings
from tests.agent.kit import HERE, SPEC, WORKERS, Driver, Ear, supervision

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
async def test_ranks_are_forked_from_the_warm_server(
    settings: Settings, bus: Bus, ear: Ear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    async with supervision(settings, FORK_SERVER) as inherited:
        await train(Agent(settings, bus, HERE, WORKERS, "first", inherited), bus, ear, corpus)
    assert len(ear.signals) == 1


async def train(agent: Agent, bus: Bus, ear: Ear, corpus: Path) -> None:
    try:
        await agent.start()
        driver = Driver(bus)
        spec = {**SPEC, "data": str(corpus)}
        prepared = await driver.ask("prepare", 1, workers=driver.workers, spec=spec)
        assert prepared.ok, prepared
        store = await driver.ask("open-store", 1)
        assert store.ok, store
        os.kill(prepared.workers["n0/1"].pid or 0, signal.SIGKILL)
        await ear.until(lambda: [s.worker for s in ear.signals] == ["n0/1"])
        released = await driver.ask("release", 2, workers=driver.workers, all_workers=True)
        assert released.ok
        await ear.until(lambda: set(ear.workers().values()) == {"idle"})
    finally:
        await agent.stop()
