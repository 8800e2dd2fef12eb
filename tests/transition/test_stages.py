"""The stages of a plan, one row of the table in docs/architecture.md after the other, without failures on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.transition import decide, phase_commands, phases
from services.transition.state import Outcome
from shared.events.severities import ErrorKind
from shared.messages.commands import COMMANDS, ConfigureTask, Prepare
from tests.transition.drive import THREE, TWO, Drive, change, restart_change, stage


def test_retry_holds_all_and_finishes_the_step() -> None:
    d = Drive()
    d.error(ErrorKind.CONNECTION, task="a", step=7)
    d.plan("p", change(action="none", survivors=THREE, hold=True, interrupted=stage(2, THREE, interrupted=True)))
    assert d.kinds() == ["hold@n0", "hold@n1", "hold@n2", "open-store@n0"]
    d.reply(d.one("open-store"), host="h", port=5)
    d.reply(d.one("hold", node="n1"))
    d.reply(d.one("hold", node="n0"))
    assert d.phases() == []
    assert d.kinds() == ["hold@n2"]
    d.reply(d.one("hold", node="n2"))
    assert d.kinds() == ["configure@n0", "configure@n1", "configure@n2"]
    command = d.one("configure", node="n1").command
    assert isinstance(command, ConfigureTask)
    assert (command.generation, command.store_host, command.store_port, command.fault_step) == (2, "h", 5, 7)
    d.answer_all()
    assert d.phases() == ["held", "resumed"]
    held, resumed = d.moved
    assert not held.complete
    assert resumed.complete
    assert resumed.generation == 2
    assert resumed.sources == dict.fromkeys(THREE, "own")
    assert resumed.deal == {"0": [0, 2], "1": [1, 3]}
    assert resumed.pids == {}  # no process was started
    assert resumed.step == 8
    assert resumed.durations_s.keys() >= {"hold", "store", "configure", "rebuild", "agree"}
    assert resumed.durations_s["rebuild"] == pytest.approx(0.1)
    assert resumed.durations_s["store"] == pytest.approx(0.01)
    assert held.started_at < held.occurred_at <= resumed.started_at < resumed.occurred_at
    assert d.outcomes == {("p", "a"): Outcome.DONE}


def test_the_command_of_a_node_names_all_members_of_a_large_stage_in_few_bytes() -> None:
    """Each node gets it, so what it takes for each rank counts as often as there are nodes."""
    workers = [f"n{node}/{slot}" for node in range(512) for slot in range(8)]
    d = Drive()
    d.plan("p", change(action="none", survivors=workers, interrupted=stage(2, workers, interrupted=True)))
    for send in d.open("open-store") + d.open("hold"):
        d.reply(send)
    command, other = (d.one("configure", node=node).command for node in ("n17", "n511"))
    assert isinstance(command, ConfigureTask)
    assert isinstance(other, ConfigureTask)
    sent = COMMANDS.request.encode(command)
    assert COMMANDS.request.decode(sent) == command
    assert len(sent) < 2 * len(workers)
    assert command.stage is other.stage  # it is checked and written once


def test_restart_prepares_beside_the_survivors_and_then_joins() -> None:
    d = Drive()
    d.plan("p", restart_change(), incident="i")
    assert d.kinds() == ["hold@n0", "hold@n1", "open-store@n0", "release@n2"]
    d.reply(d.one("release"))
    prepare = d.one("prepare").command
    assert isinstance(prepare, Prepare)
    # Not generation 3: an agent refuses older commands, and the survivors on the same node still have to join 2.
    assert (prepare.generation, prepare.workers, prepare.spec.name) == (2, ["n2/0"], "a")
    for _ in range(2):
        d.reply(d.open("hold")[0])
    d.reply(d.one("open-store"))
    for _ in range(2):
        d.reply(d.open("configure")[0])
    assert d.phases() == ["held", "resumed"], "the survivors do not wait for the process"
    assert not d.moved[-1].complete
    assert d.kinds() == ["prepare@n2"], "no drain before the process is up"
    d.reply(d.one("prepare"))
    assert d.kinds() == ["drain@n0", "drain@n1", "open-store@n0"], "the store opens while the step is finished"
    assert {s.command.generation for s in d.open()} == {3}
    d.reply(d.one("open-store"))
    for _ in range(2):
        assert d.open("configure") == []
        d.reply(d.open("drain")[0])
    assert d.kinds() == ["configure@n0", "configure@n1", "configure@n2"]
    d.answer_all()
    assert d.phases() == ["held", "resumed", "prepared", "drained", "restored"]
    assert [m.complete for m in d.moved] == [False] * 4 + [True]
    assert {m.incident for m in d.moved} == {"i"}
    assert d.moved[-1].sources["n2/0"] == "live"
    assert d.moved[2].pids == {"n2/0": 100}
    assert d.moved[-1].durations_s.keys() >= {"free", "prepare", "drain", "store", "configure", "rebuild"}


def test_the_work_for_a_reply_does_not_grow_with_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of thousands of workers, made once for each worker or each reply, would delay a plan."""
    listed: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any) -> Any:
            listed.append(name)
            return function(*given)

        return count

    for module in (decide, phase_commands, phases):
        for name in ("members", "preparing", "to_hold", "to_drain", "to_release"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counting(name, getattr(module, name)))

    def work(nodes: int) -> tuple[int, list[int]]:
        """Return how often workers were listed for the plan, and for each reply of its stage but the last."""
        names = [f"n{number}" for number in range(nodes)]
        workers = [f"{name}/{slot}" for name in names for slot in range(2)]
        d = Drive(nodes=names)
        listed.clear()
        d.plan("p", change(prepare=workers, target=stage(1, workers, "initial"), from_generation=0))
        planned = len(listed)
        for _ in names:
            d.reply(d.open("prepare")[0])
        d.reply(d.one("open-store"))
        answers = []
        for _ in names[1:]:
            listed.clear()
            d.reply(d.open("configure")[0])
            answers.append(len(listed))
        return planned, answers

    few, many = work(2), work(12)
    assert 0 < few[0] == many[0]
    assert {*few[1], *many[1]} == {0}


