"""A verification by several processes makes the report that one makes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.records.replay import replay
from services.planner.decide import DECIDER
from services.planner.replay import verification, verification_jobs
from services.planner.replay.log_fold import Fold
from services.planner.replay.replay import Replayer
from services.planner.replay.verification import Report
from shared.events.union import Event, PlanDecided, Recorded
from shared.log.anchors import Anchor
from tests.logs.kit import golden_log, read_rows, restore
from tests.planner.test_tampering import MATRIX, ROWS, Rows, at, changed, write


class Here(nullcontext[Any]):
    """Makes the passes in this process, one after the other."""

    def __init__(self, jobs: int, **_: Any) -> None:
        super().__init__(self)

    map = map


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification_jobs, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(verification, "SHARED_AT_ONCE", 1)  # the recorded logs are short


def two_forged(rows: Rows) -> Rows:
    """Two plans forged, one of each share, and a plan removed between them."""
    rows = changed(at("plan.decided", 3), incident="another")(rows)
    rows = changed(at("plan.decided", 8), incident="another")(rows)
    return MATRIX["removed plan"][0](rows)


KINDS = {
    "nothing": lambda rows: rows,
    "two forged plans": two_forged,
    **{kind: MATRIX[kind][0] for kind in ("removed event", "doubled id", "higher decider", "plan from nowhere")},
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_is_that_of_one_process(kind: str, tmp_path: Path) -> None:
    replayer = Replayer.of_file(write(KINDS[kind](list(ROWS)), tmp_path / "log.db"))
    anchors = [Anchor("0" * 64, 9)]
    assert replayer.verify(anchors, jobs=2) == replayer.verify(anchors)


@pytest.mark.usefixtures("here")
def test_plans_of_an_older_decider_are_shared_too(tmp_path: Path) -> None:
    path = write(changed(at("plan.decided", 6), queued={"x": "y"})(list(ROWS)), tmp_path / "log.db")
    replayer = Replayer.of_file(path, decider=DECIDER + 1)
    assert replayer.verify(jobs=3) == replayer.verify()
    assert replayer.verify().mismatches != []


@pytest.mark.usefixtures("here")
def test_each_answer_is_decided_again_by_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[int] = []
    decide = Fold.decide

    def counted(self: Fold, record: Recorded) -> list[Event]:
        decided.append(record.position)
        return decide(self, record)

    monkeypatch.setattr(Fold, "decide", counted)
    replayer = Replayer.of_file(write(list(ROWS), tmp_path / "log.db"))
    report = replayer.verify(jobs=2)
    answered = {p.cause for r in replayer.records if isinstance(p := r.event, PlanDecided)}
    causes = [r.position for r in replayer.records if r.event.event_id in answered]
    assert sorted(position for position in decided if position in causes) == causes
    assert report.verified == report.plans == len(causes)


@pytest.mark.usefixtures("here")
def test_a_decision_that_fails_ends_the_fold_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Fold.decide
    failing = ROWS[at("error.detected", 1)]["position"]

    def failed(self: Fold, record: Recorded) -> list[Event]:
        if record.position == failing:
            raise KeyError("no such state")
        return decide(self, record)

    monkeypatch.setattr(Fold, "decide", failed)
    rows = changed(at("plan.decided", 8), incident="another")(list(ROWS))
    replayer = Replayer.of_file(write(rows, tmp_path / "log.db"))
    report = replayer.verify()
    assert [mismatch.position for mismatch in report.mismatches] == [failing]
    assert replayer.verify(jobs=2) == report


@pytest.mark.slow
def test_the_command_takes_the_number_of_processes(tmp_path: Path) -> None:
    path = restore(read_rows(golden_log("planned-stop")), tmp_path / "log.db")
    app = typer.Typer()
    app.command()(replay)
    result = CliRunner().invoke(app, [str(path), "--verify", "--jobs", "2", "-o", "json"])
    assert result.exit_code == 0
    assert Report.model_validate(json.loads(result.stdout)) == Replayer.of_file(path).verify()
