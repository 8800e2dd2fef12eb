"""The Slurm job whose first node is lost: another node has it requeued or cancelled, as Slurm itself would.

The batch script is on the first node, and goes with it, as does srun, which brings the output of all processes. With
``--no-kill`` Slurm leaves such a job to its other nodes, up to its time limit.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from cli.launch.allocation import JOB, PROCESS
from cli.watch.slurm import states_of

WATCHERS = ("1", "2", "3")
"""Processes of the srun that ask slurmctld: several, since one may be lost, too, and not all of a large job's."""

LOOK_S = 10.0
"""Time between two questions to slurmctld."""

TURN_S = 60.0
"""How much later the next process begins to ask: it has been ended by then, if the one before has done it."""

LOOKS = 60
"""Questions until Slurm has found out that the node is down: ``SlurmdTimeout``, by itself 300 s, and as much again."""

_ANSWER_S = 60.0
"""Time for slurmctld's answer (cli/watch/slurm.py)."""


async def requeue(environment: Mapping[str, str]) -> str:
    """Have the job requeued, or else cancelled, once the node with its batch script is down; say what was done.

    What was done is in the job's output, too.

    Args:
        environment: of this process, which is none of the first one's node.
    """
    job = environment.get(JOB, "")
    if environment.get(PROCESS) not in WATCHERS:
        return f"processes {WATCHERS[0]} to {WATCHERS[-1]} of this srun ask Slurm to requeue job {job}"
    await asyncio.sleep(WATCHERS.index(environment[PROCESS]) * TURN_S)
    try:
        found = fields_of(await _asked("scontrol", "show", "job", "--oneliner", job))
        host = found.get("BatchHost", "")
        if found.get("BatchFlag") != "1" or not host:
            return f"job {job} is interactive: the same command goes on from the newest checkpoint"
        for _ in range(LOOKS):
            if "DOWN" in states_of(fields_of(await _asked("scontrol", "show", "node", "--oneliner", host))["State"]):
                return await _ended(job, host, found)
            await asyncio.sleep(LOOK_S)
    except (OSError, subprocess.SubprocessError, KeyError) as err:
        said = getattr(err, "stderr", "") or err
        return f"`scontrol requeue {job}` has it go on from the newest checkpoint (Slurm was asked: {said})"
    return f"{host}, where the batch script of job {job} runs, is not down, so the job is left to its script"


async def _ended(job: str, host: str, found: Mapping[str, str]) -> str:
    if found.get("Requeue") == "1":
        command, said = ["scontrol", "requeue", job], "requeued: it goes on from the newest checkpoint"
    else:  # nobody is left to end it
        command = ["scancel", job]
        said = "cancelled, since Slurm may not requeue it: the same command goes on from the newest checkpoint"
    said = f"{host}, where the batch script was, is down, and job {job} is {said}"
    await _asked(*command)
    await asyncio.to_thread(_append, found.get("StdErr", ""), said)
    return said


def _append(path: str, said: str) -> None:
    with suppress(OSError), open(path, "r+b") as output:  # not made here, if it is of the lost node alone
        output.seek(0, os.SEEK_END)
        output.write(f"unicron: {said}\n".encode())


def fields_of(text: str) -> dict[str, str]:
    """Return the fields of what scontrol prints on one line. Pure."""
    return {name: value for name, _, value in (field.partition("=") for field in text.split())}


async def _asked(*command: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=_ANSWER_S, check=True
    )
    return str(done.stdout)
