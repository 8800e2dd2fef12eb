"""Which steps heartbeats report: each for a while, few of short ones, and the same of all nodes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.agent.node.step_window import WINDOW_S, StepWindow, step_report
from shared.messages.signals import MAX_STEPS, StepReport, WorkerStatus
from unicron.protocol.messages import Progress


@given(step_s=st.floats(0.001, 3.0), late_s=st.floats(0.0, 0.1))
def test_a_lost_heartbeat_loses_no_step_that_takes_40_ms_or_longer(step_s: float, late_s: float) -> None:
    window, seen, missing = StepWindow(), dict[int, int](), list[int]()
    step, at_s = 0, 0.0
    for beat in range(1, 21):
        now_s = beat * 0.25 + (late_s if beat % 3 == 0 else 0.0)
        while at_s + step_s <= now_s:
            step, at_s = step + 1, at_s + step_s
            window.add(StepReport(step, step_s, 1), at_s)
        reported = [report.step for report in window.reported(now_s)]
        assert len(reported) <= MAX_STEPS + 1
        assert reported == sorted(set(reported))
        for number in reported:
            seen[number] = seen.get(number, 0) + 1
    missing = [number for number in range(1, step - 15) if seen.get(number, 0) < 2]
    assert step_s < WINDOW_S / MAX_STEPS or missing == []


@given(offset=st.integers(0, 100))
def test_nodes_report_the_same_of_short_steps_and_the_largest_loss(offset: int) -> None:
    one, other = StepWindow(), StepWindow()
    for step in range(1, 401):
        one.add(StepReport(step, 0.001, 1, 0.001, 9.0 if step == 333 else 2.0), step / 1000)
        if step <= 400 - offset:
            other.add(StepReport(step, 0.001, 1), step / 1000)
    first, second = one.reported(0.4), other.reported(0.4 - offset / 1000)
    assert 333 in [report.step for report in first]
    common = {report.step for report in first if report.step != 333} & {report.step for report in second}
    assert len(common) >= MAX_STEPS // 4


def test_the_report_of_a_step_is_small_and_a_newer_one_is_readable() -> None:
    ended: dict[str, Any] = {"loss": 2.5, "duration_s": 0.5, "compute_s": 1 / 3, "micro_batches": 4}
    rank_0, rank_1 = (
        step_report(Progress(generation=1, rank=rank, step=12, phase="ended", **ended)) for rank in (0, 1)
    )
    assert rank_0 == StepReport(12, 0.333333, 4, 0.5, 2.5)
    assert rank_1 == StepReport(12, 0.333333, 4, None, None)
    status = WorkerStatus(worker="n0/0", steps=[rank_1])
    text = status.model_dump_json()
    assert WorkerStatus.model_validate_json(text) == status
    newer = json.loads(text)
    newer["steps"][0].append("a field of a newer version")
    assert WorkerStatus.model_validate_json(json.dumps(newer)) == status
    older = {name: value for name, value in newer.items() if name != "steps"}
    assert WorkerStatus.model_validate_json(json.dumps(older)).steps == []


def test_a_time_that_no_heartbeat_can_have_is_left_out() -> None:
    progress = Progress(generation=1, rank=0, step=1, phase="ended", compute_s=-1.0, duration_s=1e300)
    assert step_report(progress) == StepReport(1)
