"""A user's script that calls ``pretrain``: a tiny GPT of megatron-core on data that is drawn from a sample's number."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args, pretrain


class Mock:
    """Samples of random tokens."""

    def __init__(self, first: int) -> None:
        """Take the samples from one on."""
        self._first = first

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample."""
        args = get_args()
        drawn = torch.randint(
            args.vocab_size, (args.seq_length + 1,), generator=torch.Generator().manual_seed(self._first + index)
        )
        return {"tokens": drawn[:-1], "labels": drawn[1:]}


def provide_datasets(counts: Any, **_: Any) -> tuple[Mock, Mock, None]:
    """Return the datasets of training and evaluation; there is none to test with, as with ``--split 99,1,0``."""
    return Mock(0), Mock(1 << 20), None


def provide_model(pre_process: bool = True, post_process: bool = True, **_: Any) -> GPTModel:
    """Return the model."""
    args = get_args()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
    )


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses, the number of tokens, and what is reported."""
    loss, tokens = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Do a forward pass."""
    batch = next(data_iterator)
    tokens = batch["tokens"]
    length = tokens.size(1)
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    output = model(tokens, positions, mask, labels=batch["labels"])
    return output, partial(loss_of)


if __name__ == "__main__":
    pretrain(provide_datasets, provide_model, ModelType.encoder_or_decoder, forward_step)
