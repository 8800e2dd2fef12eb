"""The fork server: warm children, whose ends are reported at once, and which never outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shared.machine.process import END_SIGNAL
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.test_recovery import check_result
from unicron.protocol.messages import Hello, Progress, Raised


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def blocks_sigterm(pid: int) -> bool:
    """Whether a process has SIGTERM blocked."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigBlk:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


async def gone(*pids: int) -> None:
    """Wait until processes that are no children of this one have ended (the test's time limit bounds it)."""
    for pid in pids:
        if alive(pid):
            ended = asyncio.Event()
            descriptor = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(descriptor, ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)


async def test_an_exit_is_reported_at_once(tmp_path: Path) -> None:
    async with agent(tmp_path) as a:
        delays = []
        for _ in range(5):
            await a.store()
            name, pid = a.events[-1]["id"], a.events[-1]["pid"]
            assert os.getsid(pid) == pid
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await a.until(partial(a.exits.__contains__, name))
            assert a.exits[name][1] == -signal.SIGKILL
            delays.append(a.exits[name][0] - killed)
        assert min(delays) < 1.0  # about 5 ms on an idle machine


def reported_since(events: list[dict[str, Any]], count: int, event: dict[str, Any]) -> bool:
    """Whether an event is among those after the first ``count``."""
    return event in events[count:]


async def test_a_stop_is_told_at_once_and_so_is_its_end(tmp_path: Path) -> None:
    async with agent(tmp_path) as a:
        await a.store()
        await a.store()
        name, pid = a.events[-1]["id"], a.events[-1]["pid"]
        reported = [{"event": what, "id": name, "pid": pid} for what in ("stopped", "continued", "stopped")]
        for number, event in zip((signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP), reported, strict=True):
            count = len(a.events)
            os.kill(pid, number)
            await a.until(partial(reported_since, a.events, count, event))
        # The server goes on with a child that has ended and is not yet reaped.
        os.kill(pid, signal.SIGKILL)
        await a.until(lambda: name in a.exits)
        assert [e for e in a.events if e["event"] in ("stopped", "continued")] == reported
        await a.store()


async def test_children_die_with_a_killed_server(tmp_path: Path) -> None:
    async with agent(tmp_path) as a:
        await a.store()
        await a.store()
        pids = [event["pid"] for event in a.events if event["event"] == "store"]
        assert all(alive(pid) for pid in pids)
        a.kill_server()
        await gone(*pids)


@pytest.mark.slow
@pytest.mark.parametrize("left", [True, False])
async def test_server_and_children_end_on_sigterm_unless_it_is_left_to_a_program_above(
    left: bool, tmp_path: Path
) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if left else ())
    try:
        server = agent(tmp_path, "--no-preload")
        a = await server.__aenter__()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        await a.store()
        pid = a.events[-1]["pid"]
        assert a.process is not None
        if left:
            os.kill(pid, signal.SIGTERM)
            a.process.terminate()
            await a.store()
            assert alive(pid)
            assert not blocks_sigterm(pid), "what it starts is to end by SIGTERM"
        a.process.send_signal(END_SIGNAL if left else signal.SIGTERM)
        assert await a.process.wait() == 0
        await gone(pid)
    finally:
        await server.__aexit__(None, None, None)


LEFT = """
import multiprocessing, os, signal, subprocess
from unicron.process import processes

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
processes.take_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
forked = multiprocessing.get_context("fork").Process(target=signal.pause)
forked.start()
started = subprocess.Popen(["sleep", "1000"])
for child in (forked, started):
    child.terminate()
forked.join()
print(processes.leaves_sigterm(), forked.exitcode, started.wait())
"""


def test_what_a_rank_has_started_gets_a_sigterm_that_the_rank_leaves_to_a_program_above() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"True {-signal.SIGTERM} {-signal.SIGTERM}\n", done


EARLY = """
import os, signal
from unicron.process import processes

os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
processes.take_sigterm()
pid = os.fork()
if pid == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
"""A child that gets SIGTERM before its own first steps."""


def test_a_sigterm_that_comes_as_a_child_begins_ends_it() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{-signal.SIGTERM} False\n", done


async def test_a_request_that_fails_is_answered(tmp_path: Path) -> None:
    async with agent(tmp_path) as a:
        a.ask(do="store", id="x", host="127.0.0.1", output=str(tmp_path / "missing" / "log"))
        await a.until(lambda: any(e["event"] == "error" and e["id"] == "x" for e in a.events))


UNREADABLE = [
    b"", b"\xff\xfe", b"null", b"[" * 100_000, b"9" * 5000, b"{}", b'{"do":[]}', b'{"do":"dream","id":"d"}',
    b'{"do":"fork","id":"f"}', b'{"do":"store","id":{},"host":"127.0.0.1","output":"x"}',
    b'{"do":"store","id":"s","host":"127.0.0.1","output":"a\\u0000"}',
    b'{"do":"fork","id":"f","task":"t","worker":"w","spec":"s","output":"o","env":{"A":1}}',
]  # fmt: skip


async def test_a_line_that_is_no_request_is_answered_and_ends_nothing(tmp_path: Path) -> None:
    async with agent(tmp_path) as a:
        a._fs_writer.write(b"".join(line + b"\n" for line in UNREADABLE))
        await a.until(lambda: sum(event["event"] == "error" for event in a.events) == len(UNREADABLE))
        assert "unknown request 'dream'" in next(e["detail"] for e in a.events if e.get("id") == "d")
        await a.store()
        assert a.events[-1]["event"] == "store"
        assert a.exits == {}


async def test_a_bad_specification_ends_the_process_with_its_reason(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(data=str(tmp_path / "no-such-file")))
        await a.until(lambda: "w0" in a.exits)
        assert a.exits["w0"][1] == 1
        (raised,) = a.of(Raised)
        assert (raised.kind, raised.error) == ("refused", "InvalidSpec")
        assert "no-such-file" in raised.detail
        await a.fork("w1", tmp_path / "never-read", {"UNICRON_CODE_REFUSED": "code is not run on this node"})
        await a.until(lambda: "w1" in a.exits)
        (raised,) = a.of(Raised, "w1")
        assert (raised.kind, raised.detail) == ("refused", "code is not run on this node")


PARENT = """
import os, pathlib, subprocess, unicron

