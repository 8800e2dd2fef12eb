"""Whether a hold spares a replica, for any order of what a rank hears and does."""

from __future__ import annotations

import pytest

from unicron.link.sparing import UNMEASURED_S, Sparing
from unicron.protocol import environment

FLOOR_S = 0.5

WORKERS = ["n0/0", "n0/1", "n1/0", "n1/1"]


@pytest.fixture
def sparing(monkeypatch: pytest.MonkeyPatch) -> Sparing:
    """What rank 0 of two replicas of two ranks knows, which computes since second 10."""
    monkeypatch.setenv(environment.FINISH_FLOOR_S, str(FLOOR_S))
    made = Sparing()
    made.join(WORKERS)
    made.set_replica([0, 1])
    made.begin_passes(10.0)
    return made


def test_a_replica_that_has_lost_nobody_is_spared_while_it_computes(sparing: Sparing) -> None:
    assert not sparing.spares(10.0)  # nothing is held
    sparing.hold(["n1/1"], 10.1)
    assert sparing.spares(10.2)
    sparing.end_passes()
    assert not sparing.spares(10.2)
    sparing.begin_passes(10.3)  # whose last step ended before the hold came: the next one has to be computed, too
    assert sparing.spares(10.3)


@pytest.mark.parametrize("lost", [[], ["n0/1"], ["n0/1", "n1/1"], ["n9/0"]])
def test_an_own_loss_and_an_unknown_one_spare_nothing(lost: list[str], sparing: Sparing) -> None:
    sparing.hold(lost, 10.1)
    assert not sparing.spares(10.1)
    sparing.hold(["n1/1"], 10.2)  # what is broken off stays so
    assert not sparing.spares(10.2)


@pytest.mark.parametrize("second", [[], ["n0/0", "n1/1"]])
def test_a_second_hold_may_break_off_what_the_first_has_spared(second: list[str], sparing: Sparing) -> None:
    sparing.hold(["n1/1"], 10.1)
    sparing.hold(["n1/0", "n1/1"], 10.2)
    assert sparing.spares(10.2)
    sparing.hold(second, 10.3)
    assert not sparing.spares(10.3)


def test_a_replica_that_finishes_no_micro_batch_is_broken_off(sparing: Sparing) -> None:
    assert sparing.limit_s == UNMEASURED_S
    for now_s in (10.1, 10.2, 10.6):
        sparing.finish_micro_batch(now_s)
    assert sparing.limit_s == pytest.approx(0.8)  # twice the longest
    sparing.hold(["n1/1"], 11.0)  # from here on, whatever was before
    assert sparing.spares(11.7)
    sparing.finish_micro_batch(11.7)
    assert sparing.spares(12.6)
    assert not sparing.spares(14.0)
    sparing.finish_micro_batch(14.0)
    assert not sparing.spares(14.0)


def test_a_replica_of_one_rank_and_one_whose_groups_are_not_made_leave_at_once(sparing: Sparing) -> None:
    sparing.set_replica([0])
    sparing.hold(["n1/1"], 10.1)
    assert not sparing.spares(10.1)
    sparing.join(WORKERS)
    sparing.hold(["n1/1"], 10.2)
    sparing.set_replica([0, 1])
    sparing.begin_passes(10.3)
    assert not sparing.spares(10.3)
