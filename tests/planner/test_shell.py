"""The planner's service on a real nats-server and a real log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from services.planner import decide, log_start
from services.planner.decide import DECIDER
from services.planner.lookahead.table import LookAhead
from services.planner.main import Planner, serve
from services.planner.replay.log_fold import Fold
from services.planner.replay.replay import Replayer, verify
from services.planner.state import slow_workers
from services.planner.state.cluster import State
from shared.bus.connection import Bus
from shared.events.plans import Trigger
from shared.events.union import (
    ClusterConfigured,
    Event,
    NodeJoined,
    PlanDecided,
    TaskStarving,
    TaskSubmitted,
    WorkerSlowed,
)
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.model import utc_now
from shared.planning import compiled
from shared.planning.preparation import WORKERS_FROM
from shared.service.frame import Context
from shared.settings.model import Settings
from tests.condition import until
from tests.planner.kit import spec

TIMEOUT_S = 10.0


def node(name: str) -> NodeJoined:
    return NodeJoined(
        event_id=f"join-{name}",
        occurred_at=utc_now(),
        node=name,
        incarnation="1",
        agent_pid=1,
        domain="default",
        workers=[f"{name}/0", f"{name}/1"],
    )


def submission(name: str, **fields: Any) -> TaskSubmitted:
    return TaskSubmitted(event_id=f"submit-{name}", occurred_at=utc_now(), task=name, spec=spec(name, **fields))


def events(log: EventLog) -> list[Event]:
    return [record.event for record in log.read_all()]


def plans(log: EventLog) -> list[PlanDecided]:
    return [event for event in events(log) if isinstance(event, PlanDecided)]


@contextlib.asynccontextmanager
async def planner(
    settings: Settings, bus: Bus, journal: Journal, context: Context | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """The running service; assert that it did not end by itself."""
    context = context or Context(settings, bus, journal, asyncio.Event(), "planner")
    task = asyncio.create_task(serve(context))
    try:
        yield task
        assert not task.done() or task.exception() is None
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_each_trigger_gets_one_plan_and_the_log_verifies(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog
) -> None:
    async with planner(settings, bus, journal):
        await journal.append([node("n0")])
        await journal.append([submission("a"), submission("b")])
        await until(lambda: len(plans(log)) == 3)
    assert [plan.cause for plan in plans(log)] == ["join-n0", "submit-a", "submit-b"]
    assert sum(isinstance(event, ClusterConfigured) for event in events(log)) == 1
    assert verify(log).ok


async def test_decisions_show_in_the_metrics(settings: Settings, bus: Bus, journal: Journal, log: EventLog) -> None:
    context = Context(settings, bus, journal, asyncio.Event(), "planner")
    async with planner(settings, bus, journal, context):
        await journal.append([node("n0"), submission("a")])
        await until(lambda: len(plans(log)) == 2)
    counts = [
        context.registry.get_sample_value("unicron_planner_decision_seconds_count", {"answer": answer})
        for answer in ("looked up", "solved", "no counts to choose")
    ]
    assert sum(count or 0.0 for count in counts) == 2
    hits, misses = (
        context.registry.get_sample_value("unicron_planner_look_ahead_total", {"result": result})
        for result in ("hit", "miss")
    )
    assert (hits or 0.0) + (misses or 0.0) >= 1


@pytest.mark.slow
async def test_the_planner_of_a_large_cluster_plans_while_its_solver_is_compiled_beside(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "load", lambda: None)  # other tests of this process have kernels of another folder
    large = node("n0").model_copy(update={"workers": [f"n0/{slot}" for slot in range(WORKERS_FROM)]})
    async with planner(settings, bus, journal):
        await journal.append([large, submission("gpt")])
        await until(lambda: len(plans(log)) == 2)
        assert not compiled.is_prepared()
        await until(compiled.is_prepared, limit_s=150.0)


async def test_a_restart_repeats_nothing_and_answers_what_came_meanwhile(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog
) -> None:
    async with planner(settings, bus, journal):
        await journal.append([node("n0"), submission("a")])
        await until(lambda: len(plans(log)) == 2)
    await journal.append([node("n1"), submission("b")])
    async with planner(settings, bus, journal):
        await until(lambda: len(plans(log)) == 4)
        await journal.append([submission("c")])
        await until(lambda: len(plans(log)) == 5)
    assert [plan.plan for plan in plans(log)] == ["p1", "p2", "p3", "p4", "p5"]
    assert sum(isinstance(event, ClusterConfigured) for event in events(log)) == 1
    report = verify(log)
    assert (report.ok, report.verified) == (True, 5)


async def test_what_an_older_decider_has_passed_over_stays_without_a_plan(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older planner did not answer one node's coming; a plan between its plans would contradict all later ones."""
    settings = settings.model_copy(update={"state_snapshot_events": 0})
    decided = Fold.decide
    with monkeypatch.context() as older:
        older.setattr(
            Fold, "decide", lambda self, cause: [] if cause.event.event_id == "join-n1" else decided(self, cause)
        )
        async with planner(settings, bus, journal):
            await journal.append([node("n0"), node("n1"), submission("a")])
            await until(lambda: len(plans(log)) == 2)
    before = plans(log)
    assert [plan.cause for plan in before] == ["join-n0", "submit-a"]
    for module in (decide, log_start):
        monkeypatch.setattr(module, "DECIDER", DECIDER + 1)
    async with planner(settings, bus, journal):
        await journal.append([node("n9")])
        await until(lambda: plans(log)[-1].cause == "join-n9")
    assert plans(log)[:-1] == before
    assert plans(log)[-1].decider == DECIDER + 1
    report = Replayer(list(log.read_all()), decider=DECIDER + 1).verify()
    assert (report.ok, report.older, report.verified) == (True, 2, 1)


