"""The rights of identities at a real server: what a node's stolen credential cannot do, and nodes that are removed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus import credentials
from shared.bus.connection import Bus
from shared.bus.identities import SERVICES, inbox_prefix, node_identity
from shared.errors import AccessDenied, Unavailable
from shared.log.journal import Journal
from shared.log.relay import STREAM
from shared.log.relay import SUBJECT as LOG
from shared.messages.commands import COMMANDS
from shared.messages.signals import HEARTBEATS, SIGNALS
from shared.nats.rights import RIGHTS, rights
from tests.condition import until
from tests.nats_server import OpenServer
from tests.shared.samples import node_joined

LIMIT_S = 40.0
DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[OpenServer]:
    """A server that knows the services and two nodes."""
    server = OpenServer(tmp_path / "nats")
    server.keys.make(more=[node_identity("n0"), node_identity("n1")])
    async with server:
        yield server


class Buses:
    """Connections to one server, by identity."""

    def __init__(self, server: OpenServer) -> None:
        self._server, self._open = server, dict[str, Bus]()

    async def __getitem__(self, identity: str) -> Bus:
        credential = credentials.read(self._server.keys.credential_file(identity))
        bus = self._open[identity] = await Bus.connect(self._server.url, credential=credential, name=identity)
        return bus

    async def close(self) -> None:
        for bus in self._open.values():
            await bus.close()


@pytest.fixture
async def buses(nats: OpenServer) -> AsyncIterator[Buses]:
    """Connections by identity: ``await buses["node/n0"]``."""
    opened = Buses(nats)
    yield opened
    await opened.close()


async def refused(bus: Bus, caplog: pytest.LogCaptureFixture, subject: str, *, publish: bool) -> None:
    """Check that the server refuses an identity a subject."""

    async def ignore(_: str, __: bytes) -> None:
        pass

    if publish:
        await bus.send(subject, b"x")
    else:
        await bus.listen(subject, ignore)
    await bus.wait_connected()  # the server has answered what came before
    what = "Publish to" if publish else "Subscription to"
    expected = f'permissions violation for {what} "{re.escape(subject)}"'
    await until(lambda: re.search(expected, caplog.text, re.IGNORECASE), expected, seen=lambda: caplog.text)


async def reloaded(buses: Buses, added: str) -> None:
    """Wait until the server knows an identity that was added."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await buses[added]
                return
            except AccessDenied:
                pass


NOT_TO_PUBLISH = [
    HEARTBEATS.at("n1"),
    SIGNALS.at("n1"),
    "unicron.hello.n1",
    "unicron.departures.n1",
    "unicron.preflight.n1",
    COMMANDS.at("n1"),
    COMMANDS.at("n0"),
    "unicron.leftovers.n1",
    "unicron.files.n1",
    "unicron.self-test.n1",
    "unicron.agent-restart.n1",
    "unicron.faults.n0",
    "unicron.faults.n1",
    "unicron.probe.n1",
    "unicron.revoked.n1.00000000000000000000000000000000",
    "unicron.reachability",
    "unicron.limits",
    "unicron.time",
    "unicron.health.planner",
    f"{LOG}.node.joined",
    f"$JS.API.STREAM.DELETE.{STREAM}",
    "$JS.API.INFO",
    f"$JS.ACK.{STREAM}.planner.1.1.1.1.0",
    f"{inbox_prefix('node/n1')}.x",
    f"{inbox_prefix('planner')}.x",
    "$SYS.REQ.SERVER.PING",
]
"""Subjects to which the node n0 may not publish."""

NOT_TO_READ = [
    ">",
    "unicron.>",
    COMMANDS.at("n1"),
    COMMANDS.subject,
    HEARTBEATS.subject,
    SIGNALS.at("n1"),
    "unicron.files.n1",
    "unicron.faults.n1",
    "unicron.alive.n1.*",
    "unicron.alive.*.*",
    "unicron.health.planner",
    f"{LOG}.>",
    "$JS.>",
    "_INBOX.>",
    f"{inbox_prefix('node/n1')}.>",
    *(f"{inbox_prefix(service)}.>" for service in SERVICES),
]
"""Subjects that the node n0 may not subscribe to."""


async def test_a_stolen_credential_of_a_node_publishes_nothing_for_others(
    buses: Buses, caplog: pytest.LogCaptureFixture
) -> None:
    node = await buses["node/n0"]
    for subject in NOT_TO_PUBLISH:
        await refused(node, caplog, subject, publish=True)


async def test_a_stolen_credential_of_a_node_reads_nothing_of_others(
    buses: Buses, caplog: pytest.LogCaptureFixture
) -> None:
    node = await buses["node/n0"]
    for subject in NOT_TO_READ:
        await refused(node, caplog, subject, publish=False)


async def test_only_transition_commands_agents(buses: Buses, caplog: pytest.LogCaptureFixture) -> None:
    for service in {*SERVICES} - {"transition"}:
        caplog.clear()
        await refused(await buses[service], caplog, COMMANDS.at("n0"), publish=True)

    async def carry_out(data: bytes) -> bytes:
        return data

    await (await buses["node/n0"]).answer(COMMANDS.at("n0"), lambda _, data: carry_out(data))
    assert await (await buses["transition"]).request(COMMANDS.at("n0"), b"x", timeout_s=LIMIT_S) == b"x"


