"""What Slurm gives a process of a step that it has started on several nodes, read from its environment. Pure.

A "step" of Slurm's is what one ``srun`` runs; everywhere else in this project a step is one update of a training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cli.watch.trouble import label
from shared.errors import InvalidInput

COMMANDS = ("squeue", "scontrol")
"""What a run asks Slurm with."""

JOB = "SLURM_JOB_ID"
PROCESS = "SLURM_PROCID"


class Allocation(NamedTuple):
    """The nodes of one ``srun``, each with one process, as this process sees them.

    ``name``: of this ``srun``, which no other one of the cluster has. ``node``: this process's, as node agents are
    named. ``nodes``: how many there are. ``is_first``: whether this process is the one that runs the control plane.
    """

    name: str
    node: str
    nodes: int
    is_first: bool


def allocation_of(environment: Mapping[str, str]) -> Allocation | None:
    """Return the nodes that share this ``srun``; None: this process is the only one that it has started, or no srun's.

    Raises:
        InvalidInput: a node has several processes, or a variable of Slurm's is missing or no number.
    """
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "1")
    if tasks == 1:
        return None
    nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    if tasks != nodes:
        problem = f"must be one on each node: srun --ntasks-per-node 1 (given: {tasks} on {nodes} nodes)"
        raise InvalidInput.of("SLURM_STEP_NUM_TASKS", tasks, problem, f"the processes of `unicron run` {problem}")
    # A job that was requeued has the same number, and counts its steps anew.
    restarts = _number(environment, "SLURM_RESTART_COUNT", "0")
    name = f"{_number(environment, JOB)}.{_number(environment, 'SLURM_STEP_ID')}-{restarts}"
    return Allocation(name, label(_given(environment, "SLURMD_NODENAME")), nodes, not _number(environment, PROCESS))


def lacks_commands(lacking: Sequence[str]) -> str:
    """Return a line for the user if Slurm's commands are missing, as they mostly are in a container; else empty.

    Args:
        lacking: those of ``COMMANDS`` that are not in ``PATH``.
    """
    if not lacking:
        return ""
    what = {"squeue": "a time limit that is changed", "scontrol": "the loss of the first node"}
    unseen = " and ".join(dict.fromkeys(what[name] for name in lacking))
    return f"{', '.join(lacking)} not in PATH here (a container?): {unseen} will not be answered"


def bound(environment: Mapping[str, str], cpus: int) -> str:
    """Return a line for the user if srun has bound this process, and so all ranks of its node, to few CPUs; else empty.

    Args:
        environment: of this process.
        cpus: on how many it may run.
    """
    there = environment.get("SLURM_CPUS_ON_NODE", "") if "SLURM_STEP_ID" in environment else ""
    if not there.isdigit() or int(there) <= cpus:
        return ""
    return f"srun has bound all ranks of this node to {cpus} of the job's {there} CPUs: --cpu-bind=none does not"


def _number(environment: Mapping[str, str], variable: str, default: str | None = None) -> int:
    text = _given(environment, variable, default)
    if not (text.isascii() and text.isdigit()):
        raise _refused(variable, text, "must be a whole number, as srun sets it")
    return int(text)


def _given(environment: Mapping[str, str], variable: str, default: str | None = None) -> str:
    text = environment.get(variable) or default
    if text is None:
        raise _refused(variable, None, "is not set, as srun does for each of its processes")
    return text


def _refused(variable: str, value: str | None, problem: str) -> InvalidInput:
    return InvalidInput.of(variable, value, problem, f"{variable} {problem}")
