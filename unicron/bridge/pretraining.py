"""megatron-bridge's ``pretrain()`` on the library's steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.bridge import settings
from unicron.bridge.loading import Loading
from unicron.bridge.publication import Publication
from unicron.megatron.model import model_chunks
from unicron.megatron_lm.exits import Exits
from unicron.megatron_lm.healed_training import HealedTraining
from unicron.megatron_lm.stand_ins import OneReplicaGroups

DIRECTORY = "UNICRON_BRIDGE_DIRECTORY"
"""Environment variable: where results go without an agent."""


class Pretraining(HealedTraining):
    """One call of megatron-bridge's ``pretrain()``."""

    def __init__(self, config: Any, forward_step_func: Any, callbacks: Any = None) -> None:
        """Read the configuration.

        Args:
            config: megatron-bridge's ``ConfigContainer``.
            forward_step_func: computes a micro-batch.
            callbacks: refused, since what they have is no part of the state.

        Raises:
            InvalidSpec: a setting is refused.
        """
        from megatron.bridge.training import checkpointing, initialize, setup, state, train
        from megatron.bridge.training import config as configs

        self._training: Any = train
        self._setup: Any = setup
        self._initialize: Any = initialize
        self._checkpointing: Any = checkpointing
        configs.runtime_config_update(config)
        settings.prepare(config, callbacks)
        plan = settings.plan(config)
        super().__init__(plan, settings.batch_sizes(config), Exits(config.train, plan.steps))
        self._forward_step, self._config, self._provider = forward_step_func, config, config.model
        self._state_of_bridge = state.GlobalState()
        self._state_of_bridge.cfg = config
        self._prepare_process()
        self._datasets: tuple[Any, Any, Any] | None = None
        self._is_logged = False
        self._replace(train)
        if config.checkpoint.load or config.checkpoint.pretrained_checkpoint:
            self._loading = Loading(checkpointing, self._state_of_bridge, plan.steps)
        self._attach(
            interleave=config.model.virtual_pipeline_model_parallel_size or 1,
            directory=os.environ.get(DIRECTORY, "unicron-run"),
            state=self._state(cyclic="cyclic" in self._dealt()),
        )

    def _prepare_process(self) -> None:
        """Do what ``setup()`` does once in a process, without its peers."""
        config, setup = self._config, self._setup
        setup.set_experimental_flag(config.dist.enable_megatron_core_experimental)
        if config.dist.disable_jit_fuser:
            setup.disable_jit_fuser()
        setup.setup_logging(
            logging_level=config.logger.logging_level,
            filter_warning=config.logger.filter_warnings,
            modules_to_filter=config.logger.modules_to_filter,
            set_level_for_all_loggers=config.logger.set_level_for_all_loggers,
        )
        self._initialize.initialize_megatron(
            cfg=config, allow_no_cuda=not torch.cuda.is_available(), skip_mpu_initialization=True
        )
        self._tokenizer = setup.build_tokenizer(config.tokenizer)
        model = self._provider
        model.vocab_size, model.should_pad_vocab = setup._validate_and_set_vocab_size(
            model_vocab_size=model.vocab_size, tokenizer_vocab_size=self._tokenizer.vocab_size
        )
        config.dataset.tokenizer = self._tokenizer

    # What takes megatron-bridge's names.

    def _replace(self, training: Any) -> None:
        """Put the adapter in the place of megatron-bridge's functions; ``seams`` lists them."""
        from megatron.bridge.training import eval as evaluation

        super()._replace(training)
        evaluation.get_forward_backward_func = self._forward_backward(evaluation.get_forward_backward_func)
        training.save_checkpoint = self._together(self._saving(training.save_checkpoint))
        self._publication = Publication(self._checkpointing)

    def _saving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return megatron-bridge's ``save_checkpoint`` for a folder in which an attempt may have been broken off."""

        @functools.wraps(function)
        def save_checkpoint(
            state: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any
        ) -> Any:
            iteration = state.train_state.step
            if not self._begin_saving(iteration):
                return None
            # What train() has is not the task's where that was put back, or came from another rank.
            scheduler = self._run.state["scheduler"].made
            with self._publication.saving(self._folder_of(iteration)):
                result = function(state, model, optimizer, scheduler, *args, **kwargs)
            self._note_saved(iteration)
            return result

        return save_checkpoint

    def _folder_of(self, iteration: int) -> str:
        return str(self._checkpointing.get_checkpoint_name(self._config.checkpoint.save, iteration))

    def _tracker(self) -> Path:
        return Path(self._publication.tracker_of(self._config.checkpoint.save))

    @property
    def _valid_samples(self) -> int:
        return int(self._state_of_bridge.train_state.consumed_valid_samples)

    def _lengths(self) -> dict[str, Any]:
        length = self._config.model.seq_length
        return {"seq_length": length, "decoder_seq_length": length}

    # Building.

    def _build(self, tensor: int, pipeline: int) -> tuple[Any, Any]:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        config, given = self._config, self._provider
        # A model has the provider as its configuration, so each has one of its own.
        model = config.model = copy.copy(given)
        model.tensor_model_parallel_size, model.pipeline_model_parallel_size = tensor, pipeline
        model.virtual_pipeline_model_parallel_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        model.sequence_parallel = given.sequence_parallel and tensor > 1
        model.pipeline_dtype = given.pipeline_dtype or given.params_dtype
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self._initialize._set_random_seed(
            config.rng.seed, False, config.rng.te_rng_tracker, config.rng.inference_rng_tracker, pg_collection=groups
        )
        self._setup.set_jit_fusion_options(model, config.train.micro_batch_size)
        chunks = model.provide_distributed_model(
            ddp_config=config.ddp, data_parallel_random_init=False, pg_collection=groups
        )
        model.timers = config.optimizer.timers = self._state_of_bridge.timers
        optimizer, _ = self._setup.setup_optimizer(
            optimizer_config=config.optimizer,
            scheduler_config=config.scheduler,
            model=chunks,
            use_gloo_process_groups=False,
            optimizer_config_override_provider=config.optimizer_config_override_provider,
        )
        return chunks if len(chunks) > 1 else chunks[0], optimizer

    def _make_scheduler(self, optimizer: Any) -> Any:
        from megatron.bridge.training import optim

        return optim._get_scheduler(self._config.optimizer, self._config.scheduler, optimizer)

    def _dealt(self) -> tuple[str, str, str]:
        """Return the data loaders of training, validation and test."""
        from megatron.bridge.training.config import GPTDatasetConfig

        kind = self._config.dataset.dataloader_type
        return kind, "cyclic" if isinstance(self._config.dataset, GPTDatasetConfig) else kind, kind

    def _read_datasets(self) -> tuple[Any, Any, Any]:
        """Return the datasets, which megatron-bridge's builder makes without its peers."""
        if self._datasets is None:
            from megatron.bridge.data import loaders, utils

            _make_helpers()
            provider = utils.get_dataset_provider(self._config.dataset)
            if "tokenizer" in inspect.signature(provider).parameters:
                provider = functools.partial(provider, tokenizer=self._tokenizer)
            build = functools.partial(loaders.build_train_valid_test_datasets, self._config, provider)
            train, valid, test = self._read(build, self._config.dist.distributed_timeout_minutes)
            self._datasets = train, valid, test
        return self._datasets

    # Steps.

    def _enter(self) -> None:
        state, config, run = self._state_of_bridge, self._config, self._run
        step, model_config = self._prepare(state.timers)
        config.model = model_config
        groups = OneReplicaGroups()
        chunks, begun = model_chunks(run.model), self._begun
        self._setup._update_model_config_funcs(
            chunks,
            model_config,
            config.ddp,
            run.optimizer,
            align_grad_reduce=config.dist.align_grad_reduce,
            pg_collection=groups,
        )
        if not self._is_logged:
            self._setup.maybe_log_and_save_config(config)
            self._is_logged = True
        if dist.get_rank() != dist.get_world_size() - 1:
            state._tensorboard_logger = None  # the last rank writes, which may be another one now
        train_state = state.train_state
        train_state.step = step.number - 1
        train_state.consumed_train_samples = self._consumed(train_state.step)
        train_state.consumed_valid_samples = self._evaluated(train_state.step)
        operations = self._training.flop_utils.num_floating_point_operations(
            config, train_state.consumed_train_samples - begun.train_samples
        )
        train_state.floating_point_operations_so_far = begun.operations + operations
        self._training.update_num_microbatches(train_state.consumed_train_samples, consistency_check=False)
        iterators = [
            self._iterators(
                dataset, cyclic=kind == "cyclic", is_test=i == 2, collate=getattr(dataset, "collate_fn", None)
            )
            for i, (dataset, kind) in enumerate(zip(self._read_datasets(), self._dealt(), strict=True))
        ]
        train_state.do_train = True
        train_state.do_valid = train_state.do_test = config.train.eval_iters > 0
        self._training.train(
            self._forward_step,
            chunks,
            run.optimizer,
            run.state["scheduler"].made,
            iterators[0],
            iterators[1],
            state,
            self._context,
            groups,
        )
        self._end(iterators)

    def _end(self, iterators: list[Any]) -> None:
        """Do what ``pretrain()`` does behind ``train()``."""
        state, config, run = self._state_of_bridge, self._config, self._run
        chunks, train_state = model_chunks(run.model), state.train_state
        if config.checkpoint.save and train_state.step and config.checkpoint.save_interval != 0:
            self._training.save_checkpoint(
                state,
                chunks,
                run.optimizer,
                run.state["scheduler"].made,
                train_state.floating_point_operations_so_far,
                self._context,
                train_data_iterator=iterators[0],
            )
        for wanted, name, iterator in (
            (train_state.do_valid, "validation", iterators[1]),
            (train_state.do_test, "test", iterators[2]),
        ):
            if wanted:
                self._tested = 0
                self._training.evaluate_and_print_results(
                    state,
                    f"iteration {train_state.step} on {name} set",
                    self._forward_step,
                    iterator,
                    chunks,
                    config.model,
                    verbose=True,
                    write_to_tensorboard=True,
                    is_test=name == "test",
                )

    def _train_step(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        global_state: Any,
        pg_collection: Any,
        forward_backward_func: Any,
    ) -> tuple[Any, ...]:
        iteration = global_state.train_state.step
        *done, _ = self._one_step(
            iteration, forward_step_func, data_iterator, self._config.model, forward_backward_func
        )
        return *done, None  # the largest logit of attention, which is not asked for


def _make_helpers() -> None:
    """Compile the helpers of datasets, where the installed megatron-core has none; one process of a machine does."""
    import fcntl

    from megatron.core.datasets import utils

    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.core.datasets.helpers_cpp")
        return
    with Path(utils.__file__).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        utils.compile_helpers()
