"""Replay: an honest log is decided again with the same bytes; each kind of tampering is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.records.replay import replay
from services.planner import decide
from services.planner.decide import DECIDER
from services.planner.replay.replay import Replayer, verify, verify_records
from services.planner.replay.sources import decider_of
from services.planner.replay.verification import Report
from shared.errors import NotFound, UnicronError
from shared.events.union import EVENT, ClusterConfigured, PlanDecided, Recorded
from shared.log.log import EventLog
from tests.planner.kit import World


def course() -> World:
    world = World()
    for index in range(3):
        world.join(f"n{index}")
    world.complete(world.submit("a", workers={"min": 2}))
    world.complete(world.submit("b", weight=2.0))
    world.progress("a", step=9, step_s=0.123)
    world.exit(world.task("a").members[0])
    world.complete(world.lose("n1"))
    world.complete(world.join("n1"))
    world.submit("c", workers={"min": 20})
    world.stop("c")
    world.complete(world.finish("b"))
    return world


def changed(record: Recorded, **fields: object) -> Recorded:
    event = EVENT.validate_python({**record.event.model_dump(by_alias=True), **fields})
    return record.model_copy(update={"event": event})


def index_of_plan(records: list[Recorded], number: int) -> int:
    return [i for i, r in enumerate(records) if isinstance(r.event, PlanDecided)][number]


def test_a_log_is_decided_again_to_the_byte() -> None:
    records = course().records
    report = verify_records(records)
    assert report.mismatches == []
    assert report.verified == report.plans == 11
    assert report.events == len(records)
    assert report.ok


@pytest.mark.parametrize("said", [False, True])
def test_the_planner_before_an_upgrade_decides_again_only_where_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, said: bool
) -> None:
    world = World()
    world.join("n0")
    with monkeypatch.context() as upgraded:
        upgraded.setattr(decide, "DECIDER", DECIDER + 1)
        world.join("n1")
    assert world.state.config is not None
    if said:
        world.log(ClusterConfigured(**{**world.state.config.model_dump(), **world.base(), "decider": DECIDER}))
    world.complete(world.submit("a"))
    monkeypatch.setattr(decide, "DECIDER", DECIDER + 1)
    report = Replayer(world.records, decider=DECIDER + 1).verify()
    assert [mismatch.problem for mismatch in report.mismatches] == (
        [] if said else [f"decider {DECIDER} after a plan of decider {DECIDER + 1}"]
    )


def test_a_changed_plan_is_seen_and_what_follows_it_is_judged_on_its_own() -> None:
    records = course().records
    at = index_of_plan(records, 5)
    records[at] = changed(records[at], incident="another")
    report = verify_records(records)
    assert [m.position for m in report.mismatches] == [records[at].position]
    assert "another" in report.mismatches[0].problem
    assert report.verified == report.plans - 1
    assert not report.ok


def test_a_changed_input_is_seen_in_the_plans_that_used_it() -> None:
    records = course().records
    at = next(i for i, r in enumerate(records) if r.event.type == "task.progressed")
    records[at] = changed(records[at], step_s=3.21)
    assert not verify_records(records).ok


def test_a_missing_plan_is_seen_but_not_at_the_very_end() -> None:
    records = course().records
    end = index_of_plan(records, -1)
    assert verify_records(records[:end]).ok
    at = index_of_plan(records, 6)
    assert not verify_records(records[:at] + records[at + 1 :]).ok


def test_a_plan_without_cause_is_seen() -> None:
    records = course().records
    at = index_of_plan(records, -1)
    records.append(changed(records[at], event_id="forged", plan="p99"))
    report = verify_records(records)
    assert [m.plan for m in report.mismatches] == ["p99"]


def test_an_event_between_a_cause_and_its_plan_is_decided_after_the_plan() -> None:
    """An event recorded between a cause and its plan is decided after the plan, as in the service."""
    world = course()
    at = index_of_plan(world.records, 4)
    records = world.records
    there = records[at].position
    records[at], records[at + 1] = (
        records[at + 1].model_copy(update={"position": there}),
        records[at].model_copy(update={"position": there + 1}),
    )
    assert not isinstance(records[at].event, PlanDecided)
    assert verify_records(records).ok


def test_the_state_at_a_position() -> None:
    world = course()
    records = world.records
    assert Replayer(records).state_at() == world.state
    first = index_of_plan(records, 3)
    # The plan is folded right after its cause.
    assert Replayer(records).state_at(records[first].position - 1) == Replayer(records).state_at(
        records[first].position
    )
    assert Replayer(records).state_at(0).nodes == {}
    with pytest.raises(NotFound):
        Replayer(records).state_at(len(records) + 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log file with the course. ``recorded_at`` is that of the course, because decisions used it."""
    world = course()
    times = iter([r.recorded_at for r in world.records])
    log = EventLog(f"sqlite:///{tmp_path / 'log.db'}", clock=lambda: next(times))
    for record in world.records:
        log.append([record.event])
    log.close()
    return tmp_path / "log.db"


