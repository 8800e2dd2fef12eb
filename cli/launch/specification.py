"""The specification of the task that a command line is: a mapping, as a YAML file has it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cli.launch.checking import Checked, interpreter_of
from shared.errors import InvalidInput
from shared.launch.check import Verdict
from shared.launch.script import Loop
from shared.tasks.specification import DEFAULT_MAX_RESTARTS

RESTART = "restart"
"""``loop`` of a script that is healed by whole restarts from its own checkpoint."""

USUAL_VOCABULARY = 50_257
"""Tokens where Megatron-LM's arguments leave their number to the tokenizer: GPT-2's. Only the planner's estimates of
time and memory use it."""

MOST_RESTARTS, MOST_EVERY = 1000, 1_000_000
"""What ``max_restarts`` and ``checkpoint.every`` may be; torchrun and Megatron-LM take any number."""

_PARTS = ("model", "batch", "parallel", "checkpoint")
"""Fields of which the arguments and a file may each say a part."""

_OPTIONS = {
    "model.layers": "--num-layers",
    "model.hidden": "--hidden-size",
    "model.heads": "--num-attention-heads",
    "model.sequence_length": "--seq-length",
    "batch.global": "--global-batch-size",
    "batch.micro": "--micro-batch-size",
    "steps": "--train-iters",
}
"""What the planner needs, and the argument of Megatron-LM that says it."""

NAME_CHARACTERS = 63 - len("-1000")
"""Of a task's name, with room for a number behind it."""


class Given(NamedTuple):
    """What the user says of a task beside its command line.

    ``base``: the fields of ``--spec``, with absolute paths. ``workers``: how many at most; None: nothing says that.
    ``env``: the variables that travel.
    """

    name: str | None = None
    workers: int | None = None
    env: Mapping[str, str] = {}
    base: Mapping[str, Any] = {}


def whole(found: Checked, given: Given, why: str) -> dict[str, Any]:
    """Return the specification with which a command line's task restarts whole after all.

    Args:
        found: the command line, whose verdict was that the task is healed inside the step.
        given: what the user says beside it.
        why: what was refused when the task started.

    Raises:
        InvalidInput: nothing says how many processes the script has.
    """
    restarts = found._replace(check=found.check._replace(verdict=Verdict.RESTART))
    return specification(restarts, given) | {"not_healed": why}


def specification(found: Checked, given: Given) -> dict[str, Any]:
    """Return the specification of a command line's task.

    Raises:
        InvalidInput: its script or its Python is not here, it starts a container, or the arguments do not say what the
            planner needs; with the fields.
    """
    _check_command(found)
    base = given.base
    script = _script(found, base)
    restart = found.check.verdict is Verdict.RESTART
    spec = _merged(_planned(found, restart=restart), base) | {
        "name": given.name or base.get("name") or name_of(found.name),
        "script": script,
        "arguments": [*found.launch.arguments],
        "workers": _workers(found, given, restart=restart),
    }
    if found.launch.module:
        spec["module"] = found.launch.module
    if restart:
        spec["loop"] = RESTART
        spec.setdefault("max_restarts", DEFAULT_MAX_RESTARTS)
    elif found.script.loop in (Loop.MEGATRON_LM, Loop.BRIDGE):
        spec["loop"] = found.script.loop.value
    if python := interpreter_of(found):
        spec.setdefault("python", python)
    if found.launch.max_restarts is not None:
        spec["max_restarts"] = min(found.launch.max_restarts, MOST_RESTARTS)
    if given.env:
        spec["env"] = {**base.get("env", {}), **given.env}
    if not restart:
        spec.setdefault("data", script)  # the script reads its data by itself, as its arguments say
        _check_complete(found, spec)
    return spec


def name_of(script: str) -> str:
    """Return the name of a task from that of its script or module."""
    stem = script.rpartition("/")[2].removesuffix(".py").removesuffix(".__main__").rpartition(".")[2]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:NAME_CHARACTERS].strip("-")
    return name or "task"


def numbered(name: str, number: int) -> str:
    """Return the name of the task of that number among those that would have the same name."""
    return name if number == 1 else f"{name}-{number}"


def read_base(file: Path) -> dict[str, Any]:
    """Return the fields of a YAML file, with absolute paths; it may have a part of a specification alone.

    Raises:
        InvalidInput: it cannot be read, or has no fields.
    """
    import yaml

    from unicron_client.specifications import text_of

    try:
        fields = yaml.safe_load(text_of(file))
    except yaml.YAMLError as err:
        raise _refused("--spec", str(file), f"is not YAML: {err}") from err
    if not isinstance(fields, dict):
        raise _refused("--spec", str(file), "must have fields of a specification, such as model, batch and steps")
    folder = file.resolve().parent
    for place, name in ((fields, "data"), (fields, "script"), (fields.get("checkpoint"), "directory")):
        if isinstance(place, dict) and isinstance(place.get(name), str):
            place[name] = os.path.abspath(folder / place[name])
    for name in ("workers", "env", "secrets", *_PARTS):
        if not isinstance(fields.get(name, {}), dict):
            raise _refused(f"--spec: {name}", str(fields[name]), "must be a mapping of fields")
    return fields