def test_no_survivor_has_the_state() -> None:
    d = Drive()
    d.plan(
        "p",
        change(failed=TWO, prepare=TWO, target=stage(2, TWO, source="checkpoint")),
    )
    assert d.kinds() == ["release@n0", "release@n1"]
    d.reply(d.one("release", node="n0"))
    assert d.open("prepare") == []
    d.answer_all()
    assert d.phases() == ["prepared", "restored"]


def test_held_processes_go_on_from_the_checkpoint_without_draining() -> None:
    d = Drive()
    d.plan(
        "p",
        change(survivors=TWO, failed=["n2/0"], hold=True, prepare=["n2/0"], target=stage(2, THREE, "checkpoint")),
    )
    d.answer_all()
    assert [s.command.kind for s in d.sent if s.command.kind == "drain"] == []
    assert d.phases() == ["held", "prepared", "restored"]


@pytest.mark.parametrize("goes", [Drive.lose, Drive.leave])
def test_node_lost_with_survivors_and_nothing_to_add(goes: Callable[[Drive, str], None]) -> None:
    d = Drive()
    goes(d, "n2")
    d.plan(
        "p",
        change(action="none", survivors=TWO, failed=["n2/0"], hold=True, interrupted=stage(2, TWO, interrupted=True)),
    )
    assert d.kinds() == ["hold@n0", "hold@n1", "open-store@n0"], "nothing is sent to a lost node"
    d.answer_all()
    assert d.phases() == ["held", "resumed"]
    assert d.moved[-1].complete


def test_node_lost_and_a_worker_elsewhere_joins() -> None:
    d = Drive()
    d.lose("n2")
    target = stage(3, [*TWO, "n1/1"], take=["n1/1"])
    d.plan(
        "p",
        change(
            survivors=TWO,
            failed=["n2/0"],
            hold=True,
            interrupted=stage(2, TWO, interrupted=True),
            prepare=["n1/1"],
            target=target,
        ),
    )
    assert d.kinds() == ["hold@n0", "hold@n1", "open-store@n0", "prepare@n1"]
    d.answer_all()
    assert d.phases()[-1] == "restored"
    assert d.moved[-1].complete


def test_submitted_task_starts() -> None:
    d = Drive()
    d.plan("p", change(from_generation=0, prepare=TWO, target=stage(1, TWO, "initial")))
    assert d.kinds() == ["prepare@n0", "prepare@n1"]
    d.reply(d.one("prepare", node="n0"))
    assert d.open("open-store") == []
    d.answer_all()
    assert d.phases() == ["prepared", "restored"]
    assert d.moved[-1].generation == 1


def test_stop_saves_and_releases() -> None:
    d = Drive()
    d.plan("p", change(action="stop", survivors=TWO, release=TWO))
    assert d.kinds() == ["stop@n0", "stop@n1"]
    for _ in range(2):
        d.reply(d.open("stop")[0])
    assert d.kinds() == ["release@n0", "release@n1"]
    d.answer_all()
    assert d.phases() == ["ended"]
    assert d.moved[0].complete
    assert d.moved[0].step == 7


