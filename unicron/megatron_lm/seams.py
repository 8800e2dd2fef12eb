"""The seams: each name of Megatron-LM's that the adapter replaces, calls or reads, in one table.

A seam is ``replaced`` (Megatron-LM calls the adapter in its place, so its parameters have to be exactly these),
``wrapped`` (the same, and the adapter passes on whatever it is given; it reads these by name, so they have to be
there), ``called`` (the adapter calls it with these, so it has to have them) or ``read``. What only some releases have
is in the table as well. A start checks all seams: a version that has moved one is refused by its name, rather than
trained with to a wrong result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from unicron.errors import SeamDiffers

VERSIONS = ("0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.1")
"""The releases of Megatron-LM that the table is for."""

TRAINING = "megatron.training.training"
INITIALIZE = "megatron.training.initialize"
CHECKPOINTING = "megatron.training.checkpointing"
GLOBALS = "megatron.training.global_vars"


@dataclass(frozen=True, slots=True)
class Seam:
    """One name of Megatron-LM's."""

    name: str
    """Name of the attribute, with dots inside a class."""
    module: str
    way: Literal["replaced", "wrapped", "called", "read"]
    parameters: tuple[str, ...]
    """The parameters: all of a replaced function, in order; those that are read of a wrapped one; those of the call of
    a called one."""
    purpose: str
    some: tuple[str, ...] = ()
    """Parameters that only some releases have: those that may follow the others of a replaced function; those with
    which a called one is called if it has them (``call``)."""
    renamed: str = ""
    """The name in later releases, if it is another one."""

    def place(self) -> tuple[Any, str]:
        """Return the module or class that has the seam, and the name of the attribute.

        Raises:
            ImportError, AttributeError: there is no such one.
        """
        module = import_module(self.module)
        name = self.renamed if self.renamed and not hasattr(module, self.name) else self.name
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, module)
        getattr(owner, last)
        return owner, last

    def problem(self) -> str:
        """Return how the installed Megatron-LM differs from what the adapter needs; empty: it does not differ."""
        try:
            found = getattr(*self.place())
        except (ImportError, AttributeError) as err:
            return f"{self.module}.{self.name}: {err}"
        if self.way == "read":
            return ""
        has = parameters_of(found)
        count = len(self.parameters)
        if self.way == "replaced" and (has[:count] != self.parameters or not set(has[count:]) <= set(self.some)):
            return (
                f"{self.module}.{self.name}: has the parameters {', '.join(has)}; needed: {', '.join(self.parameters)}"
            )
        if lacks := [name for name in self.parameters if name not in has]:
            return f"{self.module}.{self.name}: lacks the parameters {', '.join(lacks)}"
        return ""


