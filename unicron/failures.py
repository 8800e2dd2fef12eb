"""Telling failures apart, and reporting them."""

from __future__ import annotations

import sys
import traceback

import torch.distributed as dist

from unicron.errors import CommunicationFailed, NonFiniteValue
from unicron.protocol import Raised
from unicron.runtime import Runtime

TRACEBACK_CHARACTERS = 16 * 1024
"""Longest traceback sent: the end is kept, where the error is."""

DETAIL_CHARACTERS = 1000
"""Longest error message sent: what a list of incidents can show."""


def is_communication(error: BaseException) -> bool:
    """Return whether an error is a collective's: torch has types for some, gloo's is a plain RuntimeError."""
    if isinstance(error, dist.DistError | CommunicationFailed):
        return True
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "Connection closed by peer" in str(error))


def kind(error: BaseException) -> str:
    """Return the protocol's kind of an error."""
    if is_communication(error):
        return "communication"
    return "non_finite" if isinstance(error, NonFiniteValue) else "exception"


def report(runtime: Runtime, error: BaseException, *, step: int) -> None:
    """Print an error and tell the agent of it."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    runtime.send(
        Raised(
            generation=runtime.generation,
            rank=runtime.rank,
            step=step,
            kind=kind(error),
            error=type(error).__name__,
            detail=str(error)[:DETAIL_CHARACTERS],
            traceback=text[-TRACEBACK_CHARACTERS:],
        )
    )


def forget_frames(error: BaseException) -> None:
    """Drop what the traceback's frames hold: autograd graphs, groups and their threads."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