@pytest.mark.parametrize("first", ["the log", "the agents"])
def test_pause_ends_when_the_log_says_where_the_state_was_saved(first: str) -> None:
    d = Drive()
    d.plan("p", change(action="pause", survivors=TWO, release=TWO))
    for _ in range(2):
        d.reply(d.open("stop")[0])
    if first == "the log":
        d.stopped("a", step=7)
    assert d.kinds() == ["release@n0", "release@n1"]
    d.answer_all()
    assert d.phases() == (["ended"] if first == "the log" else [])
    if first == "the agents":
        assert d.restarted().phases() == []
        d.stopped("a", step=7)
    assert d.phases() == ["ended"]
    assert d.moved[0].complete
    assert d.moved[0].step == 7


@pytest.mark.parametrize("lost", [False, True])
def test_pause_whose_save_the_log_never_learns_ends_after_a_while(lost: bool) -> None:
    """After minutes where all have saved: the detector is away, and without its event the saved steps are lost."""
    d = Drive()
    d.plan("p", change(action="pause", survivors=TWO, release=TWO))
    if lost:
        d.lose("n0")
    d.answer_all()
    (timer,) = d.timers
    assert timer.after_s == (d.state.limits.grace_s if lost else d.state.limits.resume_s)
    assert d.phases() == []
    d.fire(timer)
    assert d.phases() == ["ended"]


def test_stop_of_a_broken_step_finishes_it_first() -> None:
    d = Drive()
    interrupted = stage(2, TWO, interrupted=True)
    d.plan("p", change(action="stop", survivors=TWO, failed=["n2/0"], hold=True, interrupted=interrupted, release=TWO))
    d.answer_all()
    assert d.phases() == ["held", "resumed", "ended"]
    assert [s.command.generation for s in d.sent if s.command.kind == "stop"] == [2, 2]


def test_end_releases_whatever_the_task_occupies() -> None:
    d = Drive()
    d.plan("p", change(from_generation=0, prepare=TWO, target=stage(1, TWO, "initial")))
    d.answer_all()
    d.plan("q", change(action="end", release=["n0/0"]))
    assert d.kinds() == ["release@n0", "release@n1"]
    d.answer_all()
    assert d.phases()[-1] == "ended"


def test_ending_without_any_process_is_recorded_at_once() -> None:
    d = Drive()
    d.plan("p", change(action="pause", from_generation=0))
    assert d.phases() == ["ended"]
    assert d.moved[0].complete


def test_a_plan_that_only_holds_keeps_the_processes_that_it_holds() -> None:
    """No worker has to finish the broken step, for example because the next plan goes back to a checkpoint."""
    d = Drive()
    d.plan("p", change(action="none", survivors=TWO, hold=True, release=["n2/0"]))
    d.answer_all()
    assert {s.node for s in d.sent if s.command.kind == "hold"} == {"n0", "n1"}
    assert {s.node for s in d.sent if s.command.kind == "release"} == {"n2"}
    assert d.state.task("a").occupied == set(TWO)


@pytest.mark.parametrize("action", ["none", "stop"])
def test_members_of_the_interrupted_stage_live_on_whether_named_as_survivors_or_not(action: Any) -> None:
    d = Drive()
    d.plan("p", change(action=action, hold=True, interrupted=stage(2, TWO, interrupted=True)))
    assert d.kinds() == ["hold@n0", "hold@n1", "open-store@n0"]
    d.answer_all()
    assert d.phases() == (["held", "resumed", "ended"] if action == "stop" else ["held", "resumed"])
    ends = {"none": [], "stop": ["n0", "n1"]}[action]
    assert sorted(s.node for s in d.sent if s.command.kind == "stop") == ends
    assert d.state.task("a").occupied == (set() if action == "stop" else set(TWO))


def test_the_end_of_a_task_only_releases() -> None:
    """A worker that is named twice is asked once; nothing is held, since nothing goes on."""
    d = Drive()
    d.plan("p", change(from_generation=0, prepare=TWO, target=stage(1, TWO, "initial")))
    d.answer_all()
    d.plan("q", change(action="end", survivors=["n0/0"], failed=["n1/0"], hold=True, release=TWO))
    assert d.kinds() == ["release@n0", "release@n1"]
    d.answer_all()
    assert d.phases()[-1] == "ended"
