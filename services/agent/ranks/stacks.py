"""What the node's ranks do, on request (``messages/stacks.py``): their stacks, and what their collectives wait for.

A thread of the rank says over its socket what its other threads do, and what torch's flight recorder has, unless the
GIL is taken. If it does not answer, the rank's main thread writes its stack on SIGUSR2, by a handler that needs no GIL,
to a file that the agent empties before and reads after. A stopped process can do neither: that it is stopped is the
report. Nobody waits longer than the request says, and a rank that is slow is reported without what it has not said.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.agent.machine.proc import handles, process_state, waits_in
from services.agent.node.process import Process
from services.agent.node.slots import Node
from shared.bus.connection import Bus
from shared.events.evidence import COLLECTIVE_GROUPS, OPERATIONS, STACK_CHARACTERS
from shared.messages.stacks import STACKS, GroupRecord, Operation, RankReport, StacksReply, StacksRequest
from unicron.protocol import messages

LOOK_S = 0.01
"""Pause between two looks at whether a rank has written its stacks, which takes it less than a millisecond."""

STOPPED = ("T", "t")
"""The kernel's letters for a stopped process (proc(5))."""

ANSWER_SHARE = 0.5
"""The part of a request's time after which a rank that has not answered is sent the signal. Chosen: a thread answers
within milliseconds, and so does the handler."""

READ_BYTES = 16 * STACK_CHARACTERS
"""Most bytes that are read of a file of stacks: a process with a hundred threads, of which the current one may come
last."""

FATAL = "Fatal Python error: "
"""How the text of a fatal signal begins."""

_CURRENT = "Current thread "

_AFTER = "\nExtension modules: "
"""Text that follows the threads of a fatal signal, and is long."""


class Stacks:
    """Answers requests for the stacks of one node's ranks, one at a time.

    Args:
        node: lists the processes.
        file: returns the file to which the process of a task and worker writes its stacks.
        send: sends a message to a rank.
        signal_: sends a signal to a rank.
    """

    def __init__(
        self,
        node: Node,
        file: Callable[[str, str], Path],
        send: Callable[[Process, messages.Message], None],
        signal_: Callable[[Process, signal.Signals], None],
    ) -> None:
        self._node, self._file, self._send, self._signal = node, file, send, signal_
        self._one_request = asyncio.Lock()
        self._requests = 0
        self._asked: dict[tuple[str, int], asyncio.Future[messages.Groups | None]] = {}
        """Process id and number of the request -> what the rank answers."""

    async def serve(self, bus: Bus) -> None:
        """Answer requests from now on."""
        node = self._node.name
        await bus.serve(STACKS, self._reply, node, refuse=lambda _: StacksReply(node=node))

    async def _reply(self, request: StacksRequest) -> StacksReply:
        async with self._one_request:
            return StacksReply(node=self._node.name, workers=await self._reports(request))

    def receive(self, process: Process, message: messages.Groups) -> None:
        """Take what a rank says of its collectives; drop an answer for which nobody asks any more."""
        asked = self._asked.pop((process.id, message.request), None)
        if asked is not None and not asked.done():
            asked.set_result(message)

    async def _reports(self, request: StacksRequest) -> dict[str, RankReport]:
        # A process that has not attached is not asked: its peers do not wait for it in a collective yet.
        ranks = [
            p
            for p in self._node.of_task(request.task)
            if p.attached and p.pid is not None and p.generation == request.generation
        ]
        self._requests += 1
        reports = await asyncio.gather(*(self._report(p, request.timeout_s) for p in ranks))
        return {process.worker: report for process, report in zip(ranks, reports, strict=True)}

    async def _report(self, process: Process, timeout_s: float) -> RankReport:
        pid = process.pid or 0
        state = process_state(pid) or ""
        report = RankReport(rank=process.rank, state=state, waits_in=waits_in(pid)[:200])
        if state in STOPPED:
            return report.model_copy(update={"detail": "stopped by a signal: it can write no stack"})
        answering = asyncio.create_task(self._answer(process, timeout_s))
        await asyncio.wait([answering], timeout=ANSWER_SHARE * timeout_s)
        stack = "" if _said(answering) else await self._stack(process, (1.0 - ANSWER_SHARE) * timeout_s)
        answer = await answering
        stack = answer.stacks if answer is not None and answer.stacks else stack
        detail = "" if stack else f"it wrote no stack within {timeout_s:.2g} s"
        groups = _records(answer.groups) if answer is not None else None
        return report.model_copy(update={"stack": stack[:STACK_CHARACTERS], "groups": groups, "detail": detail})

    async def _stack(self, process: Process, timeout_s: float) -> str:
        """Have a rank's main thread write its stack; return it once the file grows no more."""
        path = self._file(process.task, process.worker)
        if not handles(process.pid or 0, signal.SIGUSR2):
            return ""  # a script has taken the handler away: the signal would end the process
        try:
            os.truncate(path, 0)
        except OSError:
            return ""  # the file is gone with its folder
        self._signal(process, signal.SIGUSR2)
        size = -1
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                while size <= 0 or os.stat(path).st_size != size:
                    size = os.stat(path).st_size
                    await asyncio.sleep(LOOK_S)
        return of_request(read(path))

    async def _answer(self, process: Process, timeout_s: float) -> messages.Groups | None:
        """Ask a rank; return what it says, None if it does not answer."""
        key = process.id, self._requests
        answer: asyncio.Future[messages.Groups | None] = asyncio.get_running_loop().create_future()
        self._asked[key] = answer
        self._send(process, messages.AskGroups(request=self._requests))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._asked.pop(key, None)


def _said(answering: asyncio.Task[messages.Groups | None]) -> bool:
    """Return whether a rank has answered, with its stacks."""
    answer = answering.result() if answering.done() else None
    return answer is not None and answer.stacks != ""


def read(path: Path) -> str:
    """Return what a process has written of its stacks; empty if there is nothing."""
    try:
        with open(path, "rb") as file:
            return file.read(READ_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _records(groups: list[list[Any]]) -> list[GroupRecord] | None:
    """Return the groups of a rank's answer; None if it is not as ``unicron.link.flight_record`` has them."""
    try:
        return [
            GroupRecord(
                group=name,
                ranks=ranks,
                entered=entered,
                waits=[Operation(sequence=sequence, name=operation) for sequence, operation in waits[:OPERATIONS]],
            )
            for name, ranks, entered, waits in groups[:COLLECTIVE_GROUPS]
        ]
    except (ValidationError, ValueError, TypeError):
        return None


def of_request(text: str) -> str:
    """Return the stacks that a process wrote on request, that of the thread which wrote them first."""
    return _ordered(text.partition(FATAL)[0])


def of_fatal_signal(text: str) -> str:
    """Return the stacks that a fatal signal wrote, that of the thread which got it first; empty: there was none."""
    _, found, fatal = text.rpartition(FATAL)
    if not found:
        return ""
    reason, _, threads = fatal.partition(_AFTER)[0].partition("\n")
    return f"{FATAL}{reason}\n{_ordered(threads)}"[:STACK_CHARACTERS]


def _ordered(text: str) -> str:
    blocks = [block.strip("\n") for block in text.split("\n\n") if block.strip()]
    blocks.sort(key=lambda block: not block.startswith(_CURRENT))  # a stable sort: the others keep their order
    return "\n\n".join(blocks)[:STACK_CHARACTERS]
