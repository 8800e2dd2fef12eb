"""Workers that change hands: between tasks, and between the plans of one task."""

from __future__ import annotations

import pytest

from services.transition.state import Outcome, TimerName
from shared.events.codes import FailureCode
from shared.messages.commands import Prepare, ReleaseTask
from tests.transition.drive import THREE, TWO, Drive, change, restart_change, stage


def test_worker_moves_between_tasks_only_after_its_release() -> None:
    d = Drive(tasks=("a", "b"))
    d.plan(
        "p",
        change("a", survivors=THREE, release=["n2/0"], target=stage(2, TWO)),
        change(
            "b", survivors=["n0/1"], prepare=["n1/1", "n2/0"], target=stage(2, ["n0/1", "n1/1", "n2/0"], take=["n2/0"])
        ),
    )
    prepare = d.one("prepare", "b").command
    assert isinstance(prepare, Prepare)
    assert prepare.workers == ["n1/1"], "free ones start at once"
    d.reply(d.one("prepare", "b"))
    assert d.open(task="b") == [], "it releases nothing that anybody waits for: it trains on"
    for send in d.open("drain", "a"):
        assert d.open("release") == []
        d.reply(send)
    assert d.phases("a") == ["drained"]
    release = d.one("release", "a", "n2").command
    assert isinstance(release, ReleaseTask)
    assert (release.workers, release.all_workers) == (["n2/0"], True)
    assert d.open("prepare") == []
    d.reply(d.one("release", "a"))
    late = d.one("prepare", "b", "n2").command
    assert isinstance(late, Prepare)
    assert late.workers == ["n2/0"]
    d.answer_all()
    assert d.phases("a") == ["drained", "released", "restored"]
    assert d.phases("b") == ["prepared", "drained", "restored"]


def test_tasks_that_exchange_workers_do_not_wait_for_each_other() -> None:
    d = Drive(tasks=("a", "b"))
    d.plan(
        "p",
        change("a", survivors=["n0/0", "n0/1"], release=["n0/1"], prepare=["n1/1"], target=stage(2, ["n0/0", "n1/1"])),
        change("b", survivors=["n1/0", "n1/1"], release=["n1/1"], prepare=["n0/1"], target=stage(2, ["n1/0", "n0/1"])),
    )
    assert d.kinds() == ["drain@n0", "drain@n1"]
    d.answer_all()
    assert d.phases("a")[-1] == d.phases("b")[-1] == "restored"


def test_release_by_an_earlier_plan_is_waited_for() -> None:
    d = Drive(tasks=("a", "b"))
    d.plan("p", change("a", survivors=THREE, release=["n2/0"], target=stage(2, TWO)))
    d.plan("q", change("b", prepare=["n2/0"], target=stage(1, ["n2/0"], "initial")))
    assert d.open("prepare") == []
    d.answer_all()
    assert d.phases("b") == ["prepared", "restored"]


def test_worker_that_is_never_released_ends_the_wait() -> None:
    d = Drive(tasks=("a", "b"))
    d.plan("p", change("a", survivors=THREE, release=["n2/0"], target=stage(2, TWO)))
    d.plan("q", change("b", prepare=["n2/0"], target=stage(1, ["n2/0"], "initial")))
    (timer,) = d.timers
    assert (timer.task, timer.name) == ("b", TimerName.WAIT)
    d.fire(timer)
    assert d.phases("b") == ["failed"]
    assert d.moved[-1].code is FailureCode.OCCUPIED
    assert "n2/0" in d.moved[-1].detail


def test_new_plan_takes_over_and_old_answers_are_ignored() -> None:
    d = Drive()
    d.plan("p", restart_change())
    old = d.open()
    d.plan("q", restart_change(interrupted=stage(4, TWO, interrupted=True), target=stage(5, THREE, take=["n2/0"])))
    assert {s.command.plan for s in d.open()} == {"q"}
    assert {s.command.command_id for s in old}.isdisjoint(d.waiting)
    d.answer_all()
    assert {m.plan for m in d.moved} == {"q"}
    assert d.phases()[-1] == "restored"


