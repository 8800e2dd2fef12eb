"""Placement: the rules in small cases whose best workers are known, and in random clusters."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.placement.cells import PlacementRequest as Request
from services.planner.placement.ranks import Placed, place
from services.planner.state.cluster import Node, node_of
from shared.events.plans import Stage
from shared.events.severities import ErrorKind, Severity
from tests.planner.kit import World, change_of

AT = datetime(2024, 1, 1, tzinfo=UTC)


def cluster(*sizes: int, rack: int = 2) -> dict[str, Node]:
    """Nodes n0, n1, ... of these sizes, ``rack`` of them in each domain."""
    return {
        f"n{i}": Node(
            name=f"n{i}",
            incarnation="1",
            domain=f"rack{i // rack}",
            workers=tuple(f"n{i}/{slot}" for slot in range(size)),
            usable=True,
            since=AT,
        )
        for i, size in enumerate(sizes)
    }


def workers_of(nodes: dict[str, Node]) -> list[str]:
    return [worker for node in nodes.values() for worker in node.workers]


def cells(placed: Placed, request: Request) -> list[list[list[str]]]:
    """Workers by replica and stage, from the ranks alone: rank = tp + t * dp + t * d * pp."""
    t, p = request.tensor, request.pipeline
    d = request.count // (t * p)
    return [[placed.workers[t * (dp + d * pp) : t * (dp + d * pp) + t] for pp in range(p)] for dp in range(d)]


def nodes_of(workers: list[str]) -> set[str]:
    return {node_of(worker) for worker in workers}


def by_node(workers: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for worker in workers:
        found.setdefault(node_of(worker), []).append(worker)
    return found


def put(
    nodes: dict[str, Node], *requests: Request, gone: str = "", incidents: dict[str, int] | None = None
) -> list[Placed]:
    """Place the tasks where all but one node's workers are free."""
    free = [worker for worker in workers_of(nodes) if node_of(worker) != gone]
    busy = {worker for request in requests for worker in request.keep}
    found = place(requests, nodes, by_node(free), busy, incidents)
    return [found[request.name] for request in requests]


# ---- small cases


def test_ranks_follow_megatrons_order() -> None:
    request = Request("a", 8, tensor=2, pipeline=2)
    (placed,) = put(cluster(4, 4), request)
    # Ranks 0 1 | 2 3 are stage 0 of replicas 0 and 1, ranks 4 5 | 6 7 their stage 1: a replica is on one node.
    assert placed.workers == ["n0/0", "n0/1", "n1/0", "n1/1", "n0/2", "n0/3", "n1/2", "n1/3"]


def test_a_replica_is_in_one_domain_on_neighbouring_nodes_and_replicas_in_different_domains() -> None:
    request = Request("a", 16, tensor=2, pipeline=4)
    (placed,) = put(cluster(2, 2, 2, 2, 2, 2, 2, 2, 2, 2, rack=5), request)
    first, second = cells(placed, request)
    assert [sorted(nodes_of(cell)) for cell in first] == [["n0"], ["n1"], ["n2"], ["n3"]]
    assert [sorted(nodes_of(cell)) for cell in second] == [["n5"], ["n6"], ["n7"], ["n8"]]


def test_a_replica_goes_where_a_domain_has_room_for_all_of_it() -> None:
    nodes = cluster(4, 4, 4, 4, rack=2)
    request = Request("a", 8, tensor=4, pipeline=2)
    free = [w for w in workers_of(nodes) if node_of(w) != "n0"]
    assert nodes_of(place([request], nodes, by_node(free), ())["a"].workers) == {"n2", "n3"}


def test_data_parallel_replicas_spread_over_nodes_then_domains() -> None:
    (placed,) = put(cluster(2, 2, 2, 2), Request("a", 2))
    assert placed.workers == ["n0/0", "n2/0"]
    (placed,) = put(cluster(2, 2, 2, 2), Request("a", 6))
    assert sorted(Counter(node_of(w) for w in placed.workers).values()) == [1, 1, 2, 2]


def test_survivors_stay_in_order_and_one_worker_replaces_one() -> None:
    keep = ["n1/1", "n0/0", "n2/1"]
    request = Request("a", 4, keep=keep, owners=keep, ranks=["n3/0", *keep])
    (placed,) = put(cluster(2, 2, 2, 2), request, gone="n3")
    assert placed.workers[:3] == keep
    assert len(placed.workers) == 4


def test_a_broken_replica_is_completed_and_the_others_stay_where_they_are() -> None:
    nodes = cluster(2, 2, 2, 2, 2, 2, rack=3)
    # Replicas on n0 n1 | n3 n4, stage by stage; n4 is lost.
    ranks = ["n0/0", "n0/1", "n3/0", "n3/1", "n1/0", "n1/1", "n4/0", "n4/1"]
    keep = [w for w in ranks if node_of(w) != "n4"]
    request = Request("a", 8, tensor=2, pipeline=2, keep=keep, owners=keep, ranks=ranks)
    (placed,) = put(nodes, request, gone="n4")
    assert placed.workers == ["n0/0", "n0/1", "n3/0", "n3/1", "n1/0", "n1/1", "n5/0", "n5/1"]


