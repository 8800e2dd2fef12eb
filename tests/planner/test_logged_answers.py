"""The answers of the log at the start of the planner's service: each is found behind its cause, and none is kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from services.planner import logged_answers
from services.planner.log_start import last_parameters, start_of
from services.planner.logged_answers import LoggedAnswers
from services.planner.replay.log_fold import Fold
from services.planner.replay.replay import Replayer
from shared.events.union import ClusterConfigured, PlanDecided, Recorded
from shared.log.log import EventLog
from tests.logs.kit import GOLDEN, read_rows, restore
from tests.planner.kit import answers_to, recorded_answers


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
async def test_the_fold_of_a_start_is_that_of_replay(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in small pages. Nothing is decided again, and what was read ahead is small at any time."""
    monkeypatch.setattr(logged_answers, "PAGE", 3)
    path = restore(read_rows(golden), tmp_path / "log.db")
    with closing(EventLog(f"sqlite:///{path}", read_only=True)) as log:
        records = list(log.read_all())
        start = start_of(log)
        pages: list[int] = []

        async def read(*, after: int, limit: int, types: Sequence[str] = ()) -> list[Recorded]:
            pages.append(limit)
            return log.read(after=after, limit=limit, types=types)

        deciders = [r.event.decider for r in records if isinstance(r.event, PlanDecided)]
        assert (start.last, start.decider) == (len(records), max(deciders))
        configured = [r.event for r in records if isinstance(r.event, ClusterConfigured)]
        assert await last_parameters(read, start) == configured[-1]
        answers, fold, expected = LoggedAnswers(read, dict(start.answers)), Fold(), recorded_answers(records)
        for record in records:
            if fold.take(record):
                answer = await answers.to(record)
                assert answer == answers_to(record, expected)
                fold.answer(record, [r.event for r in answer])
                assert len(answers._ahead) <= 2 * 3
        assert fold.state == Replayer(records).state_at()
        assert set(pages) == {1, 3}
        answers.forget()
        assert await answers.to(records[1]) == []


def test_a_start_on_an_empty_log(tmp_path: Path) -> None:
    with closing(EventLog(f"sqlite:///{tmp_path / 'log.db'}")) as log:
        assert start_of(log) == (0, 0, 0, {}, frozenset())
