"""Messages of every kind, mutated: they are read or refused, and whoever is asked answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.agent.cluster.probe import ProbeServer
from services.agent.commands import Commands
from services.agent.files.file_server import FileServer
from services.agent.files.rank_users import RankUsers
from services.agent.files.task_secrets import TaskSecrets
from services.agent.node.process import Process
from services.agent.node.slots import Node
from services.agent.succession.hand_over import HandOver
from shared.bus.endpoints import Endpoint
from shared.errors import Undecodable
from shared.messages.admission import AGENT_RESTART, AgentRestart
from shared.messages.commands import COMMANDS
from shared.messages.node_files import FILES
from shared.messages.probes import PROBE
from shared.messages.signals import HEARTBEATS, SIGNALS
from shared.service.changes import Changes
from shared.tasks.specification import TaskSpec
from tests.examples import examples
from tests.fuzz.samples import COMMANDS_OF_ALL_KINDS, FILE_REQUESTS, INCARNATION, KINDS, PROBE_REQUESTS
from tests.local_bus import LocalBus
from tests.versions.kit import ill_formed
from unicron.protocol import messages


@pytest.fixture(autouse=True, scope="module")
def few_lines() -> Iterator[None]:
    """Each example has counters of its own, so that each would log its first message."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_a_kind_with_control_characters_is_named_in_one_line() -> None:
    with pytest.raises(Undecodable, match=r"Input tag '\\x00\\n' found") as refused:
        FILES.request.decode(b'{"kind": "\\u0000\\n"}')
    assert refused.value.detail.isprintable()


@given(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind[0]), ill_formed(list(kind[1])))))
@example((HEARTBEATS.request, b"[" * 1_000_000))
@example((SIGNALS.request, b'{"kind":' + b"9" * 5_000 + b"}"))
def test_any_bytes_are_a_message_or_refused_in_one_short_line(drawn: tuple[Any, bytes]) -> None:
    codec, data = drawn
    try:
        message = codec.decode(data)
    except Undecodable as err:
        reason = err.detail
    else:
        reason = "read"
        assert codec.decode(message.model_dump_json(by_alias=True).encode()) == message
    assert 0 < len(reason) < 1000
    assert reason.isprintable()
    assert SIGNALS.reply.encode(reason).startswith(b"- ")


class Host:
    """An agent whose ranks do all at once (``services.agent.commands.Host``)."""

    def __init__(self, node: Node, changes: Changes, folder: Path) -> None:
        self.node, self.changes, self.folder = node, changes, folder

    async def launch(self, process: Process, spec: TaskSpec) -> None:
        process.attached, process.pid = True, 1

    def send(self, process: Process, message: messages.Message) -> None:
        match message:
            case messages.Configure(generation=generation):
                process.resumed = messages.Resumed(generation=generation, step=1, source="own")
            case messages.Stop():
                process.stop_refused = messages.StopRefused(generation=1, rank=0, step=1, reason="no room")
            case _:
                process.resting = True
        self.changes.notify()

    def directory(self, task: str, generation: int) -> str:
        folder = (self.folder / task / f"generation-{generation}").resolve()
        assert folder.parent.parent == self.folder  # whatever the command says
        return str(folder)

    async def end(self, processes: Iterable[Process]) -> None:
        for process in processes:
            process.exit_code, self.node.slots[process.worker] = 0, None
        self.changes.notify()

    async def open_store(self, task: str, generation: int) -> tuple[str, int]:
        return "127.0.0.1", 1

    def close_stores(self, task: str, before: int | None = None) -> None:
        pass

    def forget_state(self, task: str) -> None:
        assert (self.folder / task).resolve().parent == self.folder


def answers(
    serve: Callable[[LocalBus], Awaitable[Callable[[], None] | None]],
    endpoint: Endpoint[Any, Any],
    messages: list[bytes],
) -> list[bytes]:
    """Return what is answered to messages that come together to the endpoint of node n0; all are answered.

    ``serve`` returns what ends the server, if that is needed.
    """

    async def ask() -> list[bytes]:
        bus = LocalBus()
        stop = await serve(bus)
        try:
            async with asyncio.timeout(60):
                return await asyncio.gather(*(bus.ask(endpoint.at("n0"), message) for message in messages))
        finally:
            if stop is not None:
                stop()

    return asyncio.run(ask())


@settings(max_examples=examples(60))
@given(st.lists(ill_formed(COMMANDS_OF_ALL_KINDS), min_size=1, max_size=6), st.booleans())
def test_an_agent_answers_every_command_also_repeated_and_out_of_order(messages: list[bytes], again: bool) -> None:
    node, changes = Node.create("n0", "i", 2), Changes()
    host = Host(node, changes, Path("/run/tasks"))
    commands = Commands(node, changes, host, lambda: None)
    sent = [*messages, *reversed(messages)] if again else messages
    for reply in answers(commands.listen, COMMANDS, sent):
        found = COMMANDS.reply.decode(reply)
        assert found.node == "n0"
        assert found.ok or found.detail
        assert found.code != "internal", found.detail


@settings(max_examples=examples(60))
@given(st.lists(ill_formed(FILE_REQUESTS), min_size=1, max_size=4))
def test_an_agent_answers_every_request_for_files(messages: list[bytes]) -> None:
    async def serve(bus: LocalBus) -> Callable[[], None]:
        server = FileServer(bus, "n0", Path("/nonexistent"), RankUsers(""), TaskSecrets())
        await server.start()
        return server.stop

    for answered in answers(serve, FILES, messages):
        reply, _ = FILES.reply.decode(answered)
        assert reply.ok or reply.code in ("undecodable", "not-found", "unavailable")


@settings(max_examples=examples(60))
@given(st.lists(ill_formed(PROBE_REQUESTS), min_size=1, max_size=3))
def test_an_agent_answers_every_request_to_probe(messages: list[bytes]) -> None:
    async def serve(bus: LocalBus) -> Callable[[], None]:
        server = ProbeServer(bus, "n0", INCARNATION, "127.0.0.1")
        await server.start()
        return server.stop

    for reply in answers(serve, PROBE, messages):
        assert PROBE.reply.decode(reply).node == "n0"


@given(ill_formed([AgentRestart(incarnation="another")]))
def test_only_a_request_for_this_agent_has_it_hand_over(message: bytes) -> None:
    due = HandOver()
    (reply,) = answers(lambda bus: due.serve(bus, "n0", INCARNATION), AGENT_RESTART, [message])
    assert AGENT_RESTART.reply.decode(reply).incarnation == INCARNATION
    assert not due.is_due