def test_cells_of_two_broken_replicas_make_one() -> None:
    nodes = cluster(2, 2, 2, 2)
    ranks = ["n0/0", "n0/1", "n2/0", "n2/1", "n1/0", "n1/1", "n3/0", "n3/1"]
    keep = ["n0/0", "n0/1", "n3/0", "n3/1"]  # stage 0 of one, stage 1 of the other
    request = Request("a", 4, tensor=2, pipeline=2, keep=keep, owners=keep, ranks=ranks)
    assert put(nodes, request)[0].workers == keep


def test_a_process_that_is_gone_goes_first_then_a_lemon_then_the_fuller_node() -> None:
    keep = ["n0/0", "n0/1", "n1/0", "n2/0"]
    nodes = cluster(2, 2, 2)
    assert put(nodes, Request("a", 3, keep=keep, owners=["n0/0", "n0/1", "n2/0"]))[0].workers == [
        "n0/0",
        "n0/1",
        "n2/0",
    ]
    shrunk = put(nodes, Request("a", 3, keep=keep, owners=keep), incidents={"n2": 1})
    assert shrunk[0].workers == ["n0/0", "n0/1", "n1/0"]
    assert put(nodes, Request("a", 3, keep=keep, owners=keep))[0].workers == ["n0/0", "n1/0", "n2/0"]


def test_lemons_are_the_spares_unless_a_group_needs_them() -> None:
    nodes = cluster(2, 2, 2)
    assert nodes_of(put(nodes, Request("a", 4), incidents={"n0": 3})[0].workers) == {"n1", "n2"}
    assert nodes_of(put(nodes, Request("a", 2), incidents={"n0": 3, "n1": 2, "n2": 1})[0].workers) == {"n2"}
    assert nodes_of(put(nodes, Request("a", 6, tensor=2), incidents={"n0": 3})[0].workers) == {
        "n0",
        "n1",
        "n2",
    }


def test_idle_workers_come_before_those_another_task_gives_up() -> None:
    nodes = cluster(2, 2)
    shrinks = Request("a", 1, keep=["n0/0", "n0/1"], owners=["n0/0", "n0/1"])
    grows = Request("b", 2, keep=["n1/0"], owners=["n1/0"])
    found = place([shrinks, grows], nodes, by_node(workers_of(nodes)), {"n0/0", "n0/1", "n1/0"})
    assert found["b"].workers == ["n1/0", "n0/1"]  # another node comes before an idle worker
    found = place(
        [shrinks, Request("b", 3, keep=["n1/0"], owners=["n1/0"])],
        nodes,
        by_node(workers_of(nodes)),
        {"n0/0", "n0/1"},
    )
    assert found["b"].workers == ["n1/0", "n0/1", "n1/1"]


def test_a_partial_node_is_used_by_the_groups_that_fit() -> None:
    nodes = cluster(7, 8)
    wide, narrow, single = (
        Request("a", 8, tensor=8),
        Request("b", 4, tensor=4),
        Request("c", 3),
    )
    found = put(nodes, single, narrow, wide)
    assert [nodes_of(placed.workers) for placed in found] == [{"n0"}, {"n0"}, {"n1"}]
    assert [placed.crossing for placed in found] == [0, 0, 0]


def test_a_group_crosses_nodes_of_one_domain_only_if_none_has_room() -> None:
    nodes = cluster(3, 2, 2, 2, 2)
    (placed,) = put(nodes, Request("a", 4, tensor=4))
    assert (nodes_of(placed.workers), placed.crossing) == ({"n0", "n1"}, 1)
    (placed,) = put(cluster(2, 2, 4), Request("a", 4, tensor=4))
    assert (nodes_of(placed.workers), placed.crossing) == ({"n2"}, 0)


def test_a_plan_says_that_groups_cross_nodes() -> None:
    world = World()
    for index in range(2):
        world.join(f"n{index}", 3)
    change = change_of(world.submit("a", parallel={"tensor": 2, "pipeline": 1}, batch={"global": 3, "micro": 1}))
    assert change.target is not None
    assert len(change.target.members) == 6
    assert "1 tensor groups span nodes" in change.reason


def test_nodes_that_failed_are_the_spares_of_a_plan_whatever_their_incarnation() -> None:
    world = World()
    for index in range(3):
        world.join(f"n{index}", 1)
    world.lose("n0")
    world.join("n0", 1)
    world.submit("a", workers={"min": 1, "max": 2})
    assert world.task().members == ("n1/0", "n2/0")
    world.error(ErrorKind.CONNECTION, worker="n1/0", task="a")
    assert world.state.incidents == {"n0": 1}
    world.exit("n1/0")
    world.error(ErrorKind.PROCESS_EXIT, worker="n1/0", task="a", severity=Severity.SEV1, escalates="e")
    assert world.state.incidents == {"n0": 1, "n1": 1}


