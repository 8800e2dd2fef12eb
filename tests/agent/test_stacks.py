"""The stacks of ranks: on request, and at the signal that native code ends a rank with."""

from __future__ import annotations

import os
import signal

import pytest

from services.agent.agent import Agent
from services.agent.ranks import stacks
from shared.bus.connection import Bus
from shared.events.evidence import STACK_CHARACTERS
from shared.messages.signals import ProcessExited
from shared.messages.stacks import MAX_TIMEOUT_S, STACKS, StacksReply, StacksRequest
from tests.agent.kit import WAIT_S, Driver, Ear, train


async def ask(bus: Bus, generation: int = 1) -> StacksReply:
    request = StacksRequest(task="gpt", generation=generation, timeout_s=MAX_TIMEOUT_S)
    answer = await bus.request(STACKS.at("n0"), request.model_dump_json().encode(), timeout_s=WAIT_S)
    return STACKS.reply.decode(answer)


@pytest.mark.slow
async def test_ranks_report_their_stacks_and_a_stopped_one_that_it_cannot(
    agent: Agent, driver: Driver, ear: Ear, bus: Bus
) -> None:
    pids = await train(driver)
    os.kill(pids["n0/1"], signal.SIGSTOP)
    await ear.until(lambda: any(w.process_state == "T" for w in ear.heartbeats[-1].workers))
    for _ in range(2):  # what was written for the first request is not in the second answer
        reply = await ask(bus)
        assert sorted(reply.workers) == ["n0/0", "n0/1"]
        runs, stopped = reply.workers["n0/0"], reply.workers["n0/1"]
        assert runs.stack.startswith("Stack (most recent call first)")
        assert runs.stack.count("most recent call first") == 1
        assert "tests/agent/stand_in.py" in runs.stack
        assert (runs.rank, runs.groups) == (0, None)  # this rank has no collectives, and does not know the question
        assert (stopped.rank, stopped.state, stopped.stack) == (1, "T", "")
        assert "stopped" in stopped.detail
    os.kill(pids["n0/1"], signal.SIGCONT)
    assert (await ask(bus, generation=2)).workers == {}
    assert "most recent call first" not in (agent._files.output("gpt", "n0/0", 1)).read_text()


async def test_a_rank_that_native_code_ends_leaves_its_stack(agent: Agent, driver: Driver, ear: Ear) -> None:
    await train(driver, behaviour="segfault")
    await ear.until(lambda: bool(ear.signals))
    exited = ear.signals[0]
    assert isinstance(exited, ProcessExited)
    assert exited.exit_code == -signal.SIGSEGV
    first, thread, frame, *_ = exited.stack.splitlines()
    assert first == "Fatal Python error: Segmentation fault"
    assert thread.startswith("Current thread")
    assert "string_at" in frame
    assert "Extension modules" not in exited.stack


def test_the_thread_that_failed_comes_first_and_long_stacks_are_cut() -> None:
    other = "Thread 0x1 (most recent call first):\n  File a\n"
    text = f"Fatal Python error: Bus error\n\n{other}\nCurrent thread 0x2 (most recent call first):\n  File b\n"
    found = stacks.of_fatal_signal(f"{other}\n{text}\nExtension modules: {'x, ' * 9999} (total: 9999)\n")
    assert found.splitlines()[1:3] == ["Current thread 0x2 (most recent call first):", "  File b"]
    assert found.endswith("  File a")
    assert stacks.of_fatal_signal(other) == ""
    assert stacks.of_request(other + "\n" + text) == other.strip()
    assert len(stacks.of_request("  File long\n" * 9999)) == STACK_CHARACTERS
