"""The time limit of the Slurm job that a run is in: the task is stopped before it, with a checkpoint."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping

from cli.launch.allocation import JOB
from cli.launch.checking import say
from cli.launch.interrupts import Interrupts

MARGIN_S = 300.0
"""How long before the limit a task is stopped. A script that restarts whole has 240 s to save; the others need a step
and a checkpoint, and all need some seconds to end."""

SHARE = 0.25
"""The most of the time that there is at the start: a job of minutes is to train, too."""

ASK_AGAIN_S = 600.0
"""Time between two questions to slurmctld: an operator may change the limit of a job that runs."""

_ANSWER_S = 60.0
"""Time for slurmctld's answer (cli/watch/slurm.py)."""

_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
"""Days, hours, minutes and seconds, as ``squeue --format %L`` prints them."""


def seconds_of(text: str) -> float | None:
    """Return the time left as squeue prints it, in seconds; None: there is no limit, or it is not known."""
    found = _LEFT.fullmatch(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def left_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds until Slurm ends this process's job; None: there is no job, or no limit that is known."""
    job = environment.get(JOB)
    if not job:
        return None
    command = ("squeue", "--noheader", "--jobs", job, "--format", "%L")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
        return seconds_of(done.stdout)
    except (OSError, subprocess.SubprocessError):
        end = environment.get("SLURM_JOB_END_TIME", "")  # from Slurm 23 on; as the limit was at the start
        return float(end) - time.time() if end.isdigit() else None


async def interrupt_before_limit(
    interrupts: Interrupts,
    margin_s: float | None,
    ask: Callable[[], float | None] = lambda: left_s(os.environ),
) -> None:
    """Interrupt a run before its job's time limit; return at once where there is none.

    Args:
        interrupts: of the run.
        margin_s: how long before; 0: never; None: as long as usual.
        ask: returns the seconds that are left.
    """
    if margin_s == 0.0 or (left := await asyncio.to_thread(ask)) is None:
        return
    margin_s = min(MARGIN_S, SHARE * left) if margin_s is None else margin_s
    end = time.monotonic() + left
    while (left := end - time.monotonic()) > margin_s:
        await asyncio.sleep(min(left - margin_s, ASK_AGAIN_S))
        if (found := await asyncio.to_thread(ask)) is not None:
            end = time.monotonic() + found
    say(f"the time limit of the Slurm job comes in {left:.0f} s")
    interrupts.limit_comes()
