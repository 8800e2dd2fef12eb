"""Megatron-LM's arguments: which are refused, which are switched off, and what the library is told of them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from unicron.errors import InvalidSpec, NotHealed
from unicron.megatron.supported import FACTOR
from unicron.megatron_lm.samples import BatchSizes

_NEXT_TO_HEALING = "set --save and let the task restart whole, without this adapter"


class Refused(NamedTuple):
    """An argument with which a step cannot be healed, or not be trained rightly."""

    name: str
    """Name of the attribute of Megatron-LM's arguments, or the path of a setting in megatron-bridge's configuration."""
    allowed: tuple[Any, ...]
    reason: str
    instead: str = _NEXT_TO_HEALING


REFUSED = (
    Refused(
        "dataloader_type", (None, "single", "cyclic"), "samples are then dealt by position", "use single or cyclic"
    ),
    Refused("data_sharding", (True,), "the samples of a micro-batch then depend on the rank", "use single"),
    Refused("num_experts", (None,), "the experts of a layer have one name, by which the state moves"),
    Refused("context_parallel_size", (1,), "gradients are summed over data-parallel ranks only"),
    Refused("expert_model_parallel_size", (1,), "gradients are summed over data-parallel ranks only"),
    Refused("fp8", (None,), "the scaling factors are no part of the state", "use --bf16"),
    Refused("fp4", (None,), "the scaling factors are no part of the state", "use --bf16"),
    Refused("use_torch_fsdp2", (False,), "its ranks each have a part that cannot be named"),
    Refused("use_megatron_fsdp", (False,), "its ranks each have a part that cannot be named"),
    Refused("data_parallel_random_init", (False,), "replicas would begin with other parameters"),
    Refused("skip_train", (False,), "there is no step"),
    Refused("full_validation", (False,), "its iterator has a position"),
    Refused("multiple_validation_sets", (False,), "its iterators have positions"),
    Refused("perform_rl_step", (False,), "its samples follow from earlier steps"),
    Refused("hybrid_context_parallel", (False,), "its samples are dealt by length"),
    Refused("moe_use_upcycling", (False,), "a task begins from the model that is built"),
    Refused("ckpt_convert_format", (None,), "that is no training"),
    Refused("lazy_mpu_init", (None, False), "the library makes the groups"),
    Refused("vision_pretraining", (False,), "its momentum teacher is no part of the state"),
    Refused("iterations_to_skip", (None, [], ()), "every step is trained"),
    Refused("optimizer", ("adam", "sgd"), "no test moves the state of this optimizer", "use adam"),
    Refused("main_params_dtype", ("fp32",), FACTOR, "use fp32"),
    Refused("exp_avg_dtype", ("fp32", "bf16"), FACTOR, "use bf16"),
    Refused("exp_avg_sq_dtype", ("fp32", "bf16"), FACTOR, "use bf16"),
    Refused("optimizer_cpu_offload", (False,), "no test moves a state that is in two memories"),
    Refused("num_distributed_optimizer_instances", (1,), "the optimizer's parts are named by data-parallel rank"),
    Refused("distribute_saved_activations", (False,), "no test recomputes from activations that are divided"),
    Refused("mtp_num_layers", (None, 0), "Megatron scales that loss by tokens that nothing divides"),
    Refused("qk_clip", (False,), "it changes weights behind the update, which the library does not know of"),
    Refused(
        "step_batch_size_schedule", (None,), "every step has the same micro-batches", "use --global-batch-size alone"
    ),
    Refused("eval_global_batch_size", (None,), "an evaluation has the batch of the training", "leave it out"),
    Refused("eval_micro_batch_size", (None,), "an evaluation has the micro-batches of the training", "leave it out"),
    Refused("start_eval_at_iter", (None,), "evaluations follow from --eval-interval alone", "leave it out"),
    Refused("tensor_parallel_num_weight_shards", (None,), "its ranks each have a part that cannot be named"),
    Refused("expert_tensor_parallel_num_weight_shards", (None,), "its ranks each have a part that cannot be named"),
    Refused("logits_load_dir", (None,), "its reader has a position"),
    Refused("logits_save_dir", (None,), "its writer has a position"),
    Refused("yaml_cfg", (None,), "its settings are in a file", "write the settings as arguments"),
)
"""The refused arguments. ``shared.launch.settings`` judges a command by them before anything starts; a test compares
both."""

_LATE = "gradients of weights would come after the backward pass, when the micro-batch is already committed"
_GRAPH = "a captured graph goes on using the process groups of the generation that captured it"
_GROUPS = "its buffers belong to process groups that a fault replaces"
_OF_GROUPS = ("enable_gloo_process_groups", "use_gloo_process_groups")
"""Names of one argument, before and from core 0.17 on."""

_DEFAULTS = ("rerun_mode", "num_workers", *_OF_GROUPS)
"""What Megatron-LM's own default switches on: nobody may have written it, so nothing is said."""

