"""The inputs of decisions that a what-if changes; names and limits are those of specifications and settings.

Only what the log has of them can be changed: the specification in ``task.submitted``, and the settings in
``cluster.configured``. The detector's thresholds are in no event.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError

from shared.errors import InvalidInput
from shared.model import Model
from shared.settings.model import Seconds
from shared.tasks.specification import Count, TaskSpec


class WorkersInput(Model):
    """Least and most workers of a task. ``max``: None takes the limit away."""

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
    value_per_eflop: Annotated[float, Field(ge=0)] = 0.0
    price_per_worker_hour: Annotated[float, Field(ge=0)] = 0.0


class Inputs(Model):
    """The changed inputs. A field counts only where it was given; the defaults of these models mean nothing."""

    tasks: dict[str, TaskInput] = Field(default_factory=dict)
    settings: SettingsInput = SettingsInput()

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
        try:
            return TaskSpec.model_validate(fields)
        except ValidationError as err:
            said = "; ".join(item["msg"].removeprefix("Value error, ") for item in err.errors())
            raise InvalidInput(f"what-if: tasks.{spec.name}: {said}") from err


def _given(model: Model) -> dict[str, Any]:
    """Return the fields that were given."""
    return {name: getattr(model, name) for name in model.model_fields_set}
