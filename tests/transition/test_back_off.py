"""A plan that waits before it starts processes: until its time, over a restart of the service, or until a user acts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from services.transition.state import TimerName
from shared.events.plans import TaskChange
from shared.events.union import TaskResumeRequested
from tests.transition.drive import EPOCH, THREE, Drive, change, restart_change, stage

WAIT_S = 30.0
UNTIL = EPOCH + timedelta(seconds=WAIT_S)


def alone(**rest: Any) -> TaskChange:
    """The answer to a fault that no process has survived."""
    fields = {"failed": THREE, "hold": True, "prepare": THREE, "target": stage(2, THREE, "checkpoint")}
    return change(**{**fields, "not_before": UNTIL, **rest})


def waiting(one: TaskChange) -> Drive:
    """A plan whose every command but the start of processes is answered."""
    drive = Drive()
    drive.plan("p1", one)
    drive.answer_all()
    return drive


def resume(drive: Drive) -> None:
    event = TaskResumeRequested(event_id=f"resume-{len(drive.records)}", occurred_at=drive.at, task="a")
    drive.log(event)


def pass_time(drive: Drive, until_s: float) -> None:
    """Let the time come and its timer run out."""
    drive.at = EPOCH + timedelta(seconds=until_s)
    [timer] = drive.timers
    drive.fire(timer)


def test_no_process_starts_before_its_time() -> None:
    drive = waiting(alone())
    assert [send.command.kind for send in drive.sent] == ["release"] * 3
    [timer] = drive.timers
    assert timer.name is TimerName.BACK_OFF
    assert WAIT_S - 1.0 < timer.after_s < WAIT_S
    pass_time(drive, WAIT_S)
    assert drive.kinds() == ["prepare@n0", "prepare@n1", "prepare@n2"]
    drive.answer_all()
    assert drive.phases() == ["prepared", "restored"]


def test_a_plan_whose_time_has_come_starts_at_once() -> None:
    drive = Drive()
    drive.at = UNTIL
    drive.plan("p1", alone())
    drive.answer_all()
    assert drive.timers == []
    assert drive.phases() == ["prepared", "restored"]


def test_survivors_train_on_meanwhile() -> None:
    drive = waiting(restart_change(not_before=UNTIL))
    assert drive.phases() == ["held", "resumed"]
    assert not any(send.command.kind in ("drain", "prepare") for send in drive.sent)
    pass_time(drive, WAIT_S)
    drive.answer_all()
    assert drive.phases() == ["held", "resumed", "prepared", "drained", "restored"]


def test_survivors_are_not_drained_for_a_process_that_has_to_go() -> None:
    drive = waiting(restart_change(not_before=UNTIL, release=["n1/1"]))
    assert not any(send.command.kind == "drain" for send in drive.sent)
    pass_time(drive, WAIT_S)
    drive.answer_all()
    assert drive.phases() == ["held", "resumed", "prepared", "drained", "released", "restored"]


def retry(**rest: Any) -> TaskChange:
    """The answer to collectives that have broken: all ranks finish the step in place."""
    fields = {"survivors": THREE, "hold": True, "interrupted": stage(2, THREE, interrupted=True)}
    return change(**{**fields, "not_before": UNTIL, **rest})


def test_a_retry_in_place_waits_once_all_have_left_the_broken_step() -> None:
    drive = waiting(retry())
    assert drive.phases() == ["held"]
    assert {send.command.kind for send in drive.sent} == {"hold"}
    [timer] = drive.timers
    assert timer.name is TimerName.BACK_OFF
    pass_time(drive, WAIT_S)
    drive.answer_all()
    assert drive.phases() == ["held", "resumed"]


def test_a_retry_from_storage_waits_too() -> None:
    drive = waiting(retry(interrupted=None, target=stage(2, THREE, "checkpoint")))
    assert {send.command.kind for send in drive.sent} == {"hold"}
    pass_time(drive, WAIT_S)
    drive.answer_all()
    assert drive.phases() == ["held", "restored"]


def test_a_user_ends_the_wait_of_a_retry() -> None:
    drive = waiting(retry())
    resume(drive)
    drive.answer_all()
    assert drive.phases() == ["held", "resumed"]


def test_a_restarted_service_waits_for_what_is_left_of_a_retry() -> None:
    drive = waiting(retry())
    drive.at = EPOCH + timedelta(seconds=20)
    again = drive.restarted()
    again.answer_all()
    [timer] = again.timers
    assert timer.after_s == pytest.approx(10.0, abs=0.1)
    pass_time(again, WAIT_S)
    again.answer_all()
    assert again.phases()[-1] == "resumed"


def test_a_restarted_service_waits_for_what_is_left() -> None:
    drive = waiting(alone())
    drive.at = EPOCH + timedelta(seconds=20)
    again = drive.restarted()
    assert [send.command.kind for send in again.sent] == ["release"] * 3
    again.answer_all()
    [timer] = again.timers
    assert timer.name is TimerName.BACK_OFF
    assert timer.after_s == pytest.approx(10.0, abs=0.1)
    pass_time(again, WAIT_S)
    again.answer_all()
    assert again.phases()[-1] == "restored"


def test_a_service_that_starts_behind_the_time_does_not_wait() -> None:
    drive = waiting(alone())
    drive.at = UNTIL + timedelta(seconds=1)
    again = drive.restarted()
    again.answer_all()
    assert again.timers == []
    assert again.phases()[-1] == "restored"


def test_a_user_ends_the_wait() -> None:
    drive = waiting(alone())
    resume(drive)
    assert drive.kinds() == ["prepare@n0", "prepare@n1", "prepare@n2"]
    drive.answer_all()
    assert drive.phases() == ["prepared", "restored"]
    [timer] = drive.timers
    drive.fire(timer)  # it comes too late for anything
    assert drive.waiting == {}


def test_a_wait_that_a_user_has_ended_stays_ended_for_a_restarted_service() -> None:
    drive = waiting(alone())
    resume(drive)
    again = drive.restarted()
    again.answer_all()
    assert again.timers == []
    assert again.phases()[-1] == "restored"


def test_a_newer_plan_takes_over_at_once() -> None:
    drive = waiting(alone())
    drive.plan("p2", change(action="end", release=THREE))
    drive.answer_all()
    assert drive.phases() == ["ended"]
    [timer] = drive.timers
    drive.fire(timer)
    assert not any(send.command.kind == "prepare" for send in drive.sent)


def test_a_node_that_is_lost_meanwhile_is_not_waited_for() -> None:
    drive = waiting(alone())
    drive.lose("n2")
    drive.plan("p2", change(failed=THREE, prepare=THREE[:2], target=stage(3, THREE[:2], "checkpoint")))
    drive.answer_all()
    assert drive.phases()[-1] == "restored"


def test_a_resumption_of_a_task_that_waits_for_nothing_changes_nothing() -> None:
    drive = Drive()
    resume(drive)
    drive.plan("p1", alone())
    drive.answer_all()
    assert [timer.name for timer in drive.timers] == [TimerName.BACK_OFF]
