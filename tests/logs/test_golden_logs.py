"""Logs of real runs: their chains are intact, every service folds them, and their plans verify."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.records.replay import replay
from services.detector.evolve import evolve as evolve_monitor
from services.detector.state.cluster import DetectorState
from services.planner.decide import DECIDER
from services.planner.replay.replay import Replayer
from services.transition.evolve import evolve as evolve_transition
from services.transition.state import State as TransitionState
from shared.events.union import EVENT, ErrorDetected, PlanDecided, Recorded, TaskFailed, TaskSubmitted
from shared.log.log import EventLog
from shared.log.relay import decode, encode
from shared.projections.evolve import evolve as evolve_views
from shared.tasks.specification import ENDED
from shared.views.documents import Views
from tests.api.accounting import allocated_worker_s
from tests.api.kit import cost_report
from tests.logs.kit import FOLDER, GOLDEN, read_rows, restore

COURSES = [
    "demo",
    "every-event",
    "planned-stop",
    "unsaved",
    "drained-node",
    "adopted-node",
    "slow-worker",
    "changed-task",
    "waiting-task",
    "unwritten-result",
    "reported-node",
    "measured-node",
    "taken-cause",
]

EVENT_TYPES = set(EVENT.json_schema()["discriminator"]["mapping"])


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An SQLite log with the rows of a golden log."""
    return restore(read_rows(request.param), tmp_path / "log.db")


@pytest.fixture
def records(path: Path) -> list[Recorded]:
    return Replayer.of_file(path).records


def test_the_chain_is_intact(path: Path) -> None:
    log = EventLog(f"sqlite:///{path}", read_only=True)
    chain = log.verify()
    log.close()
    assert (chain.ok, chain.problem) == (True, "")
    assert chain.events > 0


def test_every_plan_verifies(path: Path) -> None:
    """Byte for byte while the log's decider is the present one; from then on by what is true of every plan."""
    replayer = Replayer.of_file(path)
    report = replayer.verify()
    assert report.mismatches == []
    assert report.ok
    deciders = [r.event.decider for r in replayer.records if isinstance(r.event, PlanDecided)]
    assert report.plans == len(deciders) > 0
    assert report.verified == deciders.count(DECIDER)
    assert report.older == sum(decider < DECIDER for decider in deciders)


def test_every_plan_passes_as_one_of_an_older_decider(records: list[Recorded]) -> None:
    report = Replayer(records, decider=DECIDER + 1).verify()
    assert report.mismatches == []
    assert (report.verified, report.older, report.ok) == (0, report.plans, True)


def test_the_command_verifies_the_file(path: Path) -> None:
    app = typer.Typer()
    app.command()(replay)
    result = CliRunner().invoke(app, [str(path), "--verify", "-o", "json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["verified"] + report["older"] == report["plans"]


def test_the_planner_folds_it(records: list[Recorded]) -> None:
    state = Replayer(records).state_at()
    assert state.plans == sum(isinstance(r.event, PlanDecided) for r in records)
    assert {task.life for task in state.every_task()} == {"ended"}
    assert not any(task.members for task in state.every_task())


def test_the_monitor_folds_it(records: list[Recorded]) -> None:
    view = DetectorState()
    for record in records:
        view = evolve_monitor(view, record.event, record.recorded_at)
    assert list(view.running()) == list(view.moving()) == []
    assert view.tasks.keys() | view.ended.keys() == {
        r.event.task for r in records if isinstance(r.event, TaskSubmitted)
    }
    assert view.unanswered == {}


def test_the_transition_service_folds_it(records: list[Recorded]) -> None:
    state = TransitionState()
    for record in records:
        state = evolve_transition(state, record.event, record.recorded_at)
    assert state.tasks.keys() == {r.event.task for r in records if isinstance(r.event, TaskSubmitted)}
    assert all(task.settled for task in state.tasks.values())


def test_the_api_folds_it(records: list[Recorded]) -> None:
    views = Views()
    for record in records:
        evolve_views(views, record)
    assert all(task.state in ENDED for task in views.tasks.values())
    assert views.tasks.keys() == {r.event.task for r in records if isinstance(r.event, TaskSubmitted)}
    assert views.incidents.keys() == {r.event.incident for r in records if isinstance(r.event, ErrorDetected)}
    failed = {r.event.task: r.event.reason for r in records if isinstance(r.event, TaskFailed)}
    assert {name: views.tasks[name].reason for name in failed} == failed
    report = cost_report(views, records[-1].recorded_at)
    assert report.sum_check.ok
    allocated = allocated_worker_s(records, records[-1].recorded_at)
    assert report.allocated_worker_s == pytest.approx(allocated, abs=1e-6)
    for shares in ([report.categories], *([s.categories for s in part] for part in report.breakdowns.values())):
        assert sum(sum(kinds.values()) for kinds in shares) == pytest.approx(allocated, rel=1e-6)


def test_the_relay_carries_it(path: Path, records: list[Recorded]) -> None:
    with closing(EventLog(f"sqlite:///{path}", read_only=True)) as log:
        assert [decode(encode(row)) for row in log.page(limit=len(records))] == records


def test_the_present_decider_has_golden_logs() -> None:
    """A change that raises the decider, or adds an event, records new logs: ``tests/logs/record.py``."""
    paths = [FOLDER / f"{course}-{DECIDER}.jsonl" for course in COURSES]
    assert set(paths) <= set(GOLDEN)
    assert {row["type"] for path in paths for row in read_rows(path)} == EVENT_TYPES
