"""Metrics of several ranks and generations become one value for each step, and take no more than they may."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.task_metrics.series import (
    MOST_NAMES,
    NAME_CHARACTERS,
    Line,
    Series,
    Submission,
    read_lines,
    thin_out,
)

Logged = tuple[int, int, int, float]
"""Generation, rank, step and value."""

STEPS = st.integers(0, 30)


@st.composite
def courses(draw: st.DrawFn) -> list[Logged]:
    """Draw what ranks log in several generations, each of which begins at or before a step that was done."""
    found: list[Logged] = []
    for generation in range(1, draw(st.integers(1, 4)) + 1):
        begin, ranks = draw(STEPS), draw(st.integers(1, 3))
        for step in range(begin, begin + draw(st.integers(1, 8))):
            for rank in range(ranks):
                # Not every rank logs every step, and some log a step twice.
                found += [(generation, rank, step, draw(st.floats(0, 1))) for _ in range(draw(st.integers(0, 2)))]
    return found


def counted(course: Iterable[Logged]) -> dict[int, float]:
    """Return what counts of a course: the rule of the module, for each step on its own."""
    course = list(course)
    firsts: dict[int, int] = {}
    for generation, _, step, _ in course:
        firsts[generation] = min(step, firsts.get(generation, step))
    found: dict[int, tuple[int, int, float]] = {}
    for generation, rank, step, value in course:
        undone = any(newer > generation and first < step for newer, first in firsts.items())
        if not undone and (step not in found or (generation, -rank) >= found[step][:2]):
            found[step] = generation, -rank, value
    return {step: value for step, (_, _, value) in found.items()}


def taken(course: Iterable[Logged], order: Any = None) -> Submission:
    """Take a course file by file, in an order of the files."""
    files: dict[tuple[int, int], list[Line]] = {}
    for generation, rank, step, value in course:
        files.setdefault((generation, rank), []).append(Line(step, rank, {"loss": value}))
    submission = Submission()
    for generation, rank in order(list(files)) if order else files:
        submission.take(generation, files[generation, rank])
    return submission


def values(submission: Submission) -> dict[int, float]:
    series = submission.series.get("loss", Series())
    assert list(series.steps) == sorted(set(series.steps))
    return dict(zip(series.steps, series.values, strict=True))


@given(courses(), st.randoms(use_true_random=False))
def test_each_step_has_the_value_that_counts_in_whatever_order_files_are_read(
    course: list[Logged], random: Any
) -> None:
    assert values(taken(course)) == counted(course)
    assert values(taken(course, lambda files: random.sample(files, len(files)))) == counted(course)


def test_what_a_task_goes_back_behind_is_undone_until_it_comes_again() -> None:
    course = [(1, 0, step, 1.0) for step in range(1, 11)] + [(2, 0, step, 2.0) for step in (6, 7)]
    assert values(taken(course)) == dict.fromkeys(range(1, 6), 1.0) | {6: 2.0, 7: 2.0}


@given(st.lists(STEPS, min_size=1, max_size=200), st.integers(1, 40))
def test_what_is_thinned_out_has_the_newest_value_and_stays_in_its_bounds(steps: list[int], most: int) -> None:
    most_bytes = Series().size_bytes + 32 * most
    submission = Submission()
    for number, step in enumerate(steps):
        submission.take(1, [Line(step * 7, 0, {"loss": float(number)})])
        thin_out({1: submission}, most_bytes)
        series = submission.series["loss"]
        assert len(series) <= most
        assert max(steps[: number + 1]) * 7 == series.steps[-1]
        assert list(series.steps) == sorted(set(series.steps))
    assert {*series.steps} <= {7 * step for step in steps}
    groups = [step // series.every for step in series.steps]
    assert len({*groups}) == len(groups)


@given(st.lists(st.tuples(STEPS, st.floats(allow_nan=False), st.integers(0, 2**53), STEPS)), st.integers(1, 64))
def test_what_is_stored_is_what_was_there(points: list[tuple[int, float, int, int]], every: int) -> None:
    series = Series(every)
    for step, value, generation, rank in points:
        series.put(step, value, generation, rank)
    assert Series.from_bytes(series.to_bytes()) == series


def test_old_submissions_go_before_new_ones() -> None:
    submissions = {number: Submission() for number in (1, 2, 3)}
    for submission in submissions.values():
        submission.take(1, [Line(step, 0, {"a": 1.0, "b": 2.0}) for step in range(10)])
    thin_out(submissions, 4 * Series().size_bytes + 32 * 8)
    assert [len(one.series) for one in submissions.values()] == [0, 2, 2]
    assert all(len(series) >= 1 for series in submissions[3].series.values())


def test_a_submission_has_no_more_names_than_it_may() -> None:
    submission = Submission()
    submission.take(1, [Line(step, 0, {f"m{number}": 1.0 for number in range(MOST_NAMES + 3)}) for step in (1, 2)])
    assert len(submission.series) == MOST_NAMES
    assert submission.left_out == 6


@pytest.mark.parametrize("most", [2, 3, 10, 50])
def test_shown_points_are_evenly_spread_and_have_the_newest(most: int) -> None:
    series = Series()
    for step in range(50):
        series.put(step, math.nan if step == 49 else float(step), 1, 0)
    points = series.points(most)
    assert 1 <= len(points) <= most
    assert points[-1] == (49, None)
    assert len({after - before for (before, _), (after, _) in itertools.pairwise(points)}) <= 1


def test_lines_that_nobody_can_read_are_left_out() -> None:
    good = {"step": 3, "rank": 1, "values": {"a": 1.0, "b": math.inf}}
    wrong: list[object] = [
        [], {}, good | {"step": -1}, good | {"step": True}, good | {"step": 1.5}, good | {"rank": 2**60},
        good | {"values": 3}, good | {"values": {"a": "x"}}, good | {"values": {"a": True}},
        good | {"values": {"x" * (NAME_CHARACTERS + 1): 1.0}}, good | {"values": {"a\n": 1.0}},
    ]  # fmt: skip
    data = b"".join(json.dumps(one).encode() + b"\n" for one in [*wrong, good])
    assert list(read_lines(b"\xff\xfe{\n" + b"[" * 100_000 + b"\n" + data)) == [Line(3, 1, {"a": 1.0, "b": math.inf})]
