"""Each row of the table in docs/architecture.md, and what can go wrong on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.transition import core, phases
from services.transition.state import Outcome, TimerName
from shared.commands import ConfigureTask, HoldTask, Prepare, ReleaseTask
from shared.plans import TaskChange
from shared.severities import ErrorKind
from tests.transition.drive import Drive, change, stage

THREE = ["n0/0", "n1/0", "n2/0"]
TWO = THREE[:2]


def restart_change(**rest: Any) -> TaskChange:
    """SEV2 of n2/0 with survivors n0/0 and n1/0."""
    fields: dict[str, Any] = {
        "survivors": TWO,
        "failed": ["n2/0"],
        "hold": True,
        "interrupted": stage(2, TWO, interrupted=True),
        "prepare": ["n2/0"],
        "target": stage(3, THREE, take=["n2/0"]),
    }
    return change(**{**fields, **rest})


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
    assert set(resumed.pids) == set(THREE)
    assert resumed.step == 8
    assert resumed.durations_s.keys() >= {"hold", "store", "configure", "rebuild", "agree"}
    assert resumed.durations_s["rebuild"] == pytest.approx(0.1)
    assert resumed.durations_s["store"] == pytest.approx(0.01)
    assert held.started_at < held.occurred_at <= resumed.started_at < resumed.occurred_at
    assert d.outcomes == {("p", "a"): Outcome.DONE}


def test_restart_prepares_beside_the_survivors_and_then_joins() -> None:
    d = Drive()
    d.plan("p", restart_change(), incident="i")
    assert d.kinds() == ["hold@n0", "hold@n1", "open-store@n0", "release@n2"]
    d.reply(d.one("release"))
    prepare = d.one("prepare").command
    assert isinstance(prepare, Prepare)
    # An agent refuses what is older than the newest: the survivors on the same node still join generation 2.
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


def test_what_an_answer_takes_does_not_grow_with_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is listed anew for each of thousands of workers, or with each of their answers, holds a plan up."""
    listed: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any) -> Any:
            listed.append(name)
            return function(*given)

        return count

    for module in (core, phases):
        for name in ("members", "preparing", "to_hold", "to_drain", "to_release"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counting(name, getattr(module, name)))

    def work(nodes: int) -> tuple[int, list[int]]:
        """Return how often workers were listed for the plan, and for each of its stage's answers but the last."""
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


def test_no_survivor_holds_the_state() -> None:
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


def test_node_lost_with_survivors_and_nothing_to_add() -> None:
    d = Drive()
    d.lose("n2")
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
    assert "n2/0" in d.moved[-1].detail


def test_submitted_task_starts() -> None:
    d = Drive()
    d.plan("p", change(from_generation=0, prepare=TWO, target=stage(1, TWO, "initial")))
    assert d.kinds() == ["prepare@n0", "prepare@n1"]
    d.reply(d.one("prepare", node="n0"))
    assert d.open("open-store") == []
    d.answer_all()
    assert d.phases() == ["prepared", "restored"]
    assert d.moved[-1].generation == 1


@pytest.mark.parametrize("action", ["stop", "pause"])
def test_stop_and_pause_save_and_release(action: str) -> None:
    d = Drive()
    d.plan("p", change(action=action, survivors=TWO, release=TWO))  # type: ignore[arg-type]
    assert d.kinds() == ["stop@n0", "stop@n1"]
    for _ in range(2):
        d.reply(d.open("stop")[0])
    assert d.kinds() == ["release@n0", "release@n1"]
    d.answer_all()
    assert d.phases() == ["ended"]
    assert d.moved[0].complete
    assert d.moved[0].step == 7


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


def test_ending_without_any_process_is_told_at_once() -> None:
    d = Drive()
    d.plan("p", change(action="pause", from_generation=0))
    assert d.phases() == ["ended"]
    assert d.moved[0].complete


# ---- failures


