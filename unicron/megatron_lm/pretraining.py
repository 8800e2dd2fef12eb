"""Megatron-LM's ``pretrain()`` on the library's steps.

Megatron-LM's own ``train()`` is kept. Its ``train_step`` is one step of the library's; everything between two of them
(logging, evaluation, saving) is a boundary section. ``train()`` has the model, the iteration and more in local
variables, so where one of them changes (another model after a fault, or a section that comes again) it is left by an
exception and entered anew.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import unicron
from unicron import device
from unicron.errors import InvalidSpec
from unicron.megatron.construction import without_collectives
from unicron.megatron.model import model_chunks
from unicron.megatron.parallel import data_group
from unicron.megatron.schedule import each_backward, fill
from unicron.megatron_lm import seams, settings, tracker
from unicron.megatron_lm.exits import Exits
from unicron.megatron_lm.loading import Begun, Loading
from unicron.megatron_lm.reports import Reports
from unicron.megatron_lm.samples import CyclicOrder, FrozenReplicas, Samples, most_replicas, sample_ids
from unicron.megatron_lm.stand_ins import OneReplica, SchedulerState, print_time, without_barrier
from unicron.trainer.dropout import Dropout
from unicron.training.boundary import Section
from unicron.training.run import Generation
from unicron.training.step import Step

DIRECTORY = "UNICRON_MEGATRON_LM_DIRECTORY"
"""Environment variable: where results go without an agent."""


_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
"""Attributes of Megatron-LM's arguments, and of its model configurations from core 0.19 on, that say how the model is
split over ranks: each generation may have another layout."""


class _EnterAnew(Exception):
    """``train()`` has to be left and entered again with another model or iteration."""


class Pretraining:
    """One call of ``pretrain()``."""

    def __init__(self, call: SimpleNamespace, write_tensorboard: Callable[[Any], None]) -> None:
        """Read the arguments.

        Args:
            call: the parameters of ``pretrain()`` by name; each release has some that others do not have.
            write_tensorboard: Megatron-LM's function that makes the last rank write for TensorBoard.

        Raises:
            InvalidSpec: an argument is refused.
        """
        import megatron.training.training as training
        from megatron.training import arguments, checkpointing, global_vars, initialize

        self._training: Any = training
        self._initialize: Any = initialize
        self._checkpointing: Any = checkpointing
        self._globals: Any = global_vars
        for name in ("pg_collection", "p2p_communicator", "skip_model_parallel_init"):
            if getattr(call, name, None):
                raise InvalidSpec(f"pretrain({name}=...): the library makes the groups; leave it out")
        self._call, self._write_tensorboard = call, write_tensorboard
        is_parsed = not hasattr(call, "extra_args_provider")
        self._args = global_vars.get_args() if is_parsed else arguments.parse_args(call.extra_args_provider)
        self._plan = settings.plan(self._args)
        self._sequence_parallel = self._args.sequence_parallel
        seams.call(
            initialize.initialize_megatron,
            args_defaults=getattr(call, "args_defaults", None),
            allow_no_cuda=not torch.cuda.is_available(),
            skip_mpu_initialization=True,
            parsed_args=self._args,
        )
        self._args = global_vars.get_args()
        self._built = False
        self._pending: Step | None = None
        self._section: Section | None = None
        self._model: Any = None
        self._dropout: Dropout | None = None
        self._datasets: tuple[Any, Any, Any] | None = None
        self._context: dict[str, Any] = {}
        """State that Megatron-LM keeps from one checkpoint to the next: which rank of a generation writes what."""
        self._context_of: Generation | None = None
        """The generation to which that state belongs."""
        self._repeated = False
        """Whether the section behind the present step comes again."""
        self._saved: tuple[Generation, int] | None = None
        """Generation and iteration of the newest checkpoint that this process has saved; a rollback comes to the same
        iteration again, with processes that have not saved it."""
        self._exits = Exits(self._args, self._plan.steps)
        self._reports = Reports()
        self._batches = settings.batch_sizes(self._args)
        self._tested = 0
        self._replace()
        named = self._args.load or self._args.pretrained_checkpoint
        self._loading = Loading(checkpointing, self._open_file, self._args, self._plan.steps) if named else None
        self._run = unicron.attach(
            steps=self._plan.steps,
            micro_batches=self._plan.micro_batches,
            build=self._build,
            state=self._state(),
            interleave=self._args.virtual_pipeline_model_parallel_size or 1,
            origin=self._loading,
            micro_batches_of=lambda number: self._batch(number - 1) // self._plan.micro_batch,
            directory=os.environ.get(DIRECTORY, "unicron-run"),
            tensor=self._plan.tensor,
            pipeline=self._plan.pipeline,
        )
        self._steps = self._run.steps()

    def train(self) -> None:
        """Train to the end.

        Raises:
            InvalidSpec: there is no checkpoint to load, or it cannot be loaded.
            SystemExit: the training ends early, as the arguments ask; as stock does.
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

    # Replacements of Megatron-LM's functions.

    def _replace(self) -> None:
        """Put the adapter in the place of Megatron-LM's functions; ``seams`` lists them."""
        from megatron.core import timers

        training, checkpointing = self._training, self._checkpointing
        training.train_step = self._train_step
        training.mpu = OneReplica(training.mpu)
        training.should_disable_forward_pre_hook = lambda args: False
        # A process that is new enters ``train()`` while the others are in the midst of it: none may wait for all there.
        training.print_datetime = print_time
        for name in ("start", "stop"):
            setattr(timers.Timer, name, without_barrier(getattr(timers.Timer, name)))
        training.get_forward_backward_func = self._forward_backward(training.get_forward_backward_func)
        training.evaluate_and_print_results = self._together(training.evaluate_and_print_results)
        training.save_checkpoint = self._together(self._saving(training.save_checkpoint))

        def folder_of(iteration: int) -> str:
            return str(checkpointing.get_checkpoint_name(self._args.save, iteration, return_base_dir=True))

        def is_tracker(path: str) -> bool:
            return bool(self._args.save) and path == str(checkpointing.get_checkpoint_tracker_filename(self._args.save))

        owner, name = seams.BY_NAME["open_file"].place()
        self._open_file = tracker.opening(getattr(owner, name), is_tracker, folder_of)
        setattr(owner, name, self._open_file)
        self._folder_of = folder_of

    def _together(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function before which parameters become whole, and behind which all ranks meet."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            assert self._section is not None
            self._section.meet()
            self._run.heartbeat()
            return function(*args, **kwargs)

        return called

    def _saving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return Megatron-LM's ``save_checkpoint`` for a folder in which an attempt may have been broken off.

        A section that comes again may have saved already, and Megatron-LM saves once more where a batch is ramped up.
        A checkpoint that was saved stays as it is: if it were put aside, the tracker would name a checkpoint that is
        not there until the next one is written.
        """

        @functools.wraps(function)
        def save_checkpoint(
            iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any
        ) -> Any:
            generation = self._run.generation
            if self._is_saved(iteration) if self._repeated else self._saved == (generation, iteration):
                return None
            if self._context_of != generation:
                self._context.clear()
                self._context_of = generation
            if not dist.is_initialized() or dist.get_rank() == 0:
                tracker.put_aside(Path(self._folder_of(iteration)))
            if dist.is_initialized():
                dist.barrier()
            # The scheduler of train() is not the task's if the state was put back, or came from another rank.
            scheduler = self._run.state["scheduler"].made
            result = function(iteration, model, optimizer, scheduler, *args, **kwargs)
            self._saved = generation, iteration
            return result

        return save_checkpoint

    def _is_saved(self, iteration: int) -> bool:
        """Return whether the tracker names this checkpoint, as rank 0 sees it; all ranks call it."""
        path = Path(self._checkpointing.get_checkpoint_tracker_filename(self._args.save))
        found = torch.tensor([float(tracker.names(path, iteration))], device=device.current())
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(found, 0)
        return bool(found[0])

    def _forward_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that returns the schedule; for evaluations, one for this replica's micro-batches."""

        @functools.wraps(function)
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            schedule = function(*args, **kwargs)

            @functools.wraps(schedule)
            def called(**call: Any) -> Any:
                return self._evaluate(schedule, call) if call.get("forward_only") else schedule(**call)

            return called

        return get_forward_backward_func

    # Building.

    def _build(self, tensor: int, pipeline: int) -> tuple[Any, Any]:
        """Build model and optimizer as ``pretrain()`` does, in the groups of the present generation."""
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        args = self._args
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tensor, pipeline
        args.transformer_pipeline_model_parallel_size = pipeline
        args.virtual_pipeline_model_parallel_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        args.sequence_parallel = self._sequence_parallel and tensor > 1
        self._initialize._initialize_distributed(
            self._call.get_embedding_ranks, self._call.get_position_embedding_ranks, None
        )
        if not self._built:
            self._initialize._compile_dependencies()
            self._built = True
        self._initialize._set_random_seed(
            args.seed, args.data_parallel_random_init, args.te_rng_tracker, args.inference_rng_tracker
        )
        seams.call(self._training.set_jit_fusion_options, tp_size=tensor)
        named = args.load, args.pretrained_checkpoint
        args.load = args.pretrained_checkpoint = None  # which the library has loaded once all ranks are here
        try:
            model, optimizer, _ = seams.call(
                self._training.setup_model_and_optimizer,
                model_provider_func=self._call.model_provider,
                model_type=self._call.model_type,
                cfg_container=self._configuration(),
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
        finally:
            args.load, args.pretrained_checkpoint = named
        return model if len(model) > 1 else model[0], optimizer

    def _configuration(self) -> Any:
        """Return the object from which core 0.19 builds a model, in the present layout; None: this release has none."""
        found = copy.deepcopy(getattr(self._call, "cfg_container", None))
        if model := getattr(found, "model", None):
            for name in (*_LAYOUT, "sequence_parallel"):
                setattr(model, name, getattr(self._args, name))
        return found

    def _read_datasets(self) -> tuple[Any, Any, Any]:
        """Return the datasets, which Megatron-LM's builder makes without its peers."""
        if self._datasets is None:
            with without_collectives():
                self._datasets = tuple(
                    self._training.build_train_valid_test_datasets(
                        functools.partial(self._call.train_valid_test_dataset_provider, **self._chunk())
                    )
                )
        return self._datasets

    def _chunk(self) -> dict[str, int]:
        """Return the chunk for which datasets are asked: in an interleaved pipeline, a chunk that reads samples."""
        from megatron.core import parallel_state

        chunks = len(model_chunks(self._run.model))
        return (
            {"vp_stage": chunks - 1 if parallel_state.get_pipeline_model_parallel_rank() else 0} if chunks > 1 else {}
        )

    # Steps.

    def _next(self) -> Step | None:
        """Return the next step without taking it; None: all are done."""
        if self._pending is None:
            self._pending = next(self._steps, None)
        return self._pending

    def _enter(self) -> None:
        """Enter ``train()`` at the next step."""
        training, args, run = self._training, self._args, self._run
        step = self._next()
        assert step is not None
        self._check_start(step)
        self._model = run.model
        chunks = model_chunks(run.model)
        args.rank, args.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        args.iteration = step.number - 1
        begun = self._begun
        args.consumed_train_samples = self._consumed(args.iteration)
        args.consumed_valid_samples = self._evaluated(args.iteration)
        operations = training.num_floating_point_operations(args, args.consumed_train_samples - begun.train_samples)
        args.num_floating_point_operations_so_far = begun.operations + operations
        training.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        self._tested = 0
        if self._globals.get_tensorboard_writer() is None:
            self._write_tensorboard(args)
        train, valid, test = self._read_datasets()
        args.do_train = 1
        args.do_valid = args.do_test = int(bool(args.eval_iters))
        for timer in self._globals.get_timers()._timers.values():
            timer._started = False
        config = training.get_model_config(chunks[0])
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func"):
            setattr(config, name, None)
        self._dropout = self._dropout_of(run.model)
        iterators = (
            self._iterators(train, chunks),
            self._iterators(valid, chunks),
            self._iterators(test, chunks, is_test=True),
        )
        iteration, operations = training.train(
            self._call.forward_step_func,
            chunks,
            run.optimizer,
            run.state["scheduler"].made,
            iterators[0],
            iterators[1],
            self._call.process_non_loss_data_func,
            config,
            self._context,
            self._call.non_loss_data_func,
        )
        self._end(iteration, operations, config, iterators)

    def _end(self, iteration: int, operations: int, config: Any, iterators: tuple[Any, Any, Any]) -> None:
        """Do what ``pretrain()`` does behind ``train()``."""
        training, args, run, call = self._training, self._args, self._run, self._call
        chunks = model_chunks(run.model)
        if args.save and iteration % args.save_interval:
            training.save_checkpoint(
                iteration,
                chunks,
                run.optimizer,
                run.state["scheduler"].made,
                operations,
                {},
                train_data_iterator=iterators[0],
                preprocess_common_state_dict_fn=training.preprocess_common_state_dict,
            )
        for wanted, name, iterator in (
            (args.do_valid, "validation", iterators[1]),
            (args.do_test, "test", iterators[2]),
        ):
            if wanted:
                self._tested = 0
                training.evaluate_and_print_results(
                    f"iteration {iteration} on {name} set",
                    call.forward_step_func,
                    iterator,
                    chunks,
                    iteration,
                    call.process_non_loss_data_func,
                    config,
                    verbose=True,
                    write_to_tensorboard=True,
                    non_loss_data_func=call.non_loss_data_func,
                )

    def _check_start(self, step: Step) -> None:
        """Refuse to begin anew where Megatron-LM would not.

        Raises:
            InvalidSpec: neither the folder of ``--pretrained-checkpoint`` nor that of ``--load`` has a checkpoint; or
                that of ``--load`` has none and ``--exit-on-missing-checkpoint`` is given.
        """
        load, args = self._loading, self._args
        if load is None or step.number > 1 or load.step() >= 0:
            return
        if args.pretrained_checkpoint or args.exit_on_missing_checkpoint:
            raise InvalidSpec(f"there is no checkpoint in {load}")

    @property
    def _begun(self) -> Begun:
        """The state with which the task has begun."""
        found: Begun = self._run.state["begun"]
        return found

    def _consumed(self, iteration: int) -> int:
        """Return how many samples the steps up to an iteration have consumed."""
        return self._batches.consumed(self._begun.train_samples, iteration - self._begun.iteration)

    def _batch(self, iteration: int) -> int:
        """Return the samples of the step behind an iteration."""
        return self._batches.batch(self._consumed(iteration))

    def _evaluated(self, iteration: int) -> int:
        """Return how many validation samples the evaluations up to an iteration have consumed."""
        args, begun = self._args, self._begun
        if not args.eval_interval or not args.eval_iters:
            return 0
        evaluations = iteration // args.eval_interval - begun.iteration // args.eval_interval
        return int(begun.valid_samples + evaluations * args.eval_iters * self._plan.global_batch)

    def _dropout_of(self, model: Any) -> Dropout | None:
        """Return the object that reseeds a model's dropout, if it has any: its numbers then differ from stock's."""
        args = self._args
        rate = max(args.attention_dropout, args.hidden_dropout)
        if not rate:
            return None
        first = model_chunks(model)[0]
        if not hasattr(first, "unicron_dropout"):
            made: Any = SimpleNamespace(seed=args.seed, dropout=rate)
            first.unicron_dropout = Dropout(made, model)
        found: Dropout = first.unicron_dropout
        return found

    def _state(self) -> dict[str, Any]:
        """Return the objects of the task's state beside model and optimizer, as ``attach`` takes them."""
        args, training = self._args, self._training

        def scheduler(model: Any, optimizer: Any) -> SchedulerState:
            if args.train_samples:
                # Megatron-LM sets the size here; at another time it would take the training for one measured by
                # iterations.
                args.train_iters = None
            made = SchedulerState(training.get_optimizer_param_scheduler(optimizer))
            training.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
            return made

        def replicas(model: Any, optimizer: Any) -> FrozenReplicas:
            return FrozenReplicas(most_replicas(self._batches.divisor // self._plan.micro_batch, data_group().size()))

        state = {"scheduler": scheduler, "begun": lambda model, optimizer: Begun()}
        return state | ({"replicas": replicas} if args.dataloader_type == "cyclic" else {})

    def _iterators(self, dataset: Any, chunks: list[Any], *, is_test: bool = False) -> Any:
        order = None
        if self._args.dataloader_type == "cyclic" and dataset is not None:
            order = CyclicOrder(len(dataset), self._plan.micro_batch, self._run.state["replicas"].count)
        made = [Samples(dataset, order, is_test=is_test) for _ in chunks]
        return made if len(made) > 1 else made[0]

    def _train_step(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Any,
        iteration: int | None = None,
        pg_collection: Any = None,
        p2p_communicator: Any = None,
    ) -> tuple[Any, ...]:
        """Do one step, however often it is interrupted; return what ``train()`` expects of a step."""
        self._leave_section()
        assert iteration is not None
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
                    self._compute(step, ks, forward_step_func, data_iterator, forward_backward_func)
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

        Raises: _EnterAnew: it has to come again.
        """
        section, self._section = self._section, None
        if section is not None and section.__exit__(None, None, None):
            raise _EnterAnew

    def _compute(self, step: Step, ks: list[int], forward_step_func: Any, data: Any, schedule: Any) -> None:
        """Compute micro-batches of a step, all in one call of the schedule."""
        args, consumed = self._args, self._consumed(step.number - 1)
        ids = {k: sample_ids(consumed, k, self._plan.micro_batch) for k in ks}
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
            output, loss_func = forward_step_func(iterator, module, *rest, **named)
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
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                forward_only=False,
            )

    # Evaluation.

    def _evaluate(self, schedule: Any, call: dict[str, Any]) -> Any:
        """Compute this replica's micro-batches of one iteration of an evaluation.

        All replicas compute equally many, in a number that the schedule takes; micro-batches that only fill it count
        nothing.
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
            output, loss_func = stock(iterator, module, *rest, **named)
            return output, functools.partial(weighed, weight, loss_func)

        stock = call["forward_step_func"]
        return schedule(**call | {"forward_step_func": forward_step, "num_microbatches": len(own)})

    def _valid_from(self, samples: Samples) -> int:
        """Return the first sample of this iteration of an evaluation; the test set begins at its own first one."""
        if samples.is_test:
            first, self._tested = self._tested, self._tested + self._plan.global_batch
            return first
        return int(self._args.consumed_valid_samples)
