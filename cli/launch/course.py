"""The course of a run: the stack if there is none, the submission, the output, an interruption, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TextIO

from cli.here import DEFAULT_RUN_DIR
from cli.launch.checking import say
from cli.launch.ending import Ending, ending_of, lines_of_fault
from cli.launch.interrupts import Interrupts, OnInterrupt, answer_of, decided
from cli.launch.place import Place
from cli.launch.submission import Submitted, Whole, submit
from cli.launch.time_limit import interrupt_before_limit
from cli.stack.devices import Division
from cli.stack.meeting import Meeting
from cli.stack.run_directory import DEMO_MARKER
from cli.stack.stack import Stack
from cli.waiting import Record, WaitingClient
from shared.bus.cancellation import cancelled
from shared.errors import Conflict, InvalidInput, Unavailable, UnicronError
from shared.tasks.refusals import why_not_healed
from shared.tasks.specification import TaskSpec
from unicron_client.answers import task_path
from unicron_client.resources import ENDED, Client
from unicron_client.shipped_code import Shipment
from unicron_client.transport import Params

PATIENCE_S = 300.0
"""How long a server may be away. A control plane that is started anew is back within a minute, and a run of days must
not end with it; the task trains on anyway."""

POLL_S = 0.2
"""Time between two looks at a task that is to stop, and two tries to reach a server."""

LOOK_S = 5.0
"""Time between two looks at whether the task waits: for people."""

FAULTS_S = 1.0
"""Time between two looks at the task's faults: what its ranks print of one should not stand alone for long."""

MOST_FAULTS = 20
"""Newest faults that are looked at."""

LAST_OUTPUT_S = 10.0
"""How long the output may take behind the end of a task that was stopped; it takes one second."""


@dataclass(frozen=True)
class Launched:
    """What is run.

    ``named``: whether the user has given the name. ``division``, ``environment``: the workers of an embedded stack, and
    variables that they inherit beside those of this process. ``stream``: for the output of the ranks. ``whole``: for a
    task that restarts whole where a setting is refused at its start; None: then it has failed. ``shipped``: the code
    that comes along; None: the nodes have it. ``meeting``: where an embedded stack meets further nodes; None: it has
    none. ``stop_before_s``: how long before a job's time limit an embedded task is stopped (``time_limit.py``).
    """

    spec: TaskSpec
    named: bool
    place: Place
    on_interrupt: OnInterrupt
    stream: TextIO
    division: Division | None = None
    environment: dict[str, str] = field(default_factory=dict)
    whole: Whole | None = None
    shipped: Shipment | None = None
    meeting: Meeting | None = None
    stop_before_s: float | None = None


class Course(NamedTuple):
    """How a run has ended.

    ``ending``: of its task; None: it was never submitted. ``left``: whether the task was left running. ``at_limit``:
    whether it was interrupted since the time limit of its job came.
    """

    ending: Ending | None
    left: bool
    at_limit: bool = False


async def course(launched: Launched) -> Course:
    """Run a task to its end; return that.

    Raises:
        UnicronError: a part did not start or fails, or the server refuses the task.
    """
    with Interrupts() as interrupts:
        if launched.place.server is not None:
            return Course(*await _run(launched, launched.place.server, interrupts))
        limit = asyncio.create_task(interrupt_before_limit(interrupts, launched.stop_before_s))
        try:
            return Course(*await _run_embedded(launched, interrupts), interrupts.at_limit)
        finally:
            await cancelled(limit)


async def _run_embedded(launched: Launched, interrupts: Interrupts) -> tuple[Ending | None, bool]:
    """Do what ``_run`` does, on a stack for the time of the run."""
    async with _embedded(launched, interrupts) as stack:
        if stack is None:
            return None, False
        following = asyncio.create_task(_run(launched, stack.url, interrupts))
        await _first(following, stack.failed)
        if not following.done():
            await cancelled(following)
            raise stack.failed.result()
        return await following


