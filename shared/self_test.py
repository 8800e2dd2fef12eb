"""Messages by which the api has a node's agent test itself, before the node is used again: core NATS."""

from __future__ import annotations

from pydantic import TypeAdapter

from shared.messages import Message, MessageId

SELF_TEST = "unicron.self-test"
"""Prefix of the subjects of self-tests; the node's name follows (request and reply)."""


class SelfTest(Message):
    """A request to test the node. ``empty``: no process of a task may be there, since the node is isolated."""

    empty: bool = False


class SelfTestResult(Message):
    """The outcome. ``problem``: what is wrong, for people; empty: nothing."""

    incarnation: MessageId
    problem: str = ""


SELF_TEST_REQUEST: TypeAdapter[SelfTest] = TypeAdapter(SelfTest)
SELF_TEST_RESULT: TypeAdapter[SelfTestResult] = TypeAdapter(SelfTestResult)
