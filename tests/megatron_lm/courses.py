"""Courses of real training processes: a script under torchrun, and a task on two workers through a fault."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.unicron.harness import Agent

ROOT = Path(__file__).resolve().parents[2]

CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""What Megatron asks for with tensor parallelism."""


def parameters(folder: Path) -> dict[str, Any]:
    """Return the parameters of the first replica, by shard and name."""
    import torch

    files = sorted(folder.glob("*-0.pt"))
    assert files
    return {f"{path.stem}/{name}": value for path in files for name, value in torch.load(path).items()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of the parameters that are not the same to the last bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not one[name].equal(other[name])]


def farthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference between two parameters of the same place."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def torchrun(
    folder: Path,
    ranks: int,
    program: list[str],
    path: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run a program, which leaves its parameters in a folder, under torchrun; return them.

    Args:
        folder: is made.
        ranks: processes.
        program: its file, and its arguments.
        path: where it finds further modules.
        environment: further variables.
    """
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
    search = os.pathsep.join(filter(None, (str(ROOT), path, os.environ.get("PYTHONPATH"))))
    fixed = {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "output").open("w") as output:
        subprocess.run(
            [sys.executable, *launcher, *program],
            cwd=folder,
            env={**os.environ, **fixed, **CONNECTIONS, **environment},
            stdout=output,
            stderr=output,
            timeout=280,
            check=True,
        )
    return parameters(folder)


async def through_a_fault(
    a: Agent, spec: Path, lost: str, step: int, environment: Mapping[str, str], *, replaced: bool = False
) -> int:
    """Train on two workers, of which the second is lost at a place, and replaced by a new process or not.

    Args:
        a: the agent.
        spec: file of the specification.
        lost: the place (``program.FAULT``, without the worker); empty: nothing is lost.
        step: the updates that are applied before.
        environment: of the processes.
        replaced: whether a new process takes the lost one's place.

    Returns:
        The generation that does the rest.
    """
    workers = ["w0", "w1"]
    for worker in workers:
        await a.fork(worker, spec, {"UNICRON_TEST_FAULT": lost and f"w1:{lost}", **environment})
    generation = await a.configure(dict.fromkeys(workers, "initial"))
    if lost:
        await a.until(lambda: "w1" in a.exits, 200)
        await a.hold(["w0"])
        members = {"w0": "live"}
        if replaced:
            generation = await a.configure(members, stage="interrupted", fault_step=step)
            await a.fork("w2", spec, dict(environment))
            await a.resumed(generation)
            await a.drain(["w0"])
            members["w2"] = "take"
        generation = await a.configure(members, fault_step=step)
    await a.until(lambda: all(w in a.exits for w in a.members), 300)
    assert [a.exits[w][1] for w in a.members] == [0] * len(a.members), a.output("w0")[-3000:]
    return generation
