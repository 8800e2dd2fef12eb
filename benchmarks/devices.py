"""What holds on real devices: faults under NCCL, a whole stack, and what a step costs. ``make test-gpu``.

    .venv/bin/python -m benchmarks.devices [--part courses stack overhead kills]

Runs with one CUDA device, which several ranks then share: each says that it is a host of its own (``NCCL_HOSTID``), and
they talk over loopback sockets. So this shows how NCCL behaves at a fault, and not how fast links are.

    courses    the courses of tests/unicron/test_gpu.py: a fault in a step, on 2 to 4 ranks; the most telling first.
               What was not reached within its time is printed as not run
    stack      four ranks under the whole system: kill, exception, hangs, a lost node; then the parameters, compared
               with those of a run without a fault. Bound: the interrupted step is done within
               0.6 s and a step after detection, survivors keep their processes, nothing is computed again, each fault
               is one incident. Beside it what bare communicators cost (benchmarks/devices_communicators.py): beyond
               those and a step there may be 0.3 s
    overhead   alone on the device: steps of stock Megatron and of this library in turns, 0.35 billion parameters, bf16,
               8 micro-batches of 4 x 1,024 tokens. Bounds: 1.01 of the time, 1.02 of the memory
    kills      30 kills in a row

JSON lines on stdout, a table at the end. Exit status 0 if all bounds hold. Without a device nothing runs and the exit
status is 2, but with ``--on-cpu`` the stack does, on gloo: to try this module.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks import devices_step
from benchmarks.devices_communicators import initialisation_s, shared_device
from benchmarks.report import Report, run
from cli.stack.processes import run_module
from cli.stack.stack import Stack
from cli.waiting import Record, WaitingClient
from services.agent.machine import hardware
from services.agent.machine.hardware import VISIBLE_VARIABLE
from shared.errors import InvalidInput

ROOT = Path(__file__).resolve().parents[1]

COURSES_LIMIT_S = 120.0
"""For all courses together; each has a limit of its own in ``tests/unicron/test_gpu.py``."""

COURSES = "tests/unicron/test_gpu.py"
AT_ONCE = 5
"""Courses: each has up to 4 ranks, and most of its time is their start."""
MOST_RANKS = 4
LAST_CHARACTERS = 20_000
"""Of pytest's output, where a course has failed."""

RANKS = 4
FAULTS = ("kill", "exception", "hang=stop", "hang=sleep", "hang=collective")
KILLS = 30
STACK_STEPS = 300
"""Steps of the task with faults: more than it does until the last of them is healed, at 8 steps a second."""
KILLS_STEPS = 100_000
"""Steps of the task that is killed again and again, which nobody waits for."""

RESUME_S = 0.6
"""Required: from detection until the interrupted step is done, beside one step."""

OWN_S = 0.3
"""Required: the part of it that is more than bare processes need to make a communicator and use it once."""

HEAL_S = 60.0
"""Longest wait for one fault to be healed."""


class DeviceStack(Stack):
    """A stack of nodes with one worker each, which share the machine's devices."""

    def __init__(self, folder: Path, entries: Sequence[str]) -> None:
        self._shares = len(set(entries)) < len(entries)
        super().__init__(
            folder,
            nodes=len(entries),
            workers_per_node=1,
            devices=entries,
            environment={"UNICRON_FAULT_INJECTION": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path[1:]))},
        )

    def agent_environment(self, node: str) -> dict[str, str]:
        """Return the environment of a node's agent."""
        return super().agent_environment(node) | (shared_device(node) if self._shares else {})


def spec(name: str, corpus: Path, *, workers: int, steps: int, bf16: bool) -> Record:
    """Return the task of the stack's part."""
    return {
        "name": name,
        "workers": {"min": 1, "max": workers},
        "model": {"layers": 2, "hidden": 256, "heads": 4, "sequence_length": 256},
        "batch": {"global": 12, "micro": 1},
        "steps": steps,
        "data": str(corpus),
        "bf16": bf16,
        "deterministic_sums": True,
        "checkpoint": {"every": 1000, "memory_every": 1},
        "optimizer": {"name": "adam", "lr": 0.001},
    }


