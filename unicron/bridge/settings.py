"""megatron-bridge's configuration: what is refused, what is switched off, and what the library is told of it.

What concerns the model, its optimizer and its DistributedDataParallel is in ``unicron.megatron.supported``, as for
every model; here is what the rest of a configuration says. It lives in Python objects, so all of it is known only when
``pretrain()`` is called.
"""

from __future__ import annotations

import functools
from typing import Any

from unicron.errors import InvalidSpec, NotHealed
from unicron.megatron import supported
from unicron.megatron_lm.samples import BatchSizes
from unicron.megatron_lm.settings import Plan, Refused, say

_WHOLE = "set checkpoint.save and checkpoint.load, and submit the task with `loop: restart`, which restarts whole"
_BUILT = "a model is built without waiting for other ranks"
_GROUPS = "the library makes the groups"
_PARTS = "its ranks each have a part that cannot be named"

REFUSED = (
    Refused("dataset.dataloader_type", ("single", "cyclic"), "samples are then dealt by position or by length", _WHOLE),
    Refused("dataset.data_sharding", (True,), "the samples of a micro-batch then depend on the rank", "leave it out"),
    Refused("train.iterations_to_skip", (None, [], ()), "every step is trained", "leave it out"),
    Refused("train.skip_train", (False,), "there is no step", _WHOLE),
    Refused("train.decrease_batch_size_if_needed", (False,), "the batch is the task's in any layout", "leave it out"),
    Refused("optimizer.optimizer", ("adam", "sgd"), "no test moves the state of this optimizer", "use adam"),
    Refused("dist.use_megatron_fsdp", (False,), _PARTS, "use ddp.use_distributed_optimizer"),
    Refused("dist.use_torch_fsdp2", (False,), _PARTS, "use ddp.use_distributed_optimizer"),
    Refused("dist.use_decentralized_pg", (False,), _GROUPS, "leave it out"),
    Refused("dist.lazy_init", (False,), _GROUPS, "leave it out"),
    Refused("dist.use_tp_pp_dp_mapping", (False,), _GROUPS, "leave it out"),
    Refused("rng.data_parallel_random_init", (False,), "replicas would begin with other parameters", "leave it out"),
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
    ("train.exit_signal_handler", False, "a task is stopped by its services"),
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


def prepare(config: Any) -> None:
    """Refuse what cannot be healed, or would train wrongly; switch off what only concerns comfort.

    Args:
        config: megatron-bridge's ``ConfigContainer``.

    Raises:
        NotHealed: a setting is not healed; the message names it, why, and what to write instead.
        InvalidSpec: a setting would train wrongly.
    """
    check(config)
    switch_off(config)
    for problem in supported.configured(config.model, config.ddp, config.optimizer):
        raise NotHealed(f"{problem}; {_WHOLE}")


def check(config: Any) -> None:
    """Refuse what of a configuration is neither of a model nor of its optimizer.

    Args:
        config: megatron-bridge's ``ConfigContainer``.

    Raises:
        NotHealed: a setting is not healed; the message names it, why, and what to write instead.
        InvalidSpec: a setting would train wrongly.
    """
    for refused in REFUSED:
        value = _value(config, refused.name, refused.allowed[0])
        if value not in refused.allowed:
            raise NotHealed(
                f"{refused.name}: {_text(value)} is not healed inside the step: {refused.reason}; {refused.instead}"
            )
    train, checkpoint = config.train, config.checkpoint
    if not train.global_batch_size:
        raise NotHealed(
            "train.global_batch_size: is needed, since megatron-bridge's default depends on the number of ranks"
        )
    if batch_sizes(config).divisor % train.micro_batch_size:
        raise InvalidSpec("train.global_batch_size: every batch must be a multiple of train.micro_batch_size")
    if checkpoint.load and checkpoint.load == checkpoint.save and (checkpoint.finetune or not checkpoint.load_optim):
        raise InvalidSpec(
            f"checkpoint.{'finetune' if checkpoint.finetune else 'load_optim'}: checkpoint.load is checkpoint.save, so "
            "a task would read its own checkpoint like that after faults; use checkpoint.pretrained_checkpoint"
        )
    for name in ("pre_wrap_hook", "post_wrap_hook"):
        if getattr(config.model, name, None) is not None:
            raise NotHealed(
                f"model.{name}: a hook (which loads weights of Hugging Face, for example) is not called: {_BUILT}; "
                "convert the weights to a checkpoint and name it in checkpoint.pretrained_checkpoint"
            )


def switch_off(config: Any) -> None:
    """Give the settings that only concern comfort the value with which a step can be healed, and say so."""
    for path, value, reason in OFF:
        if (given := _value(config, path, value)) != value:
            *above, name = path.split(".")
            setattr(_value(config, ".".join(above), None) if above else config, name, value)
            if path not in _DEFAULTS and not (given is False or given == "None"):
                say(f"unicron: {path} is off: {reason}")


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
