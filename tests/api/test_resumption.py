"""What a task that goes on from its checkpoint may have otherwise than before."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from services.api.submission.resumption import CHANGEABLE, resumed
from shared.errors import InvalidInput
from shared.tasks.specification import TaskSpec, TaskState, parse_spec
from shared.views.documents import TaskView
from tests.api.kit import spec, spec_dict


def stopped(was: TaskSpec) -> TaskView:
    """Return a task with a checkpoint of step 40."""
    return TaskView(
        name="gpt",
        position=1,
        version=3,
        submission_id="a",
        submitted_at=datetime(2026, 1, 1, tzinfo=UTC),
        spec=was,
        state=TaskState.STOPPED,
        checkpoint="/c40",
        checkpoint_step=40,
    )


@pytest.mark.parametrize(
    ("change", "field", "was"),
    [
        ({"batch": {"global": 16, "micro": 1}}, "batch.global", "8"),
        ({"batch": {"global": 8, "micro": 2}}, "batch.micro", "1"),
        ({"seed": 99}, "seed", "1234"),
        ({"optimizer": {"lr": 0.1}}, "optimizer.lr", "0.001"),
        ({"optimizer": {"name": "sgd"}}, "optimizer.name", "'adam'"),
        ({"dropout": 0.5}, "dropout", "0.0"),
        ({"bf16": True}, "bf16", "False"),
        ({"exact": True}, "exact", "False"),
        ({"deterministic_sums": True}, "deterministic_sums", "False"),
        ({"order_samples": 801}, "order_samples", "800"),
        (
            {"model": {"layers": 4, "hidden": 32, "heads": 2, "sequence_length": 16}},
            "model",
            "layers was 2, is 4",
        ),
    ],
)
def test_what_the_updates_depend_on_is_refused_by_name(change: dict[str, Any], field: str, was: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resumed(stopped(spec()), spec(**change))
    (error,) = caught.value.extra["errors"]
    assert error["field"] == field
    assert was in error["problem"]
    assert "may change steps, weight, workers, checkpoint, parallel" in error["problem"]


def test_every_field_may_change_or_not() -> None:
    """A new field of the specification is refused in a resumed task until somebody decides that it may change."""
    assert set(CHANGEABLE) < set(TaskSpec.model_fields)
    known = stopped(spec(script="/a.py"))
    free: dict[str, Any] = {
        "steps": 90, "weight": 3.0, "workers": {"min": 2}, "checkpoint": {"every": 1}, "parallel": {"tensor": 2},
        "max_restarts": 9, "finish_timeout_s": 90, "progress_timeout_s": 60, "env": {"A": "b"},
        "secrets": {"S": "file:/s"}, "script": "/b/c.py", "arguments": ["--lr", "1"], "module": "b.c",
    }  # fmt: skip
    assert {*free, "code", "not_healed"} == set(CHANGEABLE)
    code: dict[str, Any] = {"digest": "0" * 64, "size_bytes": 10_240, "files": 1}
    shipped: dict[str, Any] = {"script": "c.py", "data": "c.py", "code": code}
    own = stopped(spec(script="/a.py", data="/a.py"))  # its data are its own business, wherever the script is
    assert resumed(own, spec(**shipped))[1:] == ("/c40", 40)
    assert resumed(stopped(spec(**shipped)), spec(**shipped | {"code": code | {"files": 2}}))[1:] == ("/c40", 40)
    assert resumed(known, spec(**free))[1:] == ("/c40", 40)
    restarting: dict[str, Any] = {"script": "/a.py", "loop": "restart", "workers": {"min": 2, "max": 2}}
    whole = stopped(spec(**restarting, not_healed="model: a batch norm"))
    assert resumed(whole, spec(**restarting, not_healed="model: an expert"))[1:] == ("/c40", 40)
    with pytest.raises(InvalidInput, match=r"script: was '/a\.py'"):
        resumed(known, spec())


def test_a_task_that_has_done_all_steps_goes_on_to_write_its_result() -> None:
    assert resumed(stopped(spec(steps=40)), spec(steps=40))[1:] == ("/c40", 40)
    with pytest.raises(InvalidInput, match="steps: must be at least 40: its checkpoint is of step 40"):
        resumed(stopped(spec(steps=40)), spec(steps=39))


def test_a_model_that_nobody_said_may_be_said_later_and_the_other_way_round() -> None:
    given = {name: value for name, value in spec_dict(script="/a.py").items() if name != "model"}
    known, unknown = spec(script="/a.py"), parse_spec(given)
    for earlier, now in ((unknown, known), (known, unknown)):
        assert resumed(stopped(earlier), now)[1:] == ("/c40", 40)