@contextlib.asynccontextmanager
async def _embedded(launched: Launched, interrupts: Interrupts) -> AsyncIterator[Stack | None]:
    """Have a stack for a block; None if it is interrupted as it starts."""
    assert launched.division is not None
    stack = Stack(
        launched.place.run_dir,
        nodes=launched.division.nodes,
        workers_per_node=launched.division.workers_per_node,
        devices=launched.division.shown,
        environment=launched.environment,
        meeting=launched.meeting,
    )
    starting = asyncio.create_task(stack.start())
    try:
        await _first(starting, interrupts.came)
        if starting.done():
            await starting
            # From then on the folder contains files that no demo may replace.
            (stack.run_dir / DEMO_MARKER).unlink(missing_ok=True)
            say(f"live page: {stack.url}/")
            yield stack
        else:
            yield None
    finally:
        await cancelled(starting)
        await stack.stop()


async def _run(launched: Launched, url: str, interrupts: Interrupts) -> tuple[Ending, bool]:
    """Follow the task, also as it restarts whole if it is refused at its start; return its end as ``_follow`` does."""
    ending, left = await _follow(launched, url, interrupts)
    why = "" if ending.succeeded else why_not_healed(ending.task["reason"] or "")
    if not why or launched.whole is None or interrupts.came.done():
        return ending, left
    say(f"{ending.task['name']} is not healed inside the step, and restarts whole from its own checkpoint: {why}")
    try:
        spec = launched.whole(why).model_copy(update={"name": ending.task["name"]})
    except InvalidInput as err:
        say(err.detail)
        return ending, left
    return await _follow(replace(launched, spec=spec, named=True, whole=None), url, interrupts)


async def _follow(launched: Launched, url: str, interrupts: Interrupts) -> tuple[Ending, bool]:
    """Submit the task and follow it; return how it is in the end, and whether it was left running."""
    embedded = launched.place.server is None
    submitted = await asyncio.to_thread(_submit, launched, url)
    name, left = submitted.task["name"], False
    if embedded:
        here = launched.place.run_dir == DEFAULT_RUN_DIR
        say(f"look: `unicron show {name}`, in this folder" if here else f"look: `unicron show {name} --server {url}`")
    async with WaitingClient(url, poll_s=POLL_S, patience_s=PATIENCE_S) as client:
        output = asyncio.create_task(_print_output(url, submitted, launched))
        waits = asyncio.create_task(_say_waits(client, name))
        faults = asyncio.create_task(_say_faults(client, submitted.task))
        try:
            await _first(output, interrupts.came)
            if output.done():
                await output
            else:
                left = await _interrupted(client, name, launched, interrupts, output)
        finally:
            await cancelled(output, waits, faults)
    ending = await asyncio.to_thread(_ending, url, name, launched if embedded else None)
    if embedded and ending.task["result"] is not None:
        say(f"parameters: {ending.task['result']['parameters_path']}")
    return ending, left


def _submit(launched: Launched, url: str) -> Submitted:
    with Client(url) as client:
        if launched.shipped is not None:
            client.send_code(launched.shipped)
        found = submit(
            client,
            launched.spec,
            named=launched.named,
            embedded=launched.place.server is None,
            whole=launched.whole,
        )
        if launched.place.server is None:
            others = [
                task["name"]
                for task in client.items("/v1/tasks")
                if task["state"] not in ENDED and task["name"] != found.task["name"]
            ]
            if others:
                say(f"go on, too, and share the workers: {', '.join(others)}")
        return found


def _ending(url: str, name: str, embedded: Launched | None) -> Ending:
    with Client(url) as client:
        return ending_of(client, name, None if embedded is None else embedded.place.run_dir.resolve())


async def _print_output(url: str, submitted: Submitted, launched: Launched) -> None:
    """Print what the ranks print until the task has ended, also if the server is away for a while.

    Raises:
        Unavailable: it was away for too long.
    """
    printed: Counter[tuple[str, int]] = Counter()
    answered_at = time.monotonic()
    async with WaitingClient(url, poll_s=POLL_S) as client:
        while True:
            try:
                async with _output(client, submitted) as lines:
                    try:
                        await _print_new(lines, printed, launched)
                    finally:
                        answered_at = time.monotonic()
                # A server that has ended answers this no more: what it has not sent is asked for again.
                if (await client.task(submitted.task["name"]))["state"] in ENDED:
                    return
            except Unavailable:
                if time.monotonic() - answered_at > PATIENCE_S:
                    raise
            await asyncio.sleep(POLL_S)


