"""Messages of every kind, mutated: they are read or refused, and whoever is asked answers."""

from __future__ import annotations

import asyncio
import json
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
from shared.bus.dropped import DroppedMessages
from shared.bus.messages import decode
from shared.errors import Undecodable
from shared.messages.agent_restart import AGENT_RESTART_RESULT, AgentRestart
from shared.messages.commands import REPLY
from shared.messages.node_files import FILES_REQUEST, unpack
from shared.messages.probes import PROBE_REPLY
from shared.messages.signals import HEARTBEAT, SIGNAL, refusal
from shared.service.changes import Changes
from shared.tasks.specification import TaskSpec
from tests.examples import examples
from tests.fuzz.samples import COMMANDS_OF_ALL_KINDS, FILE_REQUESTS, INCARNATION, KINDS, PROBE_REQUESTS
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
        decode(FILES_REQUEST, b'{"kind": "\\u0000\\n"}')
    assert refused.value.detail.isprintable()


@given(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind[0]), ill_formed(list(kind[1])))))
@example((HEARTBEAT, b"[" * 1_000_000))
@example((SIGNAL, b'{"kind":' + b"9" * 5_000 + b"}"))
def test_any_bytes_are_a_message_or_refused_in_one_short_line(drawn: tuple[Any, bytes]) -> None:
    adapter, data = drawn
    try:
        message = decode(adapter, data)
    except Undecodable as err:
        reason = err.detail
    else:
        reason = "read"
        assert decode(adapter, message.model_dump_json(by_alias=True).encode()) == message
    assert 0 < len(reason) < 1000
    assert reason.isprintable()
    assert refusal(reason).decode().startswith("- ")


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


def answer(serve: Callable[[bytes], Awaitable[bytes]], messages: list[bytes]) -> list[bytes]:
    """Return what is answered to messages that come together; all are answered."""

    async def ask() -> list[bytes]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(serve(message) for message in messages))

    return asyncio.run(ask())


@settings(max_examples=examples(60))
@given(st.lists(ill_formed(COMMANDS_OF_ALL_KINDS), min_size=1, max_size=6), st.booleans())
def test_an_agent_answers_every_command_also_repeated_and_out_of_order(messages: list[bytes], again: bool) -> None:
    node, changes = Node.create("n0", "i", 2), Changes()
    counters: dict[str, int] = {}
    host = Host(node, changes, Path("/run/tasks"))
    commands = Commands(node, changes, host, lambda: None, DroppedMessages(counters))
    sent = [*messages, *reversed(messages)] if again else messages
    for reply in answer(commands.serve, sent):
        found = decode(REPLY, reply)
        assert found.node == "n0"
        assert found.ok or found.detail
        assert found.code != "internal", found.detail


@settings(max_examples=examples(60))
@given(st.lists(ill_formed(FILE_REQUESTS), min_size=1, max_size=4))
def test_an_agent_answers_every_request_for_files(messages: list[bytes]) -> None:
    missing: Any = None
    server = FileServer(missing, "n0", Path("/nonexistent"), DroppedMessages({}), RankUsers(""), TaskSecrets())
    try:
        for reply in answer(server.serve, messages):
            head = json.loads(reply.partition(b"\n")[0])
            assert head["ok"] or head["code"] in ("undecodable", "not-found", "unavailable")
            if head["ok"]:
                unpack(reply)
    finally:
        server.stop()


@settings(max_examples=examples(60))
@given(st.lists(ill_formed(PROBE_REQUESTS), min_size=1, max_size=3))
def test_an_agent_answers_every_request_to_probe(messages: list[bytes]) -> None:
    missing: Any = None
    server = ProbeServer(missing, "n0", INCARNATION, "127.0.0.1", DroppedMessages({}))
    for reply in answer(server._probe, messages):
        assert decode(PROBE_REPLY, reply).node == "n0"


@given(ill_formed([AgentRestart(incarnation="another")]))
def test_only_a_request_for_this_agent_has_it_hand_over(message: bytes) -> None:
    due = HandOver()
    due._incarnation = INCARNATION
    (reply,) = answer(due._answer, [message])
    assert decode(AGENT_RESTART_RESULT, reply).incarnation == INCARNATION
    assert not due.is_due
