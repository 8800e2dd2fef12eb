"""What the demo reads of a slow worker in the log."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cli.demo.straggler import found

START = datetime(2025, 3, 1, tzinfo=UTC)


def record(second: float, kind: str, **event: Any) -> dict[str, Any]:
    return {"type": kind, "recorded_at": (START + timedelta(seconds=second)).isoformat(), "event": event}


def course(*members: str) -> list[dict[str, Any]]:
    change = {"task": "large", "target": {"members": [{"worker": worker} for worker in members]}}
    return [
        record(0, "worker.slowed", event_id="s0", worker="n0/1", slowdown=2.0),  # before the fault
        record(1, "fault.injected", event_id="f"),
        record(3, "worker.slowed", event_id="s", worker="n0/1", slowdown=3.0),
        record(3.5, "plan.decided", trigger="error", plan="p0", changes=[change]),
        record(4, "plan.decided", trigger="worker-slowed", plan="p1", changes=[change]),
        record(5, "state.moved", plan="p1", task="large", complete=False),
        record(6, "state.moved", plan="p1", task="large", complete=True),
    ]


def test_a_worker_that_is_moved_is_reported_once_the_plan_is_done() -> None:
    records = course("n0/0", "n1/0")
    assert all(found(records[:count], "f", "large", "n0/1") is None for count in range(len(records)))
    straggler = found(records, "f", "large", "n0/1")
    assert straggler is not None
    assert (straggler.id, straggler.slowdown, straggler.left) == ("s", 3.0, True)
    assert (straggler.found_s, straggler.moved_s) == (2.0, 5.0)


def test_a_worker_that_stays_is_not_left_out() -> None:
    straggler = found(course("n0/0", "n0/1"), "f", "large", "n0/1")
    assert straggler is not None
    assert not straggler.left
