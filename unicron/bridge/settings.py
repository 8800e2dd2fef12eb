"""megatron-bridge's configuration: what is refused, what is switched off, and what the library is told of it.

What concerns the model, its optimizer and its DistributedDataParallel is in ``unicron.megatron.supported``, as for
every model; here is what the rest of a configuration says. It lives in Python objects, so all of it is known only when
``pretrain()`` is called.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from unicron.errors import InvalidSpec, NotHealed
from unicron.megatron import supported
from unicron.megatron_lm.samples import BatchSizes
from unicron.megatron_lm.settings import Plan, Refused, say

_WHOLE = "give checkpoint.save and checkpoint.load one folder; a task with `loop: restart` restarts whole from there"
_BUILT = "a model is built without waiting for other ranks"
_GROUPS = "the library makes the groups"
_PARTS = "its ranks each have a part that cannot be named"
_LEFT = "leave it out"

REFUSED = (
    Refused("dataset.dataloader_type", ("single", "cyclic"), "samples are then dealt by position or by length", _WHOLE),
    Refused("dataset.data_sharding", (True,), "the samples of a micro-batch then depend on the rank", _LEFT),
    Refused("train.iterations_to_skip", (None, [], ()), "every step is trained", _LEFT),
    Refused("train.skip_train", (False,), "there is no step", _WHOLE),
    Refused("train.decrease_batch_size_if_needed", (False,), "the batch is the task's in any layout", _LEFT),
    Refused("optimizer.optimizer", ("adam", "sgd"), "no test moves the state of this optimizer", "use adam"),
    Refused("dist.use_megatron_fsdp", (False,), _PARTS, "use ddp.use_distributed_optimizer"),
    Refused("dist.use_torch_fsdp2", (False,), _PARTS, "use ddp.use_distributed_optimizer"),
    Refused("dist.use_decentralized_pg", (False,), _GROUPS, _LEFT),
    Refused("dist.lazy_init", (False,), _GROUPS, _LEFT),
    Refused("dist.use_tp_pp_dp_mapping", (False,), _GROUPS, _LEFT),
    Refused("rng.data_parallel_random_init", (False,), "replicas would begin with other parameters", _LEFT),
    Refused("peft", (None,), f"it loads the base model as the model is built; {_BUILT}", _WHOLE),
    Refused("model.restore_modelopt_state", (False,), f"it is loaded as the model is built; {_BUILT}", _WHOLE),
    Refused("model.qk_clip", (False,), "it changes weights behind the update, which the library does not know of"),
    Refused("checkpoint.ckpt_format", ("torch_dist",), "no test saves or loads another format", "use torch_dist"),
    Refused("checkpoint.ckpt_convert_format", (None,), "that is no training", _WHOLE),
)
"""Settings by their path in the configuration."""

_GRAPH = "a captured graph goes on using the process groups of the generation that captured it"
_LATE = "gradients of weights would come after the backward pass, when the micro-batch is already committed"
_ONE_RANK = "its process belongs to one rank, which may be lost"
_COMFORT = "the detector finds the fault or the slow rank that it would answer"

OFF = (
    ("rerun_state_machine.rerun_mode", "disabled", "its checks need an all-reduce in every step"),
    ("model.tp_comm_overlap", False, "its buffers belong to process groups that a fault replaces"),
    ("model.overlap_p2p_comm_warmup_flush", False, "it is not tested with recovery"),
    ("model.defer_embedding_wgrad_compute", False, _LATE),
    ("model.delay_wgrad_compute", False, _LATE),
    ("model.cuda_graph_impl", "none", _GRAPH),
    ("model.enable_cuda_graph", False, _GRAPH),
    ("model.external_cuda_graph", False, _GRAPH),
    ("optimizer.overlap_param_gather_with_optimizer_step", False, "parameters are gathered once the update is applied"),
    ("ddp.nccl_ub", False, "its buffers belong to process groups that a fault replaces"),
    ("dist.use_gloo_process_groups", False, _GROUPS),
    ("dist.distributed_timeout_seconds_after_init", None, "the library limits how long a collective may take"),
    ("checkpoint.async_save", False, "a process that writes on would outlive the attempt that began it"),
    ("checkpoint.non_persistent_save_interval", None, "the library keeps copies in memory"),
    ("checkpoint.non_persistent_ckpt_type", None, "the library keeps copies in memory"),
    ("train.check_weight_hash_across_dp_replicas_interval", None, "the library compares parameters itself"),
    ("logger.wandb_project", None, _ONE_RANK),
    ("logger.mlflow_experiment", None, _ONE_RANK),
    ("logger.log_progress", False, "it counts on as many ranks from the start to the end"),
    ("logger.log_energy", False, "it begins on all ranks at once, and a new one comes in the midst of a training"),
    ("straggler", None, _COMFORT),
    ("nvrx_straggler", None, _COMFORT),
    ("ft", None, _COMFORT),
    ("inprocess_restart", None, _COMFORT),
    ("tensor_inspect", None, "what it has seen is no part of the state"),
)
"""Path, the value that it gets, and why; one that a user has set is told."""

_DEFAULTS = ("dist.use_gloo_process_groups",)
"""What is on where nobody has written it."""


_PARTS_OF = {"DistributedDataParallelConfig": "ddp", "OptimizerConfig": "optimizer", "TransformerConfig": "model"}
"""A class of Megatron's -> the part of a configuration that is one."""


