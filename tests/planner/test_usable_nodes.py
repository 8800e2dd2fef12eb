"""What is counted of usable nodes once equals what is counted of them one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from random import Random

from services.planner.state.cluster import Node, State, node_of
from services.planner.state.usable_nodes import nodes_of, open_workers, replaced, usable_nodes, usable_workers
from tests.counted_work import peak_bytes

AT = datetime(2026, 3, 1, tzinfo=UTC)


def drawn(source: Random, number: int) -> dict[str, Node]:
    return {
        name: Node(
            name=name,
            incarnation="1",
            domain=name,
            workers=tuple(f"{name}/{slot}" for slot in range(source.randint(1, 8))),
            usable=source.random() < 0.8,
            since=AT - timedelta(microseconds=source.randrange(10**14)),
            hardware=source.choice(("cpu", "a800-80")),
        )
        for name in (f"n{i}" for i in range(number))
    }


def test_times_and_numbers_are_those_of_the_nodes_one_by_one() -> None:
    source = Random(7)
    for number in (0, 1, 2, 300):
        nodes = drawn(source, number)
        usable = [node for node in nodes.values() if node.usable]
        found = usable_nodes(nodes)
        assert found.usable_s(AT) == sum((AT - node.since for node in usable), timedelta()).total_seconds()
        assert found.nodes == Counter(node.hardware for node in usable)
        assert sum(found.workers.values()) == sum(len(node.workers) for node in usable)


def test_changed_nodes_are_counted_anew() -> None:
    nodes = drawn(Random(1), 10)
    before = usable_nodes(nodes)
    lost = {name: node.model_copy(update={"usable": False}) for name, node in nodes.items()}
    assert usable_nodes(lost).usable_s(AT) == 0.0
    assert usable_nodes(nodes) == before


def test_what_follows_from_one_replaced_node_is_what_is_counted_anew() -> None:
    source = Random(11)
    nodes: Mapping[str, Node] = drawn(source, 12)
    usable_nodes(nodes)
    for turn in range(300):
        (name,) = source.sample([*nodes, f"n{turn}"], 1)
        (node,) = drawn(source, 1).values()
        changed = {"name": name, "workers": tuple(f"{name}/{slot}" for slot in range(source.randint(1, 8)))}
        nodes = replaced(nodes, node.model_copy(update={**changed, "cordoned": source.random() < 0.1}))
        assert usable_nodes(nodes) == usable_nodes(dict(nodes))


def test_a_node_that_joins_is_counted_without_the_workers_of_all_others() -> None:
    """A fleet of thousands joins node by node, and a set of all workers for each would be quadratic."""

    def cost(slots: int) -> int:
        nodes: Mapping[str, Node] = {
            name: node.model_copy(update={"workers": tuple(f"{name}/{slot}" for slot in range(slots))})
            for name, node in drawn(Random(5), 100).items()
        }
        usable_nodes(nodes)
        new = nodes["n5"].model_copy(update={"name": "new"})
        return peak_bytes(lambda: usable_nodes(replaced(nodes, new)))

    assert cost(64) <= 1.1 * cost(8)


def test_workers_are_those_that_the_state_calls_usable_and_of_them_those_of_open_nodes() -> None:
    source = Random(3)
    nodes = {
        name: node.model_copy(update={"cordoned": source.random() < 0.3, "draining": source.random() < 0.3})
        for name, node in drawn(source, 100).items()
    }
    state = State(nodes=nodes)
    every = [worker for node in nodes.values() for worker in node.workers]
    assert usable_workers(nodes) == {worker for worker in every if state.usable(worker)}
    assert open_workers(nodes) == {worker for worker in every if nodes[node_of(worker)].open}


def test_the_nodes_of_other_workers_are_found_anew() -> None:
    assert nodes_of(("a/0", "a/1", "b/0")) == {"a", "b"}
    assert nodes_of(("a/0", "c/0")) == {"a", "c"}