def _check_command(found: Checked) -> None:
    """Check that the script can run in the Python that its command line means.

    Raises:
        InvalidInput: that is in a container; or it is not here, and a task that is healed inside the step would run in
            another one, with other libraries. Of a task that restarts whole the nodes look for it.
    """
    launch = found.launch
    if launch.container:
        problem = "starts a container, which node agents do not enter: start `unicron run` in it"
        raise _refused("SCRIPT", launch.container, problem)
    restart = found.check.verdict is Verdict.RESTART
    if launch.interpreter and not restart and shutil.which(launch.interpreter) is None:
        problem = "is no program here; a task needs its Python at the same path here and on the nodes"
        raise _refused("SCRIPT", launch.interpreter, problem)


def _script(found: Checked, base: Mapping[str, Any]) -> str:
    """Return the script's path; a file with the rest of the specification may name it and its arguments, too.

    Raises:
        InvalidInput: the script is no file here, or that file says otherwise.
    """
    if found.path is None:
        if found.launch.module:
            problem = "must be a module below the working directory or a folder of PYTHONPATH"
        else:
            problem = "must be a file, or a program that is a Python script"
        raise _refused("SCRIPT", found.name, problem)
    script = os.path.abspath(found.path)
    if base.get("script", script) != script:
        raise _refused("--spec: script", base["script"], "is not the script of the command line; leave it out there")
    if base.get("arguments", [*found.launch.arguments]) != [*found.launch.arguments]:
        raise _refused("--spec: arguments", "...", "are not those of the command line; leave them out there")
    return script


def _planned(found: Checked, *, restart: bool) -> dict[str, Any]:
    """Return model, batch, steps and layout as far as the arguments say them; of a whole restart all or none."""
    known = found.check.task
    if "model" not in known:
        return {}
    model = {"vocabulary": USUAL_VOCABULARY, **_said(known["model"])}
    planned = {"model": model, "batch": _said(known["batch"])} | _said({"steps": known["steps"]})
    if restart:
        return {} if [*_lacking(planned, found)] else planned
    planned["parallel"] = dict(known["parallel"])
    if found.script.loop in (Loop.MEGATRON_LM, Loop.BRIDGE) and known["saves_every"]:
        planned["checkpoint"] = {"every": min(known["saves_every"], MOST_EVERY)}
    return planned


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _merged(planned: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the arguments say with what a file says, which comes first."""
    parts = {name: {**planned.get(name, {}), **base.get(name, {})} for name in _PARTS}
    return {**planned, **base, **{name: part for name, part in parts.items() if part}}


def _workers(found: Checked, given: Given, *, restart: bool) -> dict[str, Any]:
    """Return the limits of the task's workers: of a whole restart exactly as many as it has processes.

    So it is of a loop on the library without a model, unless the user says the least number: the planner begins such a
    task with ``min`` workers, and gives it more only with a later plan (docs/planner.md).

    Raises:
        InvalidInput: nothing says how many.
    """
    base = given.base.get("workers", {})
    if not restart:
        lacks_model = found.script.loop is Loop.LIBRARY and "model" not in given.base
        least = given.workers or 1 if lacks_model else found.check.task.get("least_workers", 1)
        return {"min": least, **base} | ({} if given.workers is None else {"max": given.workers})
    if (count := given.workers) is None:
        problem = "must be given: nothing says how many processes this script has, which restarts as a whole"
        raise InvalidInput.of("--workers", None, problem)
    return {"min": count, "max": count}


def _lacking(spec: Mapping[str, Any], found: Checked) -> Iterator[str]:
    """Yield the fields of which the planner needs to know and does not."""
    for field in _OPTIONS:
        part, _, name = field.partition(".")
        value = spec.get(part)
        if part == "model" and value is None and found.script.loop is Loop.LIBRARY:
            continue  # it may be left out where a replica is one worker, which the specification checks
        if value is None or (name and name not in value):
            if field != "batch.micro" or found.script.loop is Loop.MEGATRON_LM:  # elsewhere it has a default
                yield field


def _check_complete(found: Checked, spec: Mapping[str, Any]) -> None:
    """Check that a task which is healed inside the step has what the planner needs.

    Raises:
        InvalidInput: with the fields that are missing, and how to give them.
    """
    lacking = [*_lacking(spec, found)]
    if not lacking:
        return
    if found.script.loop is Loop.MEGATRON_LM:
        how = f"give {', '.join(_OPTIONS[field] for field in lacking)}, or these fields in a YAML file with --spec FILE"
    else:
        how = (
            "a loop on the library has them in a YAML file, such as examples/plain-pytorch.yaml: give it with "
            "--spec FILE (docs/launching.md)"
        )
    errors = [{"field": field, "value": None, "problem": f"is missing: {how}"} for field in lacking]
    raise InvalidInput(f"{found.name}: the planner needs {', '.join(lacking)}: {how}", errors)


def _refused(field: str, value: object, problem: str) -> InvalidInput:
    return InvalidInput.of(field, value, problem)
