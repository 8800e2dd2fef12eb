"""Which of Megatron-LM's settings a step is not healed with, and which are switched off.

What the library supports is decided in ``unicron/megatron/supported.py``, on the objects that a script builds; here it
is said of arguments, before anything starts. A test compares the two where they name the same setting (``core``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from shared.launch.arguments import read_arguments


class Effect(StrEnum):
    """What a setting does to the task that has it. What is off changes nothing of what is trained."""

    OFF = "speed-off"
    RESTART = "restart"
    REFUSED = "refused"


class Setting(NamedTuple):
    """An argument of Megatron-LM that matters to healing.

    ``dest``: its name in Megatron's arguments. ``heals_with``: values that change nothing; the first is the default.
    ``core``: its names in the configurations of megatron-core, as the library checks them. ``if_written``: Megatron's
    default does not heal either, and is worth a word only where somebody has written it.
    """

    dest: str
    heals_with: tuple[Any, ...]
    effect: Effect
    why: str
    instead: str
    core: tuple[str, ...] = ()
    if_written: bool = False


_GRAPH = "a captured graph goes on using the buffers and process groups of the generation that captured it"
_LATE = "gradients of weights then come after the backward pass, when the micro-batch is already committed"
_PARTS = "each rank has a part of the parameters that has no name of its own, so that no other rank can give it back"
_SCALES = "the scaling factors are no part of the state that survivors hand on"
_FACTOR = "its numbers have a factor that is no part of the state that survivors hand on"
_EXPERTS = "the experts of one layer have the same name, by which the state moves"
_BEGINS = "a task begins from the model that is built"
_LEFT_OUT = "leave it out"
_RAMP = "--rampup-batch-size"
_OFF = "nothing: it only concerns speed, and a task that is healed inside the step runs without it"

SETTINGS = (
    Setting("fp8", (None,), Effect.RESTART, _SCALES, "--bf16 without --fp8-format", ("fp8",)),
    Setting("fp4", (None,), Effect.RESTART, _SCALES, "--bf16 without --fp4-format", ("fp4",)),
    Setting("context_parallel_size", (1,), Effect.RESTART, "gradients are summed over data-parallel ranks only",
            "--context-parallel-size 1, with more tensor parallelism or recomputation for long sequences",
            ("context_parallel_size",)),
    Setting("expert_model_parallel_size", (1,), Effect.RESTART, "gradients are summed over data-parallel ranks only",
            "a dense model", ("expert_model_parallel_size",)),
    Setting("num_experts", (None,), Effect.RESTART, _EXPERTS, "a dense model", ("num_moe_experts",)),
    Setting("mtp_num_layers", (None, 0), Effect.RESTART, "Megatron scales that loss by tokens that nothing divides",
            "no --mtp-num-layers", ("mtp_num_layers",)),
    Setting("main_params_dtype", ("fp32",), Effect.RESTART, _FACTOR, "--main-params-dtype fp32",
            ("main_params_dtype",)),
    Setting("exp_avg_dtype", ("fp32", "bf16"), Effect.RESTART, _FACTOR, "--exp-avg-dtype bf16", ("exp_avg_dtype",)),
    Setting("exp_avg_sq_dtype", ("fp32", "bf16"), Effect.RESTART, _FACTOR, "--exp-avg-sq-dtype bf16",
            ("exp_avg_sq_dtype",)),
    Setting("optimizer_cpu_offload", (False,), Effect.RESTART, "no test moves a state that is in two memories",
            "--use-distributed-optimizer without --optimizer-cpu-offload", ("optimizer_cpu_offload",)),
    Setting("optimizer", ("adam", "sgd"), Effect.RESTART, "no test moves the state of this optimizer",
            "--optimizer adam"),
    Setting("use_megatron_fsdp", (False,), Effect.RESTART, _PARTS, "--use-distributed-optimizer",
            ("use_megatron_fsdp",)),
    Setting("use_torch_fsdp2", (False,), Effect.RESTART, _PARTS, "--use-distributed-optimizer"),
    Setting("num_distributed_optimizer_instances", (1,), Effect.RESTART,
            "the optimizer's parts are named by data-parallel rank", "--num-distributed-optimizer-instances 1",
            ("num_distributed_optimizer_instances",)),
    Setting("distribute_saved_activations", (False,), Effect.RESTART,
            "no test recomputes from activations that are divided", "--recompute-granularity without it",
            ("distribute_saved_activations",)),
    Setting("dataloader_type", (None, "single", "cyclic"), Effect.RESTART,
            "an external loader deals samples by position, so that those of a lost rank cannot be dealt out again",
            "--dataloader-type single, or cyclic"),
    Setting("data_sharding", (True,), Effect.RESTART, "the samples of a micro-batch then depend on the rank",
            "no --no-data-sharding, or --dataloader-type single"),
    Setting("hybrid_context_parallel", (False,), Effect.RESTART, "its samples are dealt by length", _LEFT_OUT),
    Setting("data_parallel_random_init", (False,), Effect.RESTART, "replicas would begin with other parameters",
            _LEFT_OUT),
    Setting("skip_train", (False,), Effect.RESTART, "there is no step", "nothing: there is no step to heal"),
    Setting("full_validation", (False,), Effect.RESTART, "its iterator has a position", "--eval-iters"),
    Setting("multiple_validation_sets", (False,), Effect.RESTART, "its iterators have positions", "--eval-iters"),
    Setting("moe_use_upcycling", (False,), Effect.RESTART, _BEGINS, _LEFT_OUT),
    Setting("ckpt_convert_format", (None,), Effect.RESTART, "that is no training", "nothing: that is no training"),
    Setting("lazy_mpu_init", (None, False), Effect.RESTART, "the library makes the groups", _LEFT_OUT),
    Setting("vision_pretraining", (False,), Effect.RESTART, "its momentum teacher is no part of the state",
            "nothing: such a training is not healed inside the step"),
    Setting("iterations_to_skip", (None, [], ()), Effect.RESTART, "every step is trained", _LEFT_OUT),
    Setting("perform_rl_step", (False,), Effect.RESTART, "a loop of rollouts has state beside the training step",
            "nothing: rollouts are not healed inside the step"),
    Setting("qk_clip", (False,), Effect.RESTART, "it changes weights behind the update, of which the step is to be all",
            _LEFT_OUT),
    Setting("step_batch_size_schedule", (None,), Effect.RESTART,
            "every step has the micro-batches that the task began with", "--global-batch-size alone"),
    Setting("eval_global_batch_size", (None,), Effect.RESTART, "an evaluation has the batch of the training",
            _LEFT_OUT),
    Setting("eval_micro_batch_size", (None,), Effect.RESTART, "an evaluation has the micro-batches of the training",
            _LEFT_OUT),
    Setting("start_eval_at_iter", (None,), Effect.RESTART, "evaluations follow from --eval-interval alone", _LEFT_OUT),
    Setting("tensor_parallel_num_weight_shards", (None,), Effect.RESTART, _PARTS, "--tensor-model-parallel-size alone"),
    Setting("expert_tensor_parallel_num_weight_shards", (None,), Effect.RESTART, _PARTS, "a dense model"),
    Setting("logits_load_dir", (None,), Effect.RESTART, "its reader has a position", _LEFT_OUT),
    Setting("logits_save_dir", (None,), Effect.RESTART, "its writer has a position", _LEFT_OUT),
    Setting("yaml_cfg", (None,), Effect.RESTART, "its settings are in a file, in which none of them is looked for",
            "the settings as arguments"),
    Setting("tp_comm_overlap", (False,), Effect.OFF, "its buffers belong to process groups that a fault replaces",
            _OFF, ("tp_comm_overlap",)),
    Setting("overlap_p2p_comm_warmup_flush", (False,), Effect.OFF, "it is not tested with recovery", _OFF,
            ("overlap_p2p_comm_warmup_flush",)),
    Setting("overlap_param_gather_with_optimizer_step", (False,), Effect.OFF,
            "parameters are gathered once the whole update is applied", _OFF,
            ("overlap_param_gather_with_optimizer_step",)),
    Setting("defer_embedding_wgrad_compute", (False,), Effect.OFF, _LATE, _OFF, ("defer_embedding_wgrad_compute",)),
    Setting("delay_wgrad_compute", (False,), Effect.OFF, _LATE, _OFF, ("delay_wgrad_compute",)),
    Setting("cuda_graph_impl", ("none",), Effect.OFF, _GRAPH, _OFF, ("cuda_graph_impl",)),
    Setting("enable_cuda_graph", (False,), Effect.OFF, _GRAPH, _OFF, ("enable_cuda_graph",)),
    Setting("external_cuda_graph", (False,), Effect.OFF, _GRAPH, _OFF, ("external_cuda_graph",)),
    Setting("optimizer_cuda_graph", (False,), Effect.OFF, _GRAPH, _OFF),
    Setting("nccl_ub", (False,), Effect.OFF, "its buffers belong to process groups that a fault replaces", _OFF),
    Setting("async_save", (False,), Effect.OFF, "a process that writes on would outlive the attempt that began it",
            "nothing: a task that is healed inside the step saves between two steps, and waits for that"),
    Setting("inprocess_restart", (False,), Effect.OFF, "two programs would answer the same fault",
            "nothing: Unicron's recovery takes its place"),
    Setting("enable_ft_package", (False,), Effect.OFF, "two programs would answer the same fault",
            "nothing: Unicron's detector takes its place"),
    Setting("rerun_mode", ("disabled",), Effect.OFF, "its checks need an all-reduce in every step",
            "nothing: a loss or a gradient that is not finite is found anyway", if_written=True),
    Setting("num_workers", (0,), Effect.OFF,
            "which samples a rank reads next may change at a fault, so the training process reads them itself", _OFF,
            if_written=True),
    Setting("wandb_project", (None, ""), Effect.OFF, "its process belongs to one rank, which may be lost",
            "--tensorboard-dir, where the last rank writes, whichever process that is"),
    Setting("log_straggler", (False,), Effect.OFF, "it waits for all ranks at once, and one may be lost",
            "nothing: Unicron's detector finds slow ranks"),
    Setting("gpu_sniff_test_interval", (None,), Effect.OFF,
            "it waits for all ranks at once, and a new one comes in the midst of a training",
            "nothing: a node that was isolated is tested before it is used again"),
    Setting("check_weight_hash_across_dp_replicas_interval", (None,), Effect.OFF,
            "replicas are compared where a process has joined", "nothing: the library compares parameters itself"),
    Setting("adlr_autoresume", (False,), Effect.OFF, "two programs would start the same task again",
            "nothing: `unicron resume`, or the same command again, goes on"),
    Setting("exit_signal_handler_for_training", (False,), Effect.OFF,
            "it ends a rank without a checkpoint, and waits for ranks that may be lost", "--exit-signal-handler"),
)  # fmt: skip
"""Defaults are those of megatron-core 0.16 to 0.19."""

NO_ARGUMENT = {
    "finalize_model_grads_func": "Megatron-LM sets it, and no argument does",
    "has_cond_embedder": "a model's own, and no argument of Megatron-LM",
    "use_custom_fsdp": "a name of use_megatron_fsdp before megatron-core 0.16",
    "overlap_param_gather": "Megatron-LM's parser refuses it where the library does",
}
"""Settings that the library checks and no argument sets -> why."""


class Finding(NamedTuple):
    """A setting that a task has, and what follows. ``argument``: the option, or ``SCRIPT``, ``megatron-core``."""

    argument: str
    value: Any
    what: Effect
    why: str
    instead: str


def findings(values: Mapping[str, Any], options: Mapping[str, str]) -> list[Finding]:
    """Return what matters to healing among Megatron's arguments.

    Args:
        values: destination -> value; what is missing has its default.
        options: destination -> the option that gave it.
    """
    found = []
    for setting in SETTINGS:
        value = values.get(setting.dest, setting.heals_with[0])
        if value not in setting.heals_with and not (setting.if_written and setting.dest not in options):
            option = options.get(setting.dest, "--" + setting.dest.replace("_", "-"))
            found.append(Finding(option, value, setting.effect, setting.why, setting.instead))
    return found + _wrong_ramp(values, options) + _wrong_restarts(values, options)


def findings_of_task(loop: str, arguments: Sequence[str]) -> list[Finding]:
    """Return why a submitted task restarts whole, or what is switched off in it, as its arguments show.

    Args:
        loop: of its specification.
        arguments: of its script.
    """
    read = read_arguments(arguments)
    if loop == "unicron" or (loop == "restart" and "num_layers" not in read.values):
        return []
    return [one for one in findings(read.values, read.options) if loop == "restart" or one.what is Effect.OFF]


def ramp_problem(values: Mapping[str, Any]) -> str:
    """Return why a batch cannot grow as the arguments say; empty: it can, or it does not grow."""
    batch, ramp = values.get("global_batch_size"), values.get("rampup_batch_size")
    if not ramp or not batch:
        return ""
    first, increment, during = map(int, ramp)
    if first > 0 and increment > 0 and during >= 0 and first <= batch and (batch - first) % increment == 0:
        return ""
    return f"a batch of {first} does not become --global-batch-size {batch} by steps of {increment} in {during} samples"


def _wrong_ramp(values: Mapping[str, Any], options: Mapping[str, str]) -> list[Finding]:
    """Return the finding that a batch cannot grow as the arguments say."""
    why = ramp_problem(values)
    dest = "rampup_batch_size"
    instead = "START INCREMENT SAMPLES: whole increments, which are positive, from START to --global-batch-size"
    return [Finding(options.get(dest, _RAMP), values[dest], Effect.REFUSED, why, instead)] if why else []


def findings_of_release(core: str, values: Mapping[str, Any], options: Mapping[str, str]) -> list[Finding]:
    """Return what matters to healing among arguments that not every release of Megatron-LM heeds."""
    dest = "rampup_batch_size"
    if not values.get(dest) or not core or tuple(map(int, core.split(".")[:2])) < (0, 18):
        return []
    why = f"megatron-core {core} reads it, and trains with --global-batch-size from the first step"
    return [Finding(options.get(dest, _RAMP), values[dest], Effect.RESTART, why, _LEFT_OUT)]


def _wrong_restarts(values: Mapping[str, Any], options: Mapping[str, str]) -> list[Finding]:
    """Return what would make a restart from the task's own checkpoint train to something else."""
    if not values.get("save") or values.get("load") != values.get("save"):
        return []
    cases = (
        ("finetune", True, "begins at step 0 again with the parameters of the step that failed"),
        ("no_load_optim", True, "loses the optimizer's state"),
    )
    return [
        Finding(
            options.get(dest, "--" + dest.replace("_", "-")),
            True,
            Effect.REFUSED,
            f"--load is --save, so each restart {what}",
            "--pretrained-checkpoint with the folder to begin from, and --load with that of --save",
        )
        for dest, value, what in cases
        if values.get(dest) is value
    ]