def _output(client: WaitingClient, submitted: Submitted) -> contextlib.AbstractAsyncContextManager[AsyncIterator[str]]:
    params = {"follow": True, "since": submitted.since}
    return client.lines(f"{task_path(submitted.task['name'])}/logs", params, accept="application/x-ndjson")


async def _print_new(lines: AsyncIterator[str], printed: Counter[tuple[str, int]], launched: Launched) -> None:
    """Print what the ranks print, without what was printed before: the lines of each worker come in their order.

    Args:
        lines: as the server sends them.
        printed: worker and generation -> how many lines were printed; added to.
        launched: what is run.
    """
    several, before = launched.spec.workers.max != 1, Counter(printed)
    async for line in lines:
        entry = json.loads(line)
        if "problem" in entry:
            say(entry["problem"])
            continue
        key = (entry["worker"], entry["generation"])
        before[key] -= 1
        if before[key] < 0:
            printed[key] += 1
            text = f"{entry['worker']} | {entry['line']}" if several else entry["line"]
            print(text, file=launched.stream, flush=True)


async def _say_waits(client: WaitingClient, name: str) -> None:
    """Say why the task does not train, whenever that changes."""
    known = ""
    while True:
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(UnicronError):
            task = await client.task(name)
            waits = task["state"] in {"pending", "queued"} or task["wait"] is not None
            reason = str((task["wait"] or task)["reason"]) if waits else ""
            if reason and reason != known:
                say(f"{name} waits ({task['state']}): {reason}")
            known = reason


async def _say_faults(client: WaitingClient, task: Record) -> None:
    """Say of each fault that hits the task what it is, and how it was healed."""
    said: Counter[str] = Counter()
    newest: Params = {"task": task["name"], "order": "newest", "limit": MOST_FAULTS}
    while True:
        await asyncio.sleep(FAULTS_S)
        with contextlib.suppress(UnicronError):
            for incident in reversed((await client.get("/v1/incidents", newest))["items"]):
                if incident["detected_at"] < task["submitted_at"]:
                    continue
                for line in lines_of_fault(incident, said[incident["id"]]):
                    said[incident["id"]] += 1
                    say(line)


async def _interrupted(
    client: WaitingClient, name: str, launched: Launched, interrupts: Interrupts, output: asyncio.Task[None]
) -> bool:
    """Stop the task or leave it running, as the user wants it; return whether it was left running."""
    embedded = launched.place.server is None
    wanted = decided(launched.on_interrupt, interrupts.came.result(), embedded=embedded, terminal=sys.stdin.isatty())
    while wanted is OnInterrupt.ASK:
        asking = asyncio.create_task(answer_of(f"unicron: stop {name}, which saves a checkpoint (s), or leave it (l)?"))
        await _first(asking, output)
        if not asking.done():
            asking.cancel()
            return False
        wanted = {"s": OnInterrupt.STOP, "l": OnInterrupt.LEAVE}.get(asking.result()[:1], OnInterrupt.ASK)
    if wanted is OnInterrupt.LEAVE:
        say(f"{name} trains on: `unicron logs {name} --follow`, `unicron stop {name}`")
        return True
    say(f"stops {name} at the next step, with a checkpoint; another Ctrl-C ends this at once")
    began = time.monotonic()
    with contextlib.suppress(Conflict):  # it has ended meanwhile
        await client.post(f"{task_path(name)}/stop", {"lose_steps": False})
    task = await client.until(f"{name} stops", lambda: _answered(client, name))
    if task["state"] in ENDED:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(output, LAST_OUTPUT_S)
        if interrupts.at_limit:
            say(f"the stop took {time.monotonic() - began:.0f} s; --stop-before-s is to be longer than that")
        return False
    say(f"{name} cannot be saved ({task['stop_refused']['reason']})")
    return not embedded


async def _answered(client: WaitingClient, name: str) -> Record | None:
    """Return a task once it has ended, or has refused to stop since its state cannot be saved."""
    task = await client.task(name)
    return task if task["state"] in ENDED or task["stop_refused"] else None


async def _first(*waits: asyncio.Future[Any]) -> None:
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
