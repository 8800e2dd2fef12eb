"""An agent's metrics, with real rank processes."""

from __future__ import annotations

import os
import signal

from prometheus_client import CollectorRegistry

from services.agent.agent import Agent
from tests.agent.kit import Driver, Ear, train


async def test_ranks_and_heartbeats_show(agent: Agent, driver: Driver, ear: Ear) -> None:
    registry = CollectorRegistry()
    agent.metrics.register(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("unicron_agent_workers") == 2
    assert value("unicron_agent_ranks_started_total") == 0
    pids = await train(driver)
    await ear.until(lambda: all(w.steps_timed for w in ear.heartbeats[-1].workers))
    assert value("unicron_agent_ranks_started_total") == 2
    ranks = [s for m in registry.collect() for s in m.samples if s.name == "unicron_agent_ranks"]
    assert {sample.labels["task"] for sample in ranks} == {"gpt"}
    assert sum(sample.value for sample in ranks) == 2
    assert 0.0 <= (value("unicron_agent_progress_age_seconds", worker="n0/0") or 0.0) < 40.0
    assert 0.0 <= (value("unicron_agent_heartbeat_age_seconds") or 0.0) < 40.0
    assert (value("unicron_agent_heartbeats_total") or 0.0) >= 1
    os.kill(pids["n0/1"], signal.SIGKILL)
    await ear.until(lambda: "process-exited" in ear.kinds())
    assert value("unicron_agent_ranks_ended_total", how="unexpected") == 1
    assert value("unicron_agent_ranks_ended_total", how="expected") == 0
    assert value("unicron_agent_progress_age_seconds", worker="n0/1") is None
