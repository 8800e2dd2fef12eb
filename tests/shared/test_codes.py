"""Failure codes on the wire: their spelling, and codes of programs of another version."""

from __future__ import annotations

import json

import pytest

from shared.events.codes import FailureCode
from shared.messages.commands import Reply

SPELLING = {
    "fenced",
    "process-exited",
    "rank-raised",
    "busy",
    "not-found",
    "unavailable",
    "undecodable",
    "checkpoint-failed",
    "internal",
    "timeout",
    "invalid-reply",
    "node-lost",
    "released",
    "unknown-task",
    "occupied",
    "refused",
    "unknown",
}


def reply(**fields: object) -> Reply:
    return Reply.model_validate_json(json.dumps({"command_id": "c", "node": "n0", "ok": False, **fields}))


def test_the_spelling_of_codes_is_fixed() -> None:
    assert {code.value for code in FailureCode} == SPELLING


@pytest.mark.parametrize("code", FailureCode)
def test_a_reply_keeps_its_code(code: FailureCode) -> None:
    sent = reply(code=code.value, detail="why")
    assert sent.code is code
    assert sent.detail == "why"
    assert json.loads(sent.model_dump_json())["code"] == code.value
    assert Reply.model_validate_json(sent.model_dump_json()) == sent


def test_a_code_of_another_version_is_read_as_unknown_and_kept_as_text() -> None:
    received = reply(code="gpu-on-fire", detail="n0/0 is hot")
    assert received.code is FailureCode.UNKNOWN
    assert received.detail == "gpu-on-fire: n0/0 is hot"
    assert Reply.model_validate_json(received.model_dump_json()) == received


def test_a_reply_without_a_code_has_empty_text_on_the_wire() -> None:
    """Agents and services of older versions send and expect text."""
    done = Reply(command_id="c", node="n0", ok=True)
    assert done.code is None
    assert json.loads(done.model_dump_json())["code"] == ""
    assert reply(code="").code is None
