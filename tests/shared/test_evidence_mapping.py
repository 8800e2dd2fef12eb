"""The evidence of error events: what is written, and what decisions read."""

from __future__ import annotations

from typing import Any

import pytest

from shared.events.evidence import Evidence, LostRanks


def test_the_mapping_has_what_was_given_and_no_defaults() -> None:
    assert Evidence(workers=["n0/0"]).mapping(stalled_s=1.5) == {"workers": ["n0/0"], "stalled_s": 1.5}
    part = LostRanks(workers=["n0/0"], generation=3, ranks={"n0/0": 1}, step=7)
    mapping = Evidence(incarnation="i", tasks={"gpt": part}).mapping(reason="no heartbeat")
    assert mapping == {
        "reason": "no heartbeat",
        "incarnation": "i",
        "tasks": {"gpt": {"workers": ["n0/0"], "generation": 3, "ranks": {"n0/0": 1}, "step": 7}},
    }
    assert Evidence.read(mapping).tasks["gpt"] == part


@pytest.mark.parametrize(
    "evidence",
    [
        {},
        {"exit": "SIGKILL", "pid": 7},
        {"workers": "n0/0", "failure": 3, "incarnation": [], "tasks": {"gpt": {"workers": "n0/0"}}},
        {"workers": None, "failure": None, "incarnation": None, "tasks": None},
    ],
)
def test_absent_and_malformed_entries_have_their_defaults(evidence: dict[str, Any]) -> None:
    assert Evidence.read(evidence) == Evidence()


def test_workers_that_are_no_text_are_left_out() -> None:
    assert Evidence.read({"workers": ["n0/0", 1, None, "n1/0"]}).workers == ["n0/0", "n1/0"]
