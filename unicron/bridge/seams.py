"""The seams: each name of megatron-bridge's that the adapter replaces, calls or reads, in one table.

What a seam is, and how one is checked: ``unicron.megatron_lm.seams``.
"""

from __future__ import annotations

from unicron.megatron_lm.seams import Seam, check_all

VERSIONS = ("0.3.1",)
"""The releases of megatron-bridge that the table is for."""

ENTRY = "megatron.bridge.training.pretrain"
TRAINING = "megatron.bridge.training.train"
SETUP = "megatron.bridge.training.setup"
INITIALIZE = "megatron.bridge.training.initialize"
CHECKPOINTING = "megatron.bridge.training.checkpointing"
CONFIG = "megatron.bridge.training.config"

SEAMS = (
    Seam("pretrain", ENTRY, "replaced", ("config", "forward_step_func", "callbacks"), "the script's entry"),
    Seam("pretrain", "megatron.bridge.training.finetune", "replaced", ("config", "forward_step_func", "callbacks"),
         "the same, by another entry"),
    Seam("train_step", TRAINING, "replaced", ("forward_step_func", "data_iterator", "model", "optimizer", "scheduler",
         "global_state", "pg_collection", "forward_backward_func"), "one step of the library's takes its place"),
    Seam("train", TRAINING, "called", ("forward_step_func", "model", "optimizer", "scheduler", "train_data_iterator",
         "valid_data_iterator", "global_state", "checkpointing_context", "pg_collection"),
         "megatron-bridge's loop; entered anew when the model is another one, or a boundary section comes again"),
    Seam("should_disable_forward_pre_hook", TRAINING, "replaced", ("use_megatron_fsdp", "use_distributed_optimizer",
         "overlap_param_gather"), "hooks wait for gathers in every step"),
    Seam("Timer.start", "megatron.core.timers", "replaced", ("self", "barrier"), "may wait, as no new rank may"),
    Seam("Timer.stop", "megatron.core.timers", "replaced", ("self", "barrier"), "may wait for all, likewise"),
    Seam("get_forward_backward_func", TRAINING, "wrapped", ("pp_size", "vp_size"), "the schedule of a step"),
    Seam("get_forward_backward_func", "megatron.bridge.training.eval", "wrapped", ("pp_size", "vp_size"),
         "deals evaluation"),
    Seam("evaluate_and_print_results", TRAINING, "wrapped", ("state", "prefix", "forward_step_func", "data_iterator",
         "model", "config", "verbose", "write_to_tensorboard", "is_test"),
         "parameters are whole before it, and all ranks meet behind it"),
    Seam("save_checkpoint", TRAINING, "wrapped", ("state", "model", "optimizer", "opt_param_scheduler",
         "num_floating_point_operations_so_far", "checkpointing_context", "train_data_iterator"),
         "the same; what a broken attempt has left is put aside"),
    Seam("flop_utils.num_floating_point_operations", TRAINING, "called", ("cfg", "batch_size"),
         "of the steps that are done"),
    Seam("update_num_microbatches", TRAINING, "called", ("consumed_samples", "consistency_check"),
         "a batch that is ramped up, when train() is entered"),
    Seam("get_model_config", "megatron.core.utils", "called", ("model",),
         "the model's configuration, which is its provider"),
    Seam("runtime_config_update", CONFIG, "called", ("cfg",), "completes and validates the configuration"),
    Seam("ConfigContainer.get_data_parallel_size", CONFIG, "replaced", ("self", "world_size"),
         "consumed samples do not depend on the replicas"),
    Seam("ConfigContainer.set_data_parallel_size", CONFIG, "replaced", ("self",), "the same"),
    Seam("GPTDatasetConfig", CONFIG, "read", (), "whose evaluations read in the order of cyclic"),
    Seam("GlobalState", "megatron.bridge.training.state", "called", (), "megatron-bridge's globals"),
    Seam("GlobalState.timers", "megatron.bridge.training.state", "read", (), "timers that a left loop has not stopped"),
    Seam("GlobalState.tensorboard_logger", "megatron.bridge.training.state", "read", (), "made by the last rank"),
    Seam("TrainState", "megatron.bridge.training.state", "called", ("step", "consumed_train_samples",
         "consumed_valid_samples", "floating_point_operations_so_far", "do_train", "do_valid", "do_test"),
         "where the training stands"),
    Seam("set_experimental_flag", SETUP, "called", (), "once in each process"),
    Seam("disable_jit_fuser", SETUP, "called", (), "once in each process"),
    Seam("setup_logging", SETUP, "called", ("logging_level", "filter_warning", "modules_to_filter",
         "set_level_for_all_loggers"), "once in each process"),
    Seam("maybe_log_and_save_config", SETUP, "called", ("cfg",), "by the first rank"),
    Seam("build_tokenizer", SETUP, "called", ("tokenizer_config",), "once in each process"),
    Seam("_validate_and_set_vocab_size", SETUP, "called", ("model_vocab_size", "tokenizer_vocab_size"),
         "once in each process"),
    Seam("set_jit_fusion_options", SETUP, "called", ("model_config", "micro_batch_size"),
         "draws random numbers before the model is built"),
    Seam("setup_optimizer", SETUP, "called", ("optimizer_config", "scheduler_config", "model",
         "use_gloo_process_groups", "optimizer_config_override_provider"), "in each build"),
    Seam("_update_model_config_funcs", SETUP, "called", ("model", "model_config", "ddp_config", "optimizer",
         "align_grad_reduce", "pg_collection"), "functions of the model's configuration"),
    Seam("_get_scheduler", "megatron.bridge.training.optim", "called", ("optimizer_config", "scheduler_config",
         "optimizer"), "a scheduler for each optimizer"),
    Seam("initialize_megatron", INITIALIZE, "called", ("cfg", "allow_no_cuda", "skip_mpu_initialization"),
         "sets what there is before there are groups"),
    Seam("_set_random_seed", INITIALIZE, "called", ("seed_", "data_parallel_random_init", "te_rng_tracker",
         "inference_rng_tracker", "pg_collection"), "before each model is built"),
    Seam("ModelProviderMixin.provide_distributed_model", "megatron.bridge.models.model_provider", "called",
         ("ddp_config", "data_parallel_random_init", "pg_collection"), "the model of each build"),
    Seam("build_train_valid_test_datasets", "megatron.bridge.data.loaders", "called", ("cfg",
         "build_train_valid_test_datasets_provider"), "datasets; the adapter has iterators of its own"),
    Seam("get_dataset_provider", "megatron.bridge.data.utils", "called", ("dataset_config",), "makes the datasets"),
    Seam("get_checkpoint_name", CHECKPOINTING, "called", ("checkpoints_path", "iteration"), "a checkpoint's folder"),
    Seam("get_checkpoint_tracker_filename", CHECKPOINTING, "replaced", ("checkpoints_path",),
         "which checkpoint is the newest; written aside and renamed"),
    Seam("get_checkpoint_train_state_filename", CHECKPOINTING, "replaced", ("checkpoints_path", "prefix"),
         "the same, with where the training stands"),
    Seam("cleanup_old_non_persistent_checkpoint", CHECKPOINTING, "wrapped", (),
         "deletes old checkpoints, behind which the newest is named"),
    Seam("load_checkpoint", CHECKPOINTING, "called", ("state", "model", "optimizer", "opt_param_scheduler"),
         "the checkpoint that a task begins from"),
    Seam("read_train_state.cache_clear", CHECKPOINTING, "read", (), "it keeps what it has read"),
    Seam("checkpoint_exists", CHECKPOINTING, "called", ("checkpoints_path",), "whether there is one"),
)  # fmt: skip
"""All of them."""


def check() -> None:
    """Check every seam of the megatron-bridge that is installed.

    Raises:
        SeamDiffers: one or more differ; all are named.
    """
    check_all("megatron-bridge", ENTRY, SEAMS, VERSIONS)