child = subprocess.Popen(["sleep", "1000"])
pathlib.Path(os.environ["CHILD"]).write_text(str(child.pid))
run = unicron.attach(steps=1, micro_batches=1, build=lambda tensor, pipeline: None)
for step in run.steps():
    pass
"""


@pytest.mark.parametrize("end", ["kill", "server"])
async def test_what_a_rank_started_ends_with_it(end: str, tmp_path: Path, spec_file: SpecFile) -> None:
    script, child = tmp_path / "script.py", tmp_path / "child"
    script.write_text(PARENT)
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=str(script), steps=1, batch={"global": 1})
        await a.fork("w0", spec, {"CHILD": str(child)})
        pid = int(child.read_text())
        try:
            assert alive(pid)
            if end == "kill":
                os.kill(a.pids["w0"], signal.SIGKILL)
            else:
                a.kill_server(signal.SIGTERM)
            async with asyncio.timeout(40):
                await gone(pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


SCRIPT = """
import torch, unicron
import shared, cli, services
assert shared.MINE and cli.MINE and services.MINE

torch.manual_seed(0)
data, target = torch.randn(60, 4), torch.randn(60, 1)

def build(tensor, pipeline):
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

run = unicron.attach(steps=10, micro_batches=6, build=build, checkpoint_every=4)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            i = (step.number - 1) * 6 + k
            loss = (run.model(data[i : i + 1]) - target[i]).square().sum()
            (loss / 6).backward()
            step.commit(k, float(loss), [i])
        step.reduce()
        run.optimizer.step()
print("script done", run._training.rank_state.applied)
"""


@pytest.mark.slow
async def test_a_users_own_loop_heals_and_keeps_its_own_packages(tmp_path: Path, spec_file: SpecFile) -> None:
    project = tmp_path / "project"
    for name in ("shared", "cli", "services"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("MINE = True\n")
    (project / "script.py").write_text(SCRIPT)
    spec = spec_file(
        script=str(project / "script.py"), steps=10, batch={"global": 6}, exact=False, deterministic_sums=True
    )
    results = []
    for fail_at in ("", "1:5:1:hang"):
        async with agent(tmp_path / f"run{fail_at[:1]}") as a:
            workers = ["w0", "w1", "w2"]
            await asyncio.gather(*(a.fork(w, spec, {"UNICRON_FAIL_AT": fail_at}) for w in workers))
            await a.configure(dict.fromkeys(workers, "initial"))
            if fail_at:
                await a.lose("w1", 5)
                await a.hold(["w0", "w2"])
                resumed = await a.resumed(await a.configure({"w0": "live", "w2": "live"}, stage="interrupted"))
                assert [r.step for r in resumed] == [5, 5]
                results.append(await a.finished(2))
            else:
                results.append(await a.finished(3))
            assert "script done 10" in a.output("w0")
    assert results[0].samples_sha256 == results[1].samples_sha256
    assert largest_difference(results[0].parameters_path, results[1].parameters_path) <= 1e-5


async def test_a_rank_attaches_to_the_agents_successor(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file()
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec, {"UNICRON_FAIL_AT": "0:3:0:hang"})
        await a.configure({"w0": "initial"})
        await a.stopped("w0")
        a._server.close()
        a.writers["w0"].close()
        a._server = await asyncio.start_unix_server(a._attach, "\0" + a.address[1:])
        a.kill("w0", signal.SIGCONT)
        await a.until(lambda: len(a.of(Hello, "w0")) == 2)
        finished = await a.finished(1)
        assert max(m.step for m in a.of(Progress) if m.phase == "ended") == 6
        await check_result(a, spec, finished)


async def test_a_rank_without_an_agent_ends_after_the_grace(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(), {"UNICRON_ORPHAN_GRACE_S": "0.3"})
        a._server.close()
        a.writers["w0"].close()
        await a.until(lambda: "w0" in a.exits)
        assert a.exits["w0"][1] == 75
