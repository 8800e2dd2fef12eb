"""The log of a policy is decided again by that policy, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from services.planner.replay.log_fold import Fold
from services.planner.replay.replay import Replayer
from shared.errors import UnknownPolicy
from shared.events.plans import Problem, Solution
from shared.events.union import ClusterConfigured, PlanDecided
from shared.log.log import EventLog
from shared.planning.solver import evaluate
from simulator.policies import POLICIES, SOLVES
from simulator.run.engine import simulate
from simulator.workloads.workload import Workload
from tests.simulator import small


def case() -> Workload:
    return small.workload(small.down(450.0), small.up(700.0), tasks=(small.task("a"), small.task("b", weight=2.0)))


def written(name: str, folder: Path) -> Path:
    path = folder / f"{name}.db"
    log = EventLog(f"sqlite:///{path}")
    try:
        simulate(case(), POLICIES[name], log=log, costs=False)
    finally:
        log.close()
    return path


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_verifies(name: str, tmp_path: Path) -> None:
    report = Replayer.of_file(written(name, tmp_path)).verify(policies=SOLVES)
    assert report.ok, report.mismatches
    assert report.verified == report.plans > 0


def test_an_unknown_policy_is_a_mismatch(tmp_path: Path) -> None:
    path = written("megatron", tmp_path)
    report = Replayer.of_file(path).verify()
    assert not report.ok
    assert report.verified == 0
    assert len(report.mismatches) == report.plans
    assert "decided by policy 'megatron', which this program does not know" in report.mismatches[0].problem
    others = {name: solve for name, solve in SOLVES.items() if name != "megatron"}
    assert not Replayer.of_file(path).verify(policies=others).ok


def gives_nothing(problem: Problem) -> tuple[Solution, list[Solution]]:
    return evaluate(problem, {}, "best"), []


def test_another_policy_decides_otherwise(tmp_path: Path) -> None:
    path = written("megatron", tmp_path)
    report = Replayer.of_file(path).verify(policies={"megatron": gives_nothing})
    assert not report.ok
    assert "decided again" in report.mismatches[0].problem


def test_several_processes_find_the_same(tmp_path: Path) -> None:
    replayer = Replayer.of_file(written("oobleck", tmp_path))
    assert replayer.verify(jobs=2, policies=SOLVES) == replayer.verify(policies=SOLVES)


def test_the_live_planner_names_no_policy(tmp_path: Path) -> None:
    path = written("unicron", tmp_path)
    assert Replayer.of_file(path).verify().ok
    first = Replayer.of_file(path).records[0].event
    assert isinstance(first, ClusterConfigured)
    assert first.policy == ""


def test_a_fold_refuses_to_decide_for_a_policy_that_it_does_not_know(tmp_path: Path) -> None:
    records = Replayer.of_file(written("varuna", tmp_path)).records
    fold = Fold()
    for record in records:
        if isinstance(record.event, PlanDecided):
            break
        fold.take(record)
        last = record
    with pytest.raises(UnknownPolicy, match=r"policy: 'varuna' of the log is not known here"):
        fold.decide(last)


def test_command(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["replay", str(written("bamboo", tmp_path)), "--verify"])
    assert found.exit_code == 0, found.output