# ---- any cluster


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, Node], list[Request], list[str], set[str], dict[str, int]]:
    """A cluster, tasks that had workers before, and what each is to have now."""
    nodes = cluster(*draw(st.lists(st.integers(1, 8), min_size=1, max_size=8)), rack=draw(st.integers(1, 4)))
    everyone = draw(st.permutations(workers_of(nodes)))
    lost = draw(st.sets(st.sampled_from(sorted(nodes)), max_size=1))
    free = [worker for worker in workers_of(nodes) if node_of(worker) not in lost]
    left, had = len(free), 0
    requests = []
    for index in range(draw(st.integers(1, 4))):
        tensor, pipeline = draw(st.sampled_from([(1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (3, 1)]))
        size = tensor * pipeline
        before = draw(st.integers(0, max(0, (len(everyone) - had) // size))) * size
        ranks = everyone[had : had + before]
        had += before
        count = draw(st.integers(0, left // size)) * size
        left -= count
        keep = [worker for worker in ranks if node_of(worker) not in lost]
        requests.append(Request(f"t{index}", count, tensor, pipeline, keep, frozenset(keep), ranks))
    busy = {worker for request in requests for worker in request.keep}
    return nodes, requests, free, busy, draw(st.dictionaries(st.sampled_from(sorted(nodes)), st.integers(1, 3)))


@given(problems())
@settings(deadline=None, derandomize=True)
def test_any_placement_keeps_the_rules(
    problem: tuple[dict[str, Node], list[Request], list[str], set[str], dict[str, int]],
) -> None:
    nodes, requests, free, busy, incidents = problem
    found = place(requests, nodes, by_node(free), busy, incidents)
    everyone = [worker for request in requests for worker in found[request.name].workers]
    assert len(everyone) == len(set(everyone))
    assert set(everyone) <= set(free)
    again = place(requests[::-1], dict(reversed(nodes.items())), dict(reversed(by_node(free).items())), busy, incidents)
    assert again == found
    for request in requests:
        workers = found[request.name].workers
        assert len(workers) == request.count
        groups = [cell for replica in cells(found[request.name], request) for cell in replica]
        assert found[request.name].crossing == sum(len(nodes_of(cell)) > 1 for cell in groups)
        kept = [worker for worker in workers if worker in set(request.keep)]
        if request.tensor * request.pipeline == 1:
            # As many stay as can, in their order, before all others.
            assert len(kept) == min(request.count, len(request.keep))
            assert workers[: len(kept)] == [worker for worker in request.keep if worker in kept]
        # A group that crosses nodes did so before, or no node had room for it even at the end.
        before = {tuple(request.ranks[i : i + request.tensor]) for i in range(0, len(request.ranks), request.tensor)}
        unused = Counter(node_of(worker) for worker in free if worker not in set(everyone))
        if any(len(nodes_of(cell)) > 1 and tuple(cell) not in before for cell in groups):
            assert max(unused.values(), default=0) < request.tensor


@given(problems(), st.data())
@settings(deadline=None, derandomize=True)
def test_whole_replicas_stay_when_no_count_changes(
    problem: tuple[dict[str, Node], list[Request], list[str], set[str], dict[str, int]], data: st.DataObject
) -> None:
    nodes, requests, free, busy, incidents = problem
    same = [
        Request(w.name, len(w.ranks), w.tensor, w.pipeline, w.keep, w.owners, w.ranks)
        for w in requests
        if len(w.ranks) == len(w.keep)
    ]
    if sum(request.count for request in same) > len(free):
        return
    found = place(same, nodes, by_node(free), busy, incidents)
    assert {request.name: found[request.name].workers for request in same} == {
        request.name: list(request.ranks) for request in same
    }


@given(st.lists(st.sampled_from([(8, 1), (4, 1), (4, 2), (2, 1), (2, 2), (1, 1)]), min_size=1, max_size=12))
@settings(deadline=None, derandomize=True)
def test_new_groups_of_powers_of_two_never_cross_nodes_of_eight(shapes: list[tuple[int, int]]) -> None:
    nodes = cluster(*[8] * 6)
    requests, left = [], 48
    for index, (tensor, pipeline) in enumerate(shapes):
        if tensor * pipeline <= left:
            requests.append(Request(f"t{index}", tensor * pipeline, tensor, pipeline))
            left -= tensor * pipeline
    assert all(placed.crossing == 0 for placed in put(nodes, *requests))


MOST_STAGE_BYTES = 2000
"""Of a command, however many nodes there are (docs/sizing.md has larger clusters)."""


def test_a_stage_whose_ranks_are_dealt_over_racks_is_as_short_in_a_command_as_any() -> None:
    """No node follows the one before it there: the next one is of the next rack."""
    world = World()
    for number in range(128):
        world.join(f"n{number:03d}", workers=8, domain=f"rack{number // 16}")
    plan = world.submit(batch={"global": 4096, "micro": 1}, parallel={"tensor": 4}, workers={"min": 4, "max": 1024})
    stage = change_of(plan).stages[-1]
    text = json.dumps(stage.short)
    assert len({member.node for member in stage.members}) == 128
    assert len(text) <= MOST_STAGE_BYTES
    assert Stage.model_validate_json(text) == stage
