"""``unicron run`` on a cluster: what it submits, how it ends, and what Ctrl-C does. ``tests/e2e/test_run.py`` has the
embedded stack."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.launch.course import _say_faults
from cli.launch.ending import Ending, lines_of_fault
from cli.launch.interrupts import OnInterrupt, decided
from cli.launch.place import devices_of, division, inherited, place_of
from cli.launch.submission import Submitted, submit
from cli.stack.devices import Device, Division
from cli.waiting import WaitingClient
from services.agent.machine.hardware import Devices
from shared.errors import Conflict, InvalidInput, NoDevice
from shared.events.union import TaskFailed, TaskFinished, TaskStopped, TaskStopRequested
from shared.tasks.refusals import NOT_HEALED, reason_of, why_not_healed
from tests.api.kit import Server, spec
from tests.cli.conftest import NOWHERE, Outcome, Unicron
from tests.cli.test_run_check import CALLS_PRETRAIN, MODEL, call, write_script
from tests.cli.test_run_specification import REST
from tests.condition import until
from unicron import errors
from unicron_client.resources import Client


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with scripts and the rest of a specification."""
    monkeypatch.chdir(tmp_path)
    for variable in ("PYTHONPATH", "UNICRON_SERVER"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "healed.py").write_text("import unicron\n")
    (tmp_path / "plain.py").write_text("import torch\n")
    (tmp_path / "recipe.py").write_text("import megatron.bridge\n")
    write_script(tmp_path, "pretrain_gpt.py", CALLS_PRETRAIN)
    (tmp_path / "rest.yaml").write_text(yaml.safe_dump(REST))
    return tmp_path


# ---- refused, before anything is started

CLUSTER = ("--server", NOWHERE)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--", "pretrain_gpt.py", "--load", "a", "--save", "a", "--finetune"), 3, "--finetune: --load is --save"),
        (("--", "plain.py", "--api-key", "0123"), 3, "--api-key: looks like a secret"),
        (("--require-healing", "--", "plain.py"), 3, "SCRIPT: has a loop of its own"),
        (("--require-healing", "--check", "--", "plain.py"), 3, "--require-healing"),
        (("--require-healing", "--", "pretrain_gpt.py", *MODEL.split(), "--fp8-format", "hybrid"), 3, "--fp8-format"),
        ((*CLUSTER, "--", "healed.py"), 2, "--spec FILE"),
        ((*CLUSTER, "--", "plain.py"), 2, "--workers"),
        ((*CLUSTER, "--run-dir", "here", "--", "plain.py"), 2, "--run-dir"),
        ((*CLUSTER, "--env", "NOT_SET", "--spec", "rest.yaml", "--", "healed.py"), 2, "--env: 'NOT_SET'"),
        ((*CLUSTER, "--spec", "rest.yaml", "--", "A_TOKEN=0123", "healed.py"), 2, "secrets: {A_TOKEN: file:/path}"),
        ((*CLUSTER, "--spec", "rest.yaml", "--name", "A b", "--", "healed.py"), 2, "name: must be 1 to 63"),
        (("--run-dir", "here", "--on-interrupt", "leave", "--", "healed.py"), 2, "--on-interrupt"),
        (("--run-dir", "here", "--workers", "65", "--spec", "rest.yaml", "--", "healed.py"), 2, "--workers: 65"),
        ((*CLUSTER, "--spec", "rest.yaml", "--", "healed.py"), 5, "cannot reach a server"),
    ],
)
def test_refused(arguments: tuple[str, ...], code: int, said: str, folder: Path) -> None:
    done = call(*arguments)
    assert (done.code, done.out if "--check" not in arguments else "") == (code, "")
    assert said in done.err
    assert "0123" not in done.err
    assert not (folder / "here").exists()


def test_a_refusal_in_json_is_that_of_the_check() -> None:
    done = call("-o", "json", "--require-healing", "--", "plain.py")
    assert (done.code, json.loads(done.out)["verdict"]) == (3, "restart")


# ---- where it runs


def test_a_run_directory_means_an_embedded_stack_and_a_server_a_cluster(folder: Path) -> None:
    assert place_of(None, folder)[:2] == (None, folder)
    assert place_of("http://there:1", None).server == "http://there:1"
    with pytest.raises(InvalidInput):
        place_of("http://there:1", folder)


