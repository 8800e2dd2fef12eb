"""Failures on the way: the state-moved event that follows, its code, and the workers to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from services.transition import phases
from services.transition.state import Outcome, TimerName
from shared.events.codes import FailureCode
from shared.events.plans import Layout
from shared.events.union import TaskStopRequested
from shared.messages.commands import ConfigureTask, HoldTask, StopTask
from tests.transition.drive import THREE, TWO, Drive, change, restart_change, stage


def test_ranks_that_do_not_hold_are_named() -> None:
    d = Drive()
    d.plan("p", restart_change(survivors=["n0/0", "n0/1", "n1/0"]))
    hold = d.one("hold", node="n0")
    assert isinstance(hold.command, HoldTask)
    assert hold.command.lost == ["n2/0"]
    d.silence(hold)
    assert d.phases() == [], "the others have the same deadline"
    d.silence(d.one("hold", node="n1"))
    d.answer_all()
    (failed,) = d.moved
    assert failed.phase == "failed"
    assert failed.failed_workers == ["n0/0", "n0/1", "n1/0"]
    assert failed.code is FailureCode.TIMEOUT
    assert failed.detail.startswith("timeout: hold")
    assert not d.waiting


def test_agent_names_who_did_not_hold() -> None:
    d = Drive()
    d.plan("p", change(action="none", survivors=["n0/0", "n0/1"], hold=True, interrupted=stage(2, ["n0/0", "n0/1"])))
    d.reply(d.one("hold"), ok=False, code="timeout", workers={"n0/0": {"step": 7}})
    assert d.moved[-1].failed_workers == ["n0/1"]


@pytest.mark.parametrize("kind", ["hold", "open-store", "configure", "drain", "prepare"])
def test_refusal_of_any_command_ends_the_part(kind: str) -> None:
    d = Drive()
    d.plan("p", restart_change())
    while not d.open(kind):
        d.reply(d.open()[0])
    send = d.open(kind)[0]
    d.reply(send, ok=False, code="internal", detail="broken")
    d.answer_all()
    failed = d.moved[-1]
    assert failed.phase == "failed"
    assert set(failed.failed_workers) == set(send.workers)
    assert failed.code is FailureCode.INTERNAL
    assert failed.detail.startswith("internal: ")
    assert "broken" in failed.detail
    assert d.outcomes == {("p", "a"): Outcome.FAILED}


def test_failure_beside_the_interrupted_stage_lets_the_survivors_finish() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.reply(d.one("release"))
    d.reply(d.one("prepare"), ok=False, code="internal")
    assert d.phases() == []
    d.answer_all()
    assert d.phases() == ["held", "resumed", "failed"]
    assert d.moved[-1].failed_workers == ["n2/0"]


def test_death_of_a_process_waits_for_the_plan_that_answers_it() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.reply(d.one("hold", node="n0"), ok=False, code="process-exited", detail="n0/0 exited with -9")
    assert d.phases() == []
    (timer,) = d.timers
    assert timer.name is TimerName.GRACE
    d.plan("q", change(survivors=["n1/0"], failed=["n0/0", "n2/0"], hold=True, target=stage(4, ["n1/0"])))
    d.fire(timer)
    d.answer_all()
    assert d.phases() == ["held", "restored"]
    assert d.outcomes == {("p", "a"): Outcome.SUPERSEDED, ("q", "a"): Outcome.DONE}


def test_death_of_a_process_without_a_plan_is_recorded() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.reply(d.one("hold", node="n0"), ok=False, code="process-exited", detail="n0/0 exited with -9")
    d.fire(d.timers[0])
    assert d.phases() == ["failed"]
    assert d.moved[0].code is FailureCode.PROCESS_EXITED
    assert d.moved[0].detail.startswith("process-exited: hold: n0: n0/0")
    assert d.moved[0].failed_workers == ["n0/0"]
    assert not d.waiting


def test_members_that_missed_a_peer_are_not_to_blame() -> None:
    """Two of three workers could not join because the third did not come: the third is named."""
    d = Drive()
    d.plan("p", change(prepare=["n0/0", "n1/0", "n2/0"], target=stage(2, ["n0/0", "n1/0", "n2/0"], "initial")))
    while not d.open("configure"):
        d.reply(d.open()[0])
    for node in ("n0", "n1"):
        cleared = {f"{node}/0": {"step": 0}}
        d.reply(d.one("configure", node=node), ok=False, code="rank-raised", detail="time-out", workers=cleared)
    d.fire(d.timers[0])
    assert d.phases()[-1] == "failed"
    assert d.moved[-1].failed_workers == ["n2/0"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_plan_that_counts_on_a_released_process_fails_at_once(restart: bool) -> None:
    """The planner decided before it knew that the release had begun."""
    d = Drive()
    d.plan("p", change(survivors=["n0/0", "n1/0"], release=["n1/0"], target=stage(2, ["n0/0"])))
    for node in ("n0", "n1"):
        d.reply(d.one("drain", node=node))
    assert d.open("release", node="n1")
    if restart:
        d = d.restarted()
    both = ["n0/0", "n1/0"]
    interrupted = stage(3, both, interrupted=True)
    d.plan("q", change(action="none", from_generation=2, survivors=both, hold=True, interrupted=interrupted))
    assert d.moved[-1].phase == "failed"
    assert d.moved[-1].failed_workers == ["n1/0"]
    assert d.moved[-1].code is FailureCode.RELEASED
    assert d.moved[-1].detail.startswith("released: ")
    # The next plan starts the process again; the one after that may count on it.
    again = change(survivors=["n0/0"], failed=["n1/0"], hold=True, prepare=["n1/0"], target=stage(4, both))
    d.plan("r", again)
    d.answer_all()
    assert d.phases()[-1] == "restored"
    d.plan("s", change(action="none", survivors=both, hold=True, interrupted=stage(5, both, interrupted=True)))
    d.answer_all()
    assert d.phases()[-1] == "resumed"


def test_a_fenced_part_ends_without_an_event() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.reply(d.open("hold")[0], ok=False, code="fenced")
    assert d.moved == []
    assert not d.waiting
    assert d.outcomes == {("p", "a"): Outcome.SUPERSEDED}


@pytest.mark.parametrize("goes", [Drive.lose, Drive.leave])
def test_node_lost_on_the_way_waits_for_the_next_plan(goes: Callable[[Drive, str], None]) -> None:
    d = Drive()
    d.plan("p", restart_change())
    goes(d, "n1")
    assert "hold@n1" not in d.kinds()
    (timer,) = d.timers
    d.fire(timer)
    assert d.moved[-1].phase == "failed"
    assert d.moved[-1].failed_workers == ["n1/0"]
    assert d.moved[-1].code is FailureCode.NODE_LOST
    assert d.moved[-1].detail.startswith("node-lost")


def test_node_of_the_newcomer_lost_lets_the_survivors_finish() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.lose("n2")
    d.answer_all()
    assert d.phases() == ["held", "resumed"]
    d.fire(d.timers[0])
    assert d.phases() == ["held", "resumed", "failed"]


def test_unknown_task_fails() -> None:
    d = Drive()
    d.plan("p", change("ghost", prepare=["n0/0"], target=stage(1, ["n0/0"], "initial")))
    assert d.phases("ghost") == ["failed"]
    assert d.moved[-1].code is FailureCode.UNKNOWN_TASK


@pytest.mark.parametrize(("code", "recorded"), [("gpu-on-fire", FailureCode.UNKNOWN), ("", FailureCode.REFUSED)])
def test_a_code_that_is_not_known_fails_the_part_like_any_other(code: str, recorded: FailureCode) -> None:
    """An agent of another version sends a code that this version does not know, or none."""
    d = Drive()
    d.plan("p", restart_change())
    d.reply(d.one("hold", node="n0"), ok=False, code=code, detail="hot")
    failed = d.moved[-1]
    assert (failed.phase, failed.code, failed.failed_workers) == ("failed", recorded, ["n0/0"])
    assert code in failed.detail


def test_the_first_failure_gives_the_code() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.reply(d.one("release"))
    d.reply(d.one("prepare"), ok=False, code="unavailable")
    d.reply(d.one("hold", node="n0"), ok=False, code="internal")
    assert d.moved[-1].code is FailureCode.UNAVAILABLE
    assert d.moved[-1].detail.startswith("unavailable: prepare: n2: ; internal: hold: n0: ")


def test_ranks_that_cannot_save_have_not_stopped() -> None:
    """Nobody is to blame, no command is left, and the next plan may count on their processes."""
    d = Drive()
    d.plan("p", change(action="stop", survivors=TWO, release=TWO))
    stop = d.one("stop", node="n1")
    assert isinstance(stop.command, StopTask)
    assert not stop.command.lose_steps
    all_workers = {"n1/0": {"step": 7}}
    d.reply(stop, ok=False, code="checkpoint-failed", detail="no room", workers=all_workers)
    (failed,) = d.moved
    assert (failed.phase, failed.code, failed.failed_workers) == ("failed", FailureCode.CHECKPOINT_FAILED, [])
    assert failed.detail == "checkpoint-failed: stop: no room"
    assert not d.waiting
    d.plan("p2", change(survivors=TWO, target=stage(2, TWO)))
    assert [phase for phase in d.phases() if phase == "failed"] == ["failed"]
    assert d.kinds() == ["drain@n0", "drain@n1", "open-store@n0"]


def released() -> Drive:
    """A task whose worker on n2 is being released."""
    d = Drive()
    d.plan("p", change(survivors=THREE, release=["n2/0"], target=stage(2, TWO)))
    for send in d.open("drain"):
        d.reply(send)
    assert d.open("release", node="n2")
    return d


@pytest.mark.parametrize("action", ["move", "pause"])
def test_a_plan_that_needs_a_released_process_no_more_goes_on_without_it(action: Literal["move", "pause"]) -> None:
    d = released()
    interrupted = stage(3, THREE, interrupted=True)
    rest: dict[str, Any] = {"from_generation": 2, "survivors": THREE, "hold": True, "interrupted": interrupted}
    if action == "move":
        rest |= {"release": ["n1/0", "n2/0"], "target": stage(4, ["n0/0"])}
    d.plan("q", change(action=action, **rest))
    assert d.kinds() == ["hold@n0", "hold@n1", "open-store@n0"]
    while not d.open("configure"):
        d.reply(d.open()[0])
    for send in d.open("configure"):
        assert isinstance(send.command, ConfigureTask)
        assert (send.command.stage.layout.data, phases.members(send.command.stage)) == (2, TWO)
        assert send.command.stage.nodes == {"n0", "n1"}
    d.answer_all()
    d.stopped("a", 7)
    ending = ["drained", "released", "restored"] if action == "move" else ["ended"]
    assert d.phases() == ["drained", "held", "resumed", *ending]


def test_a_plan_whose_survivors_have_the_state_only_together_fails_without_one() -> None:
    d = released()
    interrupted = stage(3, THREE, interrupted=True)
    divided = interrupted.model_copy(update={"layout": Layout(tensor=3, pipeline=1, data=1, micro_batch=1)})
    rest: dict[str, Any] = {"release": ["n1/0", "n2/0"], "target": stage(4, ["n0/0"])}
    d.plan("q", change(from_generation=2, survivors=THREE, hold=True, interrupted=divided, **rest))
    assert d.moved[-1].code is FailureCode.RELEASED


@pytest.mark.parametrize("action", ["stop", "pause"])
def test_ranks_that_are_asked_to_stop_are_held_when_a_fault_meets_the_stop(action: Literal["stop", "pause"]) -> None:
    """They have exited only once they say so. Until then the answer to the fault may count on them."""
    d = Drive()
    d.plan("p", change(action=action, survivors=THREE, release=THREE))
    d.reply(d.one("stop", node="n2"), ok=False, code="process-exited", detail="n2/0 exited with -9")
    d.plan("q", change(action=action, survivors=TWO, failed=["n2/0"], hold=True, interrupted=stage(2, TWO)))
    assert {"hold@n0", "hold@n1"} <= set(d.kinds())
    while not d.open("stop"):
        d.reply(d.open()[0])
    assert d.phases() == ["held", "resumed"]
    d.reply(d.one("stop", node="n0"))
    d.plan("r", change(action=action, survivors=TWO, hold=True, interrupted=stage(3, TWO)))
    assert (d.moved[-1].phase, d.moved[-1].code) == ("failed", FailureCode.RELEASED), "n0/0 has exited"
    assert d.moved[-1].failed_workers == ["n0/0"]


def test_steps_are_lost_only_by_a_pause_or_on_request() -> None:
    d = Drive()
    d.plan("p", change(action="pause", survivors=TWO, release=TWO))
    assert all(isinstance(s.command, StopTask) and s.command.lose_steps for s in d.open("stop"))
    asked = Drive()
    asked.log(TaskStopRequested(event_id="x", occurred_at=asked.at, task="a", lose_steps=True))
    asked.plan("p", change(action="stop", survivors=TWO, release=TWO))
    assert len(asked.open("stop")) == 2
    assert all(isinstance(s.command, StopTask) and s.command.lose_steps for s in asked.open("stop"))
