"""Whether the nodes can use the files that a submitted specification names: refused at submission where one cannot.

The nodes are asked at the same time, for a bounded time. One that does not answer, or is of a version without this
question, has no say: its ranks would find out, and end the task with their message. So without any node a submission is
accepted.

``input_dirs`` says which paths on the nodes a submission may name. A script is code, and data is read, with the rights
of the task's processes. Who operates the cluster may name any path; who may only submit, those below the directories
that the operator names. What links there lead to, the nodes check (``CheckInputs.directories``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from services.api.access.access import Actor
from services.api.output.node_files import NodeFiles
from shared.errors import Unavailable
from shared.messages.node_files import CheckInputs, InputProblem
from shared.service.tokens import Scope
from shared.tasks.specification import TaskSpec, refused

CHECK_TIMEOUT_S = 5.0
"""How long a node may take: the 3 s that compiling a script may take there, and 2 s for the rest."""

NODES_NAMED = 10
"""Most nodes that a refusal names; of further ones it says how many they are."""


LOCAL_SCHEMES = frozenset({"file", "local"})
"""Schemes of fsspec for the machine's own files."""


def directories(actor: Actor, allowed: Sequence[Path]) -> list[Path] | None:
    """Return the directories below which a submission's paths have to be; None: any path is allowed."""
    return None if actor.scope.includes(Scope.OPERATE) else list(allowed)


def check_paths(spec: TaskSpec, actor: Actor, allowed: Sequence[Path]) -> None:
    """Refuse a specification that names a path which its actor may not use.

    Args:
        spec: with absolute paths.
        actor: who submits it.
        allowed: the setting.

    Raises:
        InvalidInput: with field, value and what is allowed.
    """
    below = directories(actor, allowed)
    if below is None:
        return
    where = ", ".join(map(str, below)) or "none: the operator names some with UNICRON_INPUT_DIRS"
    text = f"{actor.name} may name paths below these directories only: {where}"
    if wrong := [(field, path, text) for field, path in _paths(spec) if not _is_below(path, below)]:
        raise refused(wrong)


def _paths(spec: TaskSpec) -> Iterator[tuple[str, str]]:
    """Yield field and value of each path on the nodes in a specification."""
    for field, path in (("data", spec.data), ("script", spec.script)):
        if path is not None and (spec.code is None or os.path.isabs(path)):
            yield field, path
    if spec.python is not None:
        yield "python", spec.python
    place = spec.checkpoint
    if place.directory is not None:
        yield "checkpoint.directory", place.directory
    if place.url is not None and urlsplit(place.url).scheme in LOCAL_SCHEMES:
        yield "checkpoint.url", urlsplit(place.url).path


def _is_below(path: str, allowed: Sequence[Path]) -> bool:
    normal = Path(os.path.normpath(path))
    return any(normal.is_relative_to(directory) for directory in allowed)


async def check_inputs(spec: TaskSpec, nodes: Sequence[NodeFiles], below: Sequence[Path] | None = None) -> None:
    """Refuse a specification that names files which ranks on one of the nodes could not use.

    Args:
        spec: the specification.
        nodes: which are asked.
        below: directories below which the files have to be, wherever links lead; None: anywhere.

    Raises:
        InvalidInput: with field, value, problem, and the nodes concerned.
    """
    request = CheckInputs(
        task=spec.name,
        data=spec.data,
        script=spec.script,
        vocabulary=spec.model.vocabulary,
        directories=None if below is None else [str(directory) for directory in below],
        secrets=spec.secrets,
        python=None if spec.restarts_whole else spec.python,
        ships=spec.code is not None,
    )
    answers = await asyncio.gather(*(_problems(node, request) for node in nodes))
    concerned: dict[InputProblem, list[str]] = {}
    for node, problems in zip(nodes, answers, strict=True):
        for problem in problems:
            concerned.setdefault(problem, []).append(node.name)
    values: dict[str, object] = {
        "data": spec.data,
        "script": spec.script,
        "python": spec.python,
        "code": str(spec.code),
        "model.vocabulary": spec.model.vocabulary,
        **{f"secrets.{name}": place for name, place in spec.secrets.items()},
    }
    found = [(p.field, values.get(p.field), _text(p, names)) for p, names in concerned.items()]
    if found:
        raise refused(found)


async def _problems(node: NodeFiles, request: CheckInputs) -> list[InputProblem]:
    """Return what a node says; nothing if it does not answer."""
    try:
        reply, _ = await node.ask(request, CHECK_TIMEOUT_S)
    except Unavailable:
        return []
    return reply.problems


def _text(problem: InputProblem, nodes: Sequence[str]) -> str:
    """Return a problem with the nodes on which it is found."""
    named = ", ".join(sorted(nodes)[:NODES_NAMED])
    more = f" and {len(nodes) - NODES_NAMED} more" if len(nodes) > NODES_NAMED else ""
    allowed = f"; allowed: {problem.allowed}" if problem.allowed else ""
    return f"{problem.problem} on {named}{more}{allowed}"
