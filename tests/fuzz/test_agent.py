"""A real agent: messages of any kind on all its subjects, and lines of any kind from one of its ranks."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from shared.bus.connection import Bus
from shared.messages.admission import HELLO, REVOKED, Answer, Hello
from shared.settings.model import Settings
from tests.agent.conftest import ear
from tests.agent.kit import SPEC, Driver, Ear, stage
from tests.agent.program import running
from tests.fuzz.bus_course import course, readable
from tests.fuzz.samples import Target, agent_targets

__all__ = ["ear"]

EXAMPLES = 40
"""For each subject: a second or two in all."""


def harmless(target: Target, data: bytes) -> bool:
    """Return whether a message leaves the ranks and the agent alone: what can be read is carried out."""
    return not readable(target, data) or (b'"gpt"' not in data and "revoked" not in target.subject)


@pytest.mark.slow
async def test_an_agent_lives_and_works_whatever_it_receives(
    settings: Settings, bus: Bus, ear: Ear, tmp_path: Path
) -> None:
    hellos: list[Hello] = []

    async def admit(data: bytes) -> bytes:
        hellos.append(Hello.model_validate_json(data))
        return Answer(verdict="admitted").model_dump_json().encode()

    await bus.answer(HELLO.subject, lambda _, data: admit(data))
    driver = Driver(bus)
    async with running(settings, "n0", tmp_path / "agent.log") as program:
        await program.ready()
        processes = psutil.Process(program.process.pid).children(recursive=True)
        # One rank trains; the other one, of another task, sends junk while it trains.
        assert (await driver.prepare(workers=["n0/0"])).ok
        assert (await driver.configure(workers=["n0/0"])).ok
        junk = {"task": "junk", "command_id": "j1", "plan": "j", "generation": 1}
        spec = {**SPEC, "name": "junk", "env": {"BEHAVIOUR": "junk"}}
        assert (await driver.send({**junk, "kind": "prepare", "workers": ["n0/1"], "spec": spec})).ok
        joined = stage(1, ["n0/1"]).model_dump(mode="json")
        configure = {**junk, "command_id": "j2", "kind": "configure", "stage": joined, "store_port": 1}
        assert (await driver.send({**configure, "store_host": "127.0.0.1"})).ok

        targets = agent_targets("n0", hellos[0].incarnation)
        sent = await course(bus, targets, examples=EXAMPLES, seed=1, wanted=harmless)
        assert set(sent) == {target.subject for target in targets}
        # A request that nobody takes fails. A revocation is not answered: the agent's log shows that it takes them.
        revoked = REVOKED.at("n0", hellos[0].incarnation)
        assert [target.subject for target in targets if not target.answers] == [revoked]
        await ear.until(lambda: f"from {revoked} was dropped" in (tmp_path / "agent.log").read_text())
        before = ear.heartbeats[-1]
        seen = len(ear.heartbeats)
        await ear.until(lambda: len(ear.heartbeats) > seen + 1)

        steps = {worker.worker: worker.step for worker in before.workers}
        assert before.counters["undecodable"] > 50
        await ear.until(lambda: all(w.step > steps[w.worker] for w in ear.heartbeats[-1].workers[:1]))
        held = await driver.ask("hold", 2, workers=["n0/0"])
        assert held.ok, held
        assert held.workers["n0/0"].step > 0
        assert {heartbeat.incarnation for heartbeat in ear.heartbeats} == {hellos[0].incarnation}
        alive = {process.pid for process in psutil.Process(program.process.pid).children(recursive=True)}
        assert {process.pid for process in processes} <= alive
    lines = (tmp_path / "agent.log").read_text().splitlines()
    assert 0 < len([line for line in lines if "was dropped" in line]) < 100
    assert not [line for line in lines if "cannot be read" in line or line.startswith("Traceback")]
