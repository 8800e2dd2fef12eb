"""Runs whose course is known by hand: what is lost, when tasks train again, and what the log says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.planner.replay.replay import Replayer
from services.planner.state.cluster import HardwareLayout, State
from services.planner.throughput.model import flop_per_step, hardware_of, modelled_flop_per_s
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, NodeJoined, PlanDecided, Recorded, StateMoved, TaskFinished, WorkerSlowed
from shared.tasks.specification import TaskSpec
from simulator.oracle import oracle
from simulator.run.accounting import Accounting
from simulator.run.agenda import START, time_of
from simulator.run.engine import simulate
from simulator.run.execution import DECISION_S
from simulator.workloads.trace import Occurrence
from tests.simulator import small


def model_flop_per_s(spec: TaskSpec, workers: int) -> float:
    """Return T(t, x) of a data-parallel task, on nodes of two CPU workers."""
    state = State(kinds={"cpu": {2: 3}})
    layout = HardwareLayout("cpu", 1, 1, workers)
    return modelled_flop_per_s(spec, layout, hardware_of(state, "cpu"))


def seconds(record: Recorded) -> float:
    return (record.recorded_at - START).total_seconds()


def moved(records: list[Recorded], after_s: float = 0.0) -> list[tuple[str, float]]:
    """Return the phases that ended behind a time, with their times."""
    return [(r.event.phase, seconds(r)) for r in records if isinstance(r.event, StateMoved) and seconds(r) > after_s]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_nothing_happens(tmp_path: Path) -> None:
    case = small.workload()
    outcome, records = small.run(case, small.policy(), tmp_path)
    assert outcome.accumulated_waf_flop == pytest.approx(1000 * model_flop_per_s(case.tasks[0], 6), rel=1e-12)
    assert outcome.worker_s["useful"] == pytest.approx(6000.0)
    assert outcome.allocated_worker_s == pytest.approx(6000.0)
    assert outcome.transitions == 0
    assert outcome.recovery_s == []
    assert outcome.events == len(records)
    (point,) = outcome.waf
    assert point.at_s == 0.0
    assert point.waf_flop_per_s == pytest.approx(model_flop_per_s(case.tasks[0], 6))


@pytest.mark.parametrize(("lost", "kept_s"), [("nothing", 450.0), ("checkpoint", 400.0)])
def test_loss_of_a_node_by_hand(tmp_path: Path, lost: str, kept_s: float) -> None:
    """Fault at 450 s, found at 460 s, trains on four workers from 510 s on; checkpoints every 100 s."""
    case, timing = small.workload(small.down(450.0)), small.RoundTiming(lost=lost)  # type: ignore[arg-type]
    outcome, records = small.run(case, small.policy(timing), tmp_path)
    spec = case.tasks[0]
    before, after = (model_flop_per_s(spec, count) for count in (6, 4))
    step_flop = flop_per_step(spec)
    begin_s = 460.0 + DECISION_S + 50.0
    kept = kept_s * before
    if lost == "checkpoint":
        kept = kept // step_flop * step_flop  # a checkpoint has whole updates
    assert outcome.accumulated_waf_flop == pytest.approx(kept + (1000.0 - begin_s) * after, rel=1e-9)
    assert outcome.recovery_s == [pytest.approx(begin_s - 450.0)]
    assert outcome.transitions == 1
    (found,) = small.events(records, ErrorDetected)
    assert (found.node, found.severity, found.kind) == ("n2", Severity.SEV1, ErrorKind.NODE_LOST)
    assert (found.occurred_at - START).total_seconds() == 450.0
    assert [point.at_s for point in outcome.waf] == [0.0, 450.0, pytest.approx(begin_s)]
    recomputed = max(event.steps_recomputed for event in small.events(records, StateMoved))
    assert (recomputed > 0) is (lost == "checkpoint")
    assert verifies(records)


def verifies(records: list[Recorded]) -> bool:
    """Return whether each plan is decided again with the same bytes by the policies of these tests."""
    return Replayer(records).verify(policies={"round": small.policy().solve}).ok


def test_achieved_flop_agrees_with_the_cost_report(tmp_path: Path) -> None:
    """They differ by fractions of a step: the log counts whole updates."""
    tasks = small.task("a"), small.task("b", weight=2.0)
    case = small.workload(small.down(3000.0), small.up(5000.0), tasks=tasks, nodes=4, horizon_s=20_000.0)
    outcome, records = small.run(case, small.policy(), tmp_path)
    accounting = Accounting()
    for record in records:
        accounting.fold(record)
    slack = sum(spec.weight * flop_per_step(spec) for spec in tasks)
    achieved = accounting.achieved_flop(time_of(20_000.0))
    assert achieved == pytest.approx(outcome.accumulated_waf_flop, abs=slack)
    assert slack < 1e-3 * achieved


def test_a_fault_during_a_recovery_supersedes_it(tmp_path: Path) -> None:
    case = small.workload(small.down(450.0), small.down(470.0, "n1"))
    outcome, records = small.run(case, small.policy(), tmp_path)
    begin_s = 480.0 + DECISION_S + 50.0
    assert outcome.recovery_s == [pytest.approx(begin_s - 450.0), pytest.approx(begin_s - 470.0)]
    trains = [at_s for phase, at_s in moved(records) if phase in ("resumed", "restored")]
    assert len(trains) == 1
    assert trains[0] > begin_s
    last = [event for event in small.events(records, PlanDecided) if event.changes][-1]
    assert last.supersedes
    assert verifies(records)


@pytest.mark.parametrize("kind", [ErrorKind.PROCESS_EXIT, ErrorKind.COLLECTIVE_TIMEOUT])
def test_a_lighter_fault_during_a_recovery_is_answered(tmp_path: Path, kind: ErrorKind) -> None:
    """It belongs to the generation that is being formed, not to the one that the recovery replaces."""
    case = small.workload(small.error(450.0, ErrorKind.PROCESS_EXIT), small.error(480.0, kind))
    outcome, records = small.run(case, small.policy(), tmp_path)
    begin_s = 490.0 + DECISION_S + 50.0
    assert outcome.recovery_s == [pytest.approx(begin_s - 450.0), pytest.approx(begin_s - 480.0)]
    assert verifies(records)


def test_a_lost_node_among_the_newcomers(tmp_path: Path) -> None:
    """A node joins, the task trains on while its processes start; it is lost before they take part."""
    timing = small.RoundTiming(stop_s=60.0)
    case = small.workload(small.up(100.0), small.down(130.0), present=2)
    outcome, records = small.run(case, small.policy(timing), tmp_path)
    spec = case.tasks[0]
    four = model_flop_per_s(spec, 4)
    # It never stops but for the plan that takes the node out of its stage again.
    stopped_s = 1000.0 - outcome.accumulated_waf_flop / four
    assert stopped_s == pytest.approx(DECISION_S + 50.0, abs=1e-6)
    assert verifies(records)


def test_a_node_that_is_back_before_its_loss_is_found(tmp_path: Path) -> None:
    case = small.workload(small.down(450.0), small.up(453.0))
    outcome, records = small.run(case, small.policy(), tmp_path)
    errors = [record for record in records if isinstance(record.event, ErrorDetected)]
    assert [seconds(record) for record in errors] == [453.0]
    assert [event.incarnation for event in small.events(records, NodeJoined) if event.node == "n2"] == ["n2-1", "n2-2"]
    assert len(outcome.recovery_s) == 1
    assert sum(outcome.worker_s.values()) == pytest.approx(outcome.allocated_worker_s)
    assert verifies(records)


def test_nodes_that_join_later(tmp_path: Path) -> None:
    case = small.workload(small.up(400.0), present=2)
    outcome, records = small.run(case, small.policy(), tmp_path)
    four, six = (model_flop_per_s(case.tasks[0], count) for count in (4, 6))
    begin_s = 400.0 + DECISION_S + 50.0
    stop_s = 400.0 + DECISION_S
    assert outcome.accumulated_waf_flop == pytest.approx(stop_s * four + (1000.0 - begin_s) * six, rel=1e-4)
    assert outcome.allocated_worker_s == pytest.approx(4 * 1000.0 + 2 * 600.0)
    assert verifies(records)


def test_a_paused_task_and_its_fault(tmp_path: Path) -> None:
    """Each task needs a node of its own; the lighter one has none left, waits, and goes on from its checkpoint."""
    tasks = [small.task(name, weight=weight, min=2, max=2) for name, weight in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
    late = small.error(600.0, ErrorKind.PROCESS_EXIT)
    case = small.workload(small.down(450.0), late, small.up(700.0), tasks=tasks)
    outcome, records = small.run(case, small.policy(), tmp_path)
    hit = next(e for e in small.events(records, ErrorDetected) if e.kind is ErrorKind.NODE_LOST).evidence["tasks"]
    assert len(small.events(records, ErrorDetected)) == 1  # nothing runs on the lost node
    queued = [plan.queued for plan in small.events(records, PlanDecided) if plan.queued]
    assert queued
    assert hit
    spec = tasks[0]
    step_flop = flop_per_step(spec)
    rate = model_flop_per_s(spec, 2)
    saved = 400.0 * rate // step_flop * step_flop  # whole updates of the newest checkpoint
    begin_s = 700.0 + DECISION_S + 50.0
    weight = {"a": 3.0, "b": 2.0, "c": 1.0}[hit[0]]
    others = 6.0 - weight
    expected = others * 1000.0 * rate + weight * (saved + (1000.0 - begin_s) * rate)
    assert outcome.accumulated_waf_flop == pytest.approx(expected, rel=1e-9)
    assert outcome.recovery_s == [pytest.approx(begin_s - 450.0)]
    assert verifies(records)


@pytest.mark.parametrize("kind", [ErrorKind.CONNECTION, ErrorKind.PROCESS_EXIT, ErrorKind.DEVICE])
def test_lighter_faults(tmp_path: Path, kind: ErrorKind) -> None:
    """A retry and a restart have the same workers again; a broken device has its node isolated."""
    case = small.workload(small.error(450.0, kind))
    outcome, records = small.run(case, small.policy(), tmp_path)
    (found,) = small.events(records, ErrorDetected)
    assert (found.kind, found.node, found.task) == (kind, "n2", "a")
    begin_s = 460.0 + DECISION_S + 50.0
    spec = case.tasks[0]
    after = model_flop_per_s(spec, 4 if kind is ErrorKind.DEVICE else 6)
    expected = 450.0 * model_flop_per_s(spec, 6) + (1000.0 - begin_s) * after
    assert outcome.accumulated_waf_flop == pytest.approx(expected, rel=1e-9)
    assert sum(outcome.worker_s.values()) == pytest.approx(outcome.allocated_worker_s)
    assert verifies(records)


@pytest.mark.parametrize("named", ["a", "b"])
def test_an_error_that_names_its_task_follows_it(tmp_path: Path, named: str) -> None:
    """Each task has a node; the error is said to be of n2, where nothing runs, or where the other task does."""
    tasks = [small.task(name, weight=weight, min=2, max=2) for name, weight in (("a", 3.0), ("b", 2.0))]
    for node in ("n0", "n1", "n2"):
        folder = tmp_path / node
        folder.mkdir()
        happened = Occurrence(400.0, node, "error", ErrorKind.EXCEPTION.value, task=named)
        outcome, records = small.run(small.workload(happened, tasks=tasks), small.policy(), folder)
        assert [event.task for event in small.events(records, ErrorDetected)] == [named]
        assert len(outcome.recovery_s) == 1
        assert outcome.steps.keys() == {"a", "b"}
        assert verifies(records)


def test_an_error_of_a_task_that_the_run_does_not_have_hits_any_on_the_node(tmp_path: Path) -> None:
    happened = Occurrence(400.0, "n0", "error", ErrorKind.EXCEPTION.value, task="another")
    _, records = small.run(small.workload(happened), small.policy(), tmp_path)
    assert [event.task for event in small.events(records, ErrorDetected)] == ["a"]


def test_measured_throughput_scales_a_task(tmp_path: Path) -> None:
    case = small.workload()
    half, _ = small.run(replace(case, throughput={"a": 0.5}), small.policy(), tmp_path)
    assert half.accumulated_waf_flop == pytest.approx(0.5 * 1000.0 * model_flop_per_s(case.tasks[0], 6), rel=1e-3)
    assert oracle(replace(case, throughput={"a": 0.5})).accumulated_waf_flop >= half.accumulated_waf_flop


def test_survivors_that_train_meanwhile(tmp_path: Path) -> None:
    timing = small.RoundTiming(meanwhile=0.5)
    case = small.workload(small.down(450.0))
    outcome, _ = small.run(case, small.policy(timing), tmp_path)
    six, four = (model_flop_per_s(case.tasks[0], count) for count in (6, 4))
    begin_s = 460.0 + DECISION_S + 50.0
    meanwhile = (DECISION_S + 50.0) * 0.5 * six * 4 / 6
    expected = 450.0 * six + meanwhile + (1000.0 - begin_s) * four
    assert outcome.accumulated_waf_flop == pytest.approx(expected, rel=1e-9)


def test_slow_nodes(tmp_path: Path) -> None:
    case = small.workload(small.degraded(300.0, 2.0), horizon_s=3000.0)
    deaf, _ = small.run(case, small.policy(detects_slow=False), made(tmp_path / "deaf"))
    six = model_flop_per_s(case.tasks[0], 6)
    assert deaf.accumulated_waf_flop == pytest.approx(300.0 * six + 2700.0 * six / 2.0, rel=1e-9)
    outcome, records = small.run(case, small.policy(), tmp_path)
    slowed = small.events(records, WorkerSlowed)
    assert [(event.worker, event.slowdown) for event in slowed] == [("n2/0", 2.0), ("n2/1", 2.0)]
    assert outcome.accumulated_waf_flop > deaf.accumulated_waf_flop
    assert verifies(records)


def test_tasks_end(tmp_path: Path) -> None:
    tasks = small.task("a", steps=200), small.task("b")
    case = small.workload(tasks=tasks, horizon_s=5000.0, endless=False)
    outcome, records = small.run(case, small.policy(), tmp_path)
    (finished,) = small.events(records, TaskFinished)
    assert finished.task == "a"
    assert finished.step == 200
    assert list(outcome.completed_s) == ["a"]
    assert outcome.waf[-1].waf_flop_per_s == pytest.approx(model_flop_per_s(tasks[1], 6))
    assert verifies(records)


def test_equal_arguments_equal_runs(tmp_path: Path) -> None:
    case = small.workload(small.error(450.0, ErrorKind.HANG), small.down(600.0), small.up(800.0))
    first, there = small.run(case, small.policy(), tmp_path)
    (tmp_path / "again").mkdir()
    second, again = small.run(case, small.policy(), tmp_path / "again")
    assert first == second
    assert [record.hash for record in there] == [record.hash for record in again]
    assert (
        simulate(case, small.policy(), costs=False).model_copy(
            update={"worker_s": first.worker_s, "allocated_worker_s": first.allocated_worker_s}
        )
        == first
    )


@pytest.mark.parametrize(("scope", "least"), [("fixed", 4), ("own", 1)])
def test_what_a_scope_pins(tmp_path: Path, scope: str, least: int) -> None:
    """Spares are kept free, and a task of which a node is lost gets one of them."""
    case = small.workload(small.down(450.0, "n0"))
    pinned = small.policy(scope=scope, spare_nodes=1)
    outcome, records = small.run(case, pinned, tmp_path)
    submitted = next(record.event for record in records if record.event.type == "task.submitted")
    assert (submitted.spec.workers.min, submitted.spec.workers.max) == (least, 4)
    assert outcome.waf[0].waf_flop_per_s == outcome.waf[-1].waf_flop_per_s
