"""The evidence of a hang: whom the detector asks, and what of the answers is in the error event."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from services.agent.agent import Agent
from services.detector.decisions.inputs import StacksGiven
from services.detector.progress import standstill
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.task import Standstill
from shared.bus.connection import Bus
from shared.events.evidence import STACK_CHARACTERS, STACKS_CHARACTERS
from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected
from shared.log.journal import Journal
from shared.messages.stacks import GroupRecord, Operation, RankReport, StacksReply
from shared.settings.model import Settings
from tests.agent.kit import Driver
from tests.detector.conftest import LogWatch, patient, watching
from tests.detector.kit import Cluster, at, only_error, timed
from tests.detector.test_monitor import of, train

LIMIT_S = 3.0
"""Of a step of a second, by the limits of ``tests/detector/kit.py``."""


def silent_from(cluster: Cluster, since_s: float, now_s: float) -> tuple[list[StacksQuestion], list[Any]]:
    """All ranks wait for ``n1``, which computes, since a time; return the questions and the events of a tick."""
    for name in cluster.names:
        phase = "compute" if name == "n1" else "reduce"
        cluster.beat(name, now_s, phase=phase, step=5, progress_age_s=now_s - since_s)
    cluster.monitor.echo(at(now_s))
    decision = cluster.monitor.tick(at(now_s))
    return decision.stacks, list(decision.events)


def answer(cluster: Cluster, question: StacksQuestion, *, waits: bool = True, stack: str = "Thread 0x7f (x):") -> None:
    rank = cluster.names.index(question.node)
    waiting = [Operation(sequence=9, name="gloo:all_reduce")] if waits else []
    group = GroupRecord(group="1", ranks=[0, 1, 2], entered=9 if waits else 8, waits=waiting)
    report = RankReport(rank=rank, state="S", stack=stack, groups=[group])
    reply = StacksReply(node=question.node, workers={f"{question.node}/0": report})
    cluster.monitor.feed(StacksGiven(question, reply), at(0.0))


def trained() -> Cluster:
    cluster = Cluster()
    timed(cluster, 1.0, 1.0)
    return cluster


def test_the_ranks_are_asked_at_half_of_the_limit_and_the_error_has_their_answers() -> None:
    cluster = trained()
    assert silent_from(cluster, 10.0, 10.0 + 0.4 * LIMIT_S) == ([], [])
    questions, events = silent_from(cluster, 10.0, 10.0 + 0.6 * LIMIT_S)
    assert ([q.node for q in questions], events) == (["n0", "n1", "n2"], [])
    assert {(q.task, q.generation) for q in questions} == {("gpt", 1)}
    for question in questions:
        blocked = question.node == "n1"
        answer(cluster, question, waits=not blocked, stack="in user code" if blocked else f"Thread {id(question):#x}:")
    assert silent_from(cluster, 10.0, 10.0 + 0.8 * LIMIT_S) == ([], [])  # not again so soon
    error = only_error(silent_from(cluster, 10.0, 10.0 + 1.1 * LIMIT_S)[1])
    assert (error.kind, error.worker) == (ErrorKind.HANG, "n1/0")
    assert error.evidence["stacks"] == [
        {"workers": ["n1/0"], "ranks": [1], "stack": "in user code"},
        {"workers": ["n0/0", "n2/0"], "ranks": [0, 2], "stack": "Thread 0x:"},
    ]
    (found,) = error.evidence["collectives"]
    assert (found["collective"], found["sequence"], found["missing"]) == ("gloo:all_reduce", 9, [1])


def test_without_answers_the_decision_is_the_same() -> None:
    cluster = trained()
    assert silent_from(cluster, 10.0, 10.0 + 0.6 * LIMIT_S)[0]
    error = only_error(silent_from(cluster, 10.0, 10.0 + 1.1 * LIMIT_S)[1])
    assert (error.kind, error.worker) == (ErrorKind.HANG, "n1/0")
    assert not {"stacks", "collectives", "without_stack"} & error.evidence.keys()


def test_progress_makes_answers_obsolete() -> None:
    cluster = trained()
    questions, _ = silent_from(cluster, 10.0, 10.0 + 0.6 * LIMIT_S)
    answer(cluster, questions[0])
    silent_from(cluster, 12.0, 12.1)
    answer(cluster, questions[1])  # late
    assert silent_from(cluster, 12.0, 12.0 + 0.6 * LIMIT_S)[0]
    error = only_error(silent_from(cluster, 12.0, 12.0 + 1.1 * LIMIT_S)[1])
    assert "stacks" not in error.evidence


def test_a_node_speaks_for_its_own_ranks_only() -> None:
    cluster = trained()
    questions, _ = silent_from(cluster, 10.0, 10.0 + 0.6 * LIMIT_S)
    forged = StacksReply(node="n0", workers={"n1/0": RankReport(rank=1, stack="forged")})
    cluster.monitor.feed(StacksGiven(questions[0], forged), at(0.0))
    other = StacksReply(node="n0", workers={"n0/0": RankReport(stack="x")})
    cluster.monitor.feed(StacksGiven(questions[1], other), at(0.0))
    assert cluster.monitor.state.standstills["gpt"].reports == {}


def test_the_evidence_is_bounded_and_has_the_blamed_ranks_first() -> None:
    reports = {f"n{k}/0": RankReport(rank=k, stack=f"{k:06}" + "x" * (STACK_CHARACTERS - 6)) for k in range(1000)}
    found = standstill.evidence(Standstill(1, at(0), reports), 1, ["n700/0"])
    assert sum(len(one["stack"]) for one in found["stacks"]) <= STACKS_CHARACTERS
    assert [one["workers"] for one in found["stacks"]][:2] == [["n700/0"], ["n0/0"]]
    assert len(found["stacks"]) + found["stacks_left_out"] == 1000
    assert standstill.evidence(Standstill(1, at(0), reports), 2, []) == {}


@pytest.mark.slow
async def test_a_stopped_rank_and_what_its_peer_does_are_in_the_log(
    settings: Settings, bus: Bus, journal: Journal, agent: Agent, driver: Driver
) -> None:
    """Ranks and agent are real. The answers, which take milliseconds, have two seconds."""
    slow = patient(settings).model_copy(update={"hang_floor_s": 30.0, "stop_floor_s": 4.0})
    async with watching(slow, bus, journal) as monitor:
        pids = await train(journal, driver)
        os.kill(pids["n0/1"], signal.SIGSTOP)
        try:
            events = await monitor.until(lambda found: bool(of(found, ErrorDetected)))
        finally:
            os.kill(pids["n0/1"], signal.SIGCONT)
    (error,) = of(events, ErrorDetected)
    assert (error.kind, error.worker) == (ErrorKind.HANG, "n0/1")
    (stack,) = error.evidence["stacks"]
    assert (stack["workers"], stack["ranks"]) == (["n0/0"], [0])
    assert "stand_in.py" in stack["stack"]
    assert error.evidence["without_stack"]["n0/1"]["state"] == "T"


async def test_a_segmentation_fault_is_a_native_crash_with_its_stack(
    monitor: LogWatch, agent: Agent, driver: Driver
) -> None:
    await train(monitor.journal, driver, behaviour="segfault")
    events = await monitor.until(lambda found: bool(of(found, ErrorDetected)))
    error = of(events, ErrorDetected)[0]
    assert (error.kind, error.evidence["exit"], error.evidence["class"]) == (
        ErrorKind.PROCESS_EXIT,
        "SIGSEGV",
        "segfault",
    )
    assert "string_at" in error.evidence["stack"]
