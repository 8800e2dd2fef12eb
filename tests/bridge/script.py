"""A user's script of megatron-bridge's, as stock runs it: a small GPT on mock data. ``script.py PATH=JSON...``"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend

LENGTH = 32


def layers(config: Any) -> Any:
    """Return layers of megatron-core's own, since Transformer Engine needs a device."""
    return get_gpt_layer_local_spec()


def configuration() -> ConfigContainer:
    """Return the configuration of a small training."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=64,
            num_attention_heads=2,
            seq_length=LENGTH,
            vocab_size=64,
            transformer_layer_spec=layers,
            attention_backend=AttnBackend.unfused,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
        ),
        train=TrainingConfig(micro_batch_size=1, global_batch_size=12, train_iters=4, eval_iters=1, eval_interval=2),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, weight_decay=0.1, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="linear", start_weight_decay=0.1, end_weight_decay=0.1),
        ddp=DistributedDataParallelConfig(),
        dataset=MockGPTDatasetConfig(
            seq_length=LENGTH,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
            num_workers=0,
            pin_memory=False,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        checkpoint=CheckpointConfig(),
        dist=DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=False),
        rng=RNGConfig(seed=1234),
    )


if __name__ == "__main__":
    config = configuration()
    for setting in sys.argv[1:]:
        path, _, value = setting.partition("=")
        *above, name = path.split(".")
        setattr(functools.reduce(getattr, above, config), name, json.loads(value))
    pretrain(config, forward_step)
