"""What the planner needs of a script of megatron-bridge's, and how it would be healed: only its configuration says it.

    python -m unicron.bridge --fields task.yaml train.py ...        # for a person
    python -m unicron.bridge --settings answer.json train.py ...    # for ``unicron run``

run the script up to its ``pretrain()``, where it ends.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unicron.bridge import settings

USUAL_VOCABULARY = 50_257
"""Tokens where a configuration leaves their number to a tokenizer: GPT-2's. Only the planner's estimates use it."""


def writing(path: Path, *, findings: bool = False) -> Callable[..., None]:
    """Return what takes the place of ``pretrain()``: it writes a file and ends the process.

    Args:
        path: of the file, which has the fields of a specification.
        findings: whether it has the settings that matter to healing (``settings``) beside these fields (``task``, null
            where a setting is missing); else ``InvalidSpec`` is raised where a setting is refused.
    """

    def write(config: Any, forward_step_func: Any = None, callbacks: Any = None) -> None:
        from megatron.bridge.training.config import runtime_config_update

        runtime_config_update(config)
        if findings:
            found = [one.document() for one in settings.findings(config, callbacks)]
            written: dict[str, Any] = {
                "task": fields(config) if config.train.global_batch_size else None,
                "settings": found,
            }
        else:
            settings.prepare(config, callbacks)
            written = fields(config)
        path.write_text(json.dumps(written, indent=2) + "\n")  # JSON is YAML
        raise SystemExit(0)

    return write


@contextlib.contextmanager
def answering(path: Path) -> Iterator[None]:
    """Have a script run inside; write why it has not come to its ``pretrain()``, if it has not (``problem``)."""
    problem = "it ends without calling pretrain()"
    try:
        yield
    except BaseException as err:
        text = textwrap.shorten(str(err).partition("\n")[0], 300, placeholder=" ...")
        problem = f"it ends with {type(err).__name__}{text and ': '}{text} before pretrain()"
        raise
    finally:
        if not path.exists():
            path.write_text(json.dumps({"problem": problem}) + "\n")


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
