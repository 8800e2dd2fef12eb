"""Tasks in simulated time without a planner: updates, checkpoints, and what a recovery loses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.run.agenda import Agenda
from simulator.run.training import Training
from tests.simulator import small


def test_checkpoints_have_whole_updates() -> None:
    training = Training(small.task(), checkpoint_every_s=100.0)
    training.go_on(0.0, 0.25)
    training.advance(250.0)  # checkpoints at 100 s and 200 s
    assert training.step == 62.5
    assert training.saved_step == 50
    training.lose("checkpoint")
    assert training.step == 50.0
    assert training.recomputed == 12
    training.advance(340.0)
    assert training.saved_step == 50
    training.advance(350.0)  # 100 s after the recovery
    assert training.saved_step == 75


def test_what_is_lost() -> None:
    training = Training(small.task(), checkpoint_every_s=1e9, step=3.75)
    training.lose("nothing")
    assert training.step == 3.75
    training.lose("step")
    assert training.step == 3.0
    assert training.recomputed == 0
    training.save()
    training.step = 3.5
    training.lose("checkpoint")
    assert training.step == 3.0


@given(st.lists(st.floats(0.0, 1000.0), max_size=20))
def test_when_it_is_looked_at_does_not_matter(times: list[float]) -> None:
    looked_at, other = (Training(small.task(), checkpoint_every_s=70.0) for _ in range(2))
    for training in (looked_at, other):
        training.go_on(0.0, 0.37)
    for at_s in sorted(times):
        looked_at.advance(at_s)
    for training in (looked_at, other):
        training.advance(1000.0)
    assert looked_at.step == pytest.approx(other.step, rel=1e-12)
    assert looked_at.saved_step == other.saved_step == math.floor(0.37 * 980.0)


def test_agenda_keeps_the_order() -> None:
    agenda, happened = Agenda(), list[tuple[str, float]]()
    for name, at_s in (("late", 5.0), ("first", 1.0), ("second", 1.0), ("never", 2.0), ("behind", 9.0)):
        entry = agenda.at(at_s, lambda name=name: happened.append((name, agenda.now_s)))  # type: ignore[misc]
        if name == "never":
            entry.cancel()
    agenda.run(6.0, lambda _: None)
    assert happened == [("first", 1.0), ("second", 1.0), ("late", 5.0)]
    assert agenda.now_s == 6.0
    agenda.at(2.0, lambda: happened.append(("passed", agenda.now_s)))
    agenda.run(7.0, lambda _: None)
    assert happened[-1] == ("passed", 6.0)
