"""A training loop of Megatron's kind on the library's steps: what Megatron-LM's and megatron-bridge's have in common.

The owner's ``train()`` is kept. Its ``train_step`` is one step of the library's; everything between two of them
(logging, evaluation, saving) is a boundary section. ``train()`` has the model, the iteration and more in local
variables, so where one of them changes (another model after a fault, or a section that comes again) it is left by an
exception and entered anew.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import unicron
from unicron import device
from unicron.errors import InvalidSpec
from unicron.megatron.model import model_chunks
from unicron.megatron.parallel import data_group
from unicron.megatron.schedule import each_backward, fill
from unicron.megatron_lm import datasets, tracker
from unicron.megatron_lm.exits import Exits
from unicron.megatron_lm.loading import Begun, Loading
from unicron.megatron_lm.reports import Reports
from unicron.megatron_lm.samples import BatchSizes, CyclicOrder, FrozenReplicas, Samples, most_replicas, sample_ids
from unicron.megatron_lm.settings import Plan
from unicron.megatron_lm.stand_ins import SchedulerState, without_barrier
from unicron.trainer.dropout import Dropout
from unicron.training.boundary import Section
from unicron.training.run import Generation
from unicron.training.step import Step

FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")
"""Of a model's configuration, which the owner sets anew for each model and asserts that nobody else has."""


class _EnterAnew(Exception):
    """``train()`` has to be left and entered with another model or iteration."""


def _seen_by_rank_0(found: bool) -> bool:
    """Return what rank 0 has found; all ranks call it, and take part in a broadcast."""
    value = torch.tensor([float(found)], device=device.current())
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(value, 0)
    return bool(value[0])