def test_process_that_a_superseded_plan_started_is_released() -> None:
    d = Drive()
    d.plan("p", restart_change(failed=[], prepare=["n1/1"], target=stage(3, [*TWO, "n1/1"], take=["n1/1"])))
    assert d.open("prepare")
    d.plan("q", change(survivors=TWO, prepare=["n2/1"], target=stage(4, [*TWO, "n2/1"], take=["n2/1"])))
    d.answer_all()
    assert [s.command.workers for s in d.sent if isinstance(s.command, ReleaseTask)] == [["n1/1"]]
    assert d.phases()[-1] == "restored"


def test_task_that_ends_by_itself_frees_its_workers() -> None:
    d = Drive(tasks=("a", "b"))
    d.plan("p", change("a", survivors=TWO, release=["n1/0"], target=stage(2, ["n0/0"])))
    d.finish("a")
    assert d.outcomes == {("p", "a"): Outcome.SUPERSEDED}
    d.plan("q", change("b", prepare=["n1/0"], target=stage(1, ["n1/0"], "initial")))
    assert d.kinds() == ["prepare@n1"]


def test_last_released_worker_lost_still_ends_the_part() -> None:
    d = Drive()
    d.plan("p", restart_change(failed=[], prepare=["n2/1"], target=stage(3, [*TWO, "n2/1"])))
    d.plan("q", change(action="none", survivors=TWO, hold=True, interrupted=stage(4, TWO, interrupted=True)))
    for kind in ("hold", "hold", "open-store", "configure", "configure"):
        d.reply(d.open(kind)[0])
    assert not d.moved[-1].complete
    d.lose("n2")
    assert d.moved[-1].complete


def test_process_that_a_task_starts_again_on_its_own_worker_waits_for_the_release() -> None:
    """The worker is among those of the release and among those of the start."""
    d = Drive()
    d.plan("p", change(survivors=THREE, release=["n2/0"], prepare=["n2/0"], target=stage(2, THREE, take=["n2/0"])))
    assert d.kinds() == ["drain@n0", "drain@n1", "drain@n2"]
    for send in d.open("drain"):
        d.reply(send)
    assert d.kinds() == ["release@n2"]
    d.reply(d.one("release"))
    assert d.kinds() == ["prepare@n2"]
    d.answer_all()
    assert d.phases() == ["drained", "released", "prepared", "restored"]


@pytest.mark.parametrize("moment", ["draining", "drained", "released"])
def test_process_that_starts_after_the_drain_began_has_the_generation_of_the_target(moment: str) -> None:
    """The survivors' nodes have seen the target's generation by then, and refuse older commands."""
    d = Drive(tasks=("a", "b"))
    d.plan("p", change("b", from_generation=0, prepare=["n1/1"], target=stage(1, ["n1/1"], "initial")))
    d.answer_all()
    releases = restart_change(
        survivors=THREE, failed=[], interrupted=stage(2, THREE, interrupted=True), release=["n2/0"],
        prepare=["n1/1"], target=stage(3, [*TWO, "n1/1"], take=["n1/1"]),
    )  # fmt: skip
    d.plan("q", releases)
    while not d.open("drain"):
        d.reply(d.open(task="a")[0])
    assert d.open("prepare") == []
    if moment != "draining":
        while d.open("drain"):
            d.reply(d.open("drain")[0])
    if moment == "released":
        d.reply(d.one("release"))
    d.finish("b")
    assert d.one("prepare").command.generation == 3
    d.answer_all()
    assert d.phases("a")[-1] == "restored"


def test_process_that_a_superseded_plan_was_starting_is_asked_for_again_at_once() -> None:
    """The worker is the task's own: nobody has to release it."""
    d = Drive()
    first = restart_change(failed=[], prepare=["n1/1"], target=stage(3, [*TWO, "n1/1"], take=["n1/1"]))
    d.plan("p", first)
    (before,) = d.open("prepare")
    again = stage(5, [*TWO, "n1/1"], take=["n1/1"])
    d.plan("q", first.model_copy(update={"interrupted": stage(4, TWO, interrupted=True), "target": again}))
    (after,) = d.open("prepare")
    assert (after.command.plan, after.workers) == ("q", before.workers)
    d.answer_all()
    assert d.phases()[-1] == "restored"
