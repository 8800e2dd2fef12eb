"""What a task specification refuses: by field, with the limit, in an error that any client can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidInput
from shared.tasks.specification import BYTE_VOCABULARY, MAX_SPEC_BYTES, VOCABULARY_MULTIPLE, TaskSpec, load_spec

TEXT = """name: a
model: {layers: 2, hidden: 32, heads: 4, sequence_length: 32}
batch: {global: 24, micro: 1}
data: corpus
"""


def errors_of(text: str) -> list[dict[str, Any]]:
    with pytest.raises(InvalidInput) as caught:
        load_spec(text)
    problem = json.loads(json.dumps(caught.value.problem(), allow_nan=False))
    for error in problem["errors"]:
        assert f"{error['field']}: {error['problem']}" in problem["detail"]
    return list(problem["errors"])


def test_the_text_without_a_mistake_is_accepted() -> None:
    assert load_spec(f"{TEXT}steps: 5").steps == 5


@pytest.mark.parametrize(
    ("line", "field", "limit"),
    [
        ("steps: .nan", "steps", "finite"),
        ("steps: .inf", "steps", "finite"),
        ("steps: -1", "steps", "greater than or equal to 1"),
        ("steps: 1000000000000", "steps", "less than or equal to 1000000000"),
        ("weight: .nan", "weight", "finite"),
        ("weight: -.inf", "weight", "finite"),
        ("weight: -1", "weight", "greater than 0"),
        ("weight: 1e+12", "weight", "less than or equal to 1000000"),
        ("workers: {min: .nan}", "workers.min", "finite"),
        ("workers: {min: -2}", "workers.min", "greater than or equal to 1"),
        ("workers: {max: 1000000000000}", "workers.max", "less than or equal to 1000000"),
        ("workers: {min: 4, max: 2}", "workers.min", "must not exceed workers.max, 2"),
        ("optimizer: {lr: .inf}", "optimizer.lr", "finite"),
        ("dropout: .nan", "dropout", "finite"),
        ("speed: 1", "speed", "unknown field"),
        ("env: {A=B: x}", "env", "not an environment variable"),
        ('env: {A: "x\\0"}', "env", "not an environment variable"),
    ],
)
def test_a_bad_value_is_refused_by_its_field_and_limit(line: str, field: str, limit: str) -> None:
    text = TEXT if line.startswith("steps") else f"{TEXT}steps: 5\n"
    (error,) = errors_of(f"{text}{line}")
    assert error["field"] == field
    assert limit in error["problem"]


def test_fields_that_do_not_go_together_are_each_named() -> None:
    found = errors_of(f"{TEXT}steps: 5\nworkers: {{min: 30, max: 20}}\nparallel: {{tensor: 3}}")
    assert [(error["field"], error["value"]) for error in found] == [("parallel.tensor", 3), ("workers.min", 30)]


def test_a_tensor_size_that_does_not_divide_the_padded_vocabulary_is_refused() -> None:
    text = TEXT.replace("heads: 4", "heads: 16")
    (error,) = errors_of(f"{text}steps: 5\nparallel: {{tensor: 16}}")  # 257 is padded to 264
    assert (error["field"], error["value"]) == ("parallel.tensor", 16)
    assert error["problem"].endswith("264")
    assert load_spec(f"{text}steps: 5\nparallel: {{tensor: 8}}").tensor == 8
    # A user's script may pad otherwise, and a log may have the submission of such a task.
    assert load_spec(f"{text}steps: 5\nparallel: {{tensor: 16}}\nscript: train.py").tensor == 16
    accepted = load_spec(f"{text}steps: 5\nparallel: {{tensor: 16}}\nscript: train.py")
    recorded = {**accepted.model_dump(mode="json", by_alias=True), "script": None}
    assert TaskSpec.model_validate(recorded).tensor == 16


@pytest.mark.parametrize(
    ("tensor", "length", "fine"), [("2", 63, False), ("2", 62, True), ("auto", 62, False), ("auto", 60, True)]
)
def test_a_sequence_that_the_tensor_size_does_not_divide_is_refused(tensor: str, length: int, fine: bool) -> None:
    """The planner may choose any power of two that divides the 4 heads."""
    text = TEXT.replace("sequence_length: 32", f"sequence_length: {length}")
    text += f"steps: 5\nparallel: {{tensor: {tensor}, sequence_parallel: true}}"
    if fine:
        assert load_spec(text).parallel.sequence_parallel
        return
    (error,) = errors_of(text)
    assert error["field"] == "parallel.sequence_parallel"
    assert error["problem"].endswith(f"must divide model.sequence_length, {length}")
    assert load_spec(f"{text}\nscript: train.py").parallel.sequence_parallel


def test_the_trainer_has_the_same_vocabulary() -> None:
    trainer = Path(__file__).parents[2] / "unicron" / "trainer"
    assert f"\nEND_OF_DOCUMENT = {BYTE_VOCABULARY - 1}\n" in (trainer / "data.py").read_text()
    assert f"\nVOCABULARY_MULTIPLE = {VOCABULARY_MULTIPLE}\n" in (trainer / "model.py").read_text()


def test_a_text_above_the_limit_is_not_read() -> None:
    with pytest.raises(InvalidInput, match=f"at most {MAX_SPEC_BYTES}"):
        load_spec("#" * (MAX_SPEC_BYTES + 1))


def test_chunks_that_do_not_divide_the_layers_are_refused() -> None:
    """The built-in trainer gives each of a pipeline's chunks as many layers; a script may do otherwise."""
    layers = load_spec(f"{TEXT}steps: 5").model.layers
    assert load_spec(f"{TEXT}steps: 5\nparallel: {{interleave: {layers}}}").parallel.interleave == layers
    text = f"{TEXT}steps: 5\nparallel: {{pipeline: {layers}, interleave: 2}}"
    (error,) = errors_of(text)
    assert error["field"] == "parallel.interleave"
    assert error["problem"] == f"times pipeline, {2 * layers}, must divide model.layers, {layers}"
    assert load_spec(f"{text}\nscript: train.py").parallel.interleave == 2


