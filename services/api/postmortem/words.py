"""What the words of a log mean, for readers of a post-mortem who see them for the first time."""

from __future__ import annotations

from shared.events.severities import ErrorKind, Severity

KINDS = {
    ErrorKind.NODE_LOST: "nothing was heard of the node any more, so its workers and their processes count as lost",
    ErrorKind.PROCESS_EXIT: "a process of the task ended before its work was done",
    ErrorKind.CONNECTION: "processes of the task lost their connections to one another, and none of them had ended",
    ErrorKind.DEVICE: "a GPU of the node reported a fault",
    ErrorKind.EXCEPTION: "the training program raised an exception",
    ErrorKind.COLLECTIVE_TIMEOUT: "a collective operation did not end in time",
    ErrorKind.HANG: "the processes lived, and the task made no progress",
    ErrorKind.NON_FINITE: "a loss or a gradient was infinite or not a number",
    ErrorKind.TRANSITION_FAILED: "a plan could not be carried out",
    ErrorKind.BROKEN_LINK: "nodes could not reach one another",
    ErrorKind.DIFFERENCE: "a new process was not what those that train are, and had to leave before it took part",
}
"""Kind of an incident -> what has happened, as a sentence."""

ADVICE = {
    ErrorKind.NODE_LOST: "start the machine, or the service on it; the node joins again by itself.",
    ErrorKind.DEVICE: "reset the device with the agent stopped, or restart the machine; then start the agent, or "
    "`unicron return`.",
    ErrorKind.BROKEN_LINK: "mend the link; the node returns by itself once its links have worked for a while.",
    ErrorKind.PROCESS_EXIT: "If it repeats at one step, the task fails with the last line of the error.",
    ErrorKind.EXCEPTION: "If it repeats at one step, the task fails with the last line of the error.",
    ErrorKind.HANG: "If it repeats, look at the stacks below for what did not enter which collective.",
    ErrorKind.COLLECTIVE_TIMEOUT: "If it repeats, look at the network between the nodes of the task.",
    ErrorKind.CONNECTION: "If it repeats, look at the network between the nodes of the task.",
    ErrorKind.NON_FINITE: "Look at the samples of that micro-batch, and at the parameter that is named below.",
    ErrorKind.DIFFERENCE: "Undo the change that is named below; or stop and resume the task, which then takes it over.",
}
"""Kind of an incident -> what an operator can do (docs/operations.md, "What failures look like")."""

SEVERITIES = {
    Severity.SEV1: "the node is left out of use, and its workers' work is planned anew",
    Severity.SEV2: "the process is started again on its node; if that fails, it becomes SEV1",
    Severity.SEV3: "the step is tried again in place; if that fails, it becomes SEV2",
}
"""Severity -> the answer to it."""

SOURCES = {
    "own": "kept its own state",
    "live": "took it from a member that still had it",
    "memory": "read the copy in its node's memory",
    "peer-memory": "read a copy in another node's memory",
    "checkpoint": "read the checkpoint",
    "initial": "began from the initial state",
}
"""Source of a member's state -> what the member did; the nearest source first (``unicron.state.transfer``)."""

PARTS = {
    "hold": "survivors leave the broken step",
    "free": "what is left of failed processes ends",
    "prepare": "new processes start",
    "store": "a meeting point for the new group of processes starts",
    "configure": "the members form the new group: rebuild, agree, move, redistribute and first_step are parts of it",
    "rebuild": "connections of the new group are made",
    "agree": "members agree on the newest state and on what is left of the step",
    "move": "members without the state take it",
    "redistribute": "the lost member's share of the step is computed by others",
    "first_step": "the rest of the step",
    "drain": "members go on to the end of a step",
    "release": "workers that the plan gives up are freed",
    "store-interrupted": "store, for the members that finish the interrupted step",
    "configure-interrupted": "configure, of the members that finish the interrupted step",
    "store-target": "store, for the members of the new stage",
    "configure-target": "configure, of the members of the new stage",
    "stop": "the task writes a checkpoint and ends",
}
"""Part of a phase -> what is done in it (docs/transition.md). Parts of one phase overlap."""
