"""Faults as users write them."""

from __future__ import annotations

import math

import pytest

from shared.errors import InvalidInput
from shared.messages.injection import OF_NODES, OF_RANKS, parse


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("kill", "kill"),
        ("exception", "exception"),
        ("hang", "hang=stop"),
        ("hang=collective", "hang=collective"),
        ("slow=1.3", "slow=1.3"),
        ("nan", "nan"),
        ("nan=decoder.layers.0.weight", "nan=decoder.layers.0.weight"),
        ("spike", "spike=10"),
        ("oom", "oom"),
        ("disconnect", "disconnect=10"),
        ("xid=79", "xid=79"),
        ("xid=79:3", "xid=79:3"),
    ],
)
def test_a_fault_is_read_and_written_in_full(text: str, full: str) -> None:
    assert parse(text).text == full
    assert parse(full) == parse(text)


def test_arguments_have_values() -> None:
    assert (parse("disconnect=2.5").away_s, parse("disconnect=forever").away_s) == (2.5, math.inf)
    assert (parse("xid=79").xid, parse("xid=48:7").xid) == ((79, 0), (48, 7))
    assert {parse("slow=2").of_rank, parse("xid=79").of_rank} == {True, False}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pause",
        "kill=9",
        "kill=",
        "hang=up",
        "slow",
        "slow=",
        "slow=0.5",
        "slow=nan",
        "slow=1e9",
        "spike=1",
        "spike=inf",
        f"nan={'x' * 300}",
        "disconnect=0",
        "disconnect=-1",
        "xid",
        "xid=0",
        "xid=1000",
        "xid=79:x",
        "xid=٧٩",
    ],
)
def test_what_is_no_fault_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse(text)
    (error,) = refused.value.extra["errors"]
    assert (error["field"], error["value"]) == ("fault", text)
    kind = text.partition("=")[0]
    assert (OF_RANKS | OF_NODES).get(kind, "allowed: kill, exception") in error["problem"]