async def test_a_server_at_the_default_address_is_used_and_said(api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.launch.place.DEFAULT_SERVER", api.url)
    found = await asyncio.to_thread(place_of, None, None)
    assert found.server == api.url
    assert api.url in found.said
    monkeypatch.setattr("cli.launch.place.DEFAULT_SERVER", NOWHERE)
    found = place_of(None, None)
    assert found.server is None
    assert ".unicron" in found.said


GPUS = Devices(("0", "1"), ("A", "A"))


def test_workers_have_a_device_each_and_do_not_fall_back_to_the_cpu() -> None:
    assert division(GPUS, Device.AUTO, 2).shown == ("0,1",)
    assert division(Devices(), Device.AUTO, 3) == Division(1, 3)
    assert division(devices_of({}, Device.CPU), Device.CPU, 3) == Division(1, 3)
    with pytest.raises(NoDevice, match="2 devices, the task needs 3"):
        division(GPUS, Device.AUTO, 3)


def test_processes_inherit_what_stands_in_front_but_devices() -> None:
    assert inherited({"A_TOKEN": "1", "CUDA_VISIBLE_DEVICES": "0"}) == {"A_TOKEN": "1"}


# ---- the name


async def submitted(api: Server, name: str = "gpt", **how: Any) -> Submitted:
    def run() -> Submitted:
        with Client(api.url) as client:
            arguments = how.pop("arguments", ["1"])
            given = spec(name, data="/d", script="/s.py", arguments=arguments)
            return submit(client, given, **{"named": False, "embedded": False, **how})

    return await asyncio.to_thread(run)


async def ended(api: Server, kind: type[Any], task: str, **fields: Any) -> None:
    recorded = await api.append(kind, task=task, generation=1, step=9, **fields)
    await api.projected(recorded.position)


async def test_the_same_command_goes_on_and_another_gets_a_number(
    api: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (await submitted(api)).task["name"] == "gpt"
    assert (await submitted(api)).task["name"] == "gpt-2", "the first still trains"
    await ended(api, TaskStopped, "gpt", path="/c")
    other = await submitted(api, arguments=["2"])
    assert (other.task["name"], other.since) == ("gpt-3", None)
    capsys.readouterr()
    same = await submitted(api)
    assert (same.task["name"], same.task["attempt"], same.task["step"]) == ("gpt", 2, 9)
    assert same.since == same.task["submitted_at"], "what the earlier attempt printed is not printed again"
    assert "gpt goes on from step 9" in capsys.readouterr().err
    await ended(api, TaskFinished, "gpt", samples_sha256="a", parameters_path="/p")
    assert (await submitted(api)).task["name"] == "gpt-4", "what has succeeded is not run again"


async def test_a_given_name_is_that_of_submit(api: Server) -> None:
    assert (await submitted(api, named=True)).task["name"] == "gpt"
    with pytest.raises(Conflict, match="in use"):
        await submitted(api, named=True)
    await ended(api, TaskFailed, "gpt", reason="it is broken")
    assert (await submitted(api, named=True, arguments=["2"])).task["attempt"] == 2


async def test_what_an_embedded_stack_was_running_is_followed(api: Server, capsys: pytest.CaptureFixture[str]) -> None:
    first = await submitted(api, embedded=True)
    again = await submitted(api, embedded=True)
    assert (again.task["id"], again.since is None) == (first.task["id"], False)
    assert "gpt goes on" in capsys.readouterr().err
    assert (await submitted(api, embedded=True, arguments=["2"])).task["name"] == "gpt-2"


# ---- refused at its start

PEFT = "peft: LoRA is not healed inside the step: it loads the base model as the model is built"
REFUSED_AT_START = reason_of("n0/0", "n0", "NotHealed", PEFT)


def test_the_errors_behind_which_a_task_restarts_whole_are_the_library_s() -> None:
    assert all(issubclass(getattr(errors, name), errors.UnicronError) for name in NOT_HEALED)
    assert not why_not_healed(reason_of("n0/0", "n0", "ModuleNotFoundError", "No module named 'a'"))
    assert not why_not_healed("exception (NotHealed) at step 3 happened 4 times")


async def refused_at_start(api: Server, *arguments: str) -> asyncio.subprocess.Process:
    """Run a script of megatron-bridge, and end its task as a rank's refusal does."""
    process = await start(api, *arguments, script="recipe.py")
    assert (await api.http.get("/v1/tasks/recipe")).json()["spec"]["loop"] == "megatron-bridge"
    await api.append(TaskFailed, task="recipe", generation=1, step=0, reason=REFUSED_AT_START)
    return process


@pytest.mark.slow
async def test_what_is_refused_at_its_start_restarts_whole_and_the_same_command_goes_on_so(
    api: Server, unicron: Unicron
) -> None:
    process = await refused_at_start(api, "-o", "json")

    async def again() -> bool:
        return bool((await api.http.get("/v1/tasks/recipe")).json()["attempt"] == 2)

    await until(again)
    task = (await api.http.get("/v1/tasks/recipe")).json()
    assert (task["spec"]["loop"], task["spec"]["workers"]) == ("restart", {"min": 2, "max": 2})
    assert (task["spec"]["not_healed"], task["spec"]["steps"]) == (PEFT, 20)
    shown = await unicron("show", "recipe")
    assert f"and starts it again from its own checkpoint, since a step cannot be healed: {PEFT}" in shown.out
    recorded = await api.append(TaskStopped, task="recipe", generation=1, step=9, path="/c")
    done = await end(process)
    document = json.loads(done.out)
    assert (document["verdict"], document["settings"][-1]["why"], done.code) == ("restart", PEFT, 1)
    assert f"recipe is not healed inside the step, and restarts whole from its own checkpoint: {PEFT}" in done.err
    await api.projected(recorded.position)
    process = await start(api, script="recipe.py")
    task = (await api.http.get("/v1/tasks/recipe")).json()
    assert (task["attempt"], task["spec"]["loop"], task["step"]) == (3, "restart", 9)
    process.send_signal(signal.SIGTERM)
    assert (await end(process)).code == 130


@pytest.mark.slow
async def test_who_requires_healing_is_refused(api: Server) -> None:
    process = await refused_at_start(api, "--require-healing")
    done = await end(process)
    assert (done.code, done.err.splitlines()[-1].endswith(PEFT)) == (3, True)
    assert (await api.http.get("/v1/tasks/recipe")).json()["attempt"] == 1


# ---- Ctrl-C


@pytest.mark.parametrize(
    ("wanted", "number", "embedded", "terminal", "then"),
    [
        ("ask", signal.SIGINT, False, True, "ask"), ("ask", signal.SIGINT, False, False, "leave"),
        ("ask", signal.SIGTERM, False, True, "leave"), ("stop", signal.SIGTERM, False, True, "stop"),
        ("leave", signal.SIGINT, False, True, "leave"), ("ask", signal.SIGINT, True, True, "stop"),
        ("ask", signal.SIGTERM, True, False, "stop"),
    ],
)  # fmt: skip
def test_what_becomes_of_the_task(wanted: str, number: int, embedded: bool, terminal: bool, then: str) -> None:
    assert decided(OnInterrupt(wanted), number, embedded=embedded, terminal=terminal) == then


STARTED: list[asyncio.subprocess.Process] = []


@pytest.fixture(autouse=True)
async def none_left() -> AsyncIterator[None]:
    """End the processes of a test that has failed."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def start(
    api: Server, *arguments: str, stdin: int = asyncio.subprocess.DEVNULL, script: str = "healed.py"
) -> asyncio.subprocess.Process:
    """Run a command in a process of its own, and wait until its task is submitted."""
    options = ("run", "--server", api.url, "--workers", "2", "--spec", "rest.yaml", *arguments)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", *options, "--", "NCCL_DEBUG=INFO", script, "1"),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    STARTED.append(process)

    async def there() -> bool:
        return (await api.http.get(f"/v1/tasks/{script.removesuffix('.py')}")).status_code == 200

    await until(there)
    assert process.stderr is not None
    while not re.search(rb"submitted|goes on from", await process.stderr.readline()):
        pass
    return process


async def end(process: asyncio.subprocess.Process) -> Outcome:
    """Wait for a command's end."""
    out, err = await asyncio.wait_for(process.communicate(), 50)
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


async def stop_is_asked_for(api: Server) -> None:
    async def asked() -> bool:
        return any(isinstance(recorded.event, TaskStopRequested) for recorded in api.journal.log.read())

    await until(asked)


async def test_it_ends_with_the_task(api: Server, folder: Path) -> None:
    process = await start(api, "-o", "json")
    task = (await api.http.get("/v1/tasks/healed")).json()
    assert task["spec"]["env"].items() >= {"NCCL_DEBUG": "INFO", "UNICRON_WORKING_DIRECTORY": str(folder)}.items()
    assert (task["spec"]["workers"], task["spec"]["arguments"]) == ({"min": 1, "max": 2}, ["1"])
    await api.append(TaskFinished, task="healed", generation=1, step=20, samples_sha256="a", parameters_path="/p")
    done = await end(process)
    assert done.code == 0, done
    document = json.loads(done.out)
    assert (document["verdict"], document["task"]["state"], document["faults_healed"]) == ("unchanged", "succeeded", 0)
    assert done.err.splitlines()[-1] == "unicron: healed succeeded at step 20 of 20"


@pytest.mark.slow
async def test_a_failure_is_its_exit_status(api: Server) -> None:
    process = await start(api)
    await api.append(TaskFailed, task="healed", generation=1, step=3, reason="it is broken")
    done = await end(process)
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1] == "unicron: healed failed at step 3 of 20; it is broken"


@pytest.mark.slow
async def test_without_a_terminal_the_task_is_left_running(api: Server) -> None:
    process = await start(api)
    process.send_signal(signal.SIGINT)
    done = await end(process)
    assert (done.code, done.out) == (130, "")
    assert "`unicron stop healed`" in done.err
    assert (await api.http.get("/v1/tasks/healed")).json()["state"] == "pending"


@pytest.mark.slow
async def test_a_stop_ends_it_with_a_checkpoint(api: Server) -> None:
    process = await start(api, "--on-interrupt", "stop")
    process.send_signal(signal.SIGTERM)
    await stop_is_asked_for(api)
    process.send_signal(signal.SIGTERM)  # `timeout` sends it twice
    await api.append(TaskStopped, task="healed", generation=1, step=7, path="/c")
    done = await end(process)
    assert done.code == 1
    assert "stopped at step 7 of 20" in done.err.splitlines()[-1]
    assert done.err.splitlines()[-1].endswith("saved in /c")


async def test_a_person_is_asked_and_a_second_interrupt_ends_it_at_once(api: Server) -> None:
    typed, terminal = os.openpty()
    try:
        process = await start(api, stdin=terminal)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert b"(s), or leave it (l)?" in await process.stderr.readuntil(b"?")
        os.write(typed, b"what\n")
        await process.stderr.readuntil(b"?")
        os.write(typed, b"s\n")
        await stop_is_asked_for(api)
        process.send_signal(signal.SIGINT)
        assert (await end(process)).code == 130
    finally:
        os.close(typed)
        os.close(terminal)


# ---- the last line


def incident(begin: int, resumed: int | None) -> dict[str, Any]:
    time = "2026-03-01T00:00:{:02d}.500000Z"
    return {"occurred_at": time.format(begin), "resumed_at": None if resumed is None else time.format(resumed)}


def task(**fields: Any) -> Mapping[str, Any]:
    return {
        "name": "gpt",
        "state": "succeeded",
        "step": 5,
        "steps": 5,
        "reason": "",
        "checkpoint": None,
        "spec": {},
        **fields,
    }


async def test_a_fault_is_said_once_as_it_is_seen_and_once_as_it_is_healed(
    healed: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.launch.course.FAULTS_S", 0.0)
    gpt = (await healed.http.get("/v1/tasks/gpt")).json()
    looks = 0

    class Looking(WaitingClient):
        async def get(self, *arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            return await super().get(*arguments)

    async def looked() -> bool:
        return looks > 3

    async with Looking(healed.url) as client:
        saying = asyncio.create_task(_say_faults(client, gpt))
        await until(looked)
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)
    assert capsys.readouterr().err.splitlines() == [
        "unicron: process-exit of n1/1 (rank 3) in step 91; `unicron incidents show i1`",
        "unicron: process-exit of n1/1: healed after 3.0 s, no step lost",
    ]
    [incident] = (await healed.http.get("/v1/incidents")).json()["items"]
    [line] = lines_of_fault(incident | {"steps_recomputed": 2}, 1)
    assert line.endswith("2 steps computed again")
    assert len(lines_of_fault(incident | {"resumed_at": None}, 0)) == 1


def test_the_last_line_has_what_faults_have_cost() -> None:
    ending = Ending(dict(task()), [incident(3, 5), incident(1, 2), incident(8, None)], ["a.html", "b.html"])
    assert ending.line() == "gpt succeeded at step 5 of 5; 2 faults healed, 3.0 s lost; a.html"
    assert (ending.document()["faults_healed"], ending.document()["lost_s"]) == (2, 3.0)
    left = Ending(dict(task(state="degraded", reason="r", step=2)), [], [])
    assert left.line() == "gpt goes on (degraded) at step 2 of 5; r"
    assert Ending(dict(task(steps=None)), [], []).line() == "gpt succeeded at step 5"
    whole = task(steps=None, step=0, spec={"loop": "restart"})
    assert Ending(dict(whole), [incident(3, 5)], []).line() == (
        "gpt succeeded; 1 fault healed, 2.0 s until the script ran again"
    )
