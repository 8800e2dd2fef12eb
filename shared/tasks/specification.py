"""The task specification: what a user submits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from shared.errors import InvalidInput
from shared.field_problems import MISSING, problem_of, sentence
from shared.model import Model
from shared.names import Name
from shared.tasks import secrets
from shared.tasks.code import WORKING_DIRECTORY, Code, is_inside
from shared.tasks.secrets import Place
from shared.unknown_names import unknown_field_of

MAX_SPEC_BYTES = 1 << 20
"""A specification is a page of text; anything larger is a mistake (a data file, most likely)."""

MOST_REPORTED = 50
"""Wrong fields that an error names. More than a page of them help nobody, and each takes a comparison of names."""

CHECKPOINT_URL = r"^[a-z][a-z0-9+.-]*://[^\s?#\[\]*\x00]*[^\s?#\[\]*\x00/]$"
"""Form of ``checkpoint.url``. It may have no wildcard, since its folders are listed by a pattern."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""A positive count with a limit far above any real one, so that a slip is refused and nothing overflows."""

Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
"""Updates of a task: a GPT-3 of 1.3B makes one in less than a second on 128 A800, and ten million in three months."""

UNKNOWN_STEPS = 1_000_000_000
"""``steps`` of a task whose script alone knows when it has ended."""

UNKNOWN_MODEL = {"layers": 24, "hidden": 2048, "heads": 16, "sequence_length": 2048, "vocabulary": 50_257}
"""The model that stands for that of a script that does not say which: GPT-3 XL (Brown et al. 2020, table 2.1). The
planner weighs such a task as if it trained that model."""

BYTE_VOCABULARY = 257
"""Tokens of a byte-level text: one for each byte, and the end of a document (``unicron.trainer.data``)."""

VOCABULARY_MULTIPLE = 8
"""The built-in trainer pads the vocabulary to a multiple of this, whatever the layout (``unicron.trainer.model``)."""

DEFAULT_MAX_RESTARTS = 3
"""``max_restarts`` where the specification has none. Chosen: a failure of the hardware seldom comes again at the same
step, and a failure of the code costs few recoveries before it ends the task."""


DEFAULT_FINISH_TIMEOUT_S = 600.0
"""``finish_timeout_s`` where the specification has none. Chosen: an evaluation, or the conversion of a result, takes
minutes, and workers that a script keeps by mistake are worth little more."""


DEFAULT_PROGRESS_TIMEOUT_S = 14_400.0
"""``progress_timeout_s`` where the specification has none. Chosen: outages of shared storage and networks are over
within hours, and a task that has made no step in four of them keeps workers from others."""


MAX_ARGUMENTS = 4096
"""Most arguments of a script. Megatron-LM has less than a thousand; a blend of data sets may have as many more."""

Argument = Annotated[str, Field(max_length=65_536, pattern=r"^[^\x00]*$")]
"""An argument of a program: the kernel takes no null byte, and 128 KiB at most."""


class TaskState(StrEnum):
    """Where a task is in its life."""

    PENDING = "pending"
    QUEUED = "queued"
    RUNNING = "running"
    TRANSITIONING = "transitioning"
    DEGRADED = "degraded"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


ENDED = frozenset({TaskState.STOPPED, TaskState.SUCCEEDED, TaskState.FAILED})

GOING_ON = tuple(state.value for state in TaskState if state not in ENDED)
"""Names of the states of tasks that have not ended."""

IS = {
    **{state: f"is {state.value}" for state in TaskState},
    TaskState.STOPPED: "was stopped",
    TaskState.SUCCEEDED: "has succeeded",
    TaskState.FAILED: "has failed",
}
"""What a sentence says about a task in each state, behind its name."""


class Workers(Model):
    """How many workers the task may run on; below ``min`` it does not run."""

    min: Count = 1
    max: Count | None = None


class ModelShape(Model):
    """A GPT model. ``vocabulary``: tokens (256 bytes and one end of document for byte-level text).

    ``qk_layernorm``: whether queries and keys are normalised in each attention head.
    """

    layers: Count
    hidden: Count
    heads: Count
    sequence_length: Count
    vocabulary: Count = BYTE_VOCABULARY
    qk_layernorm: bool = False

    def flop_per_sample(self) -> float:
        """Model FLOP of one forward and backward pass over one sequence.

        72 s l h^2 (1 + s / 6h + V / 12 l h): Narayanan et al., SC'21, appendix, without the recomputed forward pass
        (the 96 there counts it).
        """
        s, n, h, v = self.sequence_length, self.layers, self.hidden, self.vocabulary
        return 72.0 * s * n * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * n * h))

    def parameters(self) -> int:
        """Number of parameters: 12 l h^2 (1 + 13 / 12h) + (V + s) h (SC'21, section 2.1)."""
        s, n, h, v = self.sequence_length, self.layers, self.hidden, self.vocabulary
        return 12 * n * h * h + 13 * n * h + (v + s) * h


