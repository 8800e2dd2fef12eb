"""Failure codes: why a command to a node agent, or a plan's execution for a task, has failed.

Agents put a code into their replies (``shared.messages.commands.Reply``), the transition service adds the failures that
it finds itself and records the code in ``state.moved`` (``shared.events.union.StateMoved``), and the detector decides
by it. The codes of the exception tree (``shared.errors``) are a vocabulary of their own: they appear in REST and CLI
errors.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator


class FailureCode(StrEnum):
    """Why something failed. The values are spelled so in replies and in the log."""

    # An agent finds these.
    FENCED = "fenced"
    """The command belongs to an older generation than the newest that the agent has seen for the task."""
    PROCESS_EXITED = "process-exited"
    """A process that the command depends on has ended. The agent signals the exit to the detector as well."""
    RANK_RAISED = "rank-raised"
    """Ranks raised an exception. The agent signals it to the detector as well. A reply with this code that clears all
    its workers means that they lost a peer."""
    BUSY = "busy"
    """The worker runs a process of another task."""
    NOT_FOUND = "not-found"
    """The node has no such worker."""
    UNAVAILABLE = "unavailable"
    """A part of the node that the command needs (the fork server, a store) does not answer."""
    UNDECODABLE = "undecodable"
    """The agent cannot read the command, since the sender has another version. The code is treated like
    ``INTERNAL``."""
    CHECKPOINT_FAILED = "checkpoint-failed"
    """The state cannot be saved, so the ranks have not stopped. They train on, and no worker is to blame."""
    INTERNAL = "internal"
    """An error of the agent itself."""

    # The transition service finds these.
    TIMEOUT = "timeout"
    """The agent has not answered within the command's time-out."""
    INVALID_REPLY = "invalid-reply"
    """The agent's answer cannot be parsed."""
    NODE_LOST = "node-lost"
    """A node of the stage's members was lost. The detector has reported the loss."""
    RELEASED = "released"
    """The plan counts on a process that an earlier plan has ended: the planner decided before it knew that. No worker
    is to blame."""
    UNKNOWN_TASK = "unknown-task"
    """The log has no specification of the task."""
    OCCUPIED = "occupied"
    """Another task never released a worker that the plan needs."""
    REFUSED = "refused"
    """The agent gave no code."""

    UNKNOWN = "unknown"
    """A code that this version does not know, from an agent of another version. It is treated like ``INTERNAL``."""


def known_code(value: Any) -> Any:
    """Return the failure code for a value read from the wire: ``UNKNOWN`` for other text, None for empty text."""
    if not isinstance(value, str):
        return value
    if value == "":
        return None
    try:
        return FailureCode(value)
    except ValueError:
        return FailureCode.UNKNOWN


ReceivedCode = Annotated[FailureCode | None, BeforeValidator(known_code)]
"""A failure code in a message of a program that may have another version."""
