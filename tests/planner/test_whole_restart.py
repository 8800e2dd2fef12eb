"""Tasks whose scripts restart whole: a fixed number of workers, one stage for all, and no state that moves."""

from __future__ import annotations

from typing import Any

import pytest

from services.planner.throughput.model import assumed_flop_per_s, expected_kind, hardware_of
from shared.errors import InvalidInput
from shared.events.severities import ErrorKind
from shared.planning.performance import profile
from shared.tasks.specification import UNKNOWN_STEPS, TaskSpec, parse_spec
from tests.planner.kit import World, change_of, sources, workers

SCRIPT = {"name": "a", "script": "train.py", "loop": "restart"}


def spec(**fields: Any) -> TaskSpec:
    return parse_spec({**SCRIPT, "workers": {"min": 3, "max": 3}, **fields})


def world(nodes: int = 2, least: int = 3) -> World:
    """Return a world in which the task trains on ``least`` workers."""
    found = World()
    for number in range(nodes):
        found.join(f"n{number}")
    found.complete(found.submit("a", script="train.py", loop="restart", workers={"min": least, "max": least}))
    return found


def test_what_a_script_alone_knows_may_be_left_out() -> None:
    found = spec()
    assert (found.steps_known, found.steps, found.batch.global_) == (False, UNKNOWN_STEPS, 3)
    assert (found.data, found.most_workers, found.checkpoint.in_memory) == ("train.py", 3, False)
    assert spec(steps=100).steps_known


def test_the_number_of_workers_is_fixed() -> None:
    with pytest.raises(InvalidInput, match="workers: min and max must be equal for loop restart"):
        spec(workers={"min": 2, "max": 3})
    with pytest.raises(InvalidInput, match="workers: min and max must be equal for loop restart"):
        parse_spec(SCRIPT)


def test_an_interpreter_is_named_by_its_whole_path() -> None:
    assert spec(python="/opt/train/bin/python").python == "/opt/train/bin/python"
    with pytest.raises(InvalidInput, match="python"):
        spec(python="bin/python")


def test_a_layout_that_the_library_could_not_train_is_the_scripts_own_matter() -> None:
    model = {"layers": 61, "hidden": 7168, "heads": 128, "sequence_length": 4096}
    found = spec(model=model, batch={"global": 2}, parallel={"tensor": 7, "pipeline": 16}, workers={"min": 8, "max": 8})
    assert (found.tensor, found.pipeline, found.most_workers) == (1, 1, 8)


def test_it_starts_on_exactly_its_workers() -> None:
    found = World()
    found.join("n0")
    plan = found.submit("a", script="train.py", loop="restart", workers={"min": 3, "max": 3})
    assert plan.queued == {"a": "needs at least 3 workers; 2 can be had"}
    change = change_of(found.join("n1"))
    assert len(workers(change.target)) == 3
    assert sources(change.target) == ["script"] * 3


def test_a_fault_restarts_it_on_all_workers_in_one_stage_and_keeps_the_processes_of_the_others() -> None:
    found = world()
    first, second, third = found.task().members
    change = change_of(found.exit(second))
    assert change.interrupted is None
    assert change.hold
    assert (change.survivors, change.failed, change.prepare) == ([first, third], [second], [second])
    assert workers(change.target) == [first, third, second]
    assert sources(change.target) == ["script"] * 3


def test_broken_connections_alone_restart_it_in_place() -> None:
    found = world()
    members = list(found.task().members)
    change = change_of(found.error(ErrorKind.CONNECTION, worker=members[0], node="n0", task="a"))
    assert (change.prepare, change.failed, change.hold) == ([], [], True)
    assert workers(change.target) == members


def test_a_lost_node_is_replaced_by_a_free_one() -> None:
    found = world(nodes=3)
    lost = found.task().members[0].partition("/")[0]
    change = change_of(found.lose(lost))
    assert len(workers(change.target)) == 3
    assert all(not worker.startswith(f"{lost}/") for worker in workers(change.target))


def test_without_enough_workers_it_waits_and_no_process_is_asked_to_save() -> None:
    found = world(nodes=2, least=4)
    plan = found.lose("n1")
    change = change_of(plan)
    assert (change.action, change.survivors, change.interrupted) == ("pause", [], None)
    assert plan.queued == {"a": "paused: needs at least 4 workers; 2 can be had"}


def test_more_nodes_do_not_move_it() -> None:
    found = world()
    assert found.join("n9").changes == []


def test_a_stop_lets_the_script_save_and_behind_a_fault_ends_it_at_once() -> None:
    found = world()
    members = sorted(found.task().members)
    change = change_of(found.stop("a"))
    assert (change.action, sorted(change.survivors), change.hold) == ("stop", members, False)
    found = world()
    found.exit(found.task().members[0])
    assert change_of(found.stop("a")).action == "end"


def test_the_assumed_throughput_is_that_of_its_workers() -> None:
    found = world()
    task = found.task()
    hardware = hardware_of(found.state, expected_kind(found.state, task))
    plan = found.change("a", weight=2.0)
    (posed,) = found.solved(plan).tasks
    assert posed.throughput == {3: pytest.approx(3 * assumed_flop_per_s(hardware))}
    h100 = profile("h100")
    assert 0.3 * h100.peak_flop_per_s < assumed_flop_per_s(h100) < 0.5 * h100.peak_flop_per_s