SCRIPT = f"{TEXT}steps: 5\nscript: /code/mine/train.py\n"


def test_a_script_has_arguments_and_may_be_a_module() -> None:
    spec = load_spec(f"{SCRIPT}module: mine.train\narguments: [--lr, '1e-3', '']\nloop: megatron-lm\n")
    assert (spec.module, spec.arguments, spec.loop) == ("mine.train", ["--lr", "1e-3", ""], "megatron-lm")
    assert {"module", "arguments", "loop"}.isdisjoint(load_spec(SCRIPT).model_dump())


@pytest.mark.parametrize("name", ["train", "mine.train", "code.mine.train"])
def test_the_module_of_a_script_is_any_of_its_names(name: str) -> None:
    assert load_spec(f"{SCRIPT}module: {name}").module == name
    main = SCRIPT.replace("train.py", "train/__main__.py")
    assert load_spec(f"{main}module: {name}").module == name


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (f"{TEXT}steps: 5\narguments: [a]", "arguments"),
        (f"{TEXT}steps: 5\nloop: megatron-lm", "loop"),
        (f"{TEXT}steps: 5\nmodule: mine.train", "module"),
        (f"{SCRIPT}module: other.train", "module"),
        (f"{SCRIPT}module: ain", "module"),
        (f"{SCRIPT}module: ../train", "module"),
        (f"{SCRIPT}loop: mine", "loop"),
        (f'{SCRIPT}arguments: ["a\\0b"]', "arguments.0"),
    ],
)
def test_fields_of_a_script_that_cannot_be_are_refused(text: str, field: str) -> None:
    assert field in [error["field"] for error in errors_of(text)]


@pytest.mark.parametrize(
    "arguments", ["[--wandb-api-key, abc0123]", "[--wandb-api-key=abc0123]", "['s3://me:abc0123@h/x']"]
)
def test_a_secret_among_the_arguments_is_refused_and_not_shown(arguments: str) -> None:
    (error,) = errors_of(f"{SCRIPT}arguments: {arguments}")
    assert error["field"] == "arguments"
    assert "secrets:" in error["problem"]
    assert "abc0123" not in json.dumps(error)
