"""What a simulated what-if changes: ``KEY=VALUE,...``, checked name by name.

    policy=oobleck,spares=1,node_timeout_s=10,weight.gpt=2,price_per_worker_hour=3

``policy``, ``spares``, ``node_timeout_s`` and ``checkpoint_every_s`` are the simulator's; ``weight.TASK``,
``min_workers.TASK``, ``max_workers.TASK`` and the settings are inputs of decisions (``changed_inputs``).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from pydantic import ValidationError

from shared.errors import InvalidInput
from simulator.cluster_files import ClusterFile
from simulator.policies import POLICIES
from simulator.policy import Policy
from simulator.run.measured_times import CHECKPOINT, ChangedTiming
from simulator.what_if.changed_inputs import Inputs, SettingsInput, TaskInput, WorkersInput
from simulator.workload_inputs import with_cluster
from simulator.workloads.generators import MAX_NODES
from simulator.workloads.workload import PARAMETERS, Workload

POLICY, SPARES, NODE_TIMEOUT = "policy", "spares", "node_timeout_s"

OF_TASKS = {"weight": ("weight",), "min_workers": ("workers", "min"), "max_workers": ("workers", "max")}
"""Beginning of a key that names a task -> where a specification has it."""

SETTINGS = tuple(name for name in SettingsInput.model_fields if name in PARAMETERS)
"""Settings that may be changed: the numbers among those of ``cluster.configured``."""

KEYS = (POLICY, SPARES, NODE_TIMEOUT, CHECKPOINT, *(f"{name}.TASK" for name in OF_TASKS), *SETTINGS)
"""What may be changed, for people."""

MAX_SECONDS = 365 * 86_400.0
"""A year: longer than any wait that is meant."""


@dataclass(frozen=True)
class Changes:
    """What is changed; None and empty: nothing.

    Attributes:
        policy: that answers, in place of the log's.
        spares: nodes that are there in addition, from the start to the end.
        node_timeout_s: from the loss of a node to its detection.
        checkpoint_every_s: between two checkpoints of a task.
        inputs: of decisions: tasks' weights and worker counts, and settings.
        given: key -> value, as the user wrote them.
    """

    policy: str | None = None
    spares: int = 0
    node_timeout_s: float | None = None
    checkpoint_every_s: float | None = None
    inputs: Inputs = field(default_factory=Inputs)
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def price_per_worker_hour(self) -> float | None:
        """The changed price; None: as it was."""
        changed = self.inputs.settings
        return changed.price_per_worker_hour if "price_per_worker_hour" in changed.model_fields_set else None

    def of_workload(self, workload: Workload) -> Workload:
        """Return the workload with the changes.

        Raises:
            InvalidInput: a task is named that it does not have, or is impossible with them.
        """
        names = [spec.name for spec in workload.tasks]
        for key in self.given:
            beginning, dot, task = key.partition(".")
            if dot and beginning in OF_TASKS and task not in names:
                refuse(key, self.given[key], f"no task {task!r} in the log", names, task)
        nodes = len(workload.trace.nodes) + self.spares
        if nodes > MAX_NODES:
            refuse(SPARES, str(self.spares), f"at most {MAX_NODES} nodes can be simulated", (), "")
        given = self.inputs.settings.model_fields_set
        settings = {name: float(getattr(self.inputs.settings, name)) for name in SETTINGS if name in given}
        cluster = ClusterFile(nodes=nodes, settings=settings)
        tasks = tuple(self.inputs.spec(spec) for spec in workload.tasks)
        return with_cluster(replace(workload, tasks=tasks), cluster)

    def of_policy(self, policy: Policy) -> Policy:
        """Return the policy with the changes. A policy that keeps nodes free keeps the spares free."""
        timing = ChangedTiming(policy.timing, self.node_timeout_s, self.checkpoint_every_s)
        return replace(policy, timing=timing, spare_nodes=policy.spare_nodes + self.spares)


def parse_changes(text: str) -> Changes:
    """Return the changes in text.

    Raises:
        InvalidInput: naming the key, the value and what is allowed.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            refuse(key, value, "needs a value: KEY=VALUE,...", KEYS, key)
        if key in given:
            refuse(key, value, f"is there twice, as {given[key]} and {value}", (), key)
        given[key] = value
    tasks: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, value in given.items():
        beginning, dot, task = key.partition(".")
        if dot and beginning in OF_TASKS:
            tasks[task] = _merged(tasks.get(task, {}), OF_TASKS[beginning], _task_value(key, value))
        elif key in SETTINGS:
            settings[key] = _checked(SettingsInput, key, key, value)
        elif key not in (POLICY, SPARES, NODE_TIMEOUT, CHECKPOINT):
            refuse(key, value, "unknown", KEYS, key)
    return Changes(
        policy=_policy(given[POLICY]) if POLICY in given else None,
        spares=_spares(given[SPARES]) if SPARES in given else 0,
        node_timeout_s=_seconds(NODE_TIMEOUT, given[NODE_TIMEOUT]) if NODE_TIMEOUT in given else None,
        checkpoint_every_s=_seconds(CHECKPOINT, given[CHECKPOINT]) if CHECKPOINT in given else None,
        inputs=Inputs.model_validate({"tasks": tasks, "settings": settings}),
        given=given,
    )