class Batch(Model):
    """``global``: samples in one update. ``micro``: samples in one forward pass, fixed for the task's life."""

    global_: Annotated[Count, Field(alias="global")]
    micro: Count = 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one update."""
        return self.global_ // self.micro


class Optimizer(Model):
    """Adam with decoupled weight decay (AdamW), or SGD. Defaults as in Megatron's GPT examples."""

    name: Literal["adam", "sgd"] = "adam"
    lr: Annotated[float, Field(gt=0, le=10)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip: Annotated[float, Field(ge=0)] = 1.0


class Checkpoint(Model):
    """``directory``: where checkpoints go (default: under the run directory), on all nodes the same.

    ``url``: in its place, an fsspec URL of an object store (``s3://bucket/prefix``), for this task alone. ``every``:
    steps between two of them; 0: only at a stop. ``keep``: how many of them to keep, at least the newest and the one
    before it, which stands in if the newest is damaged. ``memory_every``: steps between copies in the memory of the
    nodes; 0: none; ``auto``: as often as they are worth, at no more than one percent of the time.
    """

    directory: str | None = None
    url: Annotated[str, Field(max_length=1024, pattern=CHECKPOINT_URL)] | None = None
    every: Annotated[int, Field(ge=0, le=1_000_000)] = 50
    keep: Annotated[int, Field(ge=2, le=1_000_000)] = 2
    memory_every: Annotated[int, Field(ge=0, le=1_000_000)] | Literal["auto"] = "auto"

    @property
    def in_memory(self) -> bool:
        """Whether there are copies in the memory of the nodes."""
        return self.memory_every != 0


class Parallel(Model):
    """Tensor and pipeline sizes; ``auto`` lets the planner choose the fastest layout that fits, for each count.

    The others are fixed for the task's life. ``recompute``: activations computed again in the backward pass.
    ``interleave``: model chunks of each worker where there are several pipeline stages.
    ``sequence_parallel``: tensor-parallel ranks divide the sequence where they do not divide the layer.
    ``overlap``: data-parallel ranks communicate beside backward and forward passes.
    """

    tensor: Count | Literal["auto"] = "auto"
    pipeline: Count | Literal["auto"] = "auto"
    recompute: Literal["none", "selective", "full"] = "none"
    interleave: Count = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False


class TaskSpec(Model):
    """One training task. Only ``name``, ``model``, ``batch``, ``steps`` and ``data`` are required.

    A ``script`` with a loop on the library needs neither ``model`` nor ``data``; one that restarts whole needs none but
    ``name``.
    """

    name: Name
    model: ModelShape
    batch: Batch
    steps: Steps
    data: Annotated[str, Field(min_length=1, max_length=4096)]
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    workers: Workers = Workers()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    order_samples: Annotated[int, Field(ge=1, le=10**15)] | None = Field(
        default=None, exclude_if=lambda samples: samples is None
    )
    """Samples from whose number the order of all samples is drawn; None: ``steps`` times ``batch.global``. A task that
    goes on with other ``steps`` keeps the order that it began with: the gateway enters it."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    bf16: bool = False
    """Whether parameters and activations are bfloat16; gradients, and the optimizer's own parameters, are float32."""
    env: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, Place] = Field(default_factory=dict, exclude_if=lambda secrets: not secrets)
    """Variable -> where its value is on every node, ``file:/path``: read there as a rank starts, and shown nowhere."""
    exact: bool = False
    """Whether parameters are the failure-free run's to the last bit whatever fails and however many replicas there are,
    at the same tensor-parallel size; otherwise they are to rounding. What it costs: docs/recovery.md."""
    deterministic_sums: bool = False
    """Whether gradients are added up in float64, which in practice gives the failure-free run's parameters to the last
    bit too; ``exact`` includes it. The default is Megatron's own precision, which costs nothing."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = DEFAULT_MAX_RESTARTS
    finish_timeout_s: Annotated[float, Field(gt=0, le=604_800)] = Field(
        default=DEFAULT_FINISH_TIMEOUT_S, exclude_if=lambda limit_s: limit_s == DEFAULT_FINISH_TIMEOUT_S
    )
    """How long a script may go on behind its last step; then the task fails, and its result stays."""
    progress_timeout_s: Annotated[float, Field(gt=0, le=31_536_000)] = Field(
        default=DEFAULT_PROGRESS_TIMEOUT_S, exclude_if=lambda limit_s: limit_s == DEFAULT_PROGRESS_TIMEOUT_S
    )
    """How long a task that fails again and again is tried without a new step; then it waits for its operator."""
    script: str | None = None
    """A Python file to run in place of the built-in GPT trainer; it uses ``unicron`` itself, or ``loop`` says whose."""
    code: Code | None = Field(default=None, exclude_if=lambda code: code is None)
    """The code that comes along: ``script``, and ``data`` if it is a relative path, are of its folder. The api keeps it
    (``PUT /v1/code/{digest}``), and removes it when no task names it that is not deleted."""
    arguments: Annotated[list[Argument], Field(max_length=MAX_ARGUMENTS)] = Field(
        default_factory=list, exclude_if=lambda arguments: not arguments
    )
    """The script's arguments, as behind ``torchrun script``."""
    module: Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")] | None = Field(
        default=None, exclude_if=lambda module: module is None
    )
    """The module that ``script`` is the file of: it is run as ``python -m`` does."""
    loop: Literal["unicron", "megatron-lm", "megatron-bridge", "restart"] = Field(
        default="unicron", exclude_if=lambda loop: loop == "unicron"
    )
    """Whose training loop the script runs: one on the library, or Megatron-LM's or megatron-bridge's ``pretrain``;
    ``restart``: any other. A fault of a script of that kind ends it on all workers, and it starts again from its own
    checkpoint."""

    not_healed: Annotated[str, Field(max_length=65_536)] = Field(default="", exclude_if=lambda why: not why)
    """Why a script whose loop could be healed inside the step restarts whole: what was refused when it started."""
    model_known: bool = Field(default=True, exclude_if=lambda known: known)
    """Whether ``model`` is what the script trains; False where the document has none for a loop on the library. The
    planner then uses ``workers.min`` and, where ``workers.max`` allows more, up to twice as many as it has measured."""

    python: Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00]*$")] | None = Field(
        default=None, exclude_if=lambda python: python is None
    )
    """The Python in which the task's processes run, on all nodes the same; None: the node's own. That Python has the
    library, unless the script restarts whole: then nothing of this project need be installed there."""

    @property
    def restarts_whole(self) -> bool:
        """Whether a fault ends the script on all workers. Only the script knows how it divides its work over them."""
        return self.loop == "restart"

    @property
    def steps_known(self) -> bool:
        """Whether ``steps`` is how many updates the task makes; else its script alone decides when it has ended."""
        return not self.restarts_whole or self.steps != UNKNOWN_STEPS

    def ends_early_at(self, step: int) -> bool:
        """Return whether a task that has succeeded has steps left (``step.end_training()`` of the library).

        Nobody knows it of one that restarts whole: the newest step is the last one that its output has told of.
        """
        return not self.restarts_whole and step < self.steps

    @property
    def tensor(self) -> int:
        """Tensor-parallel size; ``auto`` is 1, and so is what only the script knows."""
        return 1 if self.parallel.tensor == "auto" or self.restarts_whole else self.parallel.tensor

    @property
    def pipeline(self) -> int:
        """Pipeline-parallel size; ``auto`` is 1, and so is what only the script knows."""
        return 1 if self.parallel.pipeline == "auto" or self.restarts_whole else self.parallel.pipeline

    @property
    def order(self) -> int:
        """Samples from whose number the order of all samples is drawn."""
        return self.order_samples or self.steps * self.batch.global_

    def _most_per_replica(self) -> int:
        """Return tensor x pipeline; what is ``auto`` can be as much as the model divides into, if it is known."""
        if not self.model_known:
            return 1
        tensor = self.model.heads if self.parallel.tensor == "auto" else self.parallel.tensor
        return tensor * (self.model.layers if self.parallel.pipeline == "auto" else self.parallel.pipeline)

    @property
    def most_workers(self) -> int:
        """The most workers that the task may have and could use: one micro-batch for each data-parallel replica."""
        if self.restarts_whole:
            return self.workers.min
        limit = self.batch.micro_batches * self._most_per_replica()
        return limit if self.workers.max is None else min(self.workers.max, limit)

    @model_validator(mode="before")
    @classmethod
    def _unknown(cls, data: Any) -> Any:
        """Fill in what nobody knows of a script: the planner needs a number, and never more."""
        if not isinstance(data, dict):
            return data
        workers = data.get("workers", {})
        least = workers.get("min") if isinstance(workers, dict) else None
        known = least if isinstance(least, int) and least > 0 else 1
        unknown: dict[str, Any] = {"data": data.get("script")}
        if data.get("loop") == "restart":
            unknown |= {"model": UNKNOWN_MODEL, "batch": {"global": known}, "steps": UNKNOWN_STEPS}
            unknown["checkpoint"] = {"memory_every": 0}
        elif data.get("script") is None or data.get("loop", "unicron") != "unicron":
            return data
        elif "model" not in data:
            unknown |= {"model": UNKNOWN_MODEL, "model_known": False}
            if isinstance(workers, dict):
                data = data | {"workers": {"max": known} | workers}
        return {name: value for name, value in unknown.items() if value is not None} | data

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """Refuse what no layout can run; each message names the field and what is allowed."""
        if problems := [text for holds, text in (*self._of_layout(), *self._of_script()) if not holds]:
            raise ValueError("; ".join(problems))
        return self

    def _of_script(self) -> Iterator[tuple[bool, str]]:
        """Yield whether something about script and checkpoint holds, and what is said where it does not."""
        place = self.checkpoint
        yield place.directory is None or place.url is None, "checkpoint.url: not beside checkpoint.directory"
        path = "" if self.script is None else self.script.removesuffix(".py").removesuffix("/__main__")
        yield self.script is not None or not self.arguments, "arguments: only beside script"
        yield self.script is not None or self.loop == "unicron", "loop: only beside script"
        yield (
            self.module is None or f"/{path}".endswith("/" + self.module.replace(".", "/")),
            f"module: script must be its file, {(self.module or '').replace('.', '/')}.py or its __main__.py",
        )
        if self.code is not None:
            yield self.script is not None, "code: only beside script"
            yield is_inside(self.script or ""), "script: must be a path below the folder of the code that comes along"
            yield (
                self.data.startswith("/") or is_inside(self.data),
                "data: must be a path below the folder of the code that comes along, or an absolute one",
            )
            directory = self.env.get(WORKING_DIRECTORY, "")
            yield (
                directory.startswith("/") or is_inside(directory),
                f"env: {WORKING_DIRECTORY} must be below the folder of the code that comes along, or an absolute path",
            )
        yield self.restarts_whole or not self.not_healed, "not_healed: only beside loop restart"
        yield (
            not self.restarts_whole or self.workers.min == self.workers.max,
            "workers: min and max must be equal for loop restart: only the script knows how it divides its work",
        )

    def _of_layout(self) -> Iterator[tuple[bool, str]]:
        """Yield whether a condition of a layout holds, and what is said where it does not."""
        m, b = self.model, self.batch
        if self.restarts_whole:
            return
        per_replica = self.tensor * self.pipeline
        limit = b.micro_batches * self._most_per_replica()
        yield m.hidden % m.heads == 0, f"model.heads: {m.heads} must divide model.hidden, {m.hidden}"
        yield b.global_ % b.micro == 0, f"batch.micro: {b.micro} must divide batch.global, {b.global_}"
        yield self.model_known or per_replica == 1, "parallel: tensor and pipeline above 1 need model"
        yield m.heads % self.tensor == 0, f"parallel.tensor: {self.tensor} must divide model.heads, {m.heads}"
        yield m.layers % self.pipeline == 0, f"parallel.pipeline: {self.pipeline} must divide model.layers, {m.layers}"
        yield (
            self.workers.max is None or self.workers.min <= self.workers.max,
            f"workers.min: {self.workers.min} must not exceed workers.max, {self.workers.max}",
        )
        yield (
            self.workers.min <= limit,
            f"workers.min: {self.workers.min} is more than batch.global and parallel can use, {limit}",
        )
        yield (
            self.workers.max is None or self.workers.max >= per_replica,
            f"workers.max: {self.workers.max} is less than one replica's tensor x pipeline, {per_replica}",
        )
        if self.script is None:
            yield from self._of_built_in_trainer()

    def _of_built_in_trainer(self) -> Iterator[tuple[bool, str]]:
        """Yield the conditions of the built-in trainer; a user's own script may do what it does not."""
        m, chunks = self.model, self.pipeline * self.parallel.interleave
        yield (
            m.layers % chunks == 0,
            f"parallel.interleave: times pipeline, {chunks}, must divide model.layers, {m.layers}",
        )
        yield (
            self.optimizer.name == "adam" or not self.parallel.distributed_optimizer,
            "parallel.distributed_optimizer: the built-in trainer divides only adam's state",
        )


