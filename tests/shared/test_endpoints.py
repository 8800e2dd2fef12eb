"""Endpoints of the bus: the list of them, and what is done about messages that are not readable."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import shared.messages
from shared.bus.connection import Bus
from shared.bus.endpoints import Endpoint
from shared.errors import InvalidReply
from shared.messages.endpoints import ENDPOINTS, page
from shared.messages.signals import HEARTBEATS, SIGNALS
from shared.messages.stacks import STACKS, StacksReply, StacksRequest

PAGE = Path(__file__).parents[2] / "docs" / "bus.md"
WAIT_S = 40.0


def test_the_documentation_lists_the_endpoints() -> None:
    assert PAGE.read_text() == page(), "make bus-page"


def test_every_endpoint_that_is_declared_is_listed() -> None:
    names = [f"shared.messages.{found.name}" for found in pkgutil.iter_modules(shared.messages.__path__)]
    declared = [one for name in names for one in vars(importlib.import_module(name)).values()]
    assert {one.subject for one in declared if isinstance(one, Endpoint)} == {one.subject for one in ENDPOINTS}
    assert len({one.subject for one in ENDPOINTS}) == len(ENDPOINTS)


def test_the_parts_of_a_subject_are_filled_in_from_the_left() -> None:
    assert (STACKS.at(), STACKS.at("n0")) == ("unicron.stacks.*", "unicron.stacks.n0")


@pytest.mark.parametrize(("reason", "data"), [(None, b"+"), ("too long", b"- too long")])
def test_a_signal_is_answered_with_why_it_was_dropped(reason: str | None, data: bytes) -> None:
    assert SIGNALS.reply.encode(reason) == data
    assert SIGNALS.reply.decode(data) == reason


async def test_a_request_that_is_not_readable_is_refused_and_counted(bus: Bus) -> None:
    async def handle(request: StacksRequest) -> StacksReply:
        return StacksReply(node=f"{request.task}-of-n0")

    await bus.serve(STACKS, handle, "n0", refuse=lambda _: StacksReply(node="refused"))
    request = StacksRequest(task="gpt", generation=1)
    assert (await bus.call(STACKS, request, "n0", timeout_s=WAIT_S)).node == "gpt-of-n0"
    assert b'"refused"' in await bus.request(STACKS.at("n0"), b"{}", timeout_s=WAIT_S)
    assert bus.dropped.counters == {"undecodable": 1}


async def test_a_reply_that_is_not_readable_is_an_error_of_its_own_and_counted(bus: Bus) -> None:
    async def handle(_: str, __: bytes) -> bytes:
        return b"[]"

    await bus.answer(STACKS.at("n0"), handle)
    with pytest.raises(InvalidReply, match="not a JSON object"):
        await bus.call(STACKS, StacksRequest(task="gpt", generation=1), "n0", timeout_s=WAIT_S)
    assert bus.dropped.counters == {"undecodable": 1}


async def test_what_is_published_for_another_node_is_dropped(bus: Bus) -> None:
    dropped, heard = bus.dropped, list[str]()

    async def hear(heartbeat: object) -> None:
        heard.append(str(heartbeat))

    receive = HEARTBEATS.receiver(hear, lambda _: None, dropped)
    beat = b'{"node": "n0", "incarnation": "i", "agent_pid": 1, "sequence": 1, "sent_at": "2026-01-01T00:00:00Z",'
    beat += b' "interval_s": 1, "workers": []}'
    await receive(HEARTBEATS.at("n0"), beat)
    await receive(HEARTBEATS.at("n9"), beat)
    assert (len(heard), dropped.counters) == (1, {"wrong_sender": 1})
