"""Workers as runs: what the text of a plan in the log says is what was planned, in the same order."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.events.plans import Layout, Member, Stage, TaskChange
from shared.events.union import EVENT, PlanDecided
from shared.events.worker_runs import (
    MAX_RUN,
    full_members,
    full_workers,
    runs_of,
    short_members,
    short_workers,
    workers_of,
)
from tests.shared import samples

NODES = st.sampled_from(["n0", "n1", "a-1", "gpu-0012"])
WORKERS = st.builds("{}/{}".format, NODES, st.integers(0, 12))
ANY = st.lists(WORKERS | st.sampled_from(["n0/x", "n0/01", "alone", "n,1/0", "n0/0-7", "/3", "n0/٣", ""]), max_size=20)
RUNS = st.lists(st.tuples(NODES, st.integers(0, 9), st.integers(1, 9)), max_size=8)


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        (["n0/0", "n0/1", "n0/2", "n1/0", "n1/2"], "n0/0-2,n1/0,n1/2"),
        (["n0/2", "n0/1"], "n0/2,n0/1"),
        (["n0/0", "n1/1"], "n0/0,n1/1"),
        (["n0/0-7"], None),
        (["n0/07"], None),
    ],
)
def test_neighbours_on_a_node_are_a_run_and_the_order_is_kept(workers: list[str], text: str | None) -> None:
    assert runs_of(workers) == text
    if text is not None:
        assert workers_of(text) == workers


@pytest.mark.parametrize(
    ("nodes", "slots", "text"),
    [
        ([f"n{number:04d}" for number in range(2048)], 8, "n[0000-2047]/0-7"),
        (["n8", "n9", "n10", "n12"], 1, "n[8-10]/0,n12/0"),
        (["n08", "n09", "n10"], 2, "n[08-10]/0-1"),
        (["n8", "n09"], 1, "n8/0,n09/0"),
        (["n999999998", "n999999999", "n1000000000"], 1, "n[999999998-999999999]/0,n1000000000/0"),
        (["a1", "b2", "b1"], 1, "a1/0,b2/0,b1/0"),
        (["a", "b"], 1, "a/0,b/0"),
        (["n00", "n16", "n32", "n01", "n17", "n33"], 2, "n[00-32:16]/0-1,n[01-33:16]/0-1"),
        (["n3", "n2", "n1"], 1, "n3/0,n2/0,n1/0"),
        (["n1", "n3", "n4"], 1, "n[1-3:2]/0,n4/0"),
    ],
)
def test_neighbours_by_their_numbers_with_the_same_slots_are_a_run(nodes: list[str], slots: int, text: str) -> None:
    workers = [f"{node}/{slot}" for node in nodes for slot in range(slots)]
    assert runs_of(workers, over_nodes=True) == text
    assert workers_of(text) == workers


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.builds("{}{}/{}".format, st.sampled_from(["n", "n0", "a[1"]), st.integers(0, 12), st.integers(0, 2)))
)
def test_any_neighbours_are_read_back(workers: list[str]) -> None:
    text = runs_of(workers, over_nodes=True)
    assert (text is None) == any("[" in worker for worker in workers)
    if text is not None:
        assert workers_of(text) == workers


@pytest.mark.parametrize(
    "text",
    [
        "n[0-3]",
        "n[3-0]/0",
        "n[0-a]/0",
        "n[0-3/0",
        "n[0-3]/x",
        "n[0-3]/4-2",
        "n[0-999999]/0-7",
        "[[0-1]/0",
        "n[0-4:0]/0",
        "n[0-4:]/0",
    ],
)
def test_a_run_over_nodes_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|allowed are"):
        workers_of(text)


@settings(derandomize=True, deadline=None)
@given(ANY)
def test_any_list_of_workers_is_read_back(workers: list[str]) -> None:
    assert full_workers(json.loads(json.dumps(short_workers(workers)))) == workers


@settings(derandomize=True, deadline=None)
@given(RUNS, st.data())
def test_any_members_are_read_back(runs: list[tuple[str, int, int]], data: st.DataObject) -> None:
    workers = [f"{node}/{slot}" for node, first, count in runs for slot in range(first, first + count)]
    sources = data.draw(st.lists(st.sampled_from(["live", "take"]), min_size=len(workers), max_size=len(workers)))
    ranks = data.draw(st.sampled_from([list(range(len(workers))), list(range(1, len(workers) + 1))]))
    members: list[dict[str, Any]] = [
        {"rank": rank, "worker": worker, "node": worker.rpartition("/")[0], "source": source}
        for rank, worker, source in zip(ranks, workers, sources, strict=True)
    ]
    short = json.loads(json.dumps(short_members([Member.model_validate(member) for member in members])))
    assert full_members(short) == members
    if members and ranks[0] == 0:
        assert len(short) == 1 + sum(one != other for one, other in pairwise(sources))


@pytest.mark.parametrize("text", ["n0", "n0/", "/0", "n0/1-", "n0/a-b", "n0/3-1", f"n0/0-{MAX_RUN}", "n0/0,,n1/0"])
def test_a_text_that_is_none_of_runs_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|allowed are 1 to"):
        workers_of(text)


def plan() -> PlanDecided:
    """A plan that moves a task of two nodes to three, one of them new."""
    workers = [f"n{node}/{slot}" for node in range(3) for slot in range(4)]
    members = [
        Member(rank=rank, worker=worker, node=worker[:2], source="live" if rank < 8 else "take")
        for rank, worker in enumerate(workers)
    ]
    layout = Layout(tensor=1, pipeline=1, data=12, micro_batch=1)
    change = TaskChange(
        task="a",
        reason="r",
        action="move",
        from_generation=1,
        survivors=workers[:8],
        prepare=workers[8:],
        target=Stage(kind="boundary", generation=2, layout=layout, members=members),
    )
    return samples.plan(1, {4: 1.0}).model_copy(update={"changes": [change]})


def test_the_log_has_runs_and_the_model_all_workers() -> None:
    planned = plan()
    (change,) = json.loads(planned.canonical())["changes"]
    assert (change["survivors"], change["prepare"], change["release"]) == ("n0/0-3,n1/0-3", "n2/0-3", [])
    assert change["target"]["members"] == [
        {"source": "live", "workers": "n0/0-3,n1/0-3"},
        {"source": "take", "workers": "n2/0-3"},
    ]
    assert EVENT.validate_json(planned.canonical()) == planned
    assert planned.model_dump(mode="json")["changes"][0]["target"]["members"][0]["worker"] == "n0/0"


def test_a_plan_with_all_workers_by_themselves_is_read() -> None:
    planned = plan()
    assert EVENT.validate_json(planned.model_dump_json()) == planned


@pytest.mark.parametrize(
    "members", [[{"source": "live", "workers": "n0"}], [{"workers": "n0/0"}], [{"source": "live", "workers": 3}]]
)
def test_damaged_members_are_no_plan(members: list[dict[str, Any]]) -> None:
    data = json.loads(plan().canonical())
    data["changes"][0]["target"]["members"] = members
    with pytest.raises(ValidationError):
        EVENT.validate_python(data)
