"""Tasks that have ended leave the transition service's state; those that may go on, or have something left, stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest

from services.transition import state
from shared.events.union import TaskProgressed
from shared.messages.commands import ReleaseTask
from tests.transition.drive import TWO, Drive, change, stage

PLENTY = [f"t{number}" for number in range(10)]


@pytest.fixture(autouse=True)
def _few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "RECENTLY_ENDED", 3)


def end(drive: Drive, *tasks: str) -> None:
    for task in tasks:
        drive.finish(task)


def start(task: str) -> Drive:
    drive = Drive(tasks=[task, *PLENTY])
    target = stage(1, ["n2/0"], "initial")
    drive.plan("new", change(task, action="move", from_generation=0, prepare=["n2/0"], target=target))
    return drive


def test_those_that_ended_last_are_kept() -> None:
    drive = Drive(tasks=PLENTY)
    end(drive, *PLENTY[:8])
    assert list(drive.state.tasks) == ["t8", "t9", "t5", "t6", "t7"]


def test_late_events_of_one_that_is_not_kept_change_nothing() -> None:
    drive = Drive(tasks=PLENTY)
    end(drive, *PLENTY)
    before = drive.state
    drive.log(
        TaskProgressed(
            event_id="late", occurred_at=drive.at, task="t0", generation=1, step=9, workers=1, step_s=1.0, loss=None
        )
    )
    drive.stopped("t0", 9)
    assert drive.state == before


def test_one_whose_processes_are_still_to_be_ended_is_kept_until_they_are() -> None:
    drive = start("a")
    drive.plan("end", change("a", action="end", release=["n2/0"]))
    end(drive, "a", *PLENTY)
    assert "a" in drive.state.tasks
    (release,) = drive.open("release", "a")
    drive.reply(release)
    assert drive.state.task("a").settled
    end(drive, "t9")
    assert "a" not in drive.state.tasks


def test_one_that_is_paused_goes_on_with_its_specification() -> None:
    drive = Drive(tasks=["a", *PLENTY])
    drive.plan("pause", change("a", action="pause", survivors=TWO, release=TWO))
    for send in drive.open("stop", "a"):
        drive.reply(send)
    drive.stopped("a", 40)
    for send in drive.open("release", "a"):
        drive.reply(send)
    assert not drive.state.task("a").part.active  # type: ignore[union-attr]
    end(drive, *PLENTY)
    target = stage(2, ["n2/0"], "checkpoint")
    drive.plan("again", change("a", action="move", prepare=["n2/0"], target=target))
    assert [send.command.kind for send in drive.open(task="a")] == ["prepare"]


@pytest.mark.parametrize(
    ("ends", "action", "keeps"),
    [
        (Drive.finish, "end", False),
        (Drive.fail, "end", True),
        (partial(Drive.stopped, step=40), "end", True),
        (None, "stop", False),
        (None, "pause", True),
    ],
)
def test_the_copies_of_one_that_may_go_on_stay_in_its_nodes_memory(
    ends: Callable[[Drive, str], None] | None, action: Literal["end", "stop", "pause"], keeps: bool
) -> None:
    """They may be all that there is of its steps since its newest checkpoint."""
    drive = start("a")
    if ends is not None:
        ends(drive, "a")
    drive.plan("end", change("a", action=action, survivors=["n2/0"], release=["n2/0"]))
    for stop in drive.open("stop", "a"):
        drive.reply(stop)
    (release,) = drive.open("release", "a")
    assert isinstance(release.command, ReleaseTask)
    assert (release.command.all_workers, release.command.keep_copies) == (True, keeps)
