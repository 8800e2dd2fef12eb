"""The inputs that a what-if replay changes (``what_if``): a YAML file, and what it makes of recorded events.

    tasks:
      gpt-large:
        weight: 2
        workers: {min: 2, max: 8}
    settings:
      allow_pausing: true
      price_per_worker_hour: 1.5

Every field is optional and has the name and the limits that it has in a task's specification or among the settings.
Only what the log has of the decisions' inputs can be changed: the specification in ``task.submitted``, and the settings
in ``cluster.configured``. The detector's thresholds are in no event; what it found is a cause, and stays as recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from shared.errors import InvalidInput
from shared.events.union import ClusterConfigured, Event, TaskChanged, TaskSubmitted
from shared.model import Model
from shared.settings.model import Seconds
from shared.tasks.specification import Count, TaskSpec

M = TypeVar("M", bound=BaseModel)

MAX_BYTES = 1 << 20
"""As a specification's (``shared.tasks.specification.MAX_SPEC_BYTES``): anything larger is a mistake."""


class WorkersInput(Model):
    """Least and most workers of a task. ``max``: null takes the limit away."""

    min: Count = 1
    max: Count | None = None


class TaskInput(Model):
    """What is changed of a task's specification."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    workers: WorkersInput = WorkersInput()


class SettingsInput(Model):
    """What is changed of the settings that ``cluster.configured`` has (``settings.model`` says what each means)."""

    mtbf_node_s: Seconds = 1.0
    throughput_hysteresis: Annotated[float, Field(ge=0, lt=1)] = 0.0
    transition_prior_s: Seconds = 1.0
    worker_flop_per_s: Annotated[float, Field(gt=0)] = 1.0
    storage_bytes_per_s: Annotated[float, Field(gt=0)] = 1.0
    starvation_s: Annotated[float, Field(ge=0)] = 0.0
    allow_pausing: bool = False
    memory_copies: bool = False
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    value_per_eflop: Annotated[float, Field(ge=0)] = 0.0
    price_per_worker_hour: Annotated[float, Field(ge=0)] = 0.0


class Inputs(Model):
    """The changed inputs. A field counts only where it was given; the defaults of these models mean nothing."""

    tasks: dict[str, TaskInput] = Field(default_factory=dict)
    settings: SettingsInput = SettingsInput()

    def event(self, event: Event) -> Event:
        """Return an event as the log would have it with these inputs.

        Raises:
            InvalidInput: the task's specification is impossible with them.
        """
        match event:
            case ClusterConfigured():
                return event.model_copy(update=_given(self.settings))
            case TaskSubmitted() if event.task in self.tasks:
                return event.model_copy(update={"spec": self.spec(event.spec)})
            case TaskChanged() if event.task in self.tasks:
                return _possible(event.task, TaskChanged, vars(event) | self._changes(self.tasks[event.task]))
            case _:
                return event

    @staticmethod
    def _changes(given: TaskInput) -> dict[str, Any]:
        """Return what a user's change of the task would have been: what is given here holds for the whole history."""
        fields = _given(given)
        limits = _given(given.workers) if "workers" in fields else {}
        weight = {"weight": fields["weight"]} if "weight" in fields else {}
        return weight | {f"{name}_workers": value for name, value in limits.items()}

    def spec(self, spec: TaskSpec) -> TaskSpec:
        """Return a specification with what is changed of its task.

        Raises:
            InvalidInput: it is impossible with that.
        """
        if spec.name not in self.tasks:
            return spec
        given = self.tasks[spec.name]
        fields = spec.model_dump(by_alias=True) | _given(given)
        if "workers" in fields:
            fields["workers"] = spec.workers.model_dump() | _given(given.workers)
        return _possible(spec.name, TaskSpec, fields)


def _possible(task: str, kind: type[M], fields: Mapping[str, Any]) -> M:
    """Return the model of these fields.

    Raises:
        InvalidInput: with what is changed of the task, they are impossible.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as err:
        said = "; ".join(item["msg"].removeprefix("Value error, ") for item in err.errors())
        raise InvalidInput(f"what-if: tasks.{task}: {said}") from err


def parse_inputs(text: str) -> Inputs:
    """Return the inputs in YAML text; those of an empty text change nothing.

    Raises:
        InvalidInput: not YAML, too large, or with one entry for each field that is wrong.
    """
    if len(text) > MAX_BYTES:
        raise InvalidInput(f"what-if: {len(text)} bytes; at most {MAX_BYTES} are allowed")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as err:
        raise InvalidInput(f"what-if: not YAML: {err}") from err
    if not isinstance(data, dict | None):
        raise InvalidInput(f"what-if: a mapping of {_names(Inputs)}, not {type(data).__name__}")
    try:
        return Inputs.model_validate(data or {})
    except ValidationError as err:
        errors = [_entry(item) for item in err.errors(include_url=False)]
        said = "; ".join(f"{entry['field']}: {entry['problem']}" for entry in errors)
        raise InvalidInput(f"what-if: {said}", errors) from err


def _given(model: Model) -> dict[str, Any]:
    """Return the fields that the file has."""
    return {name: getattr(model, name) for name in model.model_fields_set}


def _entry(item: Any) -> dict[str, Any]:
    """Return what is wrong with a field; of an unknown one, with the names that are allowed in its place."""
    place, problem = ".".join(str(part) for part in item["loc"]), item["msg"]
    if item["type"] == "extra_forbidden":
        problem = f"unknown field; allowed: {_names(_model_at(item['loc'][:-1]))}"
    value = item["input"] if isinstance(item["input"], str | int | float | None) else "..."
    return {"field": place, "value": value, "problem": f"{problem} (given: {value!r})"}


def _model_at(path: Sequence[int | str]) -> type[BaseModel]:
    """Return the model of which an unknown field was given."""
    match path:
        case ("tasks", _):
            return TaskInput
        case ("tasks", _, "workers"):
            return WorkersInput
        case ("settings",):
            return SettingsInput
        case _:
            return Inputs


def _names(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)
