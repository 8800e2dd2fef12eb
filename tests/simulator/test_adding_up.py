"""What a history comes to adds up: useful time is that of updates that exist, a difference the sum of its parts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from services.planner.replay.replay import Replayer
from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected
from simulator.outcome import Outcome
from simulator.policies import POLICIES
from simulator.policy import Policy
from simulator.run.engine import simulate
from simulator.what_if.changes import parse_changes
from simulator.what_if.history_totals import OVERHEAD
from simulator.what_if.simulation import HistoryComparison, compare_histories
from simulator.workloads.trace import Occurrence
from tests.logs.kit import golden_log, read_rows, restore
from tests.simulator import small

WORKERS = 6
"""Of the only task, while all nodes are there."""

ENDS = [455.0, 480.0, 520.0, 560.0, 700.0]
"""In the detection of a fault after 450 s, in the recovery, in the steps that are computed again, and behind them."""


def restarting(**fields: object) -> Policy:
    """Return a policy that restarts tasks from their checkpoints, of fixed shares."""
    timing = small.RoundTiming(lost="checkpoint")
    return small.policy(timing, name="megatron", solve=POLICIES["megatron"].solve, scope="fixed", **fields)


def made(policy: Policy, end_s: float, *occurrences: Occurrence) -> tuple[Outcome, float]:
    """Return the outcome of the task, and the worker-seconds that the updates which exist have taken."""
    case = small.workload(*occurrences, horizon_s=end_s)
    healthy = simulate(small.workload(horizon_s=1000.0), policy)
    (steps,) = healthy.steps.values()
    outcome = simulate(case, policy)
    return outcome, WORKERS * outcome.steps["a"] * 1000.0 / steps


@pytest.mark.parametrize("end_s", ENDS)
@pytest.mark.parametrize("fault", [small.error(450.0, ErrorKind.PROCESS_EXIT), small.error(450.0, ErrorKind.HANG)])
def test_useful_time_is_that_of_the_updates_that_exist(fault: Occurrence, end_s: float) -> None:
    outcome, useful = made(restarting(), end_s, fault)
    assert outcome.worker_s["useful"] == pytest.approx(useful, abs=2.0 * WORKERS)  # two steps: the broken one, a part
    assert sum(outcome.worker_s.values()) == pytest.approx(outcome.allocated_worker_s)
    if end_s > ENDS[0]:
        assert outcome.worker_s["recompute"] > 0.0


@pytest.mark.parametrize("end_s", ENDS)
def test_a_fault_that_is_found_with_another_one_or_never_has_stopped_its_task_all_the_same(end_s: float) -> None:
    policy = restarting()
    occurrences = (small.error(300.0, ErrorKind.HANG), small.down(450.0))
    never = small.policy(_Blind(lost="checkpoint"), name="megatron", solve=policy.solve, scope="fixed")
    outcome, useful = made(never, end_s, *occurrences)
    assert outcome.worker_s["useful"] == pytest.approx(useful, abs=2.0 * WORKERS)
    assert outcome.worker_s["detection"] >= WORKERS * (min(end_s, 450.0) - 300.0)
    assert outcome.unfound == (1 if end_s == ENDS[0] else 0), "the process that hangs has gone with its node"


class _Blind(small.RoundTiming):
    """Finds lost nodes after 10 s, and other faults not before the end."""

    def detection_s(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        return small.DETECTION_S if kind is ErrorKind.NODE_LOST else 10_000.0


@pytest.mark.parametrize("end_s", [620.0, 700.0, 900.0])
def test_a_restart_that_a_fault_has_made_necessary_belongs_to_the_fault(end_s: float) -> None:
    """The task waits for its node, 600 s, and starts again when that is back."""
    outcome, useful = made(restarting(), end_s, small.down(450.0), small.up(600.0))
    assert outcome.worker_s["transition_planned"] == pytest.approx(0.0, abs=1e-6)
    assert outcome.worker_s["transition_incident"] >= WORKERS * 0.9 * min(end_s - 600.0, small.DOWN_S)
    assert outcome.worker_s["recompute"] > 0.0
    assert outcome.worker_s["useful"] == pytest.approx(useful, abs=2.0 * WORKERS)
    failures = outcome.allocated_worker_s - outcome.worker_s["useful"]
    others = ("unscheduled", "idle")
    assert sum(outcome.worker_s[kind] for kind in others) <= 0.01 * failures


def test_steps_that_are_lost_again_before_they_are_made_again_count_each_time() -> None:
    faults = (small.error(490.0, ErrorKind.HANG), small.error(580.0, ErrorKind.HANG))
    for end_s in (600.0, 700.0, 900.0):
        outcome, useful = made(restarting(), end_s, *faults)
        assert outcome.worker_s["useful"] == pytest.approx(useful, abs=3.0 * WORKERS)


def asked(log: str, text: str, folder: Path) -> HistoryComparison:
    path = folder / f"{log}.db"
    restore(read_rows(golden_log(log)), path)
    return compare_histories(Replayer.of_file(path), log, parse_changes(text))


@pytest.mark.parametrize("log", ["demo", "slow-worker"])
@pytest.mark.parametrize(
    "text", ["policy=megatron", "policy=megatron-spares,spares=1", "policy=bamboo", "spares=1", "weight.TASK=3"]
)
def test_the_parts_of_a_difference_add_up_to_it(log: str, text: str, tmp_path: Path) -> None:
    task = "held-up" if log.startswith("slow") else "demo-gpt-small"
    found = asked(log, text.replace("TASK", task), tmp_path)
    change, what_if = found.difference, found.what_if
    assert sum(change.worker_s.values()) == pytest.approx(change.allocated_worker_s, abs=1e-6)
    waf = found.model.accumulated_waf_flop
    assert sum(found.waf_difference.values()) == pytest.approx(change.accumulated_waf_flop, abs=1e-9 * waf)
    for totals in (found.measured, found.model, what_if):
        assert sum(totals.worker_s.values()) == pytest.approx(totals.allocated_worker_s)
    policy = POLICIES[what_if.policy]
    whole = what_if.worker_s["useful"] + what_if.worker_s[OVERHEAD]
    assert what_if.worker_s[OVERHEAD] == pytest.approx((1.0 - policy.efficiency) * whole)
    assert found.model.worker_s[OVERHEAD] == found.measured.worker_s[OVERHEAD] == 0.0
    named = [line for line in found.assumptions if "efficiency of a healthy step" in line]
    assert len(named) == (0 if what_if.policy == "unicron" else 1)


def test_a_history_of_which_little_is_left_says_where_it_has_gone(tmp_path: Path) -> None:
    """No update exists at the end under Megatron: no time was useful, and all that failures cost is theirs.

    The log ends while Megatron still brings back what a lost node has broken, and it has written no checkpoint.
    """
    records = Replayer.of_file(restore(read_rows(golden_log("demo")), tmp_path / "log.db")).records
    lost = next(r for r in records if isinstance(r.event, ErrorDetected) and r.event.kind is ErrorKind.NODE_LOST)
    first = [r for r in records if r.recorded_at <= lost.recorded_at + timedelta(seconds=12)]
    found = compare_histories(Replayer(first), "demo", parse_changes("policy=megatron,checkpoint_every_s=1000"))
    assert found.what_if.accumulated_waf_flop == 0.0
    assert found.what_if.worker_s["useful"] == pytest.approx(0.0, abs=0.01)
    assert found.what_if.worker_s["recompute"] > 0.0
    assert found.what_if.failure_worker_s == pytest.approx(found.what_if.allocated_worker_s, rel=0.01)
    assert any("process-exit 1800" in line for line in found.assumptions)
    assert any("DIFFERENCE in parts" in line and "together -100.00%" in line for line in found.notes)
