"""The proof that the nodes of a generation see one and the same place for checkpoints.

Rank 0 writes a token there, and every node reads it. Separate directories of the same name would otherwise look healthy
until a checkpoint is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from unicron.checkpoint import storage
from unicron.errors import InvalidSpec
from unicron.link.waiting import Wait
from unicron.protocol.messages import Configure
from unicron.state import transfer

TOKEN = ".shared-{generation}"  # nosec B105 # a file's name
"""Name of the token's file; it is deleted once it has been read."""


def check(location: str) -> None:
    """Check that this process has the packages that it needs to reach a location.

    Raises:
        InvalidSpec: it does not have them.
    """
    try:
        storage.opened(location)
    except (ImportError, ValueError) as err:
        raise InvalidSpec(f"checkpoints cannot go to {location}: {err}") from err


def nodes_of(members: Sequence[Sequence[Any]]) -> list[str]:
    """Return the node of each member of a generation, in rank order."""
    return [str(worker).rpartition("/")[0] for _, worker, _ in members]


def is_new(members: Sequence[Sequence[Any]]) -> bool:
    """Return whether a generation has a node that was not with the others in the generation before.

    Args:
        members: rank, worker and source of each member.
    """
    nodes = nodes_of(members)
    known = {node for node, (_, _, source) in zip(nodes, members, strict=True) if source == "live"}
    return len(set(nodes)) > 1 and not set(nodes) <= known


def root(directory: str, configure: Configure) -> str:
    """Return the place of a generation's checkpoints. ``directory``: the task's; empty: the generation's own folder."""
    if directory:
        return f"{directory.rstrip('/')}/generation-{configure.generation}"
    return f"{configure.directory}/checkpoints"


def problem_of(root: str, configure: Configure, wait: Wait) -> str | None:
    """Find out whether there can be checkpoints in a generation; all ranks call it.

    Args:
        root: where the checkpoints go.
        configure: the generation.
        wait: waits for a collective.

    Returns: Why there can be none, in words, the same on all ranks; empty: there can be. None: as in the generation
        before.

    Raises:
        InvalidSpec: this process lacks a package that would reach the place.
        RuntimeError: a member was lost meanwhile.
    """
    nodes = nodes_of(configure.members)
    check(root)
    if len(set(nodes)) == 1:
        return ""
    return prove(root, configure.generation, nodes, wait) if is_new(configure.members) else None


def prove(root: str, generation: int, nodes: Sequence[str], wait: Wait) -> str:
    """Find out whether all nodes see what rank 0 writes; all ranks call it.

    Args:
        root: where the generation's checkpoints go.
        generation: its number.
        nodes: each rank's node.
        wait: waits for a collective.

    Returns:
        Empty if they do; else what is wrong, in words, the same on all ranks.

    Raises:
        RuntimeError: a member was lost meanwhile.
    """
    sees, problem = seeing(f"{root}/{TOKEN.format(generation=generation)}", wait)
    if problem:
        return f"{nodes[0]} cannot write checkpoints to {root}: {problem}"
    unseeing = sorted({node for node, seen in zip(nodes, sees, strict=True) if not seen})
    if not unseeing:
        return ""
    which = f"node {unseeing[0]} does" if len(unseeing) == 1 else f"nodes {', '.join(unseeing)} do"
    return (
        f"{which} not see the checkpoints that node {nodes[0]} writes to {root}: a task on several nodes needs a "
        "checkpoint.directory that all of them share, or an object store (checkpoint.url)"
    )


def seeing(location: str, wait: Wait) -> tuple[list[bool], str]:
    """Find out which ranks see what rank 0 writes; all ranks call it.

    Args:
        location: the place of a file that is written for this and deleted again.
        wait: waits for a collective.

    Returns:
        For each rank whether it sees the file; and why rank 0 could not write it, empty if it could.

    Raises:
        RuntimeError: a member was lost meanwhile.
    """
    rank = dist.get_rank()
    token, problem = uuid.uuid4().hex, ""
    if rank == 0:
        try:
            storage.write_whole(location, token.encode())
        except OSError as err:
            problem = f"{type(err).__name__}: {err}"
    token, problem = transfer.gather((token, problem), wait)[0]
    if problem:
        return [], str(problem)
    sees = transfer.gather(_sees(location, token), wait)
    if rank == 0:
        storage.delete(location)
    return sees, ""


def _sees(location: str, token: str) -> bool:
    try:
        return storage.read(location) == token.encode()
    except OSError:
        return False