def parameters_of(found: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters, in order."""
    return tuple(inspect.signature(found).parameters)


def call(function: Any, **values: Any) -> Any:
    """Call one of Megatron-LM's functions with those of some values that it has parameters for.

    The table says which parameters these may be: a start has checked that a function has those that it needs.
    """
    has = parameters_of(function)
    return function(**{name: value for name, value in values.items() if name in has})


SEAMS = (
    Seam("pretrain", TRAINING, "wrapped", ("train_valid_test_dataset_provider", "model_provider", "model_type",
         "forward_step_func", "process_non_loss_data_func", "get_embedding_ranks", "get_position_embedding_ranks",
         "non_loss_data_func"), "the script's entry", ("extra_args_provider", "args_defaults", "cfg_container",
         "pg_collection", "p2p_communicator", "skip_model_parallel_init")),
    Seam("train_step", TRAINING, "replaced", ("forward_step_func", "data_iterator", "model", "optimizer",
         "opt_param_scheduler", "config", "forward_backward_func", "iteration"),
         "one step of the library's takes its place", ("pg_collection", "p2p_communicator")),
    Seam("train", TRAINING, "called", ("forward_step_func", "model", "optimizer", "opt_param_scheduler",
         "train_data_iterator", "valid_data_iterator", "process_non_loss_data_func", "config", "checkpointing_context",
         "non_loss_data_func"),
         "Megatron-LM's loop; entered anew when the model is another one, or a boundary section comes again"),
    Seam("setup_model_and_optimizer", TRAINING, "called", ("model_provider_func", "model_type"),
         "in each build, without a checkpoint", ("cfg_container", "pg_collection")),
    Seam("print_datetime", TRAINING, "replaced", ("string", "override_timestamp"), "waits for all, as no new rank may"),
    Seam("Timer.start", "megatron.core.timers", "replaced", ("self", "barrier"), "may wait for all, likewise"),
    Seam("Timer.stop", "megatron.core.timers", "replaced", ("self", "barrier"), "may wait for all, likewise"),
    Seam("get_forward_backward_func", TRAINING, "wrapped", (), "deals evaluation"),
    Seam("evaluate_and_print_results", TRAINING, "wrapped", ("prefix", "forward_step_func", "data_iterator", "model",
         "iteration", "process_non_loss_data_func", "config", "verbose", "write_to_tensorboard", "non_loss_data_func"),
         "parameters are whole before it, and all ranks meet behind it"),
    Seam("save_checkpoint", TRAINING, "wrapped", ("iteration", "model", "optimizer", "opt_param_scheduler",
         "num_floating_point_operations_so_far", "checkpointing_context", "train_data_iterator",
         "preprocess_common_state_dict_fn"), "the same; what a broken attempt has left is put aside"),
    Seam("should_disable_forward_pre_hook", TRAINING, "replaced", ("args",), "hooks wait for gathers in every step"),
    Seam("mpu.get_data_parallel_world_size", TRAINING, "called", (), "consumed samples do not depend on the replicas"),
    Seam("set_jit_fusion_options", TRAINING, "called", (), "draws random numbers before the model is built",
         ("tp_size",)),
    Seam("build_train_valid_test_datasets", TRAINING, "called", ("build_train_valid_test_datasets_provider",),
         "datasets; the adapter has iterators of its own"),
    Seam("get_optimizer_param_scheduler", TRAINING, "called", ("optimizer",), "a scheduler for each optimizer"),
    Seam("num_floating_point_operations", TRAINING, "called", ("args", "batch_size"), "of the steps that are done"),
    Seam("update_num_microbatches", TRAINING, "called", ("consumed_samples", "consistency_check"),
         "a batch that is ramped up, when train() is entered"),
    Seam("get_model_config", "megatron.core.utils", "called", ("model",),
         "the model's configuration, which train() changes"),
    Seam("average_losses_across_data_parallel_group", "megatron.training.utils", "wrapped", ("losses",),
         "loss functions call it, in passes of which replicas may have different numbers"),
    Seam("preprocess_common_state_dict", TRAINING, "read", (), "for the last save"),
    Seam("parse_args", "megatron.training.arguments", "wrapped", ("extra_args_provider",),
         "the script's arguments, which from 0.18 on it reads before pretrain()"),
    Seam("initialize_megatron", INITIALIZE, "called", ("allow_no_cuda", "skip_mpu_initialization"),
         "sets what there is before there are groups; until 0.17, also validates the arguments", ("args_defaults",
         "parsed_args")),
    Seam("_initialize_distributed", INITIALIZE, "called", ("get_embedding_ranks", "get_position_embedding_ranks",
         "store"), "finds the groups that the library has made"),
    Seam("_compile_dependencies", INITIALIZE, "called", (), "once in each process"),
    Seam("_set_random_seed", INITIALIZE, "called", ("seed_", "data_parallel_random_init", "te_rng_tracker",
         "inference_rng_tracker"), "before each model is built"),
    Seam("get_args", GLOBALS, "called", (), "Megatron-LM's globals"),
    Seam("get_timers", GLOBALS, "called", (), "timers that a left loop has not stopped"),
    Seam("get_tensorboard_writer", GLOBALS, "called", (), "whether this rank writes"),
    Seam("_set_tensorboard_writer", GLOBALS, "wrapped", ("args",), "by the last rank, once"),
    Seam("open_file", CHECKPOINTING, "wrapped", (), "moves the tracker at once", renamed="maybe_msc.open"),
    Seam("get_checkpoint_name", CHECKPOINTING, "called", ("checkpoints_path", "iteration", "return_base_dir"),
         "the folder of a checkpoint"),
    Seam("load_checkpoint", CHECKPOINTING, "called", ("ddp_model", "optimizer", "opt_param_scheduler"),
         "the checkpoint that a task begins from"),
    Seam("checkpoint_exists", CHECKPOINTING, "called", ("checkpoints_path",), "whether there is one"),
    Seam("get_checkpoint_tracker_filename", CHECKPOINTING, "called", ("checkpoints_path",),
         "which checkpoint is the newest"),
)  # fmt: skip
"""All seams."""

BY_NAME = {seam.name: seam for seam in SEAMS}
"""The seams by their names in the table, which are those of the first release."""


def check() -> None:
    """Check every seam of the Megatron-LM that is installed.

    Raises:
        SeamDiffers: one or more differ; all are named.
    """
    check_all("Megatron-LM", TRAINING, SEAMS, VERSIONS)


def check_all(owner: str, entry: str, seams: Sequence[Seam], versions: Sequence[str]) -> None:
    """Check the seams of an owner that is installed.

    Args:
        owner: its name.
        entry: the module of its training, which is imported first.
        seams: what the adapter needs of it.
        versions: the releases that they are for.

    Raises:
        SeamDiffers: one or more differ; all are named.
    """
    try:
        import_module(entry)
    except ImportError as err:
        raise SeamDiffers(f"{owner}'s training module cannot be imported: {err}", ("pretrain",)) from err
    problems = {seam.name: problem for seam in seams if (problem := seam.problem())}
    if problems:
        raise SeamDiffers(
            f"this {owner} is not as {', '.join(versions)} are, which the adapter is for: "
            + "; ".join(problems.values()),
            tuple(problems),
        )
