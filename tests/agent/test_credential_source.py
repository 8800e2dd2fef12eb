"""The supervisor opens the node's credential for its agents, which know no path and need no right to the file."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.agent.succession.inheritance import CredentialSource
from shared.bus import credentials
from shared.bus.connection import Bus
from shared.errors import InvalidInput
from shared.messages.admission import HELLO, Answer
from shared.messages.signals import Heartbeat
from shared.service.joining import CREDENTIAL, CREDENTIAL_FD
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S, Ear
from tests.agent.program import Program, running
from tests.nats_server import OpenServer

pytestmark = pytest.mark.timeout(180)

START_S = 60.0
"""An agent starts in a second or two, and this test's machine may be busy with others."""


@pytest.fixture
async def own(nats: OpenServer, bus: Bus) -> Settings:
    """Settings of the node n0, which has a credential of its own; a detector admits its agents."""

    async def admit(_: bytes) -> bytes:
        return Answer(verdict="admitted").model_dump_json().encode()

    await bus.answer(HELLO.subject, lambda _, data: admit(data))
    file = await add_node(nats)
    return Settings(node="n0", run_dir=nats.directory.parent, nats_url=nats.url, nats_credential=file)


@pytest.fixture
async def node(own: Settings, ear: Ear, tmp_path: Path) -> AsyncIterator[Program]:
    """A node whose supervisor has the path of the credential."""
    async with running(own, "n0", tmp_path / "agent.log") as program:
        await program.ready()
        yield program


async def add_node(nats: OpenServer) -> Path:
    """Give the node n0 a credential that the server knows."""
    file = nats.keys.add_node("n0")
    nats.reload()
    probe = await Bus.connect(nats.url, credential=credentials.read(nats.credential_file), name="probe")
    await probe.close()
    return file


async def heard(ear: Ear, other_than: Heartbeat | None = None) -> Heartbeat:
    """Return a heartbeat, of another agent than the one that has sent ``other_than``."""
    known = other_than.incarnation if other_than is not None else ""
    async with asyncio.timeout(START_S):
        await ear.until(lambda: bool(ear.heartbeats) and ear.heartbeats[-1].incarnation != known)
    return ear.heartbeats[-1]


def targets(pid: int) -> set[str]:
    """Return what the descriptors of a process refer to."""
    folder = Path(f"/proc/{pid}/fd")
    return {os.readlink(one) for one in folder.iterdir() if one.is_symlink()}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into an agent")
async def test_the_agent_knows_no_path_and_passes_nothing_on(node: Program, ear: Ear, own: Settings) -> None:
    beat = await heard(ear)
    agent = psutil.Process(beat.agent_pid)
    variables = agent.environ()
    assert CREDENTIAL not in variables
    assert str(own.nats_credential) not in str([variables, agent.cmdline()])
    assert str(own.nats_credential) in targets(agent.pid)
    [fork_server] = [one for one in psutil.Process(node.process.pid).children() if one.pid != agent.pid]
    assert str(own.nats_credential) not in targets(fork_server.pid)
    assert not {CREDENTIAL, CREDENTIAL_FD} & fork_server.environ().keys()


@pytest.mark.slow
async def test_the_next_agent_has_the_file_as_it_then_is(node: Program, ear: Ear, nats: OpenServer) -> None:
    """Which the server would refuse otherwise: it does not know the earlier key any more."""
    before = await heard(ear)
    nats.keys.remove_node("n0")
    await add_node(nats)
    os.kill(before.agent_pid, signal.SIGKILL)
    await heard(ear, before)


@pytest.mark.slow
async def test_a_file_that_is_not_there_any_more_ends_nothing(node: Program, ear: Ear, own: Settings) -> None:
    before = await heard(ear)
    assert own.nats_credential is not None
    own.nats_credential.unlink()
    for _ in range(2):
        os.kill(before.agent_pid, signal.SIGKILL)
        before = await heard(ear, before)
    assert "the next agent has the one that was opened before" in node.log.read_text()


@pytest.mark.slow
async def test_a_supervisor_that_has_a_descriptor_needs_no_file(ear: Ear, own: Settings, tmp_path: Path) -> None:
    """As systemd passes one (``OpenFile=``): whoever starts the node may read the file; the node's user need not."""
    opens = ["sh", "-c", f'exec 7<"{own.nats_credential}" && rm "{own.nats_credential}" && exec "$@"', "sh"]
    given = {CREDENTIAL_FD: "7"}
    async with running(own, "", tmp_path / "agent.log", wrapper=opens, environment=given) as program:
        await program.ready()
        before = await heard(ear)
        assert before.node == "n0", "its name is in the credential, too"
        os.kill(before.agent_pid, signal.SIGKILL)
        await heard(ear, before)


async def test_a_descriptor_without_a_credential_is_refused(own: Settings, tmp_path: Path) -> None:
    async with running(own, "n0", tmp_path / "agent.log", environment={CREDENTIAL_FD: "99"}) as program:
        async with asyncio.timeout(WAIT_S):
            assert await program.process.wait() == 2
    assert "credential in descriptor 99: Bad file descriptor" in program.log.read_text()


def test_one_descriptor_is_open_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "n0.json"
    source = CredentialSource(Settings(nats_credential=file))
    with pytest.raises(InvalidInput, match=r"n0\.json: No such file"):
        source.open()
    for text in ("first", "second"):
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").replace(file)
        assert os.pread(source.open(), 100, 0).decode() == text
    file.unlink()
    assert os.pread(source.open(), 100, 0).decode() == "second"
    assert sum(str(file) in target for target in targets(os.getpid())) == 1
    source.close()
    assert not any(str(file) in target for target in targets(os.getpid()))
    with pytest.raises(InvalidInput, match="UNICRON_NATS_CREDENTIAL"):
        CredentialSource(Settings(nats_credential=None)).open()
