"""Measuring how fast this machine does what training does, by ``unicron.process.preflight`` in the Python of the ranks.

The program and what it has started are killed together once ``LIMIT_S`` has passed; what it had measured by then stays.
While processes of tasks are on the machine, nothing is measured: it would take their time, and they its rates.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from pydantic import ValidationError

from services.agent.machine import hardware
from services.agent.machine.hardware import NO_DEVICES, NVML_ORDER, ORDER_VARIABLE, VISIBLE_VARIABLE, Devices
from shared.events.measurements import Measurement, Rate

PROGRAM = "unicron.process.preflight"

FORK_SERVER = "unicron.forkserver"
"""The module that a fork server runs; its children are processes of tasks, and some for a moment."""

LIMIT_S = 30.0
"""Time for all of it: torch is imported, four parts take a second or two each, and CUDA is opened twice."""

PART_S = 12.0
"""Time for one part. NCCL takes most of it to find its links."""

NEIGHBOUR_S = 25.0
"""Time for an all-reduce with a neighbour, torch's import included."""

BUSY_PERCENT = 10
"""Utilisation of a device from which somebody uses it."""

_CHARACTERS = 120
"""Longest name of a device, and most characters of a problem, that are kept."""

_LINES = 320
"""Most lines of the program that are read."""


def in_use() -> str:
    """Return who uses this machine for training now, in words; empty: nobody does.

    Processes of other containers are not seen; what they do on devices is.
    """
    if found := next(_forked(), None):
        return f"process {found} belongs to a task or a self-test"
    for entry, device, reading in hardware.readings(os.environ.get(VISIBLE_VARIABLE)):
        if (reading.utilisation_percent or 0) >= BUSY_PERCENT:
            return f"device {entry} ({device.name}) is {reading.utilisation_percent}% busy"
    return ""


def _forked() -> Iterator[int]:
    """Yield the processes that fork servers have forked."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and FORK_SERVER in parent.cmdline():
                yield process.pid


async def measure(python: str, folder: Path, devices: Devices, *, limit_s: float = LIMIT_S) -> Measurement:
    """Measure this machine.

    Args:
        python: the Python of the ranks, which has torch and the library.
        folder: where a file is written and read: the node's own folder.
        devices: of the node; none: its workers are processes without one.
        limit_s: after which time it ends, in seconds.
    """
    device = _line(next((name for name in devices.names if name), "") or _processor())
    count = len(devices.entries) or len(os.sched_getaffinity(0))
    if use := await asyncio.to_thread(in_use):
        return Measurement(device=device, count=count, problems=[_line(f"not measured: {use}")])
    rates, problems = await _run(python, devices, {"folder": str(folder)}, {}, limit_s)
    return Measurement(device=device, count=count, rates=rates, problems=problems)


async def with_neighbour(
    python: str, devices: Devices, peer: str, store: str, listener: socket.socket | None, interfaces: dict[str, str]
) -> tuple[list[Rate], list[str]]:
    """Measure the all-reduce with a neighbour, which begins at the same time; return the rates, and the problems.

    Args:
        python: as in ``measure``.
        devices: of this node; the neighbour has as many.
        peer: name of the neighbour.
        store: where both have a rendezvous store, ``ip:port``.
        listener: the listening socket of the store, if it is this node's.
        interfaces: variables that say which network interface is used.
    """
    host, _, port = store.rpartition(":")
    fd = None if listener is None else listener.fileno()
    request = {"neighbour": {"host": host.strip("[]"), "port": int(port), "fd": fd}}
    rates, problems = await _run(python, devices, request, interfaces, NEIGHBOUR_S, () if fd is None else (fd,))
    return [rate.model_copy(update={"peer": peer}) for rate in rates], [_line(f"{peer}: {each}") for each in problems]


async def _run(
    python: str,
    devices: Devices,
    request: dict[str, Any],
    further: dict[str, str],
    limit_s: float,
    descriptors: tuple[int, ...] = (),
) -> tuple[list[Rate], list[str]]:
    """Run the program; return the rates that it says, and what went wrong."""
    shown = {VISIBLE_VARIABLE: ",".join(devices.entries)} if devices.entries else NO_DEVICES
    env = {**shown, **further, ORDER_VARIABLE: os.environ.get(ORDER_VARIABLE, NVML_ORDER)}
    request = {**request, "devices": len(devices.entries), "part_s": PART_S}
    command = [python, "-P", "-m", PROGRAM, json.dumps(request)]
    problem = ""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, **env},
                start_new_session=True,
                pass_fds=descriptors,
            )
        )
        try:
            async with asyncio.timeout(limit_s):
                code = await (await asyncio.shield(starting)).wait()
            if code:
                last = _text(errors).strip().rpartition("\n")[2]
                problem = f"{command[0]} -m {PROGRAM} ended with {code}: {last}"
        except TimeoutError:
            problem = f"not done within {limit_s:g} s"
        except OSError as err:
            return [], [f"{command[0]} cannot be run ({err.strerror or err})"]
        finally:
            with contextlib.suppress(OSError):  # it was never started, or has ended
                process = await starting  # perhaps this is cancelled while it starts, and it has begun others already
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        rates, problems = _read(_text(output).splitlines()[:_LINES])
        return rates, [*problems, *([problem] * bool(problem))]


def _line(text: str) -> str:
    """Return a text as a line that terminals only show."""
    return "".join(each if each.isprintable() else " " for each in text)[:_CHARACTERS]


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _read(lines: list[str]) -> tuple[list[Rate], list[str]]:
    """Return the rates and the problems that the program has printed. Libraries print lines as well."""
    rates, problems = [], []
    for line in lines:
        with contextlib.suppress(ValueError, ValidationError, TypeError):
            found = json.loads(line)
            if "problem" in found:
                problems.append(_line(str(found["problem"])))
            else:
                rates.append(Rate(**found))
    return rates[:256], problems[:60]


def _processor() -> str:
    """Return the name of the processor, or at least its kind."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.machine()
