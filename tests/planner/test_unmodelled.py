"""Tasks whose specification says nothing of their model: they begin with few workers, and grow by what was measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.replay.replay import verify_records
from services.planner.throughput.tables import table_of
from shared.errors import InvalidInput
from shared.events.union import TaskSubmitted
from shared.tasks.specification import TaskSpec, parse_spec
from tests.planner.kit import World, change_of, spec, workers
from tests.planner.test_corrections import progress

SCRIPT = {"name": "a", "script": "train.py", "batch": {"global": 24}, "steps": 1000}


def world(nodes: int = 8, **fields: Any) -> World:
    """Return a world of nodes of two workers in which the task trains."""
    found = World()
    for number in range(nodes):
        found.join(f"n{number}")
    submitted = parse_spec(SCRIPT | fields)
    found.complete(found.must(TaskSubmitted(**found.base(), task="a", spec=submitted, checkpoint="", step=0)))
    return found


def test_model_and_data_may_be_left_out() -> None:
    found = parse_spec(SCRIPT)
    assert (found.data, found.model_known, found.workers.min, found.workers.max) == ("train.py", False, 1, 1)
    assert TaskSpec.model_validate_json(found.model_dump_json(by_alias=True)) == found
    assert parse_spec({**SCRIPT, "workers": {"min": 4}}).most_workers == 4
    assert parse_spec({**SCRIPT, "workers": {"min": 4, "max": None}}).most_workers == 24
    known = spec().model_dump(by_alias=True)["model"]
    assert parse_spec({**SCRIPT, "model": known}).model_known
    assert "model_known" not in spec().model_dump()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batch": None}, "batch"),
        ({"steps": None}, "steps"),
        ({"script": None}, "model"),
        ({"script": None}, "data"),
        ({"loop": "megatron-lm"}, "model"),
        ({"parallel": {"tensor": 2}}, "parallel: tensor and pipeline above 1 need model"),
        ({"workers": {"min": 25}}, "workers.min: 25 is more than batch.global and parallel can use, 24"),
    ],
)
def test_what_the_planner_needs_all_the_same(changes: dict[str, Any], field: str) -> None:
    given = {name: value for name, value in (SCRIPT | changes).items() if value is not None}
    with pytest.raises(InvalidInput, match=field):
        parse_spec(given)


def test_it_begins_with_its_least_workers_and_stays_there() -> None:
    found = world(workers={"min": 3})
    assert len(found.task().members) == 3
    progress(found, 7.0)
    assert found.join("n9").changes == []


def test_it_grows_to_twice_what_was_measured() -> None:
    found = world(workers={"min": 3, "max": None})
    assert len(found.task().members) == 3
    assert found.join("n8").changes == []  # nothing was measured
    progress(found, 7.0)
    change = change_of(found.join("n9"))
    assert len(workers(change.target)) == 6
    assert max(table_of(found.state, found.task()).counts) == 6
    verify_records(found.records)


def test_fewer_nodes_leave_it_what_it_needs() -> None:
    found = world(nodes=3, workers={"min": 2, "max": None})
    progress(found, 1.0)
    found.complete(found.join("n3"))
    assert len(found.task().members) == 4
    lost = found.task().members[0].partition("/")[0]
    assert len(workers(change_of(found.lose(lost)).target)) >= 2


@given(st.floats(1e-6, 1e6), st.integers(1, 6))
def test_nothing_is_known_of_more_than_twice_as_many_workers(ratio: float, least: int) -> None:
    found = world(workers={"min": least, "max": None})
    for step in (8, 16, 24):
        measured = len(found.task().members)
        progress(found, ratio, step=step)
        table = table_of(found.state, found.task())
        assert table.counts[0] == least
        assert table.counts[-1] <= 2 * measured
        rates = [table.throughput[count] for count in table.counts]
        assert rates == sorted(rates)
        plan = found.join(f"n{100 + step}")
        if plan.changes:
            found.complete(plan)
            assert len(found.task().members) <= 2 * measured


def test_other_tasks_learn_nothing_from_it() -> None:
    found = world()
    found.complete(found.submit("b"))
    before = table_of(found.state, found.task("b"))
    progress(found, 1e5)
    assert table_of(found.state, found.task("b")) is before
    found.finish("a")
    assert table_of(found.state, found.task("b")).exponent == before.exponent