def parse_spec(data: Any) -> TaskSpec:
    """Return the specification in a mapping.

    Raises:
        InvalidInput: with one entry for each field: its name, its value, what is wrong and what is allowed.
    """
    if not isinstance(data, dict):
        raise InvalidInput(f"a task specification is a mapping of fields, not {type(data).__name__}")
    try:
        spec = TaskSpec.model_validate(data)
    except ValidationError as err:
        found = err.errors(include_url=False)[:MOST_REPORTED]
        errors = [entry for item in found for entry in _entries(item, data)]
        text = "; ".join(sentence(e["field"], e["problem"], repr(e["value"])) for e in errors)
        raise InvalidInput(f"task specification refused: {text}", errors) from err
    if problems := [*_not_unicode(spec.model_dump(mode="python"), ""), *_submission_problems(spec)]:
        raise refused(problems)
    return spec


def refused(problems: Sequence[tuple[str, object, str]]) -> InvalidInput:
    """Return the error of a specification that is refused.

    Args:
        problems: field, given value and problem of each field concerned.
    """
    text = "; ".join(f"{field}: {problem} (given: {value!r})" for field, value, problem in problems)
    errors = [{"field": field, "value": _shown(value), "problem": problem} for field, value, problem in problems]
    return InvalidInput(f"task specification refused: {text}", errors)


