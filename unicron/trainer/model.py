"""The built-in trainer's model: a GPT of megatron-core, its data-parallel wrapper and its optimizer."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from unicron import device
from unicron.errors import InvalidSpec
from unicron.gradients.buckets import largest_bucket_bytes
from unicron.megatron.model import sharded_parameters
from unicron.megatron.parallel import virtual_stages
from unicron.trainer.spec import Spec

VOCABULARY_MULTIPLE = 8
"""The number of rows of the embedding is a multiple of this, so that up to 8 tensor-parallel ranks can split it.
Megatron pads to 128 x the tensor-parallel size; here the padding is the same in every layout, and so are the
parameters."""

FLOAT32_BYTES = 4

INITIAL_STD = 0.02
"""Standard deviation of initial weights, as in GPT-2 and Megatron. Weights of projections to the residual stream are
divided by sqrt(2 x layers) (GPT-2, section 2.3)."""


def padded_vocabulary(spec: Spec) -> int:
    """Return the number of rows of the embedding: the vocabulary, padded."""
    return math.ceil(spec.vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def build(spec: Spec, tensor: int, pipeline: int) -> tuple[Any, Any]:
    """Return the rank's shard of the GPT in Megatron's DistributedDataParallel, and Megatron's optimizer for it.

    For an interleaved pipeline the model is a list of model chunks.

    Megatron's process groups must exist. ``initialise`` sets the parameters.

    Args:
        spec: the task.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.

    Raises:
        InvalidSpec: the layout does not divide the model.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    chunks = virtual_stages()
    if padded_vocabulary(spec) % tensor or spec.heads % tensor or spec.layers % (pipeline * chunks):
        raise InvalidSpec(
            f"tensor={tensor}, pipeline={pipeline}, interleave={chunks} does not divide the model's heads, rows or "
            "layers"
        )
    if spec.sequence_parallel and spec.sequence_length % tensor:
        raise InvalidSpec(f"tensor={tensor} does not divide the model's sequence length, {spec.sequence_length}")
    dtype = torch.bfloat16 if spec.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # Batches of sends and receives, Megatron's default, mix up what two interleaved stages send each other on gloo.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        # One rank has the whole sequence, and Megatron refuses to divide it.
        sequence_parallel=spec.sequence_parallel and tensor > 1,
        qk_layernorm=spec.qk_layernorm,
        bf16=spec.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **_recomputed(spec),
        hidden_dropout=spec.dropout,
        attention_dropout=spec.dropout,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # The loss function divides by the global number of micro-batches, so the schedule must not divide by the local.
        calculate_per_token_loss=True,
    )
    # This library reduces the gradients out of place: a broken in-place all-reduce would destroy them.
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=spec.overlap,
        overlap_param_gather=spec.overlap and spec.distributed_optimizer,
        use_distributed_optimizer=spec.distributed_optimizer,
        bucket_size=largest_bucket_bytes() // FLOAT32_BYTES,
    )
    model = [
        DistributedDataParallel(config, data_parallel, _module(spec, config, number if chunks > 1 else None))
        for number in range(chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=spec.optimizer,
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.beta1,
            adam_beta2=spec.beta2,
            adam_eps=spec.eps,
            bf16=spec.bf16,
            params_dtype=dtype,
            # In exact mode unicron.megatron.clipping clips.
            clip_grad=0.0 if spec.exact else spec.clip,
            use_distributed_optimizer=spec.distributed_optimizer,
            overlap_param_gather=spec.overlap and spec.distributed_optimizer,
        ),
        model,
        use_gloo_process_groups=False,
    )
    return (model if chunks > 1 else model[0]), optimizer


def _module(spec: Spec, config: Any, virtual_stage: int | None) -> Any:
    """Return the rank's GPT, or one chunk of it.

    Args:
        spec: the task.
        config: Megatron's TransformerConfig.
        virtual_stage: the chunk's number in an interleaved pipeline; None: there is one chunk.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    module: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=spec.qk_layernorm, normalization="LayerNorm"),
        vocab_size=padded_vocabulary(spec),
        max_sequence_length=spec.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
        vp_stage=virtual_stage,
    ).to(device.current())
    _mark_split_weights(module)
    return Float16Module(config, module) if spec.bf16 else module


def _recomputed(spec: Spec) -> dict[str, Any]:
    """Return Megatron's settings of what is computed again in the backward pass."""
    match spec.recompute:
        case "full":  # the activations between layers are kept, and no others
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        case "selective":  # attention, which takes much memory and little time (Korthikanti et al., 2022)
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        case "none":
            return {}
    raise InvalidSpec(f"parallel.recompute: {spec.recompute!r}, not none, selective or full")


def _mark_split_weights(module: Any) -> None:
    """Mark the weights that tensor-parallel ranks split, as Megatron does only where Megatron initialises them.

    Otherwise Megatron's norm of the gradients would include only one rank's part of each of these weights.
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


def initialise(spec: Spec, model: Any) -> None:
    """Set the parameters of a model; every tensor- and pipeline-parallel layout starts from the same ones.

    The seed of each parameter is made of the task's seed and the parameter's global name. The whole parameter is drawn
    and the rank's slice of it is kept.
    """
    for shard in sharded_parameters(model):
        full = _initial(spec, shard.key, tuple(shard.global_shape))
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
