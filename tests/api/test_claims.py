"""Claims as they are made, before they are settled: whose time, from when to when, for what, at what rate."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from shared.costs.claims import Claim, IncidentTimes, Part, failure_claims, planned_claims, start_claims
from shared.costs.span_claims import Window, allocated_intervals, held_worker_s, unused_claims
from shared.views.documents import Impact, SpanKind, SpanView
from tests.api.kit import START

TWO = ["n0/0", "n1/0"]
RATE = 50.0
"""Weighted FLOP/s of one of the two workers before the plan."""


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def impact(**fields: Any) -> Impact:
    """Return what a plan made at 102 did to a task of two workers with steps of half a second."""
    known: dict[str, Any] = {
        "before": TWO,
        "after": TWO,
        "planned_at": at(102),
        "step_s": 0.5,
        "waf_flop_per_s": 2 * RATE,
    }
    return Impact(task="gpt", **(known | fields))


def claim(
    workers: Sequence[str], start_s: float, end_s: float, part: Part, incident: str = "", rate: float = RATE
) -> Claim:
    return Claim(tuple(workers), at(start_s).timestamp(), at(end_s).timestamp(), part, "gpt", incident, rate)


def test_a_single_recomputed_step_shorter_than_a_second_is_claimed_with_its_rate() -> None:
    moved = impact(survivors=TWO, restored_at=at(110), steps_recomputed=1)
    assert failure_claims(moved, IncidentTimes("i1", at(100), at(101)), first=True, as_of=at(200)) == [
        claim(TWO, 109.5, 110, Part.RECOMPUTE, "i1")
    ]


@pytest.mark.parametrize(
    "fields", [{"steps_recomputed": 0}, {"steps_recomputed": 4, "step_s": 0.0}, {"steps_recomputed": -1}]
)
def test_nothing_is_recomputed_without_steps_or_without_a_known_step_time(fields: dict[str, Any]) -> None:
    assert planned_claims(impact(restored_at=at(110), **fields), at(200)) == []


def test_recomputed_steps_that_have_not_come_yet_are_claimed_up_to_now() -> None:
    moved = impact(restored_at=at(110), steps_recomputed=8)
    assert planned_claims(moved, at(111)) == [claim(TWO, 109.5, 111, Part.PLANNED)]
    assert planned_claims(moved, at(109.5)) == []


def test_a_move_that_no_incident_caused_has_recomputed_steps_and_the_pause_of_those_that_stay() -> None:
    moved = impact(survivors=TWO[:1], drained_at=at(105), restored_at=at(110), closed_at=at(112), steps_recomputed=2)
    recomputed = [claim(TWO, 109.5, 110.5, Part.PLANNED)]
    assert planned_claims(moved, at(200)) == [*recomputed, claim(["n0/0"], 105, 109.5, Part.PLANNED)]


@pytest.mark.parametrize(
    ("fields", "end_s"),
    [
        ({"restored_at": at(110), "closed_at": at(112)}, 110),
        ({"closed_at": at(112)}, 112),
        ({}, 200),
    ],
    ids=["restored", "closed", "not yet"],
)
def test_a_pause_and_a_start_end_when_restored_else_when_the_plan_is_closed_else_now(
    fields: dict[str, Any], end_s: float
) -> None:
    moved = impact(survivors=TWO, drained_at=at(105), **fields)
    assert planned_claims(moved, at(200)) == [claim(TWO, 105, end_s, Part.PLANNED)]
    started = impact(after=[*TWO, "n2/0"], **fields)
    assert start_claims(started, "", at(200)) == [claim(["n2/0"], 102, end_s, Part.PLANNED)]


def test_the_start_of_a_worker_for_an_incident_is_part_of_its_transition() -> None:
    started = impact(after=["n0/0", "n2/0"], restored_at=at(110))
    assert start_claims(started, "i1", at(200)) == [claim(["n2/0"], 102, 110, Part.TRANSITION, "i1")]


def test_a_task_that_had_no_workers_loses_nothing_while_it_starts() -> None:
    started = impact(before=[], restored_at=at(110), steps_recomputed=1)
    assert start_claims(started, "", at(200)) == [claim(TWO, 102, 109.5, Part.PLANNED, rate=0.0)]
    assert planned_claims(started, at(200)) == [claim(TWO, 109.5, 110, Part.PLANNED, rate=0.0)]


def test_a_span_that_ends_as_it_begins_is_no_claim() -> None:
    assert start_claims(impact(after=[*TWO, "n2/0"], restored_at=at(102)), "", at(200)) == []


def idle_node(number: int, **fields: Any) -> SpanView:
    name = f"n{number}"
    workers = [f"{name}/{slot}" for slot in range(8)]
    return SpanView(
        id=name, position=number, kind=SpanKind.OPEN, start=at(number), node=name, workers=workers, **fields
    )


def test_nodes_of_the_same_times_are_claimed_together() -> None:
    spans = [*(idle_node(number, hardware="a") for number in range(50)), idle_node(50, hardware="b")]
    window = Window(at(100).timestamp(), at(110).timestamp())
    claims = list(unused_claims(spans, window))
    assert [len(one.workers) for one in claims] == [400, 8]
    allocated = allocated_intervals(spans, window)
    assert len({id(times) for times in allocated.values()}) == 1
    assert held_worker_s(claims, allocated) == 408 * 10.0


def test_a_worker_whose_node_has_others_later_has_the_times_of_both() -> None:
    first = idle_node(0, hardware="a").model_copy(update={"end": at(10)})
    second = idle_node(0, hardware="a").model_copy(update={"start": at(20), "workers": ["n0/0", "n0/8"]})
    allocated = allocated_intervals([first, second], Window.of(None, at(30)))
    low, high = at(20).timestamp(), at(30).timestamp()
    assert allocated["n0/0"] == [(at(0).timestamp(), at(10).timestamp()), (low, high)]
    assert (allocated["n0/1"], allocated["n0/8"]) == ([(at(0).timestamp(), at(10).timestamp())], [(low, high)])