class HealedTraining(ABC):
    """One call of an owner's ``pretrain()``."""

    def __init__(self, plan: Plan, batches: BatchSizes, exits: Exits) -> None:
        """Prepare to train; ``_attach`` has to follow."""
        self._plan, self._batches, self._exits = plan, batches, exits
        self._loading: Loading | None = None
        self._pending: Step | None = None
        self._section: Section | None = None
        self._model: Any = None
        self._dropout: Dropout | None = None
        self._context: dict[str, Any] = {}
        """What the owner keeps from one checkpoint to the next: who writes what, among the ranks of a generation."""
        self._context_of: Generation | None = None
        """The generation of that."""
        self._repeated = False
        """Whether the section behind the present step comes again."""
        self._saved: tuple[Generation, int] | None = None
        """Generation and iteration of the newest checkpoint that this process has saved; a rollback comes to the same
        iteration again, with processes that have not saved it."""
        self._reports = Reports()
        self._tested = 0

    def train(self) -> None:
        """Train to the end.

        Raises:
            InvalidSpec: there is no checkpoint to load, or it cannot be loaded.
            SystemExit: the training ends early, as the owner's settings ask; as stock does.
        """
        while self._next() is not None:
            try:
                with self._exits:
                    self._enter()
                self._leave_section()
            except _EnterAnew:
                continue
            except BaseException as error:
                section, self._section = self._section, None
                if section is None or not section.__exit__(type(error), error, error.__traceback__):
                    raise
        self._exits.exit()

    # What an owner has of its own.

    @abstractmethod
    def _build(self, tensor: int, pipeline: int) -> tuple[Any, Any]:
        """Build model and optimizer as the owner does, in the groups of the present generation."""

    @abstractmethod
    def _enter(self) -> None:
        """Enter the owner's ``train()`` at the next step, and do what follows it in ``pretrain()``."""

    @abstractmethod
    def _make_scheduler(self, optimizer: Any) -> Any:
        """Return the owner's scheduler of learning rate and weight decay for an optimizer."""

    @abstractmethod
    def _lengths(self) -> dict[str, Any]:
        """Return the lengths of sequences, as a schedule takes them."""

    @abstractmethod
    def _folder_of(self, iteration: int) -> str:
        """Return the folder of a checkpoint."""

    @abstractmethod
    def _tracker(self) -> Path:
        """Return the file that names the newest checkpoint."""

    @property
    @abstractmethod
    def _valid_samples(self) -> int:
        """The validation samples that are consumed, as the owner counts them."""

    # Replacements of an owner's functions.

    def _replace(self, training: Any) -> None:
        """Put the adapter in the place of the functions that each owner's module of ``train()`` has."""
        from megatron.core import timers

        training.train_step = self._train_step
        training.should_disable_forward_pre_hook = lambda *args, **kwargs: False
        for name in ("start", "stop"):
            setattr(timers.Timer, name, without_barrier(getattr(timers.Timer, name)))
        training.get_forward_backward_func = self._forward_backward(training.get_forward_backward_func)
        training.evaluate_and_print_results = self._together(self._evaluating(training.evaluate_and_print_results))

    def _together(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function before which parameters become whole, and behind which all ranks meet."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            assert self._section is not None
            self._section.meet()
            self._run.heartbeat()
            return function(*args, **kwargs)

        return called

    def _evaluating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that evaluates where there is a dataset: ``--split 99,1,0`` leaves none to test with.

        Only some ranks read datasets. Rank 0, which is one of them, says whether there is one, as in stock.
        """
        places = inspect.signature(function)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            data = places.bind(*args, **kwargs).arguments["data_iterator"]
            has_dataset = all(one.has_dataset for one in (data if isinstance(data, list) else [data]))
            return function(*args, **kwargs) if _seen_by_rank_0(has_dataset) else None

        return called

    def _begin_saving(self, iteration: int) -> bool:
        """Prepare the folder of a checkpoint, in which an attempt may have been broken off; return whether to save it.

        A section that comes again may have saved already, and stock saves once more where a batch is ramped up. A
        checkpoint that was saved stays as it is: if it were put aside, the tracker would name a checkpoint that is not
        there until the next one is written.
        """
        generation = self._run.generation
        if self._is_saved(iteration) if self._repeated else self._saved == (generation, iteration):
            return False
        if self._context_of != generation:
            self._context.clear()
            self._context_of = generation
        if not dist.is_initialized() or dist.get_rank() == 0:
            tracker.put_aside(Path(self._folder_of(iteration)))
        if dist.is_initialized():
            dist.barrier()
        return True

    def _note_saved(self, iteration: int) -> None:
        """Note that a checkpoint is written and the tracker names it."""
        self._saved = self._run.generation, iteration

    def _is_saved(self, iteration: int) -> bool:
        """Return whether the tracker names this checkpoint, as rank 0 sees it; all ranks call it."""
        return _seen_by_rank_0(tracker.names(self._tracker(), iteration))

    def _forward_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what returns the schedule; for evaluations, one that computes this replica's micro-batches."""

        @functools.wraps(function)
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            schedule = function(*args, **kwargs)

            @functools.wraps(schedule)
            def called(**call: Any) -> Any:
                return self._evaluate(schedule, call) if call.get("forward_only") else schedule(**call)

            return called

        return get_forward_backward_func

    # The run.

    def _attach(self, *, interleave: int, directory: str, state: dict[str, Any]) -> None:
        """Attach this process.

        Args:
            interleave: model chunks of each rank.
            directory: where results go without an agent.
            state: what else belongs to the task's state.
        """
        plan = self._plan
        self._run = unicron.attach(
            steps=plan.steps,
            micro_batches=plan.micro_batches,
            build=self._build,
            state=state,
            interleave=interleave,
            origin=self._loading,
            micro_batches_of=lambda number: self._batch(number - 1) // plan.micro_batch,
            directory=directory,
            tensor=plan.tensor,
            pipeline=plan.pipeline,
        )
        self._steps = self._run.steps()

    def _state(self, *, cyclic: bool) -> dict[str, Any]:
        """Return what belongs to the task's state beside model and optimizer, as ``attach`` takes it.

        Args:
            cyclic: whether the order of some samples depends on the replicas.
        """

        def replicas(model: Any, optimizer: Any) -> FrozenReplicas:
            return FrozenReplicas(most_replicas(self._batches.divisor // self._plan.micro_batch, data_group().size()))

        state: dict[str, Any] = {
            "scheduler": lambda model, optimizer: SchedulerState(self._make_scheduler(optimizer)),
            "begun": lambda model, optimizer: Begun(),
        }
        return state | ({"replicas": replicas} if cyclic else {})

    def _next(self) -> Step | None:
        """Return the next step without taking it; None: all are done."""
        if self._pending is None:
            self._pending = next(self._steps, None)
        return self._pending

    def _prepare(self, timers: Any) -> tuple[Step, Any]:
        """Prepare to enter ``train()``; return the step, which all ranks begin, and the model's configuration.

        Args:
            timers: the owner's; one that a left loop has not stopped would not start again.

        Raises:
            InvalidSpec: a task begins anew where stock would not.
        """
        from megatron.core.utils import get_model_config

        step = self._next()
        assert step is not None
        loading = self._loading
        if loading is not None and loading.is_needed and step.number == 1 and loading.step() < 0:
            raise InvalidSpec(f"there is no checkpoint in {loading}")
        self._model, self._tested = self._run.model, 0
        self._dropout = self._dropout_of(self._run.model)
        for timer in timers._timers.values():
            timer._started = False
        config = get_model_config(model_chunks(self._run.model)[0])
        for name in FUNCTIONS:
            setattr(config, name, None)
        return step, config

    @property
    def _begun(self) -> Begun:
        """Where the task has begun."""
        found: Begun = self._run.state["begun"]
        return found

    def _consumed(self, iteration: int) -> int:
        """Return how many samples the steps up to an iteration have consumed."""
        return self._batches.consumed(self._begun.train_samples, iteration - self._begun.iteration)

    def _read_up_to(self, iteration: int) -> int:
        """Return how many samples the steps up to an iteration have read of the dataset that is read behind it."""
        return self._consumed(iteration)

    def _batch(self, iteration: int) -> int:
        """Return the samples of the step behind an iteration."""
        return self._batches.batch(self._consumed(iteration))

    def _evaluated(self, iteration: int) -> int:
        """Return how many validation samples the evaluations up to an iteration have consumed."""
        plan, begun = self._plan, self._begun
        if not plan.eval_interval or not plan.eval_iters:
            return 0
        evaluations = iteration // plan.eval_interval - begun.iteration // plan.eval_interval
        return int(begun.valid_samples + evaluations * plan.eval_iters * plan.global_batch)

    def _dropout_of(self, model: Any) -> Dropout | None:
        """Return what reseeds a model's dropout, if it has any: its numbers then differ from stock's."""
        plan = self._plan
        if not plan.dropout:
            return None
        first = model_chunks(model)[0]
        if not hasattr(first, "unicron_dropout"):
            made: Any = SimpleNamespace(seed=plan.seed, dropout=plan.dropout)
            first.unicron_dropout = Dropout(made, model)
        found: Dropout = first.unicron_dropout
        return found

    def _read(self, build: Callable[[], Any], limit_minutes: float) -> tuple[Any, ...]:
        """Return the datasets of training, validation and test that an owner's builder makes, without its peers."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return datasets.read(build, rank=rank, limit_s=60.0 * limit_minutes, heartbeat=self._run.heartbeat)

    def _iterators(self, dataset: Any, *, cyclic: bool, is_test: bool = False, collate: Any = None) -> Any:
        """Return what stands for an owner's iterator of a dataset, or for those of several model chunks."""
        order = None
        if cyclic and dataset is not None:
            order = CyclicOrder(len(dataset), self._plan.micro_batch, self._run.state["replicas"].count)
        made = [Samples(dataset, order, is_test=is_test, collate=collate) for _ in model_chunks(self._run.model)]
        return made if len(made) > 1 else made[0]

    # Steps.

    @abstractmethod
    def _train_step(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Take the parameters of the owner's ``train_step``; return ``_one_step``."""

    def _one_step(
        self, iteration: int, forward_step_func: Any, data: Any, config: Any, schedule: Any
    ) -> tuple[Any, ...]:
        """Do the step behind an iteration, however often it is interrupted; return what ``train()`` expects of it."""
        self._leave_section()
        while True:
            step = self._next()
            if step is None or step.number != iteration + 1 or self._run.model is not self._model:
                raise _EnterAnew
            self._pending = None
            norm = zeros = None
            is_updated = True
            report: dict[str, torch.Tensor] = {}
            config.finalize_model_grads_func = None
            with step:
                if ks := step.all_micro_batches():
                    self._compute(step, ks, forward_step_func, data, schedule)
                if self._exits.is_asked(step.number):
                    step.end_training()
                step.reduce()
                is_updated, norm, zeros = self._run.optimizer.step()
                if is_updated:
                    self._run.state["scheduler"].made.step(increment=self._batch(iteration))
                report = self._reports.of_step(step, self._batch(iteration) // self._plan.micro_batch)
            if step.completed:
                break
        self._repeated = step.repeated
        self._exits.decide(step.number, self._run.last_step, stops=step.stops)
        self._section = self._run.boundary(meets=False)
        self._section.__enter__()
        return report, int(not is_updated), False, False, 0, norm, zeros, 0

    def _leave_section(self) -> None:
        """End the section behind the last step, if there is one; leave ``train()`` if it has to come again.

        Raises:
            _EnterAnew: it has.
        """
        section, self._section = self._section, None
        if section is not None and section.__exit__(None, None, None):
            raise _EnterAnew

    def _compute(self, step: Step, ks: list[int], forward_step_func: Any, data: Any, schedule: Any) -> None:
        """Compute micro-batches of a step, all in one call of the schedule."""
        consumed, size = self._read_up_to(step.number - 1), self._plan.micro_batch
        ids = {k: sample_ids(consumed, k, size) for k in ks}
        chunks = data if isinstance(data, list) else [data]
        for one in chunks:
            one.order((k, ids[k]) for k in ks)
        reported: list[dict[str, torch.Tensor]] = []
        orders = [iter(enumerate(ks)) for _ in chunks]

        def noted(loss_func: Any, output: Any) -> Any:
            found = loss_func(output)
            # A clone: the schedule may divide it in place.
            reported.append({name: value.detach().clone().view(-1) for name, value in found[-1].items()})
            return found

        def forward_step(iterator: Samples, module: Any, *rest: Any, **named: Any) -> Any:
            k = iterator.turn()
            if self._dropout is not None:
                self._dropout.set_micro_batch(step.number, k)
            output, loss_func = forward_step_func(iterator.for_script, module, *rest, **named)
            return output, functools.partial(noted, loss_func)

        def done(*chunk: int) -> None:
            i, k = next(orders[chunk[0] if chunk else 0])
            report = reported[i] if reported else None
            step.commit(k, self._reports.add(step, k, report) if report is not None else None, ids[k], *chunk)

        with each_backward(self._run.model, done):
            schedule(
                forward_step_func=forward_step,
                data_iterator=data,
                model=model_chunks(self._run.model),
                num_microbatches=len(ks),
                micro_batch_size=size,
                forward_only=False,
                **self._lengths(),
            )

    # Evaluation.

    def _evaluate(self, schedule: Any, call: dict[str, Any]) -> Any:
        """Compute this replica's micro-batches of one iteration of an evaluation.

        All replicas compute equally many, in a number that the schedule takes; what only fills it counts nothing.
        """
        data, count = call["data_iterator"], call["num_microbatches"]
        group = data_group()
        own = list(range(group.rank(), count, group.size()))
        counted = len(own)
        own += [0] * (-(-count // group.size()) - counted)
        own = fill(self._run.model, own)
        chunks = data if isinstance(data, list) else [data]
        consumed = self._valid_from(chunks[0])
        for one in chunks:
            one.order((k, sample_ids(consumed, k, self._plan.micro_batch)) for k in own)
        seen: dict[int, Iterator[int]] = {id(one): iter(range(len(own))) for one in chunks}

        def weighed(weight: float, loss_func: Any, output: Any) -> Any:
            *rest, report = loss_func(output)
            return (*rest, {name: value * weight for name, value in report.items()} if weight != 1.0 else report)

        def forward_step(iterator: Samples, module: Any, *rest: Any, **named: Any) -> Any:
            self._run.heartbeat()
            iterator.turn()
            weight = 1.0 if next(seen[id(iterator)]) < counted else 0.0
            output, loss_func = stock(iterator.for_script, module, *rest, **named)
            return output, functools.partial(weighed, weight, loss_func)

        stock = call["forward_step_func"]
        return schedule(**call | {"forward_step_func": forward_step, "num_microbatches": len(own)})

    def _valid_from(self, samples: Samples) -> int:
        """Return the first sample of this iteration of an evaluation; the test set begins at its own first one."""
        if samples.is_test:
            first, self._tested = self._tested, self._tested + self._plan.global_batch
            return first
        return self._valid_samples