class Finding(NamedTuple):
    """A setting that matters to healing."""

    name: str
    value: Any
    what: Literal["speed-off", "restart", "refused"]
    """It is switched off; or a step is not healed with it; or a restart would train wrongly with it, too."""
    why: str
    instead: str

    def __str__(self) -> str:
        """Return what is said of a setting with which a step is not healed."""
        return f"{self.name}: {_text(self.value)} is not healed inside the step: {self.why}; {self.instead}"

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        is_plain = isinstance(self.value, str | int | float | None)
        value = self.value if is_plain else _text(self.value)
        return {"argument": self.name, "value": value, "what": self.what, "why": self.why, "instead": self.instead}


def prepare(config: Any, callbacks: Any = None) -> None:
    """Refuse what cannot be healed, or would train wrongly; switch off what only concerns comfort, and say so.

    Args:
        config: megatron-bridge's ``ConfigContainer``.
        callbacks: of ``pretrain()``.

    Raises:
        NotHealed: a setting is not healed; the message names it, why, and what to write instead.
        InvalidSpec: a setting would train wrongly.
    """
    for found in findings(config, callbacks):
        if found.what == "restart":
            raise NotHealed(str(found))
        if found.what == "refused":
            raise InvalidSpec(str(found))
        say(f"unicron: {found.name} is off: {found.why}")


def findings(config: Any, callbacks: Any = None) -> Iterator[Finding]:
    """Yield the settings that matter to healing; those that only concern comfort are switched off meanwhile.

    Args:
        config: megatron-bridge's ``ConfigContainer``.
        callbacks: of ``pretrain()``.
    """
    if callbacks:
        yield Finding("pretrain(callbacks=...)", callbacks, "restart", "what they keep is no part of the state", _LEFT)
    if dist.is_initialized():
        yield Finding("torch.distributed", "initialised before pretrain()", "restart", _GROUPS, _LEFT)
    yield from refused(config)
    yield from switched_off(config)
    for problem in supported.configured(config.model, config.ddp, config.optimizer):
        name, _, why = problem.partition(": ")
        owner, _, setting = name.partition(".")
        path = f"{_PARTS_OF[owner]}.{setting}"
        yield Finding(path, _value(config, path, None), "restart", why, _WHOLE)


def refused(config: Any) -> Iterator[Finding]:
    """Yield what of a configuration is refused, of those settings that are neither of a model nor of its optimizer."""
    for one in REFUSED:
        value = _value(config, one.name, one.allowed[0])
        if value not in one.allowed:
            yield Finding(one.name, value, "restart", one.reason, one.instead)
    yield from _refused_batches(config.train)
    checkpoint = config.checkpoint
    if checkpoint.load and checkpoint.load == checkpoint.save and (checkpoint.finetune or not checkpoint.load_optim):
        name = "finetune" if checkpoint.finetune else "load_optim"
        why = "checkpoint.load is checkpoint.save, so a task would read its own checkpoint like that after faults"
        instead = "use checkpoint.pretrained_checkpoint"
        yield Finding(f"checkpoint.{name}", getattr(checkpoint, name), "refused", why, instead)
    for name in ("pre_wrap_hook", "post_wrap_hook"):
        if (hook := getattr(config.model, name, None)) is not None:
            why = f"a hook (which loads weights of Hugging Face, for example) is not called: {_BUILT}"
            instead = "convert the weights to a checkpoint and name it in checkpoint.pretrained_checkpoint"
            yield Finding(f"model.{name}", hook, "restart", why, instead)


def _refused_batches(train: Any) -> Iterator[Finding]:
    """Yield what is refused of the sizes of batches."""
    name, batch, ramp = "train.global_batch_size", train.global_batch_size, train.rampup_batch_size
    if not batch:
        yield Finding(name, batch, "restart", "megatron-bridge's default depends on the number of ranks", "give it")
        return
    try:
        divisor = BatchSizes(batch, ramp).divisor
    except InvalidSpec as err:
        yield Finding("train.rampup_batch_size", ramp, "refused", str(err).partition(": ")[2], _LEFT)
    else:
        if divisor % train.micro_batch_size:
            why = "some batch is no multiple of train.micro_batch_size"
            yield Finding(name, batch, "refused", why, "give a multiple, also for the growth of a batch")


def switched_off(config: Any) -> Iterator[Finding]:
    """Give the settings that only concern comfort the value with which a step can be healed; yield what was set."""
    for path, value, reason in OFF:
        if (given := _value(config, path, value)) != value:
            *above, name = path.split(".")
            setattr(_value(config, ".".join(above), None) if above else config, name, value)
            if path not in _DEFAULTS and not (given is False or given == "None"):
                yield Finding(path, given, "speed-off", reason, "nothing: what is trained does not depend on it")


def batch_sizes(config: Any) -> BatchSizes:
    """Return the samples of each step's batch.

    Raises:
        InvalidSpec: no batches grow like that.
    """
    return BatchSizes(config.train.global_batch_size, config.train.rampup_batch_size)


def plan(config: Any) -> Plan:
    """Return what the library is told."""
    train, model = config.train, config.model
    return Plan(
        steps=train.train_iters,
        micro_batches=train.global_batch_size // train.micro_batch_size,
        micro_batch=train.micro_batch_size,
        global_batch=train.global_batch_size,
        tensor=model.tensor_model_parallel_size,
        pipeline=model.pipeline_model_parallel_size,
        eval_interval=train.eval_interval or 0,
        eval_iters=train.eval_iters,
        seed=config.rng.seed,
        dropout=max(model.attention_dropout, model.hidden_dropout),
    )


def _value(config: Any, path: str, default: Any) -> Any:
    """Return a setting; the default where a release, or a kind of model or of data, does not have it."""
    try:
        return functools.reduce(getattr, path.split("."), config)
    except AttributeError:
        return default


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | list | tuple | None) else type(value).__name__