OFF = (
    (
        "rerun_mode",
        "disabled",
        "its checks need an all-reduce in every step; a loss that is not finite is found anyway",
    ),
    ("tp_comm_overlap", False, _GROUPS),
    ("nccl_ub", False, _GROUPS),
    ("overlap_p2p_comm_warmup_flush", False, "it is not tested with recovery"),
    ("overlap_param_gather_with_optimizer_step", False, "parameters are gathered once the whole update is applied"),
    ("defer_embedding_wgrad_compute", False, _LATE),
    ("delay_wgrad_compute", False, _LATE),
    ("cuda_graph_impl", "none", _GRAPH),
    ("enable_cuda_graph", False, _GRAPH),
    ("external_cuda_graph", False, _GRAPH),
    ("optimizer_cuda_graph", False, _GRAPH),
    ("inprocess_restart", False, "the library heals the fault that it would answer"),
    ("enable_ft_package", False, "the detector finds the fault that it would answer"),
    ("async_save", False, "a process that writes on would outlive the attempt that began it"),
    ("exit_signal_handler_for_training", False, "it waits for ranks that may be lost, and leaves no checkpoint"),
    ("num_workers", 0, "the training process reads its samples itself"),
    *((name, False, "the library makes the groups") for name in _OF_GROUPS),
    ("adlr_autoresume", False, "a task is resumed by its services"),
    ("check_weight_hash_across_dp_replicas_interval", None, "the library compares parameters itself"),
    ("wandb_project", None, "its process belongs to one rank, which may be lost"),
    ("log_straggler", False, "the detector finds slow ranks"),
    ("gpu_sniff_test_interval", None, "it waits for all ranks at once, and a new one comes in the midst of a training"),
)
"""Attribute, the value that it gets, and why; the user is told if they have set another value."""


class Plan(NamedTuple):
    """What the library is told about a training."""

    steps: int
    micro_batches: int
    """Number of micro-batches in the largest update, over all replicas."""
    micro_batch: int
    """Number of samples."""
    global_batch: int
    tensor: int
    pipeline: int
    eval_interval: int
    """Steps from one evaluation to the next; 0: there is none."""
    eval_iters: int
    """Batches of an evaluation."""
    seed: int
    dropout: float


def check(args: Any) -> None:
    """Refuse what cannot be healed, or would train wrongly.

    Raises:
        NotHealed: an argument is not healed; the message names it, why, and what to write instead.
        InvalidSpec: an argument would train wrongly, or is one that Megatron-LM does not take.
    """
    for refused in REFUSED:
        value = getattr(args, refused.name, refused.allowed[0])
        if value not in refused.allowed:
            raise NotHealed(
                f"--{refused.name.replace('_', '-')}: {value!r} is not healed inside the step: {refused.reason}; "
                f"{refused.instead}"
            )
    if not args.global_batch_size:
        raise NotHealed(
            "--global-batch-size: is needed, since Megatron-LM's default depends on the number of ranks; write "
            "micro-batch-size times the data-parallel size"
        )
    if args.global_batch_size % args.micro_batch_size:
        raise InvalidSpec("--global-batch-size: must be a multiple of --micro-batch-size")
    if batch_sizes(args).divisor % args.micro_batch_size:
        raise InvalidSpec("--rampup-batch-size: every batch must be a multiple of --micro-batch-size")
    if args.rampup_batch_size and not _ramps_up():
        raise NotHealed(
            "--rampup-batch-size: Megatron-LM from core 0.18 on reads it, and trains with --global-batch-size from the "
            "first step; leave it out"
        )
    if args.load and args.load == args.save and (args.finetune or args.no_load_optim):
        raise InvalidSpec(
            f"--{'finetune' if args.finetune else 'no-load-optim'}: --load is --save, so a task would read its own "
            "checkpoint like that after faults; use --pretrained-checkpoint with the folder to begin from"
        )
    if getattr(args, "phase_transition_iterations", None) and not args.train_samples:
        raise InvalidSpec("--phase-transition-iterations: Megatron-LM needs --train-samples beside it")
    virtual = args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank
    if virtual and args.pipeline_model_parallel_size == 1:
        raise InvalidSpec("--num-virtual-stages-per-pipeline-rank: needs several pipeline stages")


def _ramps_up() -> bool:
    """Return whether this release of Megatron-LM ramps a batch up."""
    from megatron.core import num_microbatches_calculator

    return hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")


def switch_off(args: Any) -> None:
    """Give the arguments that only concern comfort the value with which a step can be healed, and say so."""
    for name, value, reason in OFF:
        given = getattr(args, name, value)
        if given != value:
            setattr(args, name, value)
            if name not in _DEFAULTS:
                say(f"unicron: --{name.replace('_', '-')} is off: {reason}")


@functools.cache
def say(text: str) -> None:
    """Print a line, once: a script's arguments are parsed several times."""
    print(text, file=sys.stderr, flush=True)


def batch_sizes(args: Any) -> BatchSizes:
    """Return the samples of each step's batch."""
    return BatchSizes(args.global_batch_size, args.rampup_batch_size)


def plan(args: Any) -> Plan:
    """Return what the library is told.

    Raises:
        InvalidSpec: there is no number of steps.
    """
    samples = args.train_samples
    steps = args.train_iters or (batch_sizes(args).steps(samples) if samples else 0)
    if not steps:
        raise InvalidSpec("--train-iters or --train-samples: one is needed")
    return Plan(
        steps=steps,
        micro_batches=args.global_batch_size // args.micro_batch_size,
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        eval_interval=args.eval_interval or 0,
        eval_iters=args.eval_iters or 0,
        seed=args.seed,
        dropout=max(args.attention_dropout, args.hidden_dropout),
    )


def checking(parse_args: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron-LM's parser, whose arguments are checked, and hold for one replica, on any rank.

    It raises ``InvalidSpec`` where an argument is refused.
    """

    @functools.wraps(parse_args)
    def checked(*given: Any, **named: Any) -> Any:
        args = parse_args(*given, **named)
        check(args)
        switch_off(args)
        # The batch is the task's, however many replicas there are: with one, Megatron-LM counts micro-batches as we do.
        args.rank, args.world_size = 0, args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return args

    return checked
