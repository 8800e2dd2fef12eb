"""What a submission takes over from the earlier task of its name: the checkpoint, and the order of samples.

A task that goes on applies the updates that it would have applied without the interruption, so most of its
specification stays as it was. ``CHANGEABLE`` lists what may differ; anything else is refused by its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from shared.errors import Conflict
from shared.tasks.specification import IS, TaskSpec, refused
from shared.views.documents import TaskView

CHANGEABLE = (
    "steps", "weight", "workers", "checkpoint", "parallel", "max_restarts", "finish_timeout_s", "progress_timeout_s",
    "env", "secrets", "script", "code", "arguments", "module", "not_healed",
)  # fmt: skip
"""Fields that a task which goes on from a checkpoint may have otherwise, with all below them.

They change what the task does with its samples in no update (``parallel``: a checkpoint is read in any layout), or they
are the user's own business: the surroundings of the processes, which file the script is, and its
arguments. A script stays a script, and its loop the same.
"""


def check_free(known: TaskView | None) -> None:
    """Check that a name can be submitted.

    Args:
        known: the earlier task of the name; None if there is none.

    Raises:
        Conflict: the name is in use.
    """
    if known is not None and not known.may_go_on and known.deleted_at is None:
        name = known.spec.name
        raise Conflict(
            f"name {name!r} is in use by a task that {IS[known.state]}; "
            "a name is free again when its task was stopped, has failed, has left steps or was deleted",
            field="name",
            value=name,
            state=known.state.value,
        )


def resumed(known: TaskView | None, spec: TaskSpec) -> tuple[TaskSpec, str, int]:
    """Return the specification to log, the checkpoint that it goes on from, and its step; ``("", 0)`` for a new start.

    Args:
        known: the earlier task of the same name, which has ended; None if there is none.
        spec: the submitted specification.

    Raises:
        InvalidInput: the specification changes what a task that goes on has to keep, or has fewer steps than are done.
    """
    if known is None or not known.checkpoint:
        return spec, "", 0
    step, order = known.checkpoint_step, known.spec.order
    problems = [*_changed(known.spec, spec)]
    if spec.order_samples not in (None, order):
        problems.append(("order_samples", spec.order_samples, _keeps(f"was {order}")))
    # Behind its last step its result may be left to write, and code of its script to run.
    if spec.steps < step:
        problems.append(("steps", spec.steps, f"must be at least {step}: its checkpoint is of step {step}"))
    if problems:
        raise refused(problems)
    drawn_anew = spec.steps * spec.batch.global_
    kept = spec.model_copy(update={"order_samples": None if order == drawn_anew else order})
    return kept, known.checkpoint, step


def as_logged(spec: TaskSpec, logged: TaskSpec) -> TaskSpec:
    """Return a specification with the order that its submission entered, if it names none: so it can be repeated."""
    return spec if spec.order_samples is not None else spec.model_copy(update={"order_samples": logged.order_samples})


def _changed(earlier: TaskSpec, spec: TaskSpec) -> Iterator[tuple[str, object, str]]:
    """Yield field, new value and problem of what a task that goes on has to keep. The model is one thing."""
    was, now = (one.model_dump(mode="json", by_alias=True) | {"data": _data(one)} for one in (earlier, spec))
    if (earlier.script is None) != (spec.script is None):
        yield "script", spec.script, _keeps(f"was {earlier.script!r}")
    of_model: list[str] = []
    of_script = set() if earlier.model_known and spec.model_known else {"model", "model_known"}
    free = {*CHANGEABLE, "order_samples", *of_script}
    for field, old, new in differences(was, now):
        if field.split(".")[0] in free:
            continue
        if field.startswith("model."):
            of_model.append(f"{field} was {old!r}, is {new!r}")
        else:
            yield field, new, _keeps(f"was {old!r}")
    if of_model:
        yield "model", "...", _keeps("; ".join(of_model))


def _data(spec: TaskSpec) -> str:
    """Return what a task's data are: their path; of a script that names none, the same for any script."""
    # A path that was logged relative was used from here.
    return "the script's own" if spec.data == spec.script else os.path.abspath(spec.data)


def differences(was: dict[str, Any], now: dict[str, Any], above: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield field, old and new value of what differs between two specifications."""
    for name in sorted({*was, *now}):
        old, new = was.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{above}{name}.")
        elif old != new:
            yield f"{above}{name}", old, new


def _keeps(what: str) -> str:
    *most, last = CHANGEABLE
    return (
        f"{what}; a task that goes on from its checkpoint keeps it, and may change {', '.join(most)} and {last} alone "
        "(another name begins anew)"
    )
