"""A ``Trainer`` of Hugging Face's transformers whose training goes on through failures (extra ``transformers``).

    from unicron.huggingface import Trainer

    trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=dataset, micro_batches=32)
    trainer.train()

Loop and sampler are this library's; loss, optimizer, scheduler, collator, callbacks and evaluation are those of
transformers. A micro-batch is ``per_device_train_batch_size`` samples, and ``micro_batches`` of them are one update, on
however many processes. A loss that is divided by the items of the batch (``num_items_in_batch``) is divided by those of
all micro-batches of the update.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import TrainOutput

import unicron
from unicron.errors import UnsupportedModel
from unicron.training.run import Run
from unicron.training.step import Step

REFUSED = {
    "fp16": "the scale of a loss is no part of the state; bf16 needs none",
    "deepspeed": "it divides and reduces by itself",
    "fsdp": "its ranks each have a part that cannot be named",
    "auto_find_batch_size": "every step has the same samples, whatever fails",
    "load_best_model_at_end": "the result is that of the last step",
    "push_to_hub": "a model is pushed behind the training, by one process",
    "neftune_noise_alpha": "its noise is of a stream of the process's own",
}
"""Arguments that have to be off -> why."""

_SEEDS = 1 << 63
"""Seeds are below this."""


class Trainer(transformers.Trainer):  # type: ignore[misc]  # it has no types where transformers is not installed
    """A Trainer on steps that survive the loss of processes."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    control: Any

    _run: Run | None = None
    """The training, once it has begun."""

    def __init__(self, *args: Any, micro_batches: int = 0, **options: Any) -> None:
        """Prepare as transformers' Trainer does.

        Args:
            args: the arguments of transformers' Trainer.
            micro_batches: the number in one update, over all processes; 0: ``gradient_accumulation_steps``.
            options: further options of transformers' Trainer.

        Raises:
            UnsupportedModel: an argument would train to another result after a fault; the message names it.
        """
        super().__init__(*args, **options)
        self._micro_batches = micro_batches or self.args.gradient_accumulation_steps
        self._losses: dict[int, float] = {}
        self._check()

    def _check(self) -> None:
        given = self.args
        for name, reason in REFUSED.items():
            if getattr(given, name, None):
                raise UnsupportedModel(f"TrainingArguments.{name}: must be off; {reason}")
        if given.world_size > 1 or given.n_gpu > 1:
            raise UnsupportedModel(
                "TrainingArguments: several processes or devices are found already; start the script by unicron, and "
                "show each process one device"
            )
        if transformers.SchedulerType(given.lr_scheduler_type) is transformers.SchedulerType.REDUCE_ON_PLATEAU:
            raise UnsupportedModel("TrainingArguments.lr_scheduler_type: must follow from the step alone")
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise UnsupportedModel("Trainer.optimizers: must be made by the Trainer: override create_optimizer")
        if not hasattr(self.train_dataset, "__len__") or not hasattr(self.train_dataset, "__getitem__"):
            raise UnsupportedModel("Trainer.train_dataset: must have a length and samples by number")

    # The samples.

    def _sample_ids(self, step: int, micro_batch: int) -> list[int]:
        """Return the samples of a micro-batch, from an order that is new in each epoch; an epoch's rest is left out."""
        size = self.args.per_device_train_batch_size
        epoch, place = divmod(step - 1, self._steps_in_epoch())
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % _SEEDS)
        order = torch.randperm(len(self.train_dataset), generator=generator)
        first = (place * self._micro_batches + micro_batch) * size
        found: list[int] = order[first : first + size].tolist()
        return found

    def _steps_in_epoch(self) -> int:
        steps: int = len(self.train_dataset) // (self._micro_batches * self.args.per_device_train_batch_size)
        if not steps:
            raise UnsupportedModel(
                f"Trainer.train_dataset: must have the samples of one update at least, {self._micro_batches} times "
                f"{self.args.per_device_train_batch_size}, not {len(self.train_dataset)}"
            )
        return steps

    def _batch(self, step: int, micro_batch: int) -> Any:
        """Return a collated micro-batch; what the collator draws follows from step and number."""
        with torch.random.fork_rng():
            self._reseed(step, micro_batch)
            collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
            return collate([self.train_dataset[i] for i in self._sample_ids(step, micro_batch)])

    def _reseed(self, step: int, micro_batch: int) -> None:
        seed = ((self.args.seed * 1_000_003 + step) * 1_000_003 + micro_batch) % _SEEDS
        torch.manual_seed(seed)
        random.seed(seed)

    # The loop.

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, trial: Any = None, **_: Any
    ) -> TrainOutput:
        """Train; transformers' ``train`` calls this once model and callbacks are prepared."""
        if resume_from_checkpoint is not None:
            raise UnsupportedModel("resume_from_checkpoint: must be None; a task goes on from its own checkpoints")
        steps = self.args.max_steps
        if steps <= 0:
            steps = max(1, int(self.args.num_train_epochs * self._steps_in_epoch()))
        first: list[Any] = [self.model]

        def build(tensor: int, pipeline: int) -> tuple[Any, torch.optim.Optimizer]:
            model = first.pop() if first else copy.deepcopy(self.model)
            self.optimizer = None
            self.model = self.model_wrapped = model
            return model, self.create_optimizer()

        def scheduler(model: Any, optimizer: Any) -> Any:
            self.lr_scheduler = None
            return self.create_scheduler(steps, optimizer)

        run = self._run = unicron.attach(
            steps=steps, micro_batches=self._micro_batches, build=build, state={"scheduler": scheduler}
        )
        self.state.max_steps, self.state.num_train_epochs = steps, -(-steps // self._steps_in_epoch())
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, steps)
        began = False
        for step in run.steps():
            self.model = self.model_wrapped = run.model
            self.optimizer, self.lr_scheduler = run.optimizer, run.state["scheduler"]
            self.state.is_world_process_zero = self.state.is_local_process_zero = run.generation.rank == 0
            if not began:
                self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
                began = True
            with step:
                self._update(step)
            if step.completed:
                self._between_steps(run, step)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        known = list(self._losses.values())
        return TrainOutput(self.state.global_step, sum(known) / len(known) if known else float("nan"), {})

    def _update(self, step: Step) -> None:
        """Do one step, inside its block."""
        self.state.global_step = step.number - 1
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        remaining = set(step.remaining())
        batches = dict(self._collated(step.number, remaining)) if remaining else {}
        items = self._items(batches)
        self.model.train()
        for k in step.micro_batches():
            self._reseed(step.number, k)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(self.model, self._prepare_inputs(batches[k]), num_items_in_batch=items)
            scaled = loss if self._divides(items) else loss / self._micro_batches
            self.accelerator.backward(scaled)
            # The factor that makes the step's mean over its micro-batches the loss of the whole batch.
            step.commit(k, scaled.detach() * self._micro_batches, self._sample_ids(step.number, k))
        if self.control.should_training_stop:  # without an evaluation, since when others may not have asked
            step.end_training()
        step.reduce()
        if self.args.max_grad_norm:
            step.clip_gradients(self.args.max_grad_norm)
        self.optimizer.step()
        if not step.completed:
            self.lr_scheduler.step()

    def _collated(self, step: int, own: set[int]) -> Iterator[tuple[int, Any]]:
        """Yield the micro-batches to compute, and those of other processes if their items have to be counted."""
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        for k in range(self._micro_batches):
            if counts or k in own:
                yield k, self._batch(step, k)

    def _items(self, batches: Mapping[int, Any]) -> torch.Tensor | None:
        items: torch.Tensor | None = self._get_num_items_in_batch(list(batches.values()), self.args.device)
        return items

    def _divides(self, items: torch.Tensor | None) -> bool:
        """Return whether the loss is divided by the items of the whole batch, as in transformers' ``training_step``."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def _between_steps(self, run: Run, step: Step) -> None:
        """Log, evaluate and save, as callbacks ask for it."""
        self.state.global_step, self.state.epoch = step.number, step.number / self._steps_in_epoch()
        if step.loss == step.loss:
            self._losses[step.number] = step.loss
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if step.number % self._steps_in_epoch() == 0:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        if self.control.should_log and not step.repeated and step.number in self._losses:
            self.log({"loss": self._losses[step.number], "learning_rate": self._get_learning_rate()})
        self.control.should_log = False
        if self.control.should_evaluate:
            with run.boundary() as section:
                self._evaluate(None, None)
                if self.control.should_training_stop:
                    section.end_training()
        if self.control.should_save:
            with run.boundary():
                self._save_model_of(run, step.number)

    def _save_model_of(self, run: Run, step: int) -> None:
        """Write the model as transformers reads it, on one rank; what training needs is in checkpoints of its own."""
        target = Path(self.args.output_dir, f"checkpoint-{step}")
        if run.generation.rank == 0:
            aside = target.with_name(f"{target.name}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            self.save_model(str(aside), _internal_call=True)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(aside, target)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    # Work that one process does for all, and that takes long.

    def is_world_process_zero(self) -> bool:
        """Return whether this process is the one that writes for all."""
        return self._run is None or self._run.generation.rank == 0

    def log(self, logs: dict[str, Any], *args: Any, **options: Any) -> None:
        """Log as transformers does, and keep the numbers as metrics of the task."""
        super().log(logs, *args, **options)
        if self._run is not None:
            self._run.log({name: value for name, value in logs.items() if isinstance(value, int | float)})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, on one process."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Compute a batch of an evaluation, which each process does with all of the samples."""
        if self._run is not None:
            self._run.heartbeat()
        return super().prediction_step(*args, **options)
