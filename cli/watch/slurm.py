"""States of nodes as Slurm knows them: ``scontrol show node -o``, one line for each node. The parser is pure."""

from __future__ import annotations

import re
import subprocess

from cli.watch.trouble import Trouble, key_of, label
from shared.errors import Unavailable

COMMAND = ("scontrol", "show", "node", "-o")

TIMEOUT_S = 60.0
"""Time for slurmctld's answer, which takes up to ``MessageTimeout``, 10 s by itself, for each controller."""

_WARNINGS = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"})
"""States of nodes that an operator, a health check or slurmctld wants empty (slurm.conf, scontrol(1))."""

_ERRORS = frozenset({"DOWN", "ERROR"})
"""States of nodes that can run nothing."""

_ON_PURPOSE = frozenset({"POWER_DOWN", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "FUTURE"})
"""States beside which ``DOWN`` says that power saving has the node off."""

_SUFFIXES = "*~#!%$@^+-"
"""What is appended to a state: not responding, power saving, maintenance, a reboot (sinfo(1), NODE STATE CODES)."""

_NEXT_FIELD = r"(?= [A-Z][A-Za-z]*=|$)"


def troubles(text: str) -> list[Trouble]:
    """Return the troubles in what scontrol prints."""
    return [found for line in text.splitlines() if (found := _of_line(line.strip())) is not None]


def look() -> list[Trouble]:
    """Ask scontrol.

    Raises:
        Unavailable: there is none, or slurmctld does not answer it.
    """
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise Unavailable(f"{' '.join(COMMAND)}: {err}") from err
    if done.returncode:
        raise Unavailable(f"{' '.join(COMMAND)} ended with {done.returncode}: {done.stderr.strip()[:200]}")
    return troubles(done.stdout)


def states_of(text: str) -> set[str]:
    """Return the states of a node, as scontrol prints them in one word."""
    return {part.rstrip(_SUFFIXES) for part in text.split("+")}


def _of_line(line: str) -> Trouble | None:
    name, state = re.search(r"^NodeName=(\S+)", line), re.search(r" State=(\S+)", line)
    if name is None or state is None:
        return None
    states = states_of(state[1])
    if states & _ON_PURPOSE:
        return None
    is_down = bool(states & _ERRORS)
    if not is_down and not states & _WARNINGS:
        return None
    found = re.search(rf" Reason=(.*?){_NEXT_FIELD}", line)
    reason = found[1] if found is not None else ""
    return Trouble(
        node=label(name[1]),
        key=key_of("slurm", "down" if is_down else "drain"),
        severity="error" if is_down else "warning",
        reason=re.sub(r" *\[[^\]]*\]$", "", reason),
        evidence={"State": state[1], "Reason": reason},
    )