def _merged(task: dict[str, Any], place: tuple[str, ...], value: object) -> dict[str, Any]:
    """Return what is changed of a task with one more value in its place."""
    if len(place) == 1:
        return {**task, place[0]: value}
    return {**task, place[0]: _merged(task.get(place[0], {}), place[1:], value)}


def _task_value(key: str, value: str) -> object:
    """Return the value of a key that names a task; ``none`` takes the limit of ``max_workers`` away."""
    beginning, _, _ = key.partition(".")
    if beginning == "max_workers" and value == "none":
        return None
    model = TaskInput if beginning == "weight" else WorkersInput
    return _checked(model, key, OF_TASKS[beginning][-1], value)


def _checked(model: type[TaskInput | WorkersInput | SettingsInput], key: str, name: str, value: str) -> object:
    """Return the value of a field as its model has it."""
    try:
        return getattr(model.model_validate_strings({name: value}), name)
    except ValidationError as err:
        refuse(key, value, "; ".join(item["msg"] for item in err.errors()), (), "")


def _policy(value: str) -> str:
    if value not in POLICIES:
        refuse(POLICY, value, "unknown", tuple(POLICIES), value)
    return value


def _spares(value: str) -> int:
    if not (value.isascii() and value.isdecimal()) or int(value) > MAX_NODES:
        refuse(SPARES, value, f"must be a whole number from 0 to {MAX_NODES}", (), "")
    return int(value)


def _seconds(key: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not 0.0 < found <= MAX_SECONDS:
        refuse(key, value, f"must be seconds, above 0 and up to {MAX_SECONDS:.0f}", (), "")
    return found


def refuse(key: str, value: str, problem: str, allowed: Collection[str], near: str) -> NoReturn:
    """Raise the error of a key: what is allowed in its place, and which of that is nearest to ``near``."""
    said = f"{problem}; allowed are {', '.join(allowed)}" if allowed else problem
    if meant := _nearest(near, allowed):
        said += f"; did you mean {meant}?"
    raise InvalidInput.of(key, value, said, f"what-if: {key}: {said} (given: {value!r})")


def _nearest(near: str, allowed: Collection[str]) -> str:
    """Return the allowed name that is nearest, for a key of a task with the task that the user named; else nothing."""
    beginning, dot, task = near.partition(".")
    names = {each.removesuffix(".TASK"): each for each in allowed}
    close = difflib.get_close_matches(beginning, names, n=1)
    return names[close[0]].replace("TASK", task if dot else "TASK") if close else ""
