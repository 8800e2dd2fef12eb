"""Tasks with users of their own: what the processes of one can reach of the agent and of other tasks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.agent.files.rank_users import RankUsers, may_not_switch
from services.agent.files.snapshot_folders import SnapshotFolders, node_folder
from shared.bus.connection import Bus
from shared.errors import InvalidInput, Unavailable
from shared.messages.admission import HELLO, Answer
from shared.messages.node_files import FILES, CheckInputs
from shared.service.joining import credential_of
from shared.settings.model import MAX_UID, Settings, read_settings, uid_range
from tests.agent import readable
from tests.agent.kit import SPEC, WAIT_S, Driver, Ear
from tests.agent.program import AGENT, Program, running

UIDS = "1000000000-1999999999"

pytestmark = pytest.mark.timeout(180)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")

HOSTILE = """
import json, os, pathlib, socket, sys

wanted = os.environ["BACKWARDS"][::-1].encode()
found = []


def attempt(what, do):
    try:
        result = do()
    except Exception as err:
        return
    if result:
        found.append(what)


def has(path):
    with open(path, "rb") as file:
        return wanted in file.read(1 << 20)


for process in pathlib.Path("/proc").iterdir():
    if process.name.isdigit() and process.name != str(os.getpid()):
        attempt(f"{process.name}/environ", lambda: has(process / "environ"))
        attempt(f"{process.name}/exe", lambda: os.readlink(process / "exe"))
for top in (os.environ["SEARCHED"], os.environ["UNICRON_MEMORY"] + "/..", "/proc/self/fd"):
    for folder, _, names in os.walk(top, onerror=lambda err: None):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                attempt(path, lambda: has(path))
attempt("user", lambda: os.setuid(0) or True)
attempt("group", lambda: os.setgroups([0]) or True)
attempt("agent", lambda: os.kill(int(os.environ["AGENT"]), 0) or True)
folder = pathlib.Path(os.environ["UNICRON_RUN_DIR"])
attempt("specification", lambda: (folder / "spec.json").unlink() or True)
attempt("output", lambda: (folder / "output" / "mine").touch() or True)
attempt("output moved", lambda: (folder / "output").rename(folder / "elsewhere") or True)
for line in open("/proc/net/unix"):
    name = line.split()[-1]
    if name.endswith("-fork-server"):
        def ask():
            with socket.socket(socket.AF_UNIX) as server:
                server.settimeout(30)
                server.connect("\\0" + name[1:])
                server.sendall(json.dumps({"do": "dream"}).encode() + b"\\n")
                return server.recv(1000)
        attempt("fork server", ask)
