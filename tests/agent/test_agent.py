"""The node agent with real processes, a real fork server and a real bus."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from services.agent.agent import Agent
from services.agent.files.snapshot_folders import node_folder
from services.agent.machine.hardware import NodeHardware
from services.agent.node.process import Process
from services.agent.ranks import fork_server
from services.agent.succession.inheritance import Inheritance
from shared.messages.signals import ProcessExited, RankRaised
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec
from tests.agent.kit import (
    HERE,
    SPEC,
    STAND_IN,
    WAIT_S,
    WORKERS,
    Driver,
    Ear,
    alive,
    listens,
    parent,
    supervision,
    train,
)
from unicron.protocol.messages import Hello, encode
from unicron.protocol.versions import VERSION


async def test_prepared_and_configured_workers_train_and_show_in_heartbeats(
    agent: Agent, driver: Driver, ear: Ear, settings: Settings
) -> None:
    await ear.until(lambda: ear.workers() == {"n0/0": "idle", "n0/1": "idle"})
    prepared = await driver.prepare()
    assert prepared.ok, prepared
    pids = {w: r.pid for w, r in prepared.workers.items()}
    assert all(pid and alive(pid) for pid in pids.values())
    await ear.until(lambda: set(ear.workers().values()) == {"ready"})
    configured = await driver.configure()
    assert configured.ok, configured
    assert {w: r.pid for w, r in configured.workers.items()} == pids
    assert configured.workers["n0/0"].phases == {"rebuild": 0.1}
    await ear.until(lambda: ear.heartbeats[-1].workers[0].steps_timed >= 3)
    status = ear.heartbeats[-1].workers[0]
    assert (status.task, status.generation, status.rank, status.state) == ("gpt", 1, 0, "training")
    assert status.loss == 2.0
    assert status.process_state in {"R", "S", "D"}
    output = settings.run_dir / "tasks" / "gpt" / "output" / "1-n0-0.log"
    assert output.read_text() == "a rank of gpt\n"
    assert (settings.run_dir / "tasks" / "gpt" / "spec.json").exists()


async def test_a_killed_rank_is_signalled_at_once(agent: Agent, driver: Driver, ear: Ear) -> None:
    pids = await train(driver)
    killed_s = time.monotonic()
    os.kill(pids["n0/1"], signal.SIGKILL)
    await ear.until(lambda: bool(ear.signals))
    took_s = time.monotonic() - killed_s
    exited = ear.signals[0]
    assert isinstance(exited, ProcessExited)
    assert (exited.worker, exited.exit_code, exited.pid, exited.generation) == ("n0/1", -9, pids["n0/1"], 1)
    assert exited.last_output == "a rank of gpt\n"
    assert took_s < 20.0  # about 5 ms on an idle machine; the limit is for a busy one
    await ear.until(lambda: ear.workers()["n0/1"] == "idle")


async def test_an_exception_is_signalled_before_the_end_of_its_process(agent: Agent, driver: Driver, ear: Ear) -> None:
    await train(driver, behaviour="raise")
    await ear.until(lambda: len(ear.signals) == 4)
    of_first = [s for s in ear.signals if s.worker == "n0/0"]
    assert [s.kind for s in of_first] == ["rank-raised", "process-exited"]
    raised, exited = of_first
    assert isinstance(raised, RankRaised)
    assert isinstance(exited, ProcessExited)
    assert (raised.cause, raised.error, raised.step) == ("exception", "ValueError", 2)
    assert exited.last_output.endswith("the end of the output\n")


async def test_a_refusal_is_signalled_although_the_process_was_never_configured(
    agent: Agent, driver: Driver, ear: Ear
) -> None:
    await driver.prepare(workers=["n0/0"], behaviour="refuse")
    await ear.until(lambda: len(ear.signals) == 2)
    raised, exited = ear.signals
    assert isinstance(raised, RankRaised)
    assert isinstance(exited, ProcessExited)
    assert (raised.cause, raised.error, raised.generation, raised.worker) == (
        "refused",
        "ModuleNotFoundError",
        1,
        "n0/0",
    )
    assert raised.detail == "No module named 'missing'"


async def test_an_agent_that_cannot_send_its_signals_ends(agent: Agent, driver: Driver) -> None:
    running = asyncio.create_task(agent.run())
    await train(driver)
    no_signal: Any = object()
    agent._signals.put([no_signal])
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(AttributeError):
            await running


async def test_a_path_that_is_not_unicode_is_dropped_and_ends_nothing(agent: Agent, driver: Driver, ear: Ear) -> None:
    await train(driver, behaviour="unsayable")
    await ear.until(lambda: ear.heartbeats[-1].counters.get("undecodable") == 2)
    await ear.until(lambda: any(w.step >= 4 for w in ear.heartbeats[-1].workers))
    assert ear.signals == []


async def test_a_rank_that_missed_a_peer_is_not_to_blame(agent: Agent, driver: Driver) -> None:
    assert (await driver.prepare(behaviour="miss-a-peer")).ok
    refused = await driver.configure()
    assert (refused.ok, refused.code) == (False, "rank-raised")
    assert "n0/0: DistStoreError" in refused.detail
    assert "n0/0" in refused.workers


async def test_hold_and_configure_keep_the_process(agent: Agent, driver: Driver, ear: Ear, settings: Settings) -> None:
    pids = await train(driver)
    held = await driver.ask("hold", 2, workers=["n0/0"], lost=["n0/1"])
    assert held.ok
    assert held.workers["n0/0"].pid == pids["n0/0"]
    output = settings.run_dir / "tasks" / "gpt" / "output" / "1-n0-0.log"
    assert output.read_text().endswith("lost: n0/1\n")
    assert (await driver.ask("hold", 2, workers=["n0/0"])).ok  # it is held already: the answer comes at once
    again = await driver.configure(2, ["n0/0"])
    assert again.ok
    assert again.workers["n0/0"].pid == pids["n0/0"]
    drained = await driver.ask("drain", 3, workers=["n0/0"])
    assert drained.ok
    assert drained.workers["n0/0"].step >= 0
    assert ear.signals == []


async def test_older_generations_of_other_plans_are_fenced(agent: Agent, driver: Driver) -> None:
    await train(driver)
    assert (await driver.ask("hold", 5, workers=["n0/0"])).ok
    refused = await driver.ask("release", 4, workers=driver.workers)
    assert (refused.ok, refused.code) == (False, "fenced")
    # Within one plan the order of generations is the plan's affair.
    same = await driver.ask("hold", 4, workers=["n0/1"], plan="p5")
    assert same.ok


async def test_a_waiting_command_ends_when_a_newer_plan_fences_it(
    agent: Agent, driver: Driver, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "QUIT_GRACE_S", 2 * WAIT_S)
    pids = await train(driver)
    os.kill(pids["n0/0"], signal.SIGSTOP)
    held = asyncio.create_task(driver.ask("hold", 2, workers=["n0/0"]))
    await asyncio.sleep(0)
    released = await driver.ask("release", 3, workers=["n0/0"])
    assert released.ok  # a stopped process is killed at once, without the grace
    answer = await held
    assert (answer.ok, answer.code) in {(False, "fenced"), (False, "process-exited")}
    assert ear.signals == []


async def test_a_repeated_command_joins_the_first(agent: Agent, driver: Driver) -> None:
    command = {"kind": "open-store", "command_id": "once", "plan": "p1", "task": "gpt", "generation": 1}
    first, second = await asyncio.gather(driver.send(command), driver.send(command))
    assert first.ok
    assert first == second == await driver.send(command)
    assert await listens(first.host, first.port)
    assert (await driver.ask("release", 1, workers=[], all_workers=True)).ok
    async with asyncio.timeout(40):
        while await listens(first.host, first.port):
            pass  # the port closes with the process, a moment after the answer


async def test_copies_stay_where_a_task_may_go_on(agent: Agent, driver: Driver, settings: Settings) -> None:
    await train(driver)
    folder = node_folder(settings.memory_dir, settings.run_dir, "n0") / "gpt"
    assert folder.exists()
    for number, keep in ((2, True), (3, False)):
        assert (await driver.ask("release", number, workers=driver.workers, all_workers=True, keep_copies=keep)).ok
        assert folder.exists() == keep


async def test_copies_are_deleted_on_request_unless_their_task_has_a_process(
    agent: Agent, driver: Driver, settings: Settings
) -> None:
    await train(driver)
    folder = node_folder(settings.memory_dir, settings.run_dir, "n0") / "gpt"
    assert (await driver.ask("release", 1, workers=[], delete_copies=True)).ok
    assert folder.exists()
    assert (await driver.ask("release", 2, workers=driver.workers, all_workers=True, keep_copies=True)).ok
    assert folder.exists()
    assert (await driver.ask("release", 2, workers=[], delete_copies=True)).ok
    assert not folder.exists()


@pytest.mark.parametrize(("behaviour", "code"), [("die-early", 7), ("die-joining", 3)])
async def test_a_command_fails_at_once_when_its_process_dies(
    agent: Agent, driver: Driver, ear: Ear, behaviour: str, code: int
) -> None:
    answer = await driver.prepare(behaviour=behaviour, workers=["n0/0"])
    if behaviour == "die-joining":
        assert answer.ok
        answer = await driver.configure(1, ["n0/0"])
    assert (answer.ok, answer.code) == (False, "process-exited")
    assert "n0/0" in answer.detail
    assert f"exited with {code}" in answer.detail
    await ear.until(lambda: ear.kinds() == ["process-exited"])


async def test_only_the_worker_that_failed_is_to_blame(agent: Agent, driver: Driver) -> None:
    pids = await train(driver)
    os.kill(pids["n0/0"], signal.SIGSTOP)
    held = asyncio.create_task(driver.ask("hold", 2, workers=driver.workers))
    os.kill(pids["n0/0"], signal.SIGKILL)
    answer = await held
    assert (answer.ok, answer.code) == (False, "process-exited")
    assert set(answer.workers) == {"n0/1"}


async def test_a_stop_leaves_a_checkpoint_and_no_process(agent: Agent, driver: Driver, ear: Ear) -> None:
    pids = await train(driver)
    answer = await driver.ask("stop", 2, workers=driver.workers)
    assert answer.ok
    assert not any(alive(pid) for pid in pids.values())
    await ear.until(lambda: ear.kinds() == ["rank-stopped"])


async def test_ranks_that_cannot_save_train_on_until_steps_may_be_lost(agent: Agent, driver: Driver, ear: Ear) -> None:
    pids = await train(driver, behaviour="cannot-save")
    for _ in range(2):
        answer = await driver.ask("stop", 2, workers=driver.workers)
        assert (answer.ok, answer.code, answer.detail) == (False, "checkpoint-failed", "no room")
        assert set(answer.workers) == set(driver.workers)  # nobody is to blame
        assert all(alive(pid) for pid in pids.values())
    assert ear.kinds() == []
    answer = await driver.ask("stop", 2, workers=driver.workers, lose_steps=True)
    assert answer.ok
    assert not any(alive(pid) for pid in pids.values())
    await ear.until(lambda: ear.kinds() == ["rank-stopped"])


async def test_a_finished_task_is_signalled_once_and_frees_its_workers(agent: Agent, driver: Driver, ear: Ear) -> None:
    await train(driver, behaviour="finish")
    await ear.until(lambda: set(ear.workers().values()) == {"idle"})
    await ear.until(lambda: len(ear.signals) == 2)
    assert ear.kinds() == ["rank-checkpointed", "rank-finished"]


async def test_a_fresh_process_is_kept_and_a_used_one_replaced_by_prepare(
    agent: Agent, driver: Driver, ear: Ear
) -> None:
    first = await driver.prepare(1)
    adopted = await driver.prepare(3)
    assert {w: r.pid for w, r in adopted.workers.items()} == {w: r.pid for w, r in first.workers.items()}
    assert (await driver.configure(3)).ok
    replaced = await driver.prepare(4)
    assert replaced.ok
    assert {r.pid for r in replaced.workers.values()}.isdisjoint({r.pid for r in first.workers.values()})
    busy = await driver.ask("prepare", 1, workers=["n0/0"], task="other", spec={**SPEC, "name": "other"})
    assert (busy.ok, busy.code) == (False, "busy")
    assert ear.signals == []


async def test_signals_are_repeated_until_answered(agent: Agent, driver: Driver, ear: Ear) -> None:
    ear.answering = False
    pids = await train(driver)
    os.kill(pids["n0/0"], signal.SIGKILL)
    await ear.until(lambda: len(ear.signals) >= 2)
    ear.answering = True
    os.kill(pids["n0/1"], signal.SIGKILL)
    await ear.until(lambda: {s.worker for s in ear.signals} == {"n0/0", "n0/1"})
    assert len({s.signal_id for s in ear.signals}) == 2


async def test_a_lost_fork_server_is_replaced_and_its_ranks_are_signalled(
    agent: Agent, driver: Driver, ear: Ear
) -> None:
    pids = await train(driver)
    server = parent(pids["n0/0"])
    os.kill(server, signal.SIGKILL)
    await ear.until(lambda: len(ear.signals) == 2)
    assert {s.worker for s in ear.signals} == set(driver.workers)
    assert not any(alive(pid) for pid in pids.values())
    answer = await driver.prepare(2)  # waits for the new one
    assert answer.ok, answer


async def test_a_fork_server_that_cannot_be_started_is_tried_again(
    settings: Settings, ear: Ear, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command, hidden = tmp_path / "forkserver", tmp_path / "hidden"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(STAND_IN)} "$@"\n')
    command.chmod(0o755)
    failed = asyncio.Event()

    class Listening(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if "No such file or directory" in record.getMessage():
                failed.set()
            return True

    async with supervision(settings, [str(command)]) as inherited:
        agent = Agent(settings, ear.bus, HERE, WORKERS, "first", inherited)
        try:
            await agent.start()
            driver = Driver(ear.bus)
            pids = await train(driver)
            command.rename(hidden)  # starting it is an OSError now
            with caplog.filtering(Listening()):
                os.kill(parent(pids["n0/0"]), signal.SIGKILL)
                async with asyncio.timeout(WAIT_S):
                    await failed.wait()
            hidden.rename(command)
            answer = await driver.prepare(2)
            assert answer.ok, answer
        finally:
            await agent.stop()


async def test_a_stopped_agent_leaves_no_process(settings: Settings, ear: Ear) -> None:
    async with supervision(settings) as inherited:
        agent = Agent(settings, ear.bus, HERE, WORKERS, "first", inherited)
        await agent.start()
        pids = await train(Driver(ear.bus))
        server = parent(pids["n0/0"])
        await agent.stop()
        assert not any(alive(pid) for pid in pids.values())
    assert not any(alive(pid) for pid in [server, *pids.values()])
    assert ear.signals == []


async def test_only_forked_processes_may_attach(agent: Agent, inherited: Inheritance, ear: Ear) -> None:
    reader, writer = await asyncio.open_unix_connection(f"\0{inherited.ranks_name}")
    writer.write(encode(Hello(version=VERSION, task="gpt", worker="n0/0", pid=os.getpid())))
    async with asyncio.timeout(40):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (WORKERS, ["", ""]),
        (NodeHardware("h100", ("n0/0", "n0/1"), ("GPU-1", "0")), ["GPU-1", "0"]),
    ],
)
async def test_a_task_does_not_change_which_device_a_worker_has(
    found: NodeHardware, shown: list[str], settings: Settings, ear: Ear
) -> None:
    """Its variables are those of all its ranks, which would share a device, or see one beside ranks that see none."""
    async with supervision(settings) as inherited:
        environment = Agent(settings, ear.bus, HERE, found, "first", inherited)._environment
        spec = TaskSpec.model_validate({**SPEC, "env": {"CUDA_VISIBLE_DEVICES": "0", "MINE": "1"}})
        ranks = [Process(id=worker, task="gpt", worker=worker, generation=1) for worker in found.workers]
        assert [environment.of(rank, spec)["CUDA_VISIBLE_DEVICES"] for rank in ranks] == shown
        assert environment.of(ranks[0], spec)["MINE"] == "1"
