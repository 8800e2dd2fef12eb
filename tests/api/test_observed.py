"""Slow workers and anomalies in the answers: while they last, with the task, the rank and the node."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from services.api import present
from services.api.live import LiveState
from services.planner.decide import DECIDER
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.union import (
    AnomalyObserved,
    Event,
    NodeJoined,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskSubmitted,
    WorkerSlowed,
)
from shared.projections.evolve import evolve
from shared.tasks.specification import parse_spec
from shared.views.documents import Views
from tests.agent.kit import SPEC, stage

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class History:
    """The views after some events; task ``gpt`` trains on n0/0 and n1/0."""

    def __init__(self) -> None:
        self.views, self.position = Views(), 0
        self.fold(TaskSubmitted(event_id="submitted", occurred_at=NOW, task="gpt", spec=parse_spec(SPEC)))
        for node in ("n0", "n1"):
            self.join(node)
        target = stage(1, ["n0/0", "n1/0"], source="initial")
        change = TaskChange(task="gpt", reason="new", action="move", from_generation=0, target=target)
        about: dict[str, Any] = {"occurred_at": NOW, "plan": "p1"}
        self.fold(
            PlanDecided(
                event_id="p1",
                decider=DECIDER,
                trigger=Trigger.TASK_SUBMITTED,
                cause="submitted",
                response=Response.RECONFIGURE,
                changes=[change],
                **about,
            )
        )
        moved = {
            "event_id": "m",
            "started_at": NOW,
            "task": "gpt",
            "generation": 1,
            "phase": "restored",
            "complete": True,
        }
        self.fold(StateMoved.model_validate({**about, **moved}))

    def fold(self, event: Event) -> None:
        self.position += 1
        evolve(
            self.views,
            Recorded(
                position=self.position,
                stream=event.stream,
                stream_version=1,
                recorded_at=NOW,
                event=event,
                previous_hash="",
                hash="",
            ),
        )

    def join(self, node: str, incarnation: str = "first") -> None:
        joined = {"event_id": f"{node} {incarnation}", "occurred_at": NOW, "node": node, "incarnation": incarnation}
        workers = [f"{node}/0"]
        self.fold(
            NodeJoined.model_validate({**joined, "agent_pid": 1, "domain": "d", "hardware": "cpu", "workers": workers})
        )

    def slow(self, slowdown: float, step: int = 40) -> None:
        about: dict[str, Any] = {"event_id": f"slow {slowdown}", "occurred_at": NOW, "task": "gpt", "generation": 1}
        self.fold(WorkerSlowed(**about, node="n1", worker="n1/0", slowdown=slowdown, rank=1, step=step))

    def anomaly(self, *, ended: bool, **where: Any) -> None:
        about: dict[str, Any] = {
            "event_id": f"a {ended} {where}",
            "occurred_at": NOW,
            "detected_at": NOW,
            "task": "gpt",
        }
        about |= {"kind": "slow-link" if where else "loss-spike", "generation": 1, "step": 7, "evidence": {"unit": "s"}}
        self.fold(AnomalyObserved.model_validate({**about, "value": 9.0, "expected": 2.0, "ended": ended, **where}))

    def task(self) -> Any:
        return present.task(self.views.tasks["gpt"], LiveState())

    def slowdowns(self) -> list[float]:
        tasks = list(self.views.tasks.values())
        assigned = present.assigned_ranks(tasks)
        nodes = [present.node(view, LiveState(), assigned, NOW) for view in self.views.nodes.values()]
        return [worker.slowdown for node in nodes for worker in node.workers]


def test_a_slow_worker_is_shown_with_its_task_rank_and_node_until_it_is_not() -> None:
    history = History()
    assert history.slowdowns() == [1.0, 1.0]
    history.slow(1.331)
    history.slow(1.464)
    assert history.task().slow_workers == {"n1/0": 1.464}
    assert [rank.slowdown for rank in history.task().ranks] == [1.0, 1.464]
    assert history.slowdowns() == [1.0, 1.464]
    history.slow(1.0)
    assert history.task().slow_workers == {}
    assert history.slowdowns() == [1.0, 1.0]


def test_a_node_that_joins_anew_has_no_slow_workers() -> None:
    history = History()
    history.slow(1.331)
    history.join("n1", "second")
    assert history.slowdowns() == [1.0, 1.0]
    assert history.task().slow_workers == {}


def test_anomalies_are_shown_until_they_end_and_each_link_has_its_own() -> None:
    history = History()
    history.anomaly(ended=False)
    history.anomaly(ended=False, node="n0", peer="n1")
    history.anomaly(ended=False, node="n0", peer="n2")
    shown = [(one.kind, one.node, one.peer, one.value, one.expected, one.unit) for one in history.task().anomalies]
    assert shown == [
        ("loss-spike", None, None, 9.0, 2.0, "s"),
        ("slow-link", "n0", "n1", 9.0, 2.0, "s"),
        ("slow-link", "n0", "n2", 9.0, 2.0, "s"),
    ]
    history.anomaly(ended=True, node="n0", peer="n1")
    history.anomaly(ended=True)
    assert [(one.kind, one.peer) for one in history.task().anomalies] == [("slow-link", "n2")]