def test_ranks_that_do_not_hold_are_named() -> None:
    d = Drive()
    d.plan("p", restart_change(survivors=["n0/0", "n0/1", "n1/0"]))
    hold = d.one("hold", node="n0")
    assert isinstance(hold.command, HoldTask)
    d.silence(hold)
    assert d.phases() == [], "the others have the same deadline"
    d.silence(d.one("hold", node="n1"))
    d.answer_all()
    (failed,) = d.moved
    assert failed.phase == "failed"
    assert failed.failed_workers == ["n0/0", "n0/1", "n1/0"]
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


def test_death_of_a_process_that_nobody_answers_is_reported() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.reply(d.one("hold", node="n0"), ok=False, code="process-exited", detail="n0/0 exited with -9")
    d.fire(d.timers[0])
    assert d.phases() == ["failed"]
    assert d.moved[0].detail.startswith("process-exited: hold: n0: n0/0")
    assert d.moved[0].failed_workers == ["n0/0"]
    assert not d.waiting


def test_members_that_missed_a_peer_are_not_to_blame() -> None:
    """Two of three could not join because the third never came: it is the third that is named."""
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
    """The planner made it before it knew that the drain was over and the release had begun."""
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
    assert d.moved[-1].detail.startswith("released: ")
    # The next one starts it anew, and may then count on it.
    again = change(survivors=["n0/0"], failed=["n1/0"], hold=True, prepare=["n1/0"], target=stage(4, both))
    d.plan("r", again)
    d.answer_all()
    assert d.phases()[-1] == "restored"
    d.plan("s", change(action="none", survivors=both, hold=True, interrupted=stage(5, both, interrupted=True)))
    d.answer_all()
    assert d.phases()[-1] == "resumed"


def test_fenced_ends_silently() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.reply(d.open("hold")[0], ok=False, code="fenced")
    assert d.moved == []
    assert not d.waiting
    assert d.outcomes == {("p", "a"): Outcome.SUPERSEDED}


def test_node_lost_on_the_way_waits_for_the_next_plan() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.lose("n1")
    assert "hold@n1" not in d.kinds()
    (timer,) = d.timers
    d.fire(timer)
    assert d.moved[-1].phase == "failed"
    assert d.moved[-1].failed_workers == ["n1/0"]
    assert d.moved[-1].detail.startswith("node-lost")


def test_node_of_the_newcomer_lost_lets_the_survivors_finish() -> None:
    d = Drive()
    d.plan("p", restart_change())
    d.lose("n2")
    d.answer_all()
    assert d.phases() == ["held", "resumed"]
    d.fire(d.timers[0])
    assert d.phases() == ["held", "resumed", "failed"]


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


def test_unknown_task_fails() -> None:
    d = Drive()
    d.plan("p", change("ghost", prepare=["n0/0"], target=stage(1, ["n0/0"], "initial")))
    assert d.phases("ghost") == ["failed"]


def test_last_released_worker_lost_still_ends_the_part() -> None:
    d = Drive()
    d.plan("p", restart_change(failed=[], prepare=["n2/1"], target=stage(3, [*TWO, "n2/1"])))
    d.plan("q", change(action="none", survivors=TWO, hold=True, interrupted=stage(4, TWO, interrupted=True)))
    for kind in ("hold", "hold", "open-store", "configure", "configure"):
        d.reply(d.open(kind)[0])
    assert not d.moved[-1].complete
    d.lose("n2")
    assert d.moved[-1].complete


# ---- restart of the service


def test_restart_at_any_moment_goes_on_where_the_log_ends() -> None:
    """The same commands are sent again, and what is done stays done."""
    d = Drive()
    d.plan("p", restart_change())
    while d.waiting:
        twin = d.restarted()
        twin.answer_all()
        assert set(d.waiting) <= {s.command.command_id for s in twin.sent}
        assert sorted(twin.phases()) == ["drained", "held", "prepared", "restored", "resumed"]
        assert twin.moved[-1].complete
        d.reply(next(iter(d.waiting.values())))
    assert d.restarted().sent == []


def test_restart_does_not_repeat_what_later_commands_have_overtaken() -> None:
    d = Drive()
    d.plan("p", restart_change())
    while "drained" not in d.phases():
        d.reply(next(iter(d.waiting.values())))
    twin = d.restarted()
    assert {s.command.kind for s in twin.sent} == {"open-store"}
    assert twin.sent[0].command.generation == 3