print("RESULT", json.dumps({"found": found, "uids": os.getresuid(), "groups": [*os.getresgid(), *os.getgroups()]}))
sys.stdout.flush()
(folder / "mine").write_text("a task can write its own folder")
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory that every user can enter, unlike a test's own folder."""
    folder = Path(tempfile.mkdtemp(prefix="unicron-users-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def node(settings: Settings, tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Program]:
    """A node whose tasks have users of their own, on a machine whose Python every user can read."""
    environment = {"UNICRON_RANK_UIDS": UIDS}
    log, wrapper = tmp_path / "agent.log", readable.WRAPPER
    return running(settings, "n0", log, wrapper=wrapper, environment=environment, program=AGENT)


@pytest.mark.slow
@needs_root
async def test_a_hostile_script_finds_nothing(
    settings: Settings, bus: Bus, ear: Ear, tmp_path: Path, run_dir: Path
) -> None:
    async def admit(_: bytes) -> bytes:
        return Answer(verdict="admitted").model_dump_json().encode()

    await bus.answer(HELLO.subject, lambda _, data: admit(data))
    settings = settings.model_copy(update={"run_dir": run_dir})
    secret, users = credential_of(settings).seed, RankUsers(UIDS)
    script, corpus = run_dir / "hostile.py", run_dir / "corpus.txt"
    script.write_text(HOSTILE)
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    private = run_dir / "private.txt"
    private.write_text(secret)
    private.chmod(0o600)
    memory = SnapshotFolders(node_folder(settings.memory_dir, run_dir, "n0"), users)
    memory.make("other")
    (memory.of_task("other") / "1-0-0.copy").write_text(secret)
    async with node(settings, tmp_path) as program:
        await program.ready()
        await ear.until(lambda: bool(ear.heartbeats))
        async with asyncio.timeout(WAIT_S):
            while not (checked := await inputs(bus, data=str(private), script=str(script))):
                pass  # a machine this busy has no answer in time, which is none
        assert [problem["field"] for problem in checked] == ["data"]
        env = {"BACKWARDS": secret[::-1], "SEARCHED": str(run_dir), "AGENT": str(ear.heartbeats[-1].agent_pid)}
        spec = {**SPEC, "data": str(corpus), "script": str(script), "env": env}
        driver = Driver(bus)
        await driver.ask("prepare", 1, workers=["n0/0"], spec=spec)
        await ear.until(lambda: bool(ear.signals))
        [output] = (run_dir / "tasks" / "gpt" / "output").glob("1-n0-0.log")
        [line] = [line for line in output.read_text().splitlines() if line.startswith("RESULT ")]
        uid = users.uid("gpt")
        assert json.loads(line.removeprefix("RESULT ")) == {"found": [], "uids": [uid] * 3, "groups": [uid] * 3}
        assert (run_dir / "tasks" / "gpt" / "mine").stat().st_uid == uid
    assert not memory.folder.exists()


async def inputs(bus: Bus, *, data: str, script: str) -> list[dict[str, Any]]:
    request = CheckInputs(task="gpt", vocabulary=300, data=data, script=script)
    reply, _ = await bus.call(FILES, request, "n0", timeout_s=WAIT_S)
    return [problem.model_dump() for problem in reply.problems]


@needs_root
def test_memory_that_another_user_has_made_is_not_used(tmp_path: Path) -> None:
    folders = SnapshotFolders(tmp_path / "node", RankUsers(UIDS))
    folders.folder.mkdir()
    os.chown(folders.folder, 12345, 12345)
    with pytest.raises(Unavailable, match="belongs to user 12345"):
        folders.make("gpt")


MINIMAL = "-all,+chown,+kill,+setgid,+setuid"
"""The rights of a container's agent (docs/security.md)."""

COPIES = """
import logging, os, pathlib, subprocess, sys
from services.agent.files.rank_users import RankUsers, may_not_switch
from services.agent.files.snapshot_folders import SnapshotFolders

logging.basicConfig()
assert not may_not_switch(os.geteuid(), pathlib.Path("/proc/self/status").read_text())
users = RankUsers(sys.argv[1])
folders = SnapshotFolders(pathlib.Path(sys.argv[2]), users)
for task in ("gpt", "bert"):
    folders.make(task)
    uid = users.uid(task)
    copy = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').close()", str(folders.of_task(task) / "copy")]
    subprocess.run(copy, user=uid, group=uid, extra_groups=[], check=True)
try:
    os.listdir(folders.of_task("gpt"))
    print("too many rights")
except PermissionError:
    pass
folders.forget("gpt")
print(sorted(os.listdir(folders.folder)))
folders.close()
print(folders.folder.exists())
"""


AT_ONCE = """
import itertools, logging, os, pathlib, sys
from services.agent.files.rank_users import RankUsers
from services.agent.files.snapshot_folders import SnapshotFolders

logging.basicConfig()
users, top = RankUsers(sys.argv[1]), pathlib.Path(sys.argv[2])
top.mkdir()


def interrupt(name, folders, awaited):
    call = getattr(os, name)

    def interrupted(path, *arguments, **named):
        try:
            return call(path, *arguments, **named)
        finally:
            if path == awaited:
                setattr(os, name, call)
                folders.make("gpt")

    setattr(os, name, interrupted)
    folders.make("gpt")
    setattr(os, name, call)


for name, which in itertools.product(("mkdir", "stat", "chmod", "chown"), ("node", "task")):
    folders = SnapshotFolders(top / f"{name}-{which}", users)
    interrupt(name, folders, folders.folder if which == "node" else folders.of_task("gpt"))
    found = [path.stat() for path in (folders.folder, folders.of_task("gpt"))]
    if [(one.st_uid, oct(one.st_mode & 0o7777)) for one in found] != [(0, "0o711"), (users.uid("gpt"), "0o700")]:
        print(name, which, found)
"""
"""A second process of the task starts behind each step of the first one's."""


def with_few_rights(program: str, folder: Path) -> tuple[str, str]:
    """Run a program as root with the rights of a container's agent; return what it writes."""
    command = [*readable.WRAPPER, "setpriv", "--bounding-set", MINIMAL, sys.executable, "-P", "-c", program, UIDS]
    environment = {"PYTHONPATH": str(readable.ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [*command, str(folder)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout, done.stderr


needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) takes the rights away")


@needs_root
@needs_setpriv
def test_copies_are_deleted_without_a_right_to_the_files_of_others(run_dir: Path) -> None:
    """They would use up the memory of a container, whose root has few rights."""
    assert with_few_rights(COPIES, run_dir / "node") == ("['bert']\nFalse\n", "")


@needs_root
@needs_setpriv
def test_two_processes_of_a_task_start_at_once(run_dir: Path) -> None:
    """Neither takes a folder that the other one is making for somebody else's, nor goes without snapshots."""
    assert with_few_rights(AT_ONCE, run_dir / "memory") == ("", "")


@needs_root
def test_a_folder_that_an_agent_made_before_it_died_is_given_to_the_task(tmp_path: Path) -> None:
    users = RankUsers(UIDS)
    folders = SnapshotFolders(tmp_path / "node", users)
    folders.of_task("gpt").mkdir(parents=True)
    folders.make("gpt")
    assert folders.of_task("gpt").stat().st_uid == users.uid("gpt")


def test_a_task_has_the_same_user_on_every_node() -> None:
    assert RankUsers("").uid("gpt") is None
    assert RankUsers(UIDS).uid("gpt") == RankUsers(UIDS).uid("gpt")
    assert RankUsers(UIDS).uid("gpt") != RankUsers(UIDS).uid("bert")
    assert RankUsers("7-7").uid("gpt") == 7


@given(st.integers(1, MAX_UID), st.integers(1, MAX_UID), st.text(max_size=20))
def test_the_user_is_one_of_the_range(first: int, last: int, task: str) -> None:
    first, last = sorted((first, last))
    users = RankUsers(f"{first}-{last}")
    assert first <= (users.uid(task) or 0) <= last
    assert users.includes(users.uid(task) or 0)
    assert not users.includes(0)


@pytest.mark.parametrize("text", ["5", "a-b", "0-5", "5-4", "-", "1-", f"1-{MAX_UID + 1}", "1-2-3", " 1-2", "¹-²"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FIRST-LAST"):
        uid_range(text)
    with pytest.raises(InvalidInput, match="rank_uids"):
        read_settings(rank_uids=text)


def test_only_root_with_the_capabilities_may_switch_users() -> None:
    enough = "Name:\tpython\nCapEff:\t00000000000000e1\n"
    assert not may_not_switch(0, enough)
    assert "runs as user 1000" in may_not_switch(1000, enough)
    assert "lacks CAP_SETUID" in may_not_switch(0, "CapEff:\t0000000000000061\n")


@needs_root
async def test_an_agent_whose_tasks_could_not_enter_the_run_directory_does_not_start(
    settings: Settings, tmp_path: Path, run_dir: Path
) -> None:
    closed = run_dir / "closed"
    closed.mkdir(mode=0o700)
    settings = settings.model_copy(update={"run_dir": closed / "run"})
    async with node(settings, tmp_path) as program:
        assert await program.process.wait() == InvalidInput.exit_code
        assert "must let other users in" in program.log.read_text()
