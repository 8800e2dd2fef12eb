"""Checks of the model and the optimizer that a user's ``build`` returns.

This library reduces the gradients over data-parallel ranks, out of place, in a step that may lose and regain ranks.
Megatron's own reductions and scalings at the end of a step (``finalize_model_grads``) do not run. Settings that rely on
them would train to a wrong result without an error, and are refused before training begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from unicron import device
from unicron.errors import UnsupportedModel
from unicron.megatron.model import is_megatron, model_chunks, parameters
from unicron.megatron.optimizer import torch_optimizers


def check(
    model: Any, optimizer: Any, tensor: int, pipeline: int, chunks: int = 1, *, counts_each_step: bool = False
) -> None:
    """Check that a model and its optimizer train to the right result.

    Args:
        model: as ``build`` returned it.
        optimizer: as ``build`` returned it.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        chunks: model chunks of each rank: Megatron's virtual pipeline size, or 1.
        counts_each_step: whether the loop says how many micro-batches each step has.

    Raises:
        UnsupportedModel: they would not train to the right result; the message names the setting and its allowed
            values.
    """
    _check_chunks(model, chunks)
    for chunk in model_chunks(model):
        _check_module(chunk, tensor, pipeline)
        if chunks > 1:
            _check_interleaved(chunk.config, chunks)
    _check_optimizer(optimizer)
    if is_megatron(model) and not counts_each_step and _batch_grows():
        raise UnsupportedModel(
            "rampup_batch_size: must be None, or attach(micro_batches_of=...) says how many micro-batches a step has"
        )
    config = getattr(optimizer, "config", None)
    for setting in _OPTIMIZER_SETTINGS:
        if problem := setting.problem("OptimizerConfig", config):
            raise UnsupportedModel(problem)
    if getattr(config, "use_precision_aware_optimizer", False) and len(set(_trained_types(model))) > 1:
        raise UnsupportedModel(
            "OptimizerConfig.use_precision_aware_optimizer: must be False, where trained parameters are of several "
            "types; what it keeps of a parameter depends on the type"
        )


def _trained_types(model: Any) -> Iterator[torch.dtype]:
    return (parameter.dtype for parameter in parameters(model) if parameter.requires_grad)


def _check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer of which this library cannot tell which rank has what.

    Raises:
        UnsupportedModel: it is such an optimizer.
    """
    if not torch_optimizers(optimizer):
        raise UnsupportedModel(f"optimizer: {type(optimizer).__name__} contains no torch optimizer")
    for one in (optimizer, *torch_optimizers(optimizer)):
        for kind in type(one).__mro__:
            if kind.__name__ in _DIVIDING_OPTIMIZERS:
                raise UnsupportedModel(
                    f"optimizer: {kind.__name__} {_DIVIDING_OPTIMIZERS[kind.__name__]}; use Megatron's "
                    "DistributedDataParallelConfig.use_distributed_optimizer, or an optimizer that every rank has whole"
                )


def _check_chunks(model: Any, chunks: int) -> None:
    """Refuse anything but the modules that the pipeline's schedule takes.

    Raises:
        UnsupportedModel: the model is something else.
    """
    found = model_chunks(model)
    if not all(isinstance(chunk, torch.nn.Module) for chunk in found):
        raise UnsupportedModel(f"model: must be a module or a list of modules, not {type(model).__name__}")
    if len(found) != chunks:
        raise UnsupportedModel(
            f"model: build returned {len(found)} model chunks, and parallel.interleave asks for {chunks} with this "
            "layout (with one pipeline stage there is always one); build as many as "
            "megatron.core.parallel_state.get_virtual_pipeline_model_parallel_world_size() says, one for None"
        )
    if chunks > 1 and not is_megatron(model):
        raise UnsupportedModel("model: each chunk must be wrapped in Megatron's DistributedDataParallel")


