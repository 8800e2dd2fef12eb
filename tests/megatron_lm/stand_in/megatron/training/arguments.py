"""The arguments that tests give, by the names that Megatron-LM has for them."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

NUMBERS = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32, "vocab_size": 64,
    "micro_batch_size": 1, "global_batch_size": None, "train_iters": None, "train_samples": None, "seed": 1234,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "eval_iters": 1, "eval_interval": 1000,
    "save_interval": None, "exit_interval": None, "exit_duration_in_mins": None, "ckpt_step": None,
    "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": None,
}  # fmt: skip
FLOATS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
TEXTS = ("load", "save", "pretrained_checkpoint")
FLAGS = (
    "finetune", "no_load_optim", "sequence_parallel", "exit_signal_handler", "exit_on_missing_checkpoint",
    "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "data_parallel_random_init",
    "te_rng_tracker", "inference_rng_tracker",
)  # fmt: skip
FIXED = {
    "dataloader_type": "single", "rampup_batch_size": None, "virtual_pipeline_model_parallel_size": None,
    "decoder_seq_length": None, "exit_signal": signal.SIGTERM, "consumed_train_samples": 0,
    "consumed_valid_samples": 0, "iteration": 0, "num_floating_point_operations_so_far": 0.0,
    "distributed_timeout_minutes": 10,
}  # fmt: skip


def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for kind, defaults in ((int, NUMBERS), (float, FLOATS), (str, dict.fromkeys(TEXTS))):
        for name, default in defaults.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    for name in FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    if extra_args_provider is not None:
        extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    vars(args).update(FIXED)
    return args
