"""The verdict on a command line: whether its task is healed inside the step, or by whole restarts, or is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from shared.launch.arguments import Arguments
from shared.launch.command import Launch
from shared.launch.script import VERSIONS, Loop, Script
from shared.launch.settings import Effect, Finding, findings, findings_of_release, ramp_problem
from shared.tasks import secrets


class Verdict(StrEnum):
    """How a task runs: as it is, without settings that do not change the result, with whole restarts, or not at all."""

    UNCHANGED = "unchanged"
    OFF = "speed-off"
    RESTART = "restart"
    REFUSED = "refused"


LINES = """run = unicron.attach(steps=..., micro_batches=..., build=build)
for step in run.steps():
    with step:
        for k in step.micro_batches(): ...  # forward and backward pass of micro-batch k, then step.commit(k, loss)
        step.reduce(); run.optimizer.step()"""
"""What makes a loop of one's own heal inside the step, in a few lines."""

_ADAPT = f"a loop on the library (docs/integrating.md):\n{LINES}"
_RANGE = " to ".join(f"{major}.{minor}" for major, minor in VERSIONS)


class Check(NamedTuple):
    """A verdict, its reasons, and what is known of the task."""

    verdict: Verdict
    findings: list[Finding]
    task: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        settings = [
            {"argument": f.argument, "value": f.value, "what": f.what.value, "why": f.why, "instead": f.instead}
            for f in self.findings
        ]
        return {"verdict": self.verdict.value, "settings": settings, "task": self.task}

    def restarting(self, script: str, why: str) -> Check:
        """Return the verdict on a task that restarts whole since a setting was refused at its start; empty: this one.

        Args:
            script: what the command line names.
            why: what was refused; it says what to write instead.
        """
        if not why:
            return self
        finding = Finding("SCRIPT", script, Effect.RESTART, why, "what the reason says; another --name tries it")
        return Check(Verdict.RESTART, [*self.findings, finding], self.task | {"heals": "restart"})


class Configuration(NamedTuple):
    """What a script of megatron-bridge's gives to its ``pretrain()``: known once it has been run up to there.

    ``problem``: why that is not known, as a clause about the script ("it ..."); empty: it is known. ``findings``: the
    settings that matter to healing. ``task``: fields of a specification (none: one of them is not set).
    """

    problem: str = ""
    findings: tuple[Finding, ...] = ()
    task: Mapping[str, Any] = {}


UNKNOWN = Configuration("there is no megatron-bridge here with which it could be run up to pretrain()")
"""Of a script that was not run."""

FIELDS = ("model", "batch", "steps")
"""Of a specification, what the planner needs of a task that is healed inside the step."""


def check(
    launch: Launch,
    script: Script,
    arguments: Arguments,
    *,
    own_parser: bool = False,
    given: Collection[str] = (),
    configuration: Configuration = UNKNOWN,
) -> Check:
    """Return the verdict on a command line.

    Args:
        launch: what it starts.
        script: what is known of the script.
        arguments: its arguments, read by the table or by Megatron-LM's own parser.
        own_parser: whether it was Megatron-LM's own parser.
        given: fields of the specification that the user gives beside the command line.
        configuration: of a script of megatron-bridge's.
    """
    found = [*_secret(launch)]
    megatron = script.loop is Loop.MEGATRON_LM
    if script.loop is Loop.BRIDGE:
        found += _of_bridge(launch, given, configuration)
    elif not megatron and script.loop is not Loop.LIBRARY:
        found.append(Finding("SCRIPT", launch.script or launch.module, Effect.RESTART, script.why, _ADAPT))
    if megatron and not script.core_in_range:
        why = f"its pretrain is not one of {_RANGE}, whose seams are known"
        found.append(Finding("megatron-core", script.core, Effect.RESTART, why, f"megatron-core {_RANGE}"))
    if megatron or script.path is None:  # the arguments of another script are its own, and stay as they are
        found += findings(arguments.values, arguments.options)
    if megatron:
        found += findings_of_release(script.core, arguments.values, arguments.options)
        found += _unreadable(script, arguments)
    effects = {finding.what for finding in found}
    verdict = next((Verdict(effect) for effect in (Effect.REFUSED, Effect.RESTART, Effect.OFF) if effect in effects),
                   Verdict.UNCHANGED)  # fmt: skip
    task = _task(launch, script, verdict)
    if script.loop is Loop.BRIDGE:
        task["read_by"] = "script" if not configuration.problem else "start" if not found else "table"
        return Check(verdict, found, task | _of_fields(configuration.task))
    task["read_by"] = "megatron" if own_parser else "table"
    is_megatrons = megatron or "num_layers" in arguments.values
    return Check(verdict, found, task | _planned(arguments.values) if is_megatrons else task)


def _secret(launch: Launch) -> list[Finding]:
    return [
        Finding(argument, None, Effect.REFUSED, secrets.WHY, secrets.INSTEAD)
        for argument in secrets.secret_arguments(launch.arguments)
    ]


