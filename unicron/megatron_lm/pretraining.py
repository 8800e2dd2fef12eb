"""Megatron-LM's ``pretrain()`` on the library's steps."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from unicron.errors import NotHealed
from unicron.megatron.model import model_chunks
from unicron.megatron_lm import seams, settings, tracker
from unicron.megatron_lm.exits import Exits
from unicron.megatron_lm.healed_training import HealedTraining
from unicron.megatron_lm.loading import Loading
from unicron.megatron_lm.stand_ins import OneReplica, print_time

DIRECTORY = "UNICRON_MEGATRON_LM_DIRECTORY"
"""Environment variable: where results go without an agent."""


_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
"""Attributes of Megatron-LM's arguments, and of its model configurations from core 0.19 on, that say how the model is
split over ranks: each generation may have another layout."""


class Pretraining(HealedTraining):
    """One call of Megatron-LM's ``pretrain()``."""

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
                raise NotHealed(f"pretrain({name}=...): the library makes the groups; leave it out")
        self._call, self._write_tensorboard = call, write_tensorboard
        is_parsed = not hasattr(call, "extra_args_provider")
        self._args = global_vars.get_args() if is_parsed else arguments.parse_args(call.extra_args_provider)
        plan = settings.plan(self._args)
        self._sequence_parallel = self._args.sequence_parallel
        seams.call(
            initialize.initialize_megatron,
            args_defaults=getattr(call, "args_defaults", None),
            allow_no_cuda=not torch.cuda.is_available(),
            skip_mpu_initialization=True,
            parsed_args=self._args,
        )
        self._args = global_vars.get_args()
        super().__init__(plan, settings.batch_sizes(self._args), Exits(self._args, plan.steps))
        self._built = False
        self._datasets: tuple[Any, Any, Any] | None = None
        self._replace(training)
        if self._args.load or self._args.pretrained_checkpoint:
            self._loading = Loading(checkpointing, self._open_file, self._args, plan.steps)
        self._cyclic = self._args.dataloader_type == "cyclic"
        self._attach(
            interleave=self._args.virtual_pipeline_model_parallel_size or 1,
            directory=os.environ.get(DIRECTORY, "unicron-run"),
            state=self._state(cyclic=self._cyclic),
        )

    # Replacements of Megatron-LM's functions.

    def _replace(self, training: Any) -> None:
        """Put the adapter in the place of Megatron-LM's functions; ``seams`` lists them."""
        super()._replace(training)
        checkpointing = self._checkpointing
        training.mpu = OneReplica(training.mpu)
        # A process that is new enters ``train()`` while the others are in the midst of it: none may wait for all there.
        training.print_datetime = print_time
        training.save_checkpoint = self._together(self._saving(training.save_checkpoint))

        def is_tracker(path: str) -> bool:
            return bool(self._args.save) and path == str(checkpointing.get_checkpoint_tracker_filename(self._args.save))

        owner, name = seams.BY_NAME["open_file"].place()
        self._open_file = tracker.opening(getattr(owner, name), is_tracker, self._folder_of)
        setattr(owner, name, self._open_file)

    def _saving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return Megatron-LM's ``save_checkpoint`` for a folder in which an attempt may have been broken off."""

        @functools.wraps(function)
        def save_checkpoint(
            iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if not self._begin_saving(iteration):
                return None
            # The scheduler of train() is not the task's where the state was put back, or came from another rank.
            scheduler = self._run.state["scheduler"].made
            result = function(iteration, model, optimizer, scheduler, *args, **kwargs)
            self._note_saved(iteration)
            return result

        return save_checkpoint

    def _folder_of(self, iteration: int) -> str:
        return str(self._checkpointing.get_checkpoint_name(self._args.save, iteration, return_base_dir=True))

    def _tracker(self) -> Path:
        return Path(self._checkpointing.get_checkpoint_tracker_filename(self._args.save))

    @property
    def _valid_samples(self) -> int:
        return int(self._args.consumed_valid_samples)

    def _lengths(self) -> dict[str, Any]:
        return {"seq_length": self._args.seq_length, "decoder_seq_length": self._args.decoder_seq_length}

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
        """Return what core 0.19 builds a model from, in the present layout; None: this release has none."""
        found = copy.deepcopy(getattr(self._call, "cfg_container", None))
        if model := getattr(found, "model", None):
            for name in (*_LAYOUT, "sequence_parallel"):
                setattr(model, name, getattr(self._args, name))
        return found

    def _read_datasets(self) -> tuple[Any, Any, Any]:
        """Return the datasets, which Megatron-LM's builder makes without its peers."""
        if self._datasets is None:
            provide = functools.partial(self._call.train_valid_test_dataset_provider, **self._chunk())
            build = functools.partial(self._training.build_train_valid_test_datasets, provide)
            train, valid, test = self._read(build, self._args.distributed_timeout_minutes)
            self._datasets = train, valid, test
        return self._datasets

    def _chunk(self) -> dict[str, int]:
        """Return the chunk for which datasets are asked: of an interleaved pipeline, one that reads samples."""
        from megatron.core import parallel_state

        chunks = len(model_chunks(self._run.model))
        return (
            {"vp_stage": chunks - 1 if parallel_state.get_pipeline_model_parallel_rank() else 0} if chunks > 1 else {}
        )

    # Steps.

    def _read_up_to(self, iteration: int) -> int:
        """Return it as Megatron-LM does: a phase has a dataset of its own, and ``consumed_train_samples`` counts on."""
        phases: list[int] | None = getattr(self._args, "phase_transition_iterations", None)
        if not phases:
            return super()._read_up_to(iteration)
        begun = max(one for one in (0, *phases) if one <= iteration)
        return (iteration - begun) * self._plan.global_batch

    def _enter(self) -> None:
        training, args, run = self._training, self._args, self._run
        step, config = self._prepare(self._globals.get_timers())
        chunks = model_chunks(run.model)
        args.rank, args.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        args.iteration = step.number - 1
        begun = self._begun
        args.consumed_train_samples = self._consumed(args.iteration)
        args.consumed_valid_samples = self._evaluated(args.iteration)
        operations = training.num_floating_point_operations(args, args.consumed_train_samples - begun.train_samples)
        args.num_floating_point_operations_so_far = begun.operations + operations
        training.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        if self._globals.get_tensorboard_writer() is None:
            self._write_tensorboard(args)
        train, valid, test = self._read_datasets()
        args.do_train = 1
        args.do_valid = args.do_test = int(bool(args.eval_iters))
        iterators = (
            self._iterators(train, cyclic=self._cyclic),
            self._iterators(valid, cyclic=self._cyclic),
            self._iterators(test, cyclic=self._cyclic, is_test=True),
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

    def _make_scheduler(self, optimizer: Any) -> Any:
        args, training = self._args, self._training
        if args.train_samples:
            # Megatron-LM sets it here, and another time would take the training for one that iterations measure.
            args.train_iters = None
        made = training.get_optimizer_param_scheduler(optimizer)
        training.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        return made

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
        assert iteration is not None
        return self._one_step(iteration, forward_step_func, data_iterator, config, forward_backward_func)