def between_s(first: str, last: str | None) -> float | None:
    """Return the seconds between two times of the interface; None: there is no second one."""
    if last is None:
        return None
    return round((datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds(), 3)


class Healing:
    """Has one fault after the other happen to a task, and reports how each was healed."""

    def __init__(self, report: Report, client: WaitingClient, task: str) -> None:
        self._report, self._client, self._task = report, client, task
        self._seen: frozenset[str] = frozenset()
        self.rows: list[Record] = []

    async def fault(self, fault: str, rank: int) -> None:
        """Have a fault happen to a rank, wait until all is as before, and report it."""
        before, step_s = await self._pids(), await self._step_s()
        lost = next(one["worker"] for one in (await self._client.task(self._task))["ranks"] if one["rank"] == rank)
        await self._client.post(f"/v1/tasks/{self._task}/faults", {"fault": fault, "rank": rank, "step": None})
        await self._healed(fault, step_s, before, lost)

    async def node_lost(self, stack: Stack, node: str) -> None:
        """Kill a node, bring it back, and report how the loss was healed."""
        before, step_s = await self._pids(), await self._step_s()
        await stack.kill_node(node)
        await self._healed("node lost", step_s, before, lost=f"{node}/0")
        await stack.start_node(node)

    async def _healed(self, fault: str, step_s: float, before: dict[str, int], lost: str) -> None:
        async def restored() -> list[Record] | None:
            new = [one for one in await self._client.incidents() if one["id"] not in self._seen]
            return new if new and all(one["restored_at"] for one in new) else None

        new = await self._client.until(f"{fault} is healed", restored, HEAL_S)
        await asyncio.sleep(2 * step_s)  # a further incident would be one of the same fault
        new = [one for one in await self._client.incidents() if one["id"] not in self._seen]
        self._seen |= {one["id"] for one in new}
        after = await self._pids()
        kept = [worker for worker, pid in before.items() if worker != lost and after.get(worker) == pid]
        resume_s = between_s(new[0]["detected_at"], new[0]["resumed_at"])
        row = {
            "fault": fault,
            "incidents": [one["kind"] for one in new],
            "detection_s": between_s(new[0]["occurred_at"], new[0]["detected_at"]),
            "resume_s": resume_s,
            "restore_s": between_s(new[0]["detected_at"], new[0]["restored_at"]),
            "steps_recomputed": sum(one["steps_recomputed"] for one in new),
            "survivors_kept": len(kept),
            "survivors": len(before) - 1,
            "step_s": round(step_s, 3),
            "beyond_a_step_s": None if resume_s is None else round(resume_s - step_s, 3),
            "phases_s": await self._phases_s(new[0]["plans"]),
        }
        self.rows.append(row)
        self._report.line("fault", **row)

    async def _phases_s(self, plans: Sequence[str]) -> dict[str, float]:
        """Return how long the phases of the first plan's stages took on the slowest rank."""
        found: dict[str, float] = {}
        for plan in plans[:1]:
            for milestone in (await self._client.get(f"/v1/plans/{plan}"))["milestones"]:
                for name, value_s in milestone["durations_s"].items():
                    found.setdefault(f"{milestone['phase']}: {name}", round(value_s, 3))
        return found

    async def _pids(self) -> dict[str, int]:
        task = await self._client.task(self._task)
        return {rank["worker"]: rank["pid"] for rank in task["ranks"]}

    async def _step_s(self) -> float:
        first, at_s = (await self._client.task(self._task))["step"], time.monotonic()

        async def further() -> int | None:
            step: int = (await self._client.task(self._task))["step"]
            return step if step >= first + 5 else None

        steps: int = await self._client.until("steps", further, HEAL_S) - first
        return (time.monotonic() - at_s) / steps


async def stack_part(report: Report, entries: Sequence[str], kills: int, faults: Sequence[str], steps: int) -> None:
    """Run the part ``stack``, or ``kills``."""
    bf16 = bool(entries[0])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.txt"
        await run_module("unicron.trainer.corpus", str(corpus))
        bare_s = await asyncio.to_thread(initialisation_s, report, entries)
        async with DeviceStack(folder / "run", entries) as stack, WaitingClient(stack.url) as client:
            await client.submit(spec("faulty", corpus, workers=RANKS, steps=steps, bf16=bf16))
            await client.until_step("faulty", 3, HEAL_S)
            healing = Healing(report, client, "faulty")
            for fault in faults:
                await healing.fault(fault, rank=1)
            for _ in range(kills):
                await healing.fault("kill", rank=1)
            if faults:
                await healing.node_lost(stack, "n2")
            judge(report, healing.rows, bare_s)
            if not faults:
                return
            faulty = await client.until_ended("faulty", 4 * HEAL_S)
            await client.submit(spec("plain", corpus, workers=RANKS, steps=steps, bf16=bf16))
            plain = await client.until_ended("plain", 4 * HEAL_S)
            paths = [Path(task["result"]["parameters_path"]) for task in (faulty, plain)]
            difference = await asyncio.to_thread(largest_difference, *paths)
            report.equal("parameters of a run with faults: largest difference", difference, 0.0)


def largest_difference(left: Path, right: Path) -> float:
    """Return the largest absolute difference between two files of parameters, of any type."""
    from safetensors.torch import load_file

    a, b = load_file(left), load_file(right)
    differences = [(a[name].double() - b[name].double()).abs().max() for name in a.keys() | b.keys()]
    largest: float = max(float(difference) for difference in differences)
    return largest


def judge(report: Report, rows: Sequence[Record], bare_s: float) -> None:
    """Report the bounds of the faults that were healed; ``bare_s`` is what ``initialisation_s`` has measured."""
    beyond = [row["beyond_a_step_s"] for row in rows if row["fault"] != "node lost"]
    known = [value for value in beyond if value is not None]
    slowest = max(known) if len(known) == len(beyond) and known else None
    report.at_most(
        "interrupted step done after detection, beside a step (s): the slowest",
        slowest,
        RESUME_S,
        median=statistics.median(known) if known else None,
    )
    report.at_most(
        "of that, beside what bare communicators cost (s)",
        None if slowest is None else slowest - bare_s,
        OWN_S,
        bare_s=bare_s,
    )
    report.equal("survivors that kept their processes", sum(row["survivors_kept"] for row in rows),
                 sum(row["survivors"] for row in rows))  # fmt: skip
    report.equal("steps computed again", sum(row["steps_recomputed"] for row in rows), 0)
    report.equal("incidents", sum(len(row["incidents"]) for row in rows), len(rows))


def courses_part(report: Report, *, shares: bool) -> None:
    """Run the part ``courses``: the tests on devices, several at a time, and say what each has come to."""
    environment = os.environ | ({"UNICRON_TEST_ON_ONE_DEVICE": "1"} if shares else {})
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", COURSES]
    listed = subprocess.run(
        [*command, "--collect-only", "-qq"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    collected = [line for line in listed.stdout.splitlines() if "::" in line]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "-v", "-n", str(AT_ONCE), "--dist", "worksteal"],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(COURSES_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # pytest prints what has failed, and ends its workers
            process.wait()
        output.seek(0)
        text = output.read()
    found = dict(reversed(match) for match in re.findall(r"(PASSED|FAILED|ERROR|SKIPPED) +(tests/\S+::\S+)", text))
    for test in collected:
        report.line("course", test=test.partition("::")[2], outcome=found.get(test, "not run").lower())
    passed = sum(outcome == "PASSED" for outcome in found.values())
    report.equal("courses that passed, of those that ran", passed, len(found), not_run=len(collected) - len(found))
    if passed < len(found):
        print(text[-LAST_CHARACTERS:], file=sys.stderr)


async def measure(report: Report, parts: Sequence[str], on_cpu: bool) -> None:
    """Run the parts."""
    there = hardware.devices(os.environ.get(VISIBLE_VARIABLE))
    if not there.entries and not on_cpu:
        raise InvalidInput(f"there is no CUDA device{f': {there.problem}' if there.problem else ''}")
    report.line("device", names=list(there.names), driver=there.driver)
    entries = [there.entries[i % len(there.entries)] for i in range(RANKS)] if there.entries else [""] * RANKS
    if "courses" in parts:
        await asyncio.to_thread(courses_part, report, shares=len(there.entries) < MOST_RANKS)
    if "stack" in parts:
        await stack_part(report, entries, 0, FAULTS, STACK_STEPS)
    if "overhead" in parts:
        await asyncio.to_thread(devices_step.measure, report)
    if "kills" in parts:
        await stack_part(report, entries, KILLS, (), KILLS_STEPS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = ("courses", "stack", "overhead", "kills")
    parser.add_argument("--part", nargs="+", choices=every, default=every, help="which parts")
    parser.add_argument("--on-cpu", action="store_true", help="the stack on gloo, where there is no device")
    options = parser.parse_args(arguments)
    return run(lambda report: measure(report, options.part, options.on_cpu))


if __name__ == "__main__":
    sys.exit(main())