async def test_a_task_that_waits_too_long_is_logged_once_and_a_restart_does_not_repeat_it(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog
) -> None:
    impatient = settings.model_copy(update={"starvation_s": 0.2})
    whole = {"workers": {"min": 2}}
    async with planner(impatient, bus, journal):
        await journal.append([node("n0"), submission("a", **whole), submission("b", **whole)])
        await until(lambda: [p.trigger for p in plans(log)].count(Trigger.TASK_STARVING) >= 2)
    patient = settings.model_copy(update={"starvation_s": 3600.0})
    async with planner(patient, bus, journal):
        await journal.append([node("n1")])
        await until(lambda: plans(log)[-1].cause == "join-n1")
    called = [event for event in events(log) if isinstance(event, TaskStarving)]
    starving = [plan for plan in plans(log) if plan.trigger is Trigger.TASK_STARVING]
    assert [plan.cause for plan in starving] == [event.event_id for event in called]
    assert [event.task for event in called[:2]] == ["b", "a"]
    assert list(starving[0].queued) == ["a"]
    assert verify(log).ok


def slowed(event_id: str, slowdown: float) -> WorkerSlowed:
    return WorkerSlowed(
        event_id=event_id, occurred_at=utc_now(), node="n0", worker="n0/0", slowdown=slowdown, task="a", generation=1
    )


async def test_the_end_of_a_trial_is_logged(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was left out is as fast again: the service says when it is trusted, and a plan uses it."""
    monkeypatch.setattr(slow_workers, "TRIAL_S", 0.2)
    async with planner(settings, bus, journal):
        await journal.append([node("n0"), node("n1"), submission("a", workers={"min": 1, "max": 4})])
        await journal.append([slowed("slow", 50.0), slowed("over", 1.0)])
        await until(lambda: [p.trigger for p in plans(log)].count(Trigger.WORKER_SLOWED) == 2)
    ends = [event for event in events(log) if isinstance(event, WorkerSlowed) and event.ends is not None]
    assert [event.ends for event in ends] == ["over"]
    first, second = (plan for plan in plans(log) if plan.trigger is Trigger.WORKER_SLOWED)
    assert (first.cause, second.cause) == ("slow", ends[0].event_id)
    assert first.slow is not None
    assert first.slow.choices[0].used == {"n0/0": ""}
    assert second.slow is None
    assert verify(log).ok


@pytest.mark.parametrize(("mtbf_s", "count"), [(1000.0, 2), (None, 1)])
async def test_parameters_are_logged_when_they_have_changed(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog, mtbf_s: float | None, count: int
) -> None:
    async with planner(settings, bus, journal):
        await until(lambda: bool(events(log)))
    changed = settings if mtbf_s is None else settings.model_copy(update={"mtbf_node_s": mtbf_s})
    async with planner(changed, bus, journal):
        await journal.append([node("n0")])
        await until(lambda: len(plans(log)) == 1)
    configured = [event for event in events(log) if isinstance(event, ClusterConfigured)]
    assert len(configured) == count
    assert configured[-1].mtbf_node_s == changed.mtbf_node_s
    assert verify(log).ok


class Endless(LookAhead):
    """A table whose making goes on until it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = [threading.Event(), threading.Event()]
        self.threads: list[int] = []
        self.left: list[bool] = []

    def rebuild(self, state: State, at: datetime, going_on: Callable[[], bool] = lambda: True) -> bool:
        self.threads.append(threading.get_ident())
        self.begun[min(len(self.threads), 2) - 1].set()
        while going_on():
            time.sleep(0.001)  # yields the processor; no condition is waited for
        self.left.append(True)
        return False


async def test_the_table_is_made_in_a_thread_and_left_when_the_state_changes(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog
) -> None:
    context = Context(settings, bus, journal, asyncio.Event(), "planner")
    planner = Planner(context)
    planner.look_ahead = table = Endless()
    running = asyncio.create_task(planner.run())
    try:
        for index, begun in enumerate(table.begun):
            # The first rebuild runs while the second record is folded: the event loop was not blocked by it.
            assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
            assert len(table.left) == index
            await journal.append([node(f"n{index}")])
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert threading.get_ident() not in table.threads


class WithoutTable(Planner):
    """A planner that does not look ahead by itself."""

    async def begin(self) -> None:
        pass


async def test_hits_and_misses_are_in_the_health_and_in_the_log_line(
    settings: Settings, bus: Bus, journal: Journal, log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.planner.main")
    context = Context(settings, bus, journal, asyncio.Event(), "planner")
    planner = WithoutTable(context)
    for event in (node("n0"), submission("a")):
        (record,) = await journal.append([event])
        await planner.take(record)
    table = planner.look_ahead
    assert table.hits == 0
    table.rebuild(planner.state, utc_now())
    misses = table.misses
    (record,) = await journal.append([node("n1")])
    await planner.take(record)
    counters = (await context.health()).counters
    assert (counters["look_ahead_hits"], counters["look_ahead_misses"]) == (table.hits, misses)
    assert table.hits > 0
    assert misses > 0
    assert counters["look_ahead_answers"] == len(planner.look_ahead) > 0
    solved, _, found = [r.getMessage() for r in caplog.records if r.name == "services.planner.main"]
    assert "solved in" in solved
    assert "looked up in" in found
    assert f"{table.hits} hits, {misses} misses" in found
