"""Who may have an agent do what: NATS lets transition publish on one subject, and the detector on another."""

from __future__ import annotations

import json

from services.agent.agent import Agent
from shared.bus.connection import Bus
from shared.events.codes import FailureCode
from shared.messages.commands import LEFTOVERS, ReleaseTask, Reply
from tests.agent.kit import WAIT_S, Driver, alive, train
from tests.versions.kit import COMMAND_SAMPLES


async def test_the_detector_has_processes_ended_and_nothing_else(agent: Agent, driver: Driver, bus: Bus) -> None:
    pids = await train(driver)
    # What all commands have, and workers, without a kind: it is no release either.
    nameless = {"command_id": "nameless", "plan": "p9", "task": "gpt", "generation": 9, "workers": ["n0/0"]}
    answer = await bus.request(LEFTOVERS.at("n0"), json.dumps(nameless).encode(), timeout_s=WAIT_S)
    assert Reply.model_validate_json(answer).code is FailureCode.UNDECODABLE
    assert all(alive(pid) for pid in pids.values())
    for command in COMMAND_SAMPLES:
        answer = await bus.request(
            LEFTOVERS.at("n0"), command.model_dump_json(by_alias=True).encode(), timeout_s=WAIT_S
        )
        reply = Reply.model_validate_json(answer)
        if isinstance(command, ReleaseTask):
            assert reply.ok
        else:
            assert reply.code is FailureCode.UNDECODABLE
            assert all(alive(pid) for pid in pids.values())
    assert not alive(pids["n0/0"])