def _check_interleaved(config: Any, chunks: int) -> None:
    """Refuse a configuration with which Megatron's interleaved schedule would train wrongly.

    Args:
        config: a model chunk's TransformerConfig.
        chunks: model chunks of each rank.

    Raises:
        UnsupportedModel: the configuration would train wrongly.
    """
    if config.virtual_pipeline_model_parallel_size != chunks:
        raise UnsupportedModel(
            f"TransformerConfig.virtual_pipeline_model_parallel_size: must be {chunks}, the number of model chunks, "
            f"not {config.virtual_pipeline_model_parallel_size!r}"
        )
    if not device.is_cuda() and not config.overlap_p2p_comm:
        raise UnsupportedModel(
            "TransformerConfig.overlap_p2p_comm: must be True (and batch_p2p_comm False) for an interleaved pipeline "
            "on gloo, which mixes up what two stages send each other in one batch"
        )
    if config.overlap_p2p_comm_warmup_flush:
        raise UnsupportedModel(
            "TransformerConfig.overlap_p2p_comm_warmup_flush: must be False, not True; it is not tested with recovery"
        )


def _check_module(model: torch.nn.Module, tensor: int, pipeline: int) -> None:
    """Check one module of a model.

    Raises:
        UnsupportedModel: it would not train to the right result.
    """
    _check_distribution(model)
    if is_megatron(model):
        found = next(filter(None, _refused(model)), "")
        if found:
            raise UnsupportedModel(found)
    elif hasattr(model, "sharded_state_dict"):
        raise UnsupportedModel("model: must be wrapped in Megatron's DistributedDataParallel")
    elif (tensor, pipeline) != (1, 1):
        raise UnsupportedModel(
            f"model: a module without Megatron's sharded_state_dict cannot be split over tensor={tensor}, "
            f"pipeline={pipeline}; set parallel.tensor and parallel.pipeline to 1"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training and module.track_running_stats:
            raise UnsupportedModel(
                f"model: {name or 'it'} is a batch norm that trains; its running statistics depend on which process "
                "computes what, and how often"
            )


def _check_distribution(model: torch.nn.Module) -> None:
    """Refuse modules and parameters that torch itself distributes over ranks.

    Raises:
        UnsupportedModel: there is such a module or parameter.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UnsupportedModel("model: DistributedDataParallel of torch reduces gradients itself; return what it wraps")
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedModel(
                f"model: {name or 'it'} is in FSDP, whose ranks each have a part; return what it wraps"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedModel(
                f"model: {name} is a DTensor (FSDP2's fully_shard, or tensor parallelism of torch), of which each rank "
                "has a part that this library cannot name; use Megatron's tensor and pipeline parallelism"
            )


_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "fp8"}
"""Types of numbers as Megatron-LM's arguments name them."""


class _Setting(NamedTuple):
    """A setting of Megatron, and the values with which a task trains to the right result."""

    name: str
    allowed: tuple[Any, ...]
    """The values that a task may have; the first is Megatron's default."""
    reason: str

    def problem(self, owner: str, settings: Any) -> str:
        """Return what is wrong with the setting of an object; empty: nothing, or the object does not have it."""
        value = getattr(settings, self.name, self.allowed[0])
        value = _TYPES.get(value, value) if isinstance(value, torch.dtype) else value
        if value in self.allowed:
            return ""
        return f"{owner}.{self.name}: must be {self.allowed[0]}, not {value!r}; {self.reason}"


_DIVIDING_OPTIMIZERS = {
    "LayerWiseDistributedOptimizer": "gives each rank whole parameters, whose state nobody else has after a fault",
    "ZeroRedundancyOptimizer": "gives each rank whole parameters, whose state nobody else has after a fault",
    "PostLocalSGDOptimizer": "averages the parameters of ranks, whose gradients step.reduce() has made equal",
}
"""Class of an optimizer -> what it does. The keys are names: Megatron's layer-wise optimizer is not in every version,
and importing torch's takes seconds."""

_REDUCES = "step.reduce() reduces the gradients"
_GRAPH = "a captured graph goes on using the buffers and process groups of the generation that captured it"
_LATE_WEIGHTS = "gradients of weights then come after the backward pass, when the micro-batch is already committed"

_DDP_SETTINGS = (
    _Setting("use_megatron_fsdp", (False,), _REDUCES),
    _Setting("use_custom_fsdp", (False,), _REDUCES),
    _Setting("num_distributed_optimizer_instances", (1,), "the optimizer's parts are named by data-parallel rank"),
    _Setting("delay_wgrad_compute", (False,), _LATE_WEIGHTS),
)
"""Settings of ``DistributedDataParallelConfig``."""

_MODEL_SETTINGS = (
    _Setting("finalize_model_grads_func", (None,), "step.reduce() takes its place"),
    _Setting("fp8", (None,), "the scaling factors of fp8 are no part of the state"),
    _Setting("fp4", (None,), "the scaling factors of fp4 are no part of the state"),
    _Setting("context_parallel_size", (1,), "gradients are summed over data-parallel ranks only"),
    _Setting("expert_model_parallel_size", (1,), "gradients are summed over data-parallel ranks only"),
    _Setting("num_moe_experts", (None,), "the experts of one layer have the same name, by which the state moves"),
    _Setting("mtp_num_layers", (None, 0), "Megatron scales that loss by tokens that nothing divides"),
    _Setting("enable_cuda_graph", (False,), _GRAPH),
    _Setting("external_cuda_graph", (False,), _GRAPH),
    _Setting("cuda_graph_impl", ("none",), _GRAPH),
    _Setting("tp_comm_overlap", (False,), "its user buffers belong to process groups that a fault replaces"),
    _Setting("defer_embedding_wgrad_compute", (False,), _LATE_WEIGHTS),
    _Setting("delay_wgrad_compute", (False,), _LATE_WEIGHTS),
    _Setting("distribute_saved_activations", (False,), "no test recomputes from activations that are divided"),
    _Setting("has_cond_embedder", (False,), "its gradients need one more sum over the pipeline stages"),
)
"""Settings of ``TransformerConfig``."""

FACTOR = "its numbers have a factor that is no part of the state"

_OPTIMIZER_SETTINGS = (
    _Setting("main_params_dtype", ("fp32",), FACTOR),
    _Setting("exp_avg_dtype", ("fp32", "bf16"), FACTOR),
    _Setting("exp_avg_sq_dtype", ("fp32", "bf16"), FACTOR),
    _Setting("optimizer_cpu_offload", (False,), "no test moves a state that is in two memories"),
)
"""Settings of ``OptimizerConfig``."""

_GATHER = _Setting("overlap_param_gather", (False,), "without use_distributed_optimizer there is nothing to gather")
"""A setting of ``DistributedDataParallelConfig``; supported with the distributed optimizer."""

_GATHER_IN_UPDATE = _Setting(
    "overlap_param_gather_with_optimizer_step", (False,), "parameters are gathered once the whole update is applied"
)
"""A setting of ``OptimizerConfig``; Megatron's optimizer sets it on the model."""


def configured(model: Any, ddp: Any, optimizer: Any = None) -> Iterator[str]:
    """Yield a message for each setting with which a Megatron model, if it is built, would train to a wrong result.

    Args:
        model: its ``TransformerConfig``.
        ddp: its ``DistributedDataParallelConfig``.
        optimizer: the optimizer's ``OptimizerConfig``; None: it is not asked for.
    """
    for owner, config, settings in (
        ("DistributedDataParallelConfig", ddp, _DDP_SETTINGS),
        ("TransformerConfig", model, _MODEL_SETTINGS),
        ("OptimizerConfig", optimizer, _OPTIMIZER_SETTINGS),
    ):
        yield from filter(None, (setting.problem(owner, config) for setting in settings))


def _refused(model: Any) -> Iterator[str]:
    """Yield a message for each setting of a Megatron model that would train to a wrong result.

    Args:
        model: Megatron's DistributedDataParallel.
    """
    ddp = model.ddp_config
    if not ddp.use_distributed_optimizer:
        yield _GATHER.problem("DistributedDataParallelConfig", ddp)
    if ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        yield "DistributedDataParallelConfig.overlap_param_gather: must be False without overlap_grad_reduce"
    yield _GATHER_IN_UPDATE.problem("DistributedDataParallel", model)
    yield from configured(model.config, ddp)
    for name, parameter in model.named_parameters():
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            yield f"model: nothing here averages the gradients of {name} over tensor-parallel ranks, as it asks for"


def _batch_grows() -> bool:
    """Return whether Megatron's calculator of micro-batches, if there is one, raises the global batch size."""
    from megatron.core import num_microbatches_calculator as calculators

    # Core 0.16 and 0.17 have a class for a ramp, and 0.18 and 0.19 one for a schedule.
    present = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    return present is not None and not isinstance(present, calculators.ConstantNumMicroBatchesCalculator)