def _not_unicode(value: object, field: str) -> Iterator[tuple[str, object, str]]:
    """Yield the texts that no database can hold: JSON and YAML can escape halves of a surrogate pair."""
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        yield field, value, "must be Unicode text, without surrogates"
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _not_unicode(name, field)
            yield from _not_unicode(part, f"{field}.{name}".lstrip("."))


def _submission_problems(spec: TaskSpec) -> Iterator[tuple[str, object, str]]:
    """Yield what a new specification is refused for, and the log may have: the model reads old submissions, too."""
    tensor, vocabulary = spec.tensor, spec.model.vocabulary
    padded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if spec.script is None and padded % tensor != 0:
        yield (
            "parallel.tensor",
            tensor,
            f"must divide model.vocabulary, {vocabulary}, rounded up to a multiple of {VOCABULARY_MULTIPLE}: {padded}",
        )
    # With ``auto`` the planner chooses among powers of two up to 16 that divide the heads.
    largest = math.gcd(spec.model.heads, 16) if spec.parallel.tensor == "auto" else tensor
    length = spec.model.sequence_length
    if spec.script is None and spec.parallel.sequence_parallel and length % largest != 0:
        size = f"parallel.tensor, {'which may be ' * (spec.parallel.tensor == 'auto')}{largest},"
        yield "parallel.sequence_parallel", True, f"{size} must divide model.sequence_length, {length}"
    yield from secrets.problems(spec.env, spec.secrets)
    for argument in secrets.secret_arguments(spec.arguments):
        yield "arguments", argument, f"{secrets.WHY}; instead: {secrets.INSTEAD}"
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value:
            yield "env", name, "not an environment variable: a name without '=', and no null byte in name or value"


def _entries(item: Any, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a complaint as field, value and problem; one about fields that do not go together for each of them."""
    field = ".".join(str(part) for part in item["loc"])
    problem = problem_of(item)
    if item["type"] == "extra_forbidden":
        problem = unknown_field_of(TaskSpec, item["loc"])
    if field or item["type"] != "value_error":
        shown = None if problem == MISSING else _shown(item["input"])  # else it would be what the field is missing in
        return [{"field": field or "(task)", "value": shown, "problem": problem}]
    found = []
    for text in problem.split("; "):
        name, _, what = text.partition(": ")
        value: Any = data
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found.append({"field": name, "value": _shown(value), "problem": what})
    return found


def _shown(value: object) -> str | int | float | bool | None:
    """Return a value as an error may show it: no structures, and nothing that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else "..."


def load_spec(text: str) -> TaskSpec:
    """Return the specification in YAML text.

    Raises:
        InvalidInput: not YAML, too large, or not a valid specification.
    """
    if len(text) > MAX_SPEC_BYTES:
        raise InvalidInput(f"a specification of {len(text)} bytes; at most {MAX_SPEC_BYTES} are allowed")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as err:
        raise InvalidInput(f"not YAML: {err}") from err
    return parse_spec(data)
