"""The pure part of the node agent."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.agent.machine.proc import Scheduled
from services.agent.node.process import Process
from services.agent.node.slots import Node
from shared.messages.signals import (
    ProcessExited,
    RankCheckpointFailed,
    RankCopies,
    RankFinished,
    RankRaised,
    RankStopped,
    Signal,
)
from unicron.protocol import messages

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def node() -> tuple[Node, Process]:
    made = Node.create("n0", "incarnation", 2)
    process = made.start("gpt", "n0/1", 1)
    process.pid, process.attached = 7, True
    return made, process


def configured(rank: int = 0, generation: int = 2) -> tuple[Node, Process]:
    made, process = node()
    made.configure(process, generation=generation, rank=rank, at_s=1.0)
    return made, process


def receive(made: Node, process: Process, message: messages.Message, at_s: float = 2.0) -> list[Signal]:
    return made.receive(process, message, at_s=at_s, now=NOW)


def progress(step: int, phase: str, generation: int = 2, **rest: Any) -> messages.Progress:
    return messages.Progress(generation=generation, rank=0, step=step, phase=phase, **rest)


def test_a_slot_goes_from_idle_to_training_and_back() -> None:
    made, process = node()
    states = []

    def note() -> None:
        states.append(made.status(at_s=5.0, process_states={7: "R"}, schedules={})[1].state)

    process.attached = False
    note()
    process.attached = True
    note()
    made.configure(process, generation=1, rank=0, at_s=1.0)
    note()
    receive(made, process, messages.Held(generation=1, step=3))
    note()
    made.exited(process, 0, last_output="", now=NOW)
    note()
    assert states == ["starting", "ready", "training", "waiting", "idle"]


def test_the_step_counts_updates_applied() -> None:
    made, process = configured()
    for phase, step, applied in [("begun", 5, 4), ("reduce", 5, 4), ("ended", 5, 5), ("begun", 6, 5)]:
        receive(made, process, progress(step, phase, duration_s=0.5 if phase == "ended" else None))
        assert process.step == applied
    assert (process.step_s, process.steps_timed) == (0.5, 1)
    status = made.status(at_s=3.5, process_states={7: "S"}, schedules={})[1]
    assert (status.progress_age_s, status.process_state, status.phase) == (1.5, "S", "begun")


def test_how_often_the_state_is_copied_is_what_the_last_step_said() -> None:
    made, process = configured()

    def reported() -> tuple[int | None, bool | None]:
        status = made.status(at_s=3.5, process_states={7: "S"}, schedules={})[1]
        return status.memory_every, status.replicated

    assert reported() == (None, None)
    receive(made, process, progress(5, "ended", duration_s=0.5, memory_every=8, replicated=True))
    receive(made, process, progress(6, "begun"))
    assert reported() == (8, True)
    receive(made, process, progress(6, "ended", duration_s=0.5, memory_every=0, replicated=False))
    assert reported() == (0, False)


def test_parts_of_joining_are_reported_apart_from_micro_batches() -> None:
    made, process = configured()

    def reported() -> tuple[int | None, int | None]:
        status = made.status(at_s=3.5, process_states={}, schedules={})[1]
        return status.setup_parts, status.micro_batch

    receive(made, process, progress(5, "setup", setup_parts=2))
    assert reported() == (2, None)
    receive(made, process, progress(5, "compute", micro_batch=3))
    assert reported() == (None, 3)
    receive(made, process, progress(5, "setup", setup_parts=1))
    made.configure(process, generation=3, rank=0, at_s=3.0)
    assert reported() == (None, None)


def test_an_error_with_a_lone_surrogate_can_be_signalled() -> None:
    made, process = configured()
    texts: dict[str, Any] = {"error": "E\ud83d", "detail": "bad \udcff sample", "traceback": "Traceback \ud83d"}
    raised = messages.Raised(generation=2, rank=0, step=9, kind="exception", **texts)
    (signal,) = receive(made, process, messages.decode(messages.encode(raised)))
    assert isinstance(signal, RankRaised)
    assert RankRaised.model_validate_json(signal.model_dump_json()) == signal
    assert (signal.error, signal.detail, signal.traceback) == ("E?", "bad ? sample", "Traceback ?")
    assert process.raised is not None
    assert process.raised.detail == "bad ? sample"  # it goes into the answer of a command, too


def test_messages_of_an_older_generation_are_ignored() -> None:
    made, process = configured(generation=3)
    assert receive(made, process, progress(9, "ended", generation=2)) == []
    assert process.step == 0
    resumed = messages.Resumed(generation=2, step=9, source="own")
    receive(made, process, resumed)
    assert process.resumed is None
    raised = messages.Raised(generation=2, rank=0, step=9, kind="communication", error="E", detail="", traceback="")
    assert receive(made, process, raised) == []


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("exception", "exception"),
        ("communication", "communication"),
        ("non_finite", "non_finite"),
        ("refused", "refused"),
        ("wrong_loop", "wrong_loop"),
        ("new", "exception"),
    ],
)
def test_what_a_rank_raises_becomes_a_signal(kind: str, cause: str) -> None:
    made, process = configured()
    raised = messages.Raised(generation=2, rank=0, step=1, kind=kind, error="E", detail="d", traceback="t")
    [signal] = receive(made, process, raised)
    assert isinstance(signal, RankRaised)
    assert (signal.cause, signal.worker, signal.generation) == (cause, "n0/1", 2)


def raised_before_joining(kind: str) -> messages.Raised:
    return messages.Raised(generation=0, rank=0, step=0, kind=kind, error="E", detail="d", traceback="t")


def test_a_process_can_refuse_its_task_before_it_is_configured() -> None:
    made, process = node()
    [signal] = receive(made, process, raised_before_joining("refused"))
    assert isinstance(signal, RankRaised)
    # The generation is that of the plan that started the process, so that the detector takes the signal for current.
    assert (signal.cause, signal.generation, signal.rank) == ("refused", process.generation, None)
    assert receive(made, process, raised_before_joining("exception")) == []


def test_a_refusal_of_an_older_generation_is_ignored() -> None:
    made, process = configured(generation=3)
    assert receive(made, process, raised_before_joining("refused")) == []


def test_a_failed_checkpoint_is_signalled_and_changes_nothing() -> None:
    made, process = configured(rank=1)
    message = messages.CheckpointFailed(generation=2, rank=1, step=5, reason="no room in \udcff")
    (signal,) = receive(made, process, message)
    assert isinstance(signal, RankCheckpointFailed)
    assert (signal.generation, signal.rank, signal.step, signal.reason) == (2, 1, 5, "no room in ?")
    assert (process.raised, process.ending) == (None, False)


@pytest.mark.parametrize(("lack", "said"), [("gone from \udcff", "gone from ?"), ("", "")])
def test_copies_that_are_missing_and_there_again_are_signalled(lack: str, said: str) -> None:
    made, process = configured(rank=1)
    (signal,) = receive(made, process, messages.Copies(generation=2, rank=1, step=5, lack=lack))
    assert isinstance(signal, RankCopies)
    assert (signal.generation, signal.rank, signal.step, signal.lack) == (2, 1, 5, said)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_signals_the_end_of_the_task(rank: int) -> None:
    made, process = configured(rank)
    stopped = receive(made, process, messages.Stopped(generation=2, rank=rank, step=4, path="/c"))
    finished = receive(made, process, messages.Finished(generation=2, rank=rank, step=5))
    kinds = [type(s) for s in stopped + finished]
    assert kinds == ([RankStopped, RankFinished] if rank == 0 else [])
    assert made.exited(process, 0, last_output="", now=NOW) == []


def test_an_unexpected_end_is_signalled_with_the_last_output() -> None:
    made, process = configured(rank=1)
    [signal] = made.exited(process, -9, last_output="Killed", now=NOW)
    assert isinstance(signal, ProcessExited)
    assert (signal.exit_code, signal.pid, signal.rank, signal.last_output) == (-9, 7, 1, "Killed")
    assert not signal.oom_killed
    assert made.slots["n0/1"] is None
    with pytest.raises(KeyError):
        made.start("gpt", "n0/9", 1)


def test_an_occupied_slot_is_not_given_away() -> None:
    made, _ = node()
    with pytest.raises(ValueError, match="occupied"):
        made.start("other", "n0/1", 1)


def test_time_in_which_the_agent_did_not_run_does_not_count_against_ranks() -> None:
    made, process = configured()
    receive(made, process, progress(1, "compute"), at_s=10.0)
    made.paused(30.0)
    assert made.status(at_s=41.0, process_states={}, schedules={})[1].progress_age_s == 1.0


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["p1", "p2", "p3"]))))
def test_no_command_older_than_another_plans_is_admitted(commands: list[tuple[int, str]]) -> None:
    made = Node.create("n0", "incarnation", 1)
    admitted: list[tuple[int, str]] = []
    for generation, plan in commands:
        if made.admit("gpt", generation, plan):
            newest = max(admitted, default=(generation, plan), key=lambda c: c[0])
            assert generation >= newest[0] or plan in {p for g, p in admitted if g == newest[0]}
            admitted.append((generation, plan))
    ids = [s.signal_id for s in _signals(made, len(commands))]
    assert len(set(ids)) == len(ids)


def _signals(made: Node, count: int) -> list[Signal]:
    found: list[Signal] = []
    for _ in range(count):
        process = made.start("gpt", "n0/0", 1)
        found += made.exited(process, 1, last_output="", now=NOW)
    return found


def test_the_longest_time_without_progress_of_each_phase_is_reported() -> None:
    """Without the time in which the rank lacked a CPU; joining and other slow phases are left out."""
    made, process = configured()
    course = [("begun", 30.0, 0.0), ("compute", 31.0, 0.0), ("compute", 33.0, 1.5), ("compute", 34.0, 1.5)]
    for phase, at_s, waited_s in [*course, ("reduce", 34.25, 1.5), ("aside", 34.5, 1.5), ("ended", 99.0, 1.5)]:
        schedule = Scheduled(1.0, waited_s)
        made.receive(process, progress(1, phase), at_s=at_s, now=NOW, schedule=schedule)
    assert made.status(at_s=99.0, process_states={}, schedules={})[1].gaps_s == {
        "begun": 1.0,
        "compute": 1.0,
        "reduce": 0.25,
    }
    made.configure(process, generation=3, rank=0, at_s=100.0)
    assert made.status(at_s=100.0, process_states={}, schedules={})[1].gaps_s == {}


def trained(rank: int) -> tuple[Node, Process]:
    """A process whose script goes on behind the last step."""
    made, process = configured(rank)
    result = messages.Finished(generation=2, rank=rank, step=5, parameters_path="/p", ended=False)
    receive(made, process, progress(5, "tail"))
    process.rank = rank
    assert receive(made, process, result) == []
    return made, process


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_behind_the_last_step_has_finished_once_its_script_has_ended(rank: int) -> None:
    made, process = trained(rank)
    assert not process.finished
    status = made.status(at_s=9.0, process_states={}, schedules={})[1]
    assert (status.state, status.phase, status.step, status.progress_age_s) == ("training", "tail", 5, 7.0)
    signals = receive(made, process, messages.Finished(generation=2, rank=rank, step=5, parameters_path="/p"))
    assert [type(signal) for signal in signals] == ([RankFinished] if rank == 0 else [])
    assert made.exited(process, 0, last_output="", now=NOW) == []
    assert made.ended == {"expected": 1, "unexpected": 0}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_that_ends_its_process_without_an_error_has_ended(rank: int) -> None:
    made, process = trained(rank)
    signals = made.exited(process, 0, last_output="", now=NOW)
    assert [getattr(signal, "parameters_path", None) for signal in signals] == (["/p"] if rank == 0 else [])


@pytest.mark.parametrize("code", [1, 3, -9])
def test_a_script_that_fails_behind_the_last_step_is_signalled_as_such(code: int) -> None:
    made, process = trained(0)
    raised = messages.Raised(
        generation=2, rank=0, step=0, kind="exception", error="ValueError", detail="no room", traceback="..."
    )
    found = [*receive(made, process, raised), *made.exited(process, code, last_output="the end", now=NOW)]
    assert [(type(signal), getattr(signal, "trained", None)) for signal in found] == [
        (RankRaised, True),
        (ProcessExited, True),
    ]
    assert isinstance(found[1], ProcessExited)
    assert found[1].exit_code == code
    assert made.ended == {"expected": 0, "unexpected": 1}


def test_the_place_of_a_boundary_section_is_reported_on_one_line_whatever_a_rank_says() -> None:
    made, process = configured()
    receive(made, process, progress(3, "aside", sections=1, section="a\nb" * 200))
    found = made.status(at_s=3.0, process_states={}, schedules={})
    status = next(one for one in found if one.worker == process.worker)
    assert (status.sections, status.section) == (1, ("ab" * 200)[:256])