async def test_a_node_has_nobody_reply_on_a_subject_that_it_may_not_use_itself(
    buses: Buses, nats: OpenServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The detector may publish to JetStream. Who asks it must not choose what it publishes to."""
    detector, node, other = await buses["detector"], await buses["node/n0"], await buses["test"]
    answered: list[bytes] = []

    async def answer(data: bytes) -> bytes:
        answered.append(data)
        return b"+"

    heard: asyncio.Queue[str] = asyncio.Queue()

    async def hear(subject: str, _: bytes) -> None:
        heard.put_nowait(subject)

    await detector.answer(SIGNALS.subject, lambda _, data: answer(data))
    await other.listen(f"{LOG}.>", hear)
    await node._client.publish(SIGNALS.at("n0"), b"forged", reply=f"{LOG}.forged")
    assert await node.request(SIGNALS.at("n0"), b"honest", timeout_s=LIMIT_S) == b"+"
    await other.wait_connected()
    assert (answered, heard.empty()) == ([b"honest"], True)
    assert detector.dropped.counters == {"undecodable": 1}
    assert f"asks for a reply on '{LOG}.forged'" in caplog.text


async def test_no_two_requests_have_names_that_follow_from_one_another(buses: Buses) -> None:
    """A node that sees the names of the requests that it gets must not know those of others."""
    bus = await buses["transition"]
    names = {bytes(bus._client._nuid.next()) for _ in range(1000)}
    assert len(names) == 1000
    assert {len(name) for name in names} == {22}
    assert len({name[:12] for name in names}) > 990, "nats-py's own have the first 12 letters in common"


async def test_services_relay_and_follow_the_log_with_their_rights(
    buses: Buses, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    for service in SERVICES:
        followed: asyncio.Queue[int] = asyncio.Queue()

        async def handle(record: object, followed: asyncio.Queue[int] = followed) -> None:
            followed.put_nowait(record.position)  # type: ignore[attr-defined]

        async with Journal(journal.log, await buses[service]) as own:
            following = asyncio.create_task(own.follow(handle, consumer=service, after=0))
            [record] = await own.append([node_joined(SERVICES.index(service))])
            async with asyncio.timeout(LIMIT_S):
                while await followed.get() < record.position:
                    pass
                while await own.relay() < record.position:
                    pass
            following.cancel()
            await asyncio.wait({following})
    assert "ermissions" not in caplog.text


async def test_a_node_that_is_added_while_a_command_runs_costs_no_answer(buses: Buses, nats: OpenServer) -> None:
    """Nor does one that is removed. Answers that NATS itself allows (`allow_responses`) are forgotten by a reload."""
    transition, node = await buses["transition"], await buses["node/n0"]
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def carry_out(_: bytes) -> bytes:
        begun.set()
        await goes_on.wait()
        return b"done"

    await node.answer(COMMANDS.at("n0"), lambda _, data: carry_out(data))
    command = asyncio.create_task(transition.request(COMMANDS.at("n0"), b"", timeout_s=LIMIT_S))
    await begun.wait()
    nats.keys.add_node("n2")
    nats.reload()
    await reloaded(buses, "node/n2")
    goes_on.set()
    assert await command == b"done"
    assert node.connected


async def test_a_node_that_is_removed_is_cut_off(buses: Buses, nats: OpenServer) -> None:
    """Within a second on a machine that is not busy: the server closes its connections when it reloads."""
    node, other = await buses["node/n0"], await buses["node/n1"]
    nats.keys.remove_node("n0")
    stolen = time.monotonic()
    nats.reload()
    await until(lambda: "Authorization Violation" in node.trouble, seen=lambda: node.trouble)
    print(f"cut off after {time.monotonic() - stolen:.3f} s")
    with pytest.raises(Unavailable):
        await node.request(SIGNALS.at("n0"), b"", timeout_s=0.1)
    assert other.connected
    assert other.trouble == ""


async def test_a_node_that_is_added_again_has_another_key(buses: Buses, nats: OpenServer) -> None:
    old = credentials.read(nats.keys.credential_file("node/n0"))
    nats.keys.remove_node("n0")
    assert not nats.keys.credential_file("node/n0").exists()
    nats.keys.add_node("n0")
    nats.reload()
    await reloaded(buses, "node/n0")
    assert credentials.read(nats.keys.credential_file("node/n0")).public_key != old.public_key
    with pytest.raises(AccessDenied):
        await Bus.connect(nats.url, credential=old, name="old")


def test_nodes_share_no_subject_with_one_another_but_the_inboxes_of_services() -> None:
    first, second = rights("node/n0"), rights("node/n1")
    inboxes = {f"{inbox_prefix(service)}.>" for service in SERVICES}
    assert set(first.publish) & set(second.publish) <= inboxes
    assert set(first.subscribe) & set(second.subscribe) == set()


def test_every_identity_reads_its_own_inbox_and_no_other() -> None:
    for identity in [*SERVICES, "node/n0"]:
        read = [subject for subject in rights(identity).subscribe if subject.startswith(("_INBOX", ">", "*"))]
        assert read == [f"{inbox_prefix(identity)}.>"]


def test_the_documentation_shows_the_table() -> None:
    rows = re.findall(r"^\| (\S+) \| (.*) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    shown = {
        kind: (set(re.findall(r"`([^`]+)`", publish)), set(re.findall(r"`([^`]+)`", subscribe)))
        for kind, publish, subscribe in rows
        if kind in RIGHTS
    }
    assert shown == {kind: (set(found.publish), set(found.subscribe)) for kind, found in RIGHTS.items()}
