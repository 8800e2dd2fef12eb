"""The start of the planner's service: the fold of the log is that of replay, and what it lacks is decided on once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.planner import log_start
from services.planner.decide import DECIDER
from services.planner.log_start import LogStart
from services.planner.replay.log_fold import Fold
from services.planner.replay.replay import Replayer
from shared.errors import Conflict, Unavailable
from shared.events.union import Event, PlanDecided, Recorded
from shared.log.log import EventLog
from tests.logs.kit import GOLDEN, read_rows, restore


class Away(EventLog):
    """A log whose pages have seven records, and that is away at every third read of one."""

    reads = 0

    def read(self, **given: Any) -> list[Recorded]:
        self.reads += 1
        if self.reads % 3 == 0:
            raise Unavailable("away")
        return super().read(**{**given, "limit": 7})


def undecided(_: Recorded) -> list[Event]:
    return []


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_the_fold_of_a_start_is_that_of_replay_also_after_outages(golden: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{restore(read_rows(golden), tmp_path / 'log.db')}"
    with closing(EventLog(url, read_only=True)) as log:
        records = list(log.read_all())
    start, outages = LogStart(fold := Fold(), 0, undecided), 0
    with closing(Away(url, read_only=True)) as log:
        while not start.last or start.position < start.last:
            try:
                start.fold(log)
            except Unavailable:
                outages += 1
    assert outages > 0
    assert (start.position, start.decided) == (len(records), [])
    assert fold.state == Replayer(records).state_at()


def test_what_has_no_answer_is_decided_on_in_its_place(tmp_path: Path) -> None:
    """The log ends behind a cause: its answer is the one that the log had, and is folded once, when it is delivered."""
    rows = read_rows(GOLDEN[-1])
    with closing(EventLog(f"sqlite:///{restore(rows, tmp_path / 'whole.db')}", read_only=True)) as log:
        records = list(log.read_all())
    decider = max(r.event.decider for r in records if isinstance(r.event, PlanDecided))
    first = next(r for r in records if isinstance(r.event, PlanDecided))
    with closing(EventLog(f"sqlite:///{restore(rows[: first.position - 1], tmp_path / 'cut.db')}")) as log:
        start = LogStart(fold := Fold(), 0, lambda record: fold.decide(record))
        start.fold(log)
    assert decider == DECIDER
    assert [event.canonical() for event in start.decided] == [first.event.canonical()]
    assert not fold.is_delivered
    assert not fold.take(first)


def test_a_start_on_an_empty_log_and_on_one_of_a_newer_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(EventLog(f"sqlite:///{tmp_path / 'log.db'}")) as log:
        (start := LogStart(Fold(), 0, undecided)).fold(log)
    assert (start.position, start.last, start.decided) == (0, 0, [])
    monkeypatch.setattr(log_start, "DECIDER", DECIDER - 2)
    path = restore(read_rows(GOLDEN[-1]), tmp_path / "newer.db")
    with closing(EventLog(f"sqlite:///{path}", read_only=True)) as log:
        with pytest.raises(Conflict, match=f"decider {DECIDER}, this program is decider {DECIDER - 2}"):
            LogStart(Fold(), 0, undecided).fold(log)