def _of_bridge(launch: Launch, given: Collection[str], configuration: Configuration) -> Sequence[Finding]:
    """Return what matters to healing in the configuration of a script of megatron-bridge's.

    It is in Python objects. Where the script was not run, and the user says what the planner needs, a start checks it,
    when ``pretrain()`` is called, and refuses settings by name.
    """
    if not configuration.problem:
        return configuration.findings
    if set(FIELDS) <= {*given}:
        return []
    # Without the arguments, one of which may be a secret.
    name = (f"-m {launch.module}" if launch.module else launch.script) + (" ..." if launch.arguments else "")
    how = f"python -m unicron.bridge --fields task.yaml {name}"
    return [
        Finding(
            "SCRIPT",
            launch.script or launch.module,
            Effect.RESTART,
            f"its model, batch and steps are in Python objects, and {configuration.problem}",
            f"`{how}` where that runs, which writes them, or refuses a setting; then --spec task.yaml",
        )
    ]


def _unreadable(script: Script, arguments: Arguments) -> list[Finding]:
    """Return the arguments that no release of Megatron-LM has, and those with a value that none takes."""
    wrong = Effect.REFUSED if script.core_in_range and not arguments.unknown else Effect.RESTART
    found = [
        Finding(option, None, wrong, problem, "a value that Megatron-LM's parser takes")
        for option, problem in arguments.wrong.items()
    ]
    for option in arguments.unknown:
        if f'"{option}"' not in script.text and f"'{option}'" not in script.text:
            why = "no release of Megatron-LM core 0.16 to 0.19 has it, so a fork's training module reads it"
            found.append(Finding(option, None, Effect.RESTART, why, "an argument that the script itself adds, or none"))
    return found


def _task(launch: Launch, script: Script, verdict: Verdict) -> dict[str, Any]:
    """Return what of a task is known beside its settings."""
    task: dict[str, Any] = {
        "script": launch.script or None,
        "module": launch.module or None,
        "arguments": [*launch.arguments] if verdict is not Verdict.REFUSED else None,
        "loop": script.loop.value,
        "heals": {Verdict.RESTART: "restart", Verdict.REFUSED: None}.get(verdict, "step"),
        "workers": launch.workers,
        "launchers": [*launch.launchers],
        "megatron_core": script.core or None,
    }
    if launch.max_restarts is not None:
        task["max_restarts"] = launch.max_restarts
    return task


def _of_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the planner needs, of fields of a specification; nothing if there are none."""
    if not fields:
        return {}
    known = {name: fields[name] for name in (*FIELDS, "parallel")}
    return known | {
        "least_workers": fields["workers"]["min"],
        "saves_every": fields.get("checkpoint", {}).get("every"),
    }


def _planned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return model, batch, steps and layout that the planner needs; None: the arguments do not say."""
    batch = values.get("global_batch_size")
    steps, samples = values.get("train_iters"), values.get("train_samples")
    if not steps and samples is not None and batch and not ramp_problem(values):
        steps = _steps_of(samples, batch, values.get("rampup_batch_size"))
    tensor, pipeline = values.get("tensor_model_parallel_size", 1), values.get("pipeline_model_parallel_size", 1)
    context = values.get("context_parallel_size", 1)
    return {
        "model": {
            "layers": values.get("num_layers"),
            "hidden": values.get("hidden_size"),
            "heads": values.get("num_attention_heads"),
            "sequence_length": values.get("seq_length") or values.get("encoder_seq_length"),
            "vocabulary": values.get("vocab_size"),
        },
        "batch": {"global": batch, "micro": values.get("micro_batch_size")},
        "steps": steps,
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "interleave": _chunks(values, pipeline),
            "sequence_parallel": bool(values.get("sequence_parallel", False)) and tensor > 1,
            "distributed_optimizer": bool(values.get("use_distributed_optimizer", False)),
            "overlap": bool(values.get("overlap_grad_reduce", False)),
        },
        "least_workers": tensor * pipeline * context,
        "saves_every": (values.get("save") and values.get("save_interval")) or None,
    }


def _steps_of(samples: int, batch: int, rampup: Sequence[Any] | None) -> int:
    """Return the updates of a training of so many samples, as Megatron-LM counts them."""
    first, increment, during = map(int, rampup) if rampup else (batch, 0, -1)
    if first >= batch or during <= 0:
        return samples // batch
    steps = consumed = 0
    while consumed <= min(during, samples):
        grown = int(consumed / (during / ((batch - first) // increment)))
        steps, consumed = steps + 1, consumed + min(batch, first + grown * increment)
    return steps + max(0, samples - consumed) // batch


def _chunks(values: Mapping[str, Any], pipeline: int) -> int:
    """Return the model chunks of each worker."""
    if chunks := values.get("num_virtual_stages_per_pipeline_rank"):
        return int(chunks)
    layers, each = values.get("num_layers"), values.get("num_layers_per_virtual_pipeline_stage")
    return max(1, layers // pipeline // each) if layers and each else 1
