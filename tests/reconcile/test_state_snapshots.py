"""What a service decides from a snapshot and the rest of the log is what it decides from the whole log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.detector.decide import decide as monitor
from services.detector.decisions.inputs import Echo, Tick
from services.detector.state_snapshot import KEPT as DETECTOR
from services.planner.replay.log_fold import Fold
from services.planner.replay.replay import Replayer
from services.planner.state_snapshot import KEPT as PLANNER
from services.transition.decide import decide
from services.transition.state_snapshot import KEPT as TRANSITION
from shared.events.union import Event, Recorded
from shared.log.log import EventLog
from shared.service.core import Append, Started
from shared.service.state_snapshots import KeptState
from tests.api import test_any_history as any_history
from tests.api.kit import START
from tests.examples import examples
from tests.kept import folded, restored
from tests.logs.kit import COURSES, read_rows, restore
from tests.planner.kit import answers_to, recorded_answers
from tests.planner.test_state import random_course
from tests.reconcile.services import LIMITS, TRANSITION_LIMITS
from tests.shared import samples

S = TypeVar("S")

quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

histories = st.lists(any_history.events | samples.events, max_size=25).map(any_history.record)
NOW = START + timedelta(seconds=600)


def both(kept: KeptState[S], records: Sequence[Recorded], cut: int) -> tuple[S, S]:
    """Return the state of the whole log, and that of a snapshot at a cut with the rest of the log."""
    _, whole = folded(kept, records, len(records))
    after, state = folded(kept, records, min(cut, len(records)))
    assert after <= cut
    _, resumed = folded(kept, records, len(records), after=after, state=restored(kept, state))
    assert resumed == whole
    assert order(resumed) == order(whole)
    return whole, resumed


def order(value: Any) -> Any:
    """Return a state with its maps as lists of pairs: two maps are equal whatever the order of their items."""
    if hasattr(value, "__pydantic_fields__") or hasattr(value, "__dataclass_fields__"):
        names = getattr(value, "__pydantic_fields__", None) or value.__dataclass_fields__
        return [order(getattr(value, name)) for name in names]
    if isinstance(value, dict):
        return [(key, order(each)) for key, each in value.items()]
    return [order(each) for each in value] if isinstance(value, list | tuple) else value


def contents(events: Iterable[Event]) -> list[str]:
    return [event.canonical() for event in events]


def appended(effects: Iterable[object]) -> list[str]:
    return contents(event for effect in effects if isinstance(effect, Append) for event in effect.events)


@quick
@given(histories, st.integers(0, 25))
def test_the_detector_of_any_history(records: list[Recorded], cut: int) -> None:
    whole, resumed = both(DETECTOR, records, cut)
    for item in (Started(), Echo(), Tick()):
        (_, expected), (_, found) = (monitor(state, item, NOW, LIMITS) for state in (whole, resumed))
        assert appended(found) == appended(expected)
    assert resumed == whole


@quick
@given(histories, st.integers(0, 25))
def test_the_transition_service_of_any_history(records: list[Recorded], cut: int) -> None:
    whole, resumed = (replace(state, limits=TRANSITION_LIMITS) for state in both(TRANSITION, records, cut))
    assert decide(resumed, Started(), NOW) == decide(whole, Started(), NOW)


@settings(deadline=None, max_examples=examples(6), suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**16), st.floats(0.0, 1.0))
def test_the_planner_of_any_course(seed: int, share: float) -> None:
    """Each plan behind the snapshot is decided with the same bytes."""
    records = random_course(seed).records
    cut = round(share * len(records))
    both(PLANNER, records, cut)
    after, state = folded(PLANNER, records, cut)
    fold, recorded = Fold(state=restored(PLANNER, state)), recorded_answers(records)
    for record in records[after:]:
        if fold.take(record):
            decided = fold.decide(record)
            assert contents(decided) == contents([r.event for r in answers_to(record, recorded)])
            fold.answer(record, decided)


@pytest.mark.parametrize("golden", COURSES)
def test_recorded_logs(golden: Path, tmp_path: Path) -> None:
    """Read from the database, as the program that writes snapshots reads them."""
    path = restore(read_rows(golden), tmp_path / "log.db")
    with closing(EventLog(f"sqlite:///{path}", read_only=True)) as log:
        records = list(log.read_all())
        for cut in range(0, len(records), 7):
            both(DETECTOR, records, cut)
            both(TRANSITION, records, cut)
            both(PLANNER, records, cut)
        after, state = PLANNER.fold(log, PLANNER.kind(), 0, len(records) // 2)
        assert PLANNER.fold(log, restored(PLANNER, state), after, len(records)) == (
            len(records),
            Replayer(records).state_at(),
        )


def test_an_answer_that_is_still_to_come_is_in_no_snapshot() -> None:
    """Its plan is folded behind its cause, and may yet be lost with the database's last commits."""
    records = random_course(1).records
    recorded = recorded_answers(records)
    causes = [record.position for record in records if answers_to(record, recorded)]
    for position in causes:
        after, state = folded(PLANNER, records, position)
        assert after < position
        assert state.plans == sum(r.event.type == "plan.decided" for r in records[:after])
