"""A user's script that calls megatron-bridge's ``pretrain``: a tiny GPT. ``train.py PATH=JSON...``"""

from __future__ import annotations

import functools
import json
import signal
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.pretrain import pretrain
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

LENGTH, VOCABULARY, BATCH, STEPS = 32, 64, 12, 6


@dataclass
class Provider(TransformerConfig, ModelProviderMixin):  # type: ignore[misc]
    """The model."""

    seq_length: int = LENGTH
    vocab_size: int | None = None
    should_pad_vocab: bool = False

    def provide(self) -> GPTModel:
        """Return it."""
        return GPTModel(
            config=self,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=self.vocab_size or 0,
            max_sequence_length=self.seq_length,
            share_embeddings_and_output_weights=True,
        )


def configuration() -> ConfigContainer:
    """Return the configuration."""
    return ConfigContainer(
        model=Provider(
            num_layers=1, hidden_size=32, num_attention_heads=2, attention_dropout=0.0, hidden_dropout=0.0,
            use_cpu_initialization=True, params_dtype=torch.float32, gradient_accumulation_fusion=False,
            bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
            persist_layer_norm=False,
        ),
        train=SimpleNamespace(
            micro_batch_size=1, global_batch_size=BATCH, rampup_batch_size=None, train_iters=STEPS, eval_iters=1,
            eval_interval=2, exit_interval=None, exit_duration_in_mins=None, exit_signal_handler=False,
            exit_signal=signal.SIGTERM,
        ),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, weight_decay=0.1, clip_grad=1.0),
        scheduler=SimpleNamespace(samples=BATCH * STEPS),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=4000),
        dataset=SimpleNamespace(dataloader_type="single", seq_length=LENGTH),
        logger=SimpleNamespace(
            logging_level=30, filter_warnings=True, modules_to_filter=None, set_level_for_all_loggers=False
        ),
        tokenizer=SimpleNamespace(vocab_size=VOCABULARY),
        checkpoint=SimpleNamespace(
            save=None, save_interval=3, load=None, finetune=False, load_optim=True, pretrained_checkpoint=None,
            ckpt_step=None,
        ),
        dist=SimpleNamespace(
            distributed_timeout_minutes=10,
            enable_megatron_core_experimental=False, disable_jit_fuser=False, align_grad_reduce=True
        ),
        rng=SimpleNamespace(seed=1234, te_rng_tracker=False, inference_rng_tracker=False),
    )  # fmt: skip


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses, the number of tokens, and what is reported."""
    loss, tokens = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Do a forward pass."""
    batch = next(data_iterator)
    positions = torch.arange(LENGTH).expand_as(batch["tokens"])
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    return model(batch["tokens"], positions, mask, labels=batch["labels"]), loss_of


if __name__ == "__main__":
    config = configuration()
    for setting in sys.argv[1:]:
        path, _, value = setting.partition("=")
        *above, name = path.split(".")
        setattr(functools.reduce(getattr, above, config), name, json.loads(value))
    pretrain(config, forward_step)