def test_a_plan_that_cannot_be_folded_ends_the_verification_with_a_mismatch() -> None:
    records = course().records
    at = index_of_plan(records, 3)
    text = records[at].event.canonical().replace('"n0', '"n9')
    assert text != records[at].event.canonical()
    records[at] = records[at].model_copy(update={"event": EVENT.validate_json(text)})
    report = verify_records(records)
    assert not report.ok
    assert report.verified == 3
    assert report.mismatches[-1].problem.startswith("cannot be folded, and no later record be checked: KeyError")


def test_a_report_is_ok_if_every_plan_is_verified_or_an_older_one_that_passed() -> None:
    assert Report(events=9, plans=3, verified=1, older=2).ok
    assert not Report(events=9, plans=4, verified=1, older=2).ok
    assert not Report(events=9, plans=3, verified=1, older=2, chain_ok=False).ok


def test_a_file_is_verified_in_three_lines(path: Path) -> None:
    replayer = Replayer.of_file(path)
    assert replayer.verify().ok
    assert replayer.state_at().plans == 11
    with pytest.raises(NotFound):
        Replayer.of_file(path.parent / "none.db")


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(replay)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, UnicronError):
        return result.exception.exit_code, result.stdout
    return result.exit_code, result.stdout


def test_the_command_verifies_a_file(path: Path) -> None:
    code, output = run(str(path), "--verify", "-o", "json")
    assert code == 0
    assert json.loads(output) == {
        "events": 34,
        "plans": 11,
        "verified": 11,
        "older": 0,
        "mismatches": [],
        "chain_ok": True,
        "head": Replayer.of_file(path).records[-1].hash,
        "problem": None,
        "problems": [],
        "skipped": [],
        "begins_after": 0,
    }
    code, output = run("--run-dir", str(path.parent), "--verify")
    assert code == 0
    assert "hash chain: intact" in output


def test_the_command_shows_a_state(path: Path) -> None:
    code, output = run(str(path), "--at", "4")
    assert code == 0
    assert "3 plans" not in output
    code, output = run(str(path), "-o", "json")
    assert code == 0
    assert json.loads(output)["plans"] == 11
    assert run(str(path), "--at", "9999")[0] == 3
    assert run(str(path.parent / "none.db"))[0] == 3


def test_the_command_fails_on_a_log_that_does_not_verify(tmp_path: Path) -> None:
    world = course()
    records = world.records
    at = index_of_plan(records, 5)
    records[at] = changed(records[at], incident="another")
    times = iter([r.recorded_at for r in records])
    log = EventLog(f"sqlite:///{tmp_path / 'log.db'}", clock=lambda: next(times))
    for record in records:
        log.append([record.event])
    assert verify(log).chain_ok
    log.close()
    code, output = run(str(tmp_path / "log.db"), "--verify", "-o", "json")
    assert code == 6
    assert len(json.loads(output)["mismatches"]) == 1


@pytest.mark.parametrize("task", ["decider", 'a","decider":7,"event_id":"', "b"])
def test_the_decider_of_a_stored_plan_is_that_of_its_event(task: str) -> None:
    plan = next(r.event for r in course().records if isinstance(r.event, PlanDecided) and r.event.solution)
    assert plan.solution is not None
    solution = plan.solution.model_copy(update={"assignment": {task: 5, "event_id": 3}})
    for decider in (DECIDER, 30):
        text = plan.model_copy(update={"decider": decider, "queued": {task: task}, "solution": solution}).canonical()
        assert decider_of(text) == decider
        assert decider_of(text.replace(f'"decider":{decider},"event_id":"', '"event_id":"')) is None
        assert decider_of(text[:-1] + ',"decider":9}') == 9
    assert decider_of(plan.canonical().replace(f'"decider":{plan.decider},', '"decider":0,')) is None
    assert decider_of('{"type":"task.stopped"}') is None
    with pytest.raises(ValueError, match="EOF"):
        decider_of("")
    with pytest.raises(ValueError, match="not an event"):
        decider_of("[]")
