"""A process of Megatron-LM's own script, stock or with the adapter; what the parameters are at its end goes to a file.

    python program.py stock|unicron SCRIPT FOLDER ARGS...

The model that was built last is what is written: ``<tensor rank>-<pipeline rank>.pt``, by each shard's first replica.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT = "UNICRON_TEST_FAULT"
"""Environment variable ``worker:where:count``: that worker is killed where it is for the count-th time, once.

With a further ``:step``, what counts is how often it is there in that step, or behind it. Under torchrun a worker is
known by its rank.
"""

SIGNAL = "UNICRON_TEST_SIGNAL"
"""Environment variable: the name of the signal that is sent in place of SIGKILL."""


def model_of(script: str) -> Any:
    """Return the class of the model that one of Megatron-LM's scripts trains."""
    if script.endswith("t5.py"):
        from megatron.core.models.T5 import T5Model as Model
    elif script.endswith("mamba.py"):
        from megatron.core.models.mamba import MambaModel as Model
    elif script.endswith("bert.py"):
        from megatron.core.models.bert.bert_model import BertModel as Model
    else:
        from megatron.core.models.gpt import GPTModel as Model
    return Model


def fault(folder: Path, training: Any, evaluation: str, model: Any, step: Callable[[], int] = lambda: 0) -> None:
    """Place a kill as the environment says.

    Args:
        folder: where it is noted that it is done.
        training: the owner's module that has ``train()``.
        evaluation: the name there of the function that evaluates.
        model: the class of the model.
        step: returns the number of the present step.
    """
    text = os.environ.get(FAULT, "")
    worker, _, rest = text.partition(":")
    mark = folder / f"killed-{worker}"
    if not text or os.environ.get("UNICRON_WORKER", os.environ.get("RANK")) != worker or mark.exists():
        return
    where, count, *steps = rest.split(":")
    left = int(count)

    def reach() -> None:
        nonlocal left
        if steps and step() != int(steps[0]):
            return
        left -= 1
        if left == 0:
            mark.touch()
            os.kill(os.getpid(), signal.Signals[os.environ.get(SIGNAL, "SIGKILL")])

    def before(owner: Any, name: str) -> None:
        stock = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            reach()
            return stock(*args, **kwargs)

        setattr(owner, name, called)

    import megatron.core.dist_checkpointing as dist_checkpointing
    import megatron.core.optimizer.optimizer as optimizers

    from unicron.training.step import Step

    places: dict[str, tuple[Any, str]] = {
        "forward": (model, "forward"),
        "reduce": (Step, "_report_buckets"),
        "launch": (Step, "_before_launch"),  # of a bucket that is reduced beside the passes
        "unscale": (optimizers.MixedPrecisionOptimizer, "_unscale_main_grads_and_check_for_nan"),
        "evaluate": (model, "forward"),
        "save": (dist_checkpointing, "save"),
    }
    if where == "evaluate":
        evaluate = getattr(training, evaluation)

        @functools.wraps(evaluate)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            if not hasattr(model, "placed"):
                model.placed = True
                before(model, "forward")
            return evaluate(*args, **kwargs)

        setattr(training, evaluation, evaluated)
    elif where == "update":
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # noqa: F401

        before(optimizers, "clip_grad_by_total_norm_fp32")
    else:
        before(*places[where])


class Built:
    """The model that this process has built last, and the place that it trained in."""

    model: list[Any]
    place: tuple[int, int, int]
    """Tensor-, pipeline- and data-parallel rank."""

    def noting_model(self, build: Callable[..., Any], of: Callable[[Any], Any] = lambda found: found) -> Any:
        """Return a function that builds a model, which is noted. ``of``: takes it from what is returned."""

        @functools.wraps(build)
        def called(*args: Any, **kwargs: Any) -> Any:
            found = build(*args, **kwargs)
            self.model = of(found)
            return found

        return called

    def noting_place(self, train: Callable[..., Any]) -> Any:
        """Return an owner's ``train()``, with which the place is noted."""
        from megatron.core import parallel_state

        @functools.wraps(train)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.place = (
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_data_parallel_rank(),
            )
            return train(*args, **kwargs)

        return called

    def run(self, mode: str, script: str, folder: Path, arguments: list[str], run_script: Callable[..., None]) -> None:
        """Run a script; write the parameters of each shard's first replica, or those of all ranks with the adapter."""
        import torch

        end: SystemExit | None = None
        try:
            if mode == "stock":
                sys.argv = [script, *arguments]
                runpy.run_path(script, run_name="__main__")
            else:
                run_script(script, arguments)
        except SystemExit as exits:  # of a run that is to exit early
            end = exits
        tensor, pipeline, replica = self.place
        if replica == 0 or mode == "unicron":
            found = {f"{i}.{n}": p.detach().clone() for i, m in enumerate(self.model) for n, p in m.named_parameters()}
            torch.save(found, folder / f"{tensor}-{pipeline}-{replica}.pt")
        if end is not None:
            raise end


def main(mode: str, script: str, folder: Path, arguments: list[str]) -> None:
    """Be the process."""
    from tests.megatron_lm import cpu, mamba_kernels

    sys.path.insert(0, str(Path(script).parent))
    if "--spec" in arguments:
        mamba_kernels.install()
    cpu.apply()
    import megatron.core.models.bert.bert_layer_specs as bert
    import megatron.training.training as training

    from unicron.megatron_lm import run_script

    # The script asks for both specifications, of which Transformer Engine's raises where that is not installed.
    bert.bert_layer_with_transformer_engine_spec = None

    if "--use-precision-aware-optimizer" in arguments:
        from tests.unicron import fused_adam

        fused_adam.enable()
    built = Built()
    training.setup_model_and_optimizer = built.noting_model(training.setup_model_and_optimizer, lambda found: found[0])
    training.train = built.noting_place(training.train)
    fault(folder, training, "evaluate", model_of(script), lambda: training.get_args().curr_iteration + 1)
    built.run(mode, script, folder, arguments, run_script)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
