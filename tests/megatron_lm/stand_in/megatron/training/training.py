"""The loop, and what it calls."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import checkpoint_exists, load_checkpoint, save_checkpoint
from megatron.training.global_vars import get_args, get_timers
from megatron.training.initialize import initialize_megatron, set_jit_fusion_options
from torch.utils.data import default_collate


def print_datetime(string: str, override_timestamp: float | None = None) -> None:
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print(f"[{string}] {override_timestamp or time.time():.3f}", flush=True)


def num_floating_point_operations(args: Any, batch_size: int) -> float:
    return float(72 * batch_size * args.seq_length * args.num_layers * args.hidden_size**2)


def should_disable_forward_pre_hook(args: Any) -> bool:
    return bool(args.use_distributed_optimizer and args.overlap_param_gather)


def preprocess_common_state_dict(common_state_dict: Any) -> Any:
    return dict(common_state_dict)


def pretrain(
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
) -> None:
    initialize_megatron(extra_args_provider, args_defaults, store=store)
    args = get_args()
    set_jit_fusion_options()
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type)
    datasets = build_train_valid_test_datasets(train_valid_test_dataset_provider)
    train_data, valid_data, _ = (
        _batches(dataset, consumed)
        for dataset, consumed in zip(
            datasets, (args.consumed_train_samples, args.consumed_valid_samples, 0), strict=True
        )
    )
    args.do_valid = bool(args.eval_iters)
    config = get_model_config(model[0])
    iteration, operations = train(
        forward_step_func, model, optimizer, scheduler, train_data, valid_data, process_non_loss_data_func, config, {},
        non_loss_data_func,
    )  # fmt: skip
    if args.save and iteration % args.save_interval:
        save_checkpoint(iteration, model, optimizer, scheduler, operations, {})


def setup_model_and_optimizer(
    model_provider_func: Any, model_type: Any, checkpointing_context: Any = None
) -> tuple[Any, Any, Any]:
    args = get_args()
    module = model_provider_func(pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage())
    buckets = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        bucket_size=4000,
    )
    model = [DistributedDataParallel(get_model_config(module), buckets, module)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=0.0,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        ),
        model,
        use_gloo_process_groups=False,
    )
    scheduler = get_optimizer_param_scheduler(optimizer)
    if checkpoint_exists(args.load):
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(model, optimizer, scheduler)
    return model, optimizer, scheduler


def get_optimizer_param_scheduler(optimizer: Any) -> Any:
    args = get_args()
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="linear",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )


def build_train_valid_test_datasets(
    build_train_valid_test_datasets_provider: Any, train_valid_test_num_samples: Any = None
) -> Any:
    args = get_args()
    evaluations = 1 + args.train_iters // args.eval_interval
    counts = [count * args.global_batch_size for count in (args.train_iters, evaluations * args.eval_iters, 1)]
    return build_train_valid_test_datasets_provider(train_valid_test_num_samples or counts)


def _batches(dataset: Any, consumed: int) -> Any:
    """Yield this rank's micro-batches, as the data loader ``single`` deals them."""
    size, rank, replicas = get_args().micro_batch_size, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    for first in itertools.count(consumed + rank * size, size * replicas):
        yield default_collate([dataset[i] for i in range(first, first + size)])


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
    forward_backward_func: Any,
    iteration: int | None = None,
) -> tuple[Any, ...]:
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.decoder_seq_length,
        forward_only=False,
    )
    is_updated, norm, zeros = optimizer.step()
    if is_updated:
        opt_param_scheduler.step(increment=args.global_batch_size)
    return _mean(reports), int(not is_updated), False, False, 0, norm, zeros, None


def _mean(reports: Any) -> dict[str, torch.Tensor]:
    """Return the mean over the tokens of all replicas of what micro-batches report."""
    found = {}
    for name in reports[0] if reports else ():
        total = torch.stack([report[name] for report in reports]).sum(dim=0)
        torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
        found[name] = total[0] / total[1]
    return found


def evaluate_and_print_results(
    prefix: str,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    iteration: int,
    process_non_loss_data_func: Any,
    config: Any,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    non_loss_data_func: Any = None,
) -> None:
    args, reports = get_args(), []
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        for _ in range(args.eval_iters):
            reports += get_forward_backward_func()(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                forward_only=True,
            )
            args.consumed_valid_samples += args.global_batch_size
    for chunk in model:
        chunk.train()
    _print(f"evaluation at {prefix}", _mean(reports))


def _print(what: str, losses: dict[str, torch.Tensor]) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(what, *(f"| {name}: {float(value):.6e}" for name, value in losses.items()), flush=True)


def train(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Any,
    config: Any,
    checkpointing_context: Any,
    non_loss_data_func: Any,
    inference_model: Any = None,
) -> tuple[int, float]:
    args, timers = get_args(), get_timers()
    for chunk in model:
        chunk.train()
    iteration, operations = args.iteration, args.num_floating_point_operations_so_far
    config.grad_scale_func, config.timers = optimizer.scale_loss, timers
    if args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    timers("interval-time", log_level=0).start(barrier=True)
    print_datetime("before the start of training step")
    schedule = get_forward_backward_func()

    def save() -> None:
        save_checkpoint(
            iteration, model, optimizer, opt_param_scheduler, operations, checkpointing_context,
            train_data_iterator=train_data_iterator, preprocess_common_state_dict_fn=preprocess_common_state_dict,
        )  # fmt: skip

    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples, consistency_check=True, verbose=True)
        losses, _, _, should_exit, _, _, _, _ = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config, schedule, iteration
        )
        iteration += 1
        samples = mpu.get_data_parallel_world_size() * args.micro_batch_size * get_num_microbatches()
        args.consumed_train_samples += samples
        operations += num_floating_point_operations(args, samples)
        _print(f" iteration {iteration:8d}/{args.train_iters:8d}", losses)
        if args.do_valid and iteration % args.eval_interval == 0:
            evaluate_and_print_results(
                f"iteration {iteration}", forward_step_func, valid_data_iterator, model, iteration,
                process_non_loss_data_func, config, non_loss_data_func=non_loss_data_func,
            )  # fmt: skip
        is_due = bool(args.save and args.save_interval and iteration % args.save_interval == 0)
        if is_due:
            save()
        if args.exit_interval and iteration % args.exit_interval == 0:
            if args.save and not is_due:
                save()
            print_datetime(f"exiting program at iteration {iteration}")
            should_exit = True
        if should_exit:
            sys.exit(0)
    timers("interval-time").stop()
    return iteration, operations
