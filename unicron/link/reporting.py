"""Errors of a training process: their kinds, and their reports to the agent (``Raised`` of ``process.protocol``)."""

from __future__ import annotations

import sys
import traceback

import torch.distributed as dist

from unicron.errors import (
    CommunicationFailed,
    InvalidSpec,
    MemberDiffers,
    NonFiniteValue,
    UnsupportedModel,
    UnsupportedState,
    WrongLoop,
)
from unicron.link.agent_link import AgentLink
from unicron.link.lacks import Lack, lack_of
from unicron.protocol.messages import DIFFERS, REFUSED, WRONG_LOOP, Configure, Copies, Raised, Resumed

TRACEBACK_CHARACTERS = 16 * 1024
"""Longest traceback sent. Longer ones lose their beginning: the error is at the end."""

DETAIL_CHARACTERS = 1000
"""Longest error message sent: as much as a list of incidents can show."""

_SOURCES = {
    "own": "own state",
    "live": "the live state of another rank",
    "memory": "a snapshot on this node",
    "peer-memory": "a snapshot on another node",
    "checkpoint": "a checkpoint",
    "loaded": "the checkpoint that the script was given",
    "initial": "initial parameters",
    "script": "script",
}
"""``Resumed.source`` in words."""

_PHASES = {
    "rebuild": "groups",
    "agree": "agreement",
    "move": "state",
    "redistribute": "missing micro-batches",
    "first_step": "first step",
}
"""``Resumed.phases`` in words."""

NAME_CHARACTERS = 300
"""Longest name of a parameter sent; those of Megatron's models have at most 100 characters."""


def is_communication(error: BaseException) -> bool:
    """Return whether an error was raised by a collective since a peer was lost or a socket was shut.

    Where the process itself lacks what its call needed, no peer is to blame. Torch has types for some of these errors.
    Gloo's are plain ``RuntimeError``, which their text tells from others.
    """
    if isinstance(error, CommunicationFailed):
        return True
    of_collective = isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection closed by peer" in str(error)
    )
    return of_collective and lack_of(error) is None


REFUSALS = (InvalidSpec, UnsupportedModel, UnsupportedState)
"""Errors that say, whenever they are raised, that the task cannot run as specified."""

REFUSALS_AT_START = (ImportError, SyntaxError, FileNotFoundError, WrongLoop)
"""Errors that say so of a process that has not joined a generation yet: it lacks a module or a file, its script is not
Python, or uses the library wrongly. Later they are ordinary exceptions."""


def kind(error: BaseException, *, starting: bool = False) -> str:
    """Return the protocol's kind of an error.

    Args:
        error: the error.
        starting: whether the process has not joined a generation yet.
    """
    if is_communication(error):
        return "communication"
    if isinstance(error, REFUSALS) or (starting and isinstance(error, REFUSALS_AT_START) and not lack_of(error)):
        return REFUSED
    if isinstance(error, MemberDiffers):
        return DIFFERS
    if isinstance(error, WrongLoop):
        return WRONG_LOOP
    return "non_finite" if isinstance(error, NonFiniteValue) else "exception"


def report(link: AgentLink, error: BaseException, *, step: int, starting: bool = False) -> None:
    """Print an error and report it to the agent: of a lost peer, which a new generation answers, one line is printed.

    Args:
        link: to the agent.
        error: the error.
        step: the step that it was raised in, counted from 1; 0: before there was a step.
        starting: whether the process has not joined a generation yet.
    """
    _forget_lines(error)
    text = "".join(traceback.format_exception(error))
    found = error if isinstance(error, NonFiniteValue) else NonFiniteValue("")
    lack = lack_of(error) or Lack("", "")
    detail = f"{str(error)[: DETAIL_CHARACTERS // 2]}; {lack}" if lack.resource else str(error)
    broken_off = f"unicron: step {step} was broken off, and comes again: {_of_peer(error)}"
    print(broken_off if step and link.supervised and is_communication(error) else text, file=sys.stderr, flush=True)
    link.send(
        Raised(
            generation=link.generation,
            rank=link.rank,
            step=step,
            kind=kind(error, starting=starting),
            error=type(error).__name__,
            detail=detail[:DETAIL_CHARACTERS],
            traceback=text[-TRACEBACK_CHARACTERS:],
            parameter=found.parameter[:NAME_CHARACTERS],
            micro_batch=found.micro_batch,
            difference=error.difference[:DETAIL_CHARACTERS] if isinstance(error, MemberDiffers) else "",
            resource=lack.resource,
            limit=lack.limit,
        )
    )


def _of_peer(error: BaseException) -> str:
    return str(error) if isinstance(error, CommunicationFailed) else "a peer is gone"


def report_resumed(link: AgentLink, message: Resumed) -> None:
    """Print and report that the first step of a generation is done."""
    link.send(message)
    shown = ", ".join(f"{_PHASES.get(name, name)} {seconds:.3f} s" for name, seconds in message.phases.items())
    source = _SOURCES.get(message.source, message.source)
    print(f"unicron: generation {message.generation} from {source}{f': {shown}' if shown else ''}", flush=True)


def _forget_lines(error: BaseException) -> None:
    """Drop the lines that are not Python: a script may be any file by mistake, and others may read tracebacks."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, SyntaxError):
            one.text = None
        left += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def forget_frames(error: BaseException) -> None:
    """Drop an error's traceback and the local variables of its frames: autograd graphs, groups and their threads."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def report_copies(link: AgentLink, configure: Configure, step: int, lack: str | None) -> None:
    """Report what there is to say about in-memory copies (``Snapshots.agreed``), if there is anything."""
    if lack or (lack is not None and configure.rank == 0):
        lack = lack[:DETAIL_CHARACTERS]
        link.send(Copies(generation=configure.generation, rank=configure.rank, step=step, lack=lack))
