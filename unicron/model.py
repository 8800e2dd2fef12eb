"""A GPT of megatron-core, its data-parallel wrapper and its optimizer, built from a task specification."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from unicron import device
from unicron.errors import InvalidSpec
from unicron.spec import Spec

VOCABULARY_MULTIPLE = 8
"""The embedding is padded to a multiple of this, so that it splits over up to 8 tensor-parallel ranks. Megatron pads
to 128 x the tensor size; a padding that does not depend on the layout keeps parameters equal across layouts."""

INITIAL_STD = 0.02
"""Standard deviation of initial weights, as in GPT-2 and Megatron; projections back to the residual stream are
divided by sqrt(2 x layers) (GPT-2, section 2.3)."""

_TRACKED = "model-parallel-rng"
"""Megatron's name for the generator of what tensor-parallel ranks split."""


def checkpoint_metadata() -> dict[str, Any]:
    """Return what sharded state dicts are made by.

    One key for each layer, so that names do not depend on the pipeline, and a distributed optimizer's state as if it
    were not divided. A new one each time: Megatron adds the present generation's process group to what it is given.
    """
    return {"non_homogeneous_layers": True, "distrib_optim_sharding_type": "fully_reshardable"}


def padded_vocabulary(spec: Spec) -> int:
    """Return the embedding's number of rows."""
    return math.ceil(spec.vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def build(spec: Spec, tensor: int, pipeline: int) -> tuple[Any, Any]:
    """Return the rank's GPT in Megatron's DistributedDataParallel, and Megatron's optimizer over it.

    The model-parallel groups must exist. Parameters are not yet set: see ``initialise``.

    Raises:
        InvalidSpec: the layout does not divide the model.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if padded_vocabulary(spec) % tensor or spec.heads % tensor or spec.layers % pipeline:
        raise InvalidSpec(f"tensor={tensor}, pipeline={pipeline} does not divide the model's heads, rows or layers")
    config = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        hidden_dropout=spec.dropout,
        attention_dropout=spec.dropout,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # The loss function scales by the global number of micro-batches; the schedule must not scale by the local.
        calculate_per_token_loss=True,
    )
    module: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=padded_vocabulary(spec),
        max_sequence_length=spec.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    ).to(device.current())
    _mark_split_weights(module)
    model = DistributedDataParallel(
        config,
        # Gradients are reduced by this library out of place (a broken in-place all-reduce would destroy them).
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=spec.distributed_optimizer,
        ),
        module,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=spec.optimizer,
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.beta1,
            adam_beta2=spec.beta2,
            adam_eps=spec.eps,
            # In exact mode unicron.clipping does it.
            clip_grad=0.0 if spec.exact else spec.clip,
            use_distributed_optimizer=spec.distributed_optimizer,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    return model, optimizer


def _mark_split_weights(module: Any) -> None:
    """Tell Megatron which weights tensor-parallel ranks split, as it does itself only when it initialises them.

    The norm of the gradients would otherwise count one rank's part of each.
    """
    from megatron.core import tensor_parallel

    split_axis = {
        tensor_parallel.ColumnParallelLinear: 0,
        tensor_parallel.VocabParallelEmbedding: 0,
        tensor_parallel.RowParallelLinear: 1,
    }
    for layer in module.modules():
        for kind, axis in split_axis.items():
            if isinstance(layer, kind) and layer.weight is not None:
                tensor_parallel.set_tensor_model_parallel_attributes(layer.weight, True, axis, 1)


def sharded_parameters(model: Any) -> dict[str, Any]:
    """Return the rank's parameters as megatron ShardedTensors, by a name that is the same in every layout."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    state = model.module.sharded_state_dict(metadata=checkpoint_metadata())
    return {value.key: value for value in state.values() if isinstance(value, ShardedTensor)}


def initialise(spec: Spec, model: Any) -> None:
    """Set the parameters from the seed: each from a generator of its own (seed, global name), then sliced.

    So any tensor- and pipeline-parallel layout starts from the same parameters.
    """
    for name, shard in sharded_parameters(model).items():
        full = _initial(spec, name, tuple(shard.global_shape))
        view = tuple(
            slice(start, start + size) for start, size in zip(shard.global_offset, shard.local_shape, strict=True)
        )
        with torch.no_grad():
            shard.data.copy_(full[view].reshape(shard.data.shape))


def _initial(spec: Spec, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "layernorm" in name:
        return torch.ones(shape)
    seed = int.from_bytes(hashlib.sha256(f"{spec.seed}/{name}".encode()).digest()[:8], "little") >> 1
    residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    std = INITIAL_STD / math.sqrt(2 * spec.layers) if residual else INITIAL_STD
    return torch.normal(0.0, std, shape, generator=torch.Generator().manual_seed(seed))


class Dropout:
    """Reseeds the generators before each layer, from (seed, step, micro-batch, layer, tensor-parallel rank).

    So a micro-batch draws the same numbers wherever, and however often, it is computed.
    """

    def __init__(self, spec: Spec, model: Any) -> None:
        """Register on the model's layers; does nothing where the specification has no dropout."""
        from megatron.core import tensor_parallel

        self._seed = spec.seed
        self._at = (0, 0)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add(_TRACKED, spec.seed)  # attention enters it even where dropout is 0
        if spec.dropout == 0.0:
            return
        # Layer 0 stands for the embedding, which is called before the decoder's first layer.
        model.module.register_forward_pre_hook(partial(self._reseed, 0))
        for layer in model.module.decoder.layers:
            layer.register_forward_pre_hook(partial(self._reseed, layer.layer_number))

    def at(self, step: int, micro_batch: int) -> None:
        """Tell which micro-batch is computed next."""
        self._at = (step, micro_batch)

    def _reseed(self, layer: int, module: Any, arguments: Any) -> None:
        from megatron.core import parallel_state, tensor_parallel

        rank = parallel_state.get_tensor_model_parallel_rank()
        seeds = []
        # What tensor-parallel ranks replicate must draw the same on each; what they split must not.
        for which in ("all", f"tensor {rank}"):
            text = f"{self._seed}/{self._at[0]}/{self._at[1]}/{layer}/{which}"
            seeds.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add(_TRACKED, seeds[1])
        torch.manual_seed(seeds[0])


class _BackwardPasses:
    """Tells when a backward pass of Megatron's schedules is done, in the place of Megatron's timers."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._name = ""

    def __call__(self, name: str, **options: Any) -> _BackwardPasses:
        self._name = name
        return self

    def start(self, **options: Any) -> None:
        """Do nothing."""

    def stop(self, **options: Any) -> None:
        """Tell."""
        if self._name == "backward-compute":
            self._done()


@contextlib.contextmanager
def each_backward(model: Any, done: Callable[[], None]) -> Iterator[None]:
    """Call ``done`` after the backward pass of each micro-batch in Megatron's schedules (not interleaved ones).

    They come in the order of the data iterator. The gradients of the one just done, and no others, are in the buffers
    if ``done`` commits it.
    """
    config = model.config
    timers, config.timers = config.timers, _BackwardPasses(done)
    try:
        yield
    finally:
        config.timers = timers


def forward_backward(
    spec: Spec,
    model: Any,
    dropout: Dropout,
    step: int,
    batches: list[tuple[int, dict[str, torch.Tensor]]],
    done: Callable[[int, float | None], None],
) -> None:
    """Compute loss and gradients of micro-batches with Megatron's schedule; gradients are scaled by 1/M, once.

    M is the number of micro-batches in the global batch. Gradients are added to the parameters' ``main_grad``.

    Args:
        spec: the task.
        model: the rank's model.
        dropout: reseeds the generators.
        step: counts from 1.
        batches: (micro-batch, its samples), in order.
        done: called after the backward pass of each micro-batch, with the mean loss over its tokens; None on ranks that
            are not a pipeline's last stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    where = device.current()
    losses: list[torch.Tensor] = []
    order = iter(enumerate(batches))

    def backward_done() -> None:
        i, (micro_batch, _) = next(order)
        done(micro_batch, float(losses[i]) if losses else None)

    def loss_function(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        each = output.float().reshape(-1)
        weights = mask.reshape(-1)
        loss = (each * weights).sum() / weights.sum().clamp(min=1.0)
        # A detached clone: the schedule may scale the loss it is given in place.
        losses.append(loss.detach().clone())
        return loss / spec.micro_batches, weights.sum().to(torch.int), losses[-1]

    def forward_step(iterator: Any, module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro_batch, batch = next(iterator)
        dropout.at(step, micro_batch)
        batch = {k: v.to(where) for k, v in batch.items()}
        output = module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(loss_function, batch["loss_mask"])

    with each_backward(model, backward_done):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=spec.sequence_length,
            micro_batch_size=spec.micro_batch,
            forward_only=False,
        )


def unwrapped(model: Any) -> Any:
    """Return the module inside Megatron's wrappers (data parallelism, half precision)."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def tied_weight(model: Any) -> torch.nn.Parameter | None:
    """Return the weight that embedding and output layer share, if this rank has it."""
    module = unwrapped(model)
    if not getattr(module, "share_embeddings_and_output_weights", False):
        return None
    weight: torch.nn.Parameter | None = module.shared_embedding_or_output_weight()
    return weight


def tied_group(model: Any) -> Any:
    """Return the group of the pipeline stages that each hold a copy of the shared weight; None if it is one stage."""
    from megatron.core import parallel_state

    if tied_weight(model) is None or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return None
    return parallel_state.get_embedding_group()


def separate_output_weight(model: Any) -> torch.Tensor | None:
    """Let the output layer use the shared weight under another name, so that its gradient is not mixed with the other.

    Returns:
        The tensor that the output layer's gradients are added to; None if this rank does not use the weight twice.
    """
    module = unwrapped(model)
    weight = tied_weight(model)
    if weight is None or not (module.pre_process and module.post_process):
        return None
    alias = weight.detach().requires_grad_()
    alias.grad = torch.zeros_like(alias)

    def replace(layer: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        alias.data = weight.data
        return arguments, keywords | {"weight": alias}

    module.output_layer.register_forward_pre_hook(replace, with_kwargs=True)
    return alias.grad
