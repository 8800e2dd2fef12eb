"""The environment variables of a training process: their names, their defaults, and how they are read.

The node agent sets those of the first group for every rank that it starts. An operator or a test may set the others;
all ranks of a task need the same values, except for ``RANK_NICE`` and the injected faults. Standard library only:
the node agent imports this module too, and of the library only this package.
"""

from __future__ import annotations

import os

# Set by the node agent.

SOCKET = "UNICRON_SOCKET"
"""The agent's Unix socket. A leading ``@`` stands for Linux's abstract namespace, which needs no file and sets no limit
on the length of the run directory. Without this variable there is no agent."""

TASK = "UNICRON_TASK"
"""The task's name."""

WORKER = "UNICRON_WORKER"
"""The worker (slot) that the process occupies, ``node/k``."""

SPEC = "UNICRON_SPEC"
"""The file that contains the task's specification as JSON."""

RUN_DIR = "UNICRON_RUN_DIR"
"""The task's folder below the agent's run directory, for a script's own files."""

MEMORY = "UNICRON_MEMORY"
"""The folder in shared memory for the task's snapshots on this node; without it no snapshots are taken. Only the agent
deletes the folder, never a rank."""

NODE, DOMAIN = "UNICRON_NODE", "UNICRON_DOMAIN"
"""The rank's node, and the node's failure domain."""

HOST = "UNICRON_STORE_HOST"
"""The address under which peers reach the node."""

CODE_DIGEST, CODE_DIRECTORY = "UNICRON_CODE_DIGEST", "UNICRON_CODE_DIRECTORY"
"""The digest of the code that has come along with the task, and its folder on this node, which relative paths of the
specification are of. Without them no code has come along."""

CODE_REFUSED = "UNICRON_CODE_REFUSED"
"""Why that code is not run here."""

ORPHAN_GRACE_S = "UNICRON_ORPHAN_GRACE_S"
"""How long a process trains on while nothing listens on ``SOCKET``. Between two agents their supervisor does."""

# Set by an operator or a test.

DATA_DIRECTORY = "UNICRON_DATA_DIRECTORY"
"""Where text is tokenised to and dataset indices are kept; default: ``data`` beside the specification."""

WORKING_DIRECTORY = "UNICRON_WORKING_DIRECTORY"
"""Where a script runs: the folder in which ``unicron run`` was called. Without it: that of the node agent."""

STACKS = "UNICRON_STACKS_DESCRIPTOR"
"""The open file for a process's stacks, where a fresh interpreter takes the place of the forked process."""

SEARCH_PATH = "PYTHONPATH"
"""Python's own variable. A forked process has started before the task's value of it is known."""

JOIN_TIMEOUT_S = "UNICRON_JOIN_TIMEOUT_S"
"""How long the members of a generation wait for one another when it begins."""

FINISH_FLOOR_S = "UNICRON_FINISH_FLOOR_S"
"""How long, at least, a replica that a hold spares may go without a finished micro-batch (``unicron.link.sparing``)."""

LEND_AFTER_S = "UNICRON_LEND_AFTER_S"
"""How long ranks try in vain to write a result before their workers may go to other tasks (``loop.finishing``)."""

BUCKET_BYTES = "UNICRON_BUCKET_BYTES"
"""Largest size of a bucket of gradients (``unicron.gradients.buckets``)."""

ROUND_BYTES = "UNICRON_ROUND_BYTES"
"""Bytes that a rank sends, and receives, in one round of a transfer of state."""

REPORT_INTERVAL_S = "UNICRON_REPORT_INTERVAL_S"
"""How long a rank may keep back what it does inside a step; newer progress takes the place of what was kept back."""

RANK_NICE = "UNICRON_RANK_NICE"
"""How much less of a busy core ranks get than everything else (see nice(2))."""

MTBF_NODE_S = "UNICRON_MTBF_NODE_S"
"""Mean time between losses of one node, from which the interval between snapshots follows
(``unicron.snapshot.interval``). The node agent sets it to its own setting of that name."""

FAIL_AT = "UNICRON_FAIL_AT"
"""Injected faults; the form is described in ``unicron.process.faults``."""

FAULT_SIGNALS = "UNICRON_FAULT_SIGNALS"
"""With the value 1, SIGUSR1 makes a process raise an ``InjectedFault`` at the next fault point of a step."""

# Set by torchrun, read where there is no agent. Where there is one, a rank sets them in each generation that it joins.

RANK, LOCAL_RANK, GROUP_RANK = "RANK", "LOCAL_RANK", "GROUP_RANK"
WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE = "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"

TORCHRUN = (RANK, LOCAL_RANK, GROUP_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)

TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
"""Variables that only torchrun sets."""

GENERATION = "UNICRON_GENERATION"
"""The generation that a rank has joined, beside torchrun's variables."""

DEFAULTS: dict[str, float] = {
    # Without a supervisor there is no next agent: the node is lost, and so is what its processes do from here on.
    ORPHAN_GRACE_S: 5.0,
    # All members get their Configure at the same moment, so they wait together, and meet in well under a second.
    JOIN_TIMEOUT_S: 20.0,
    # Below the least time after which the detector takes a rank for hanging (0.5 s, ``hang_floor_s``): a rank that
    # waits for a peer that hangs has then left its step, and only the peer is blamed. On a busy machine a healthy
    # replica may be broken off, which loses the micro-batches that it had computed, and nothing else.
    FINISH_FLOOR_S: 0.4,
    # This is longer than an outage after which a restart of the processes would be better: a restart takes about as
    # long.
    LEND_AFTER_S: 30.0,
    # The latency of a collective (below 1 ms) is small beside the transfer of 32 MiB, and a fault redoes little.
    BUCKET_BYTES: 32 << 20,
    # The latency of a round (below 1 ms) is small beside the transfer of 64 MiB; two such buffers fit beside any state.
    ROUND_BYTES: 64 << 20,
    # Half the interval of heartbeats (0.25 s), which are all that the agent passes progress on with; and with it a rank
    # that waits for a peer has said so before the peer may be taken for hanging (0.5 s, ``hang_floor_s``).
    REPORT_INTERVAL_S: 0.125,
    RANK_NICE: 0,
    # The prior of the planner (``mtbf_node_s``).
    MTBF_NODE_S: 20 * 86_400.0,
}
"""Values of the numeric variables where the environment does not set them."""


def number(name: str) -> float:
    """Return the value of a numeric variable: the environment's, or its default.

    Raises:
        ValueError: the environment's value is not a number.
    """
    return float(os.environ.get(name, DEFAULTS[name]))


def text(name: str, default: str = "") -> str:
    """Return the value of a variable, or ``default`` where the environment does not set it."""
    return os.environ.get(name, default)


def placed(path: str) -> str:
    """Return a path of a specification: a relative one is of the code that has come along, if any has."""
    return os.path.join(text(CODE_DIRECTORY), path) if path else ""
