"""What the planner needs of a script of megatron-bridge's, which only its own configuration says.

    python -m unicron.bridge --fields task.yaml train.py ...

runs the script up to its ``pretrain()``, where it ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicron.bridge import settings

USUAL_VOCABULARY = 50_257
"""Tokens where a configuration leaves their number to a tokenizer: GPT-2's. Only the planner's estimates use it."""


def writing(path: Path) -> Callable[..., None]:
    """Return what takes the place of ``pretrain()``: it writes the fields of a specification, and ends the process.

    It raises ``InvalidSpec`` where a setting is refused.
    """

    def write(config: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.bridge.training.config import runtime_config_update

        runtime_config_update(config)
        settings.prepare(config)
        path.write_text(json.dumps(fields(config), indent=2) + "\n")  # JSON is YAML
        raise SystemExit(0)

    return write


def fields(config: Any) -> dict[str, Any]:
    """Return model, batch, steps and layout as a task's specification has them.

    Args:
        config: megatron-bridge's ``ConfigContainer``, validated.
    """
    model, plan = config.model, settings.plan(config)
    found = {
        "model": {
            "layers": model.num_layers,
            "hidden": model.hidden_size,
            "heads": model.num_attention_heads,
            "sequence_length": model.seq_length,
            "vocabulary": model.vocab_size or getattr(config.tokenizer, "vocab_size", None) or USUAL_VOCABULARY,
        },
        "batch": {"global": plan.global_batch, "micro": plan.micro_batch},
        "steps": plan.steps,
        "parallel": {
            "tensor": plan.tensor,
            "pipeline": plan.pipeline,
            "interleave": model.virtual_pipeline_model_parallel_size or 1,
            "sequence_parallel": bool(model.sequence_parallel) and plan.tensor > 1,
            "distributed_optimizer": bool(config.optimizer.use_distributed_optimizer),
            "overlap": bool(config.ddp.overlap_grad_reduce),
        },
        "workers": {"min": plan.tensor * plan.pipeline},
    }
    if config.checkpoint.save and config.checkpoint.save_interval:
        found["checkpoint"] = {"every": config.checkpoint.save_interval}
    return found
