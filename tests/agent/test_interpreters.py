"""Tasks that name their Python: a fork server of its own runs there, as long as the supervisor does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.agent.agent import Agent
from services.agent.files import file_server
from services.agent.machine.interpreters import Interpreters, probe
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.messages.node_files import FILES, CheckInputs, InputProblem
from shared.messages.signals import Heartbeat
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec
from tests.agent.kit import HERE, SPEC, WAIT_S, WORKERS, Driver, Ear, parent, supervision
from tests.agent.program import Program
from tests.agent.test_supervisor import gone, kill, node, successor

__all__ = ["node"]

ROOT = Path(__file__).parents[2]
OTHER = "UNICRON_TEST_OTHER_PYTHON"


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Another Python than the agent's: its processes have a variable."""
    return program(tmp_path / "python", f'export {OTHER}=1\nexec "{sys.executable}" "$@"')


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def is_other(pid: int) -> bool:
    return OTHER in psutil.Process(pid).environ()


async def start(driver: Driver, generation: int, worker: str, **spec: object) -> int:
    """Start a process of a task of its own on a worker; return its pid."""
    task = f"task-{worker[-1]}"
    answer = await driver.send(
        {
            "kind": "prepare", "command_id": f"{task}-{generation}", "plan": f"p{generation}", "task": task,
            "generation": generation, "workers": [worker], "spec": {**SPEC, "name": task, **spec},
        }
    )  # fmt: skip
    assert answer.ok, answer
    return answer.workers[worker].pid or 0


def pids(beat: Heartbeat) -> set[int | None]:
    return {status.pid for status in beat.workers}


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_fork_server_runs_in_each_python_in_use(node: Program, bus: Bus, ear: Ear, other: str) -> None:
    driver = Driver(bus)
    there, here = await start(driver, 1, "n0/0", python=other), await start(driver, 1, "n0/1")
    assert is_other(parent(there))
    assert not is_other(parent(here))
    opened = {"kind": "open-store", "command_id": "s", "plan": "p1", "task": "task-0", "generation": 1}
    assert (await driver.send(opened)).ok
    assert len(psutil.Process(parent(there)).children()) == 2, "a task's store runs in its Python, too"

    before = await kill(ear)
    await successor(ear, before)
    await ear.until(lambda: pids(ear.heartbeats[-1]) == {there, here})

    os.kill(parent(there), signal.SIGKILL)
    await ear.until(lambda: [one.worker for one in ear.signals] == ["n0/0"])
    assert await gone(there)
    assert psutil.pid_exists(here), "ranks of another Python go on"
    again = await start(driver, 2, "n0/0", python=other)
    assert is_other(parent(again))

    servers = [parent(again), parent(here)]
    node.process.kill()
    for pid in (again, here, *servers):
        assert await gone(pid)
    await node.process.communicate()


@pytest.fixture
async def listing(settings: Settings, bus: Bus, other: str) -> AsyncIterator[Agent]:
    """An agent of a node whose operator has listed a Python."""
    settings = settings.model_copy(update={"interpreters": f"{other}, /opt/none/bin/python"})
    async with supervision(settings) as inherited:
        started = Agent(settings, bus, HERE, WORKERS, "0" * 32, inherited)
        try:
            await started.start()
            yield started
        finally:
            await started.stop()


async def test_the_first_python_of_the_list_is_that_of_tasks_that_name_none(
    listing: Agent, ear: Ear, other: str
) -> None:
    driver = Driver(ear.bus)
    refused = await driver.ask("prepare", 1, workers=["n0/1"], spec={**SPEC, "python": sys.executable})
    assert f"{sys.executable} is not among the interpreters of the node" in refused.detail
    unnamed, named = await start(driver, 1, "n0/0"), await start(driver, 1, "n0/1", python=other)
    assert is_other(parent(unnamed))
    assert parent(named) == parent(unnamed)


async def test_a_python_without_the_library_is_named(agent: Agent, driver: Driver, tmp_path: Path) -> None:
    without = program(tmp_path / "without", "exit 1")
    refused = await driver.ask("prepare", 1, workers=["n0/0"], spec={**SPEC, "python": without})
    assert not refused.ok
    assert f"no fork server in {without}: the fork server ended; see forkserver-" in refused.detail
    assert (await driver.prepare()).ok, "the worker is free again"


def spec(**fields: object) -> TaskSpec:
    return TaskSpec.model_validate({**SPEC, **fields})


def test_where_tasks_have_users_of_their_own_only_listed_pythons_run_fork_servers(other: str) -> None:
    """A fork server runs as the agent's user, which may be root."""
    with pytest.raises(Unavailable, match=r"is not among .*: none"):
        Interpreters([], separate_users=True).of(spec(python=other))
    assert Interpreters([sys.executable, other], separate_users=True).of(spec(python=other)) == other
    assert Interpreters([], separate_users=False).of(spec(python=other)) == other
    with pytest.raises(Unavailable, match=r"/opt/none is no program"):
        Interpreters([], separate_users=False).of(spec(python="/opt/none"))


def test_the_nodes_own_python_is_no_other_one() -> None:
    for path in (sys.executable, f"{os.path.dirname(sys.executable)}/./{os.path.basename(sys.executable)}"):
        assert Interpreters([], separate_users=True).of(spec(python=path)) == ""
    whole = spec(python="/opt/none", script="/train.py", loop="restart", workers={"min": 1, "max": 1})
    assert Interpreters([], separate_users=True).of(whole) == "", "it is the script's own, run as the task's user"


async def test_a_python_says_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = await probe(sys.executable)
    assert found["lacking"] == []
    assert {"python", "unicron", "torch"} <= found["versions"].keys()
    bare = program(tmp_path / "bare", f'exec "{sys.executable}" -S "$@"')
    with pytest.raises(Unavailable, match="cannot import the library: ModuleNotFoundError: No module named 'unicron'"):
        await probe(bare)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert (await probe(bare))["lacking"] == ["torch", "fsspec", "safetensors", "xxhash"]
    with pytest.raises(Unavailable, match="cannot be run"):
        await probe("/opt/none/bin/python")


async def test_a_submission_that_names_a_python_without_the_library_is_refused_and_a_slow_one_is_not(
    agent: Agent, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass")

    async def problems(python: str) -> list[InputProblem]:
        request = CheckInputs(data=str(script), script=str(script), vocabulary=300, python=python)
        answer = await bus.request(FILES.at("n0"), request.model_dump_json().encode(), timeout_s=WAIT_S)
        return FILES.reply.decode(answer)[0].problems

    (problem,) = await problems(program(tmp_path / "bare", f'exec "{sys.executable}" -S "$@"'))
    assert problem.field == "python"
    assert "cannot import the library" in problem.problem
    assert await problems(sys.executable) == []
    monkeypatch.setattr(file_server, "PYTHON_LIMIT_S", 0.3)
    assert await problems(program(tmp_path / "slow", "exec sleep 60")) == [], "it may be healthy"
