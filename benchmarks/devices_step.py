"""Steps of stock Megatron and of this library in turns, in one process on one device (``benchmarks.devices``).

    .venv/bin/python -m benchmarks.devices_step [--seconds 45] [--layers 24 --hidden 1024 ...]

Both train the same GPT, each with a model and an optimizer of its own. Each pair of steps is timed in the other order.
Then copies in memory are taken, one at a time, beside steps without one: what a copy costs, divided by the interval at
which it is taken by default, is what copies cost a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.intervals import median_interval
from benchmarks.report import Report
from unicron.protocol import environment
from unicron.snapshot.interval import best_exponent, loss_mtbf_s
from unicron.snapshot.snapshots import Snapshots

SECONDS = 45.0
"""For how long pairs are timed. A step takes 0.7 s on an H200: 30 pairs."""

RATIO, MEMORY_RATIO = 1.01, 1.02
"""Required of the median paired ratio of times, and of the largest memory of the device."""

WIDTH = 0.02
"""Of the 95% interval; a wider one resolves nothing."""

WARM_UP = 2

COPIES = 7
"""Copies in memory that are timed: few, since each takes some steps of 0.7 s, and enough for a median."""

COPIES_RATIO = 1.01
"""Required of a step with copies in memory by default, beside one without."""

SHARED_MEMORY = Path("/dev/shm")


def measure(report: Report, *arguments: str, seconds: float = SECONDS) -> None:
    """Run the measurement in a process of its own, and report it with its bounds."""
    command = [sys.executable, "-m", "benchmarks.devices_step", "--seconds", str(seconds), *arguments]
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        place = {environment.MEMORY: folder, environment.NODE: "n0", environment.DOMAIN: "n0"}
        done = subprocess.run(command, env=os.environ | place, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    ratios, copies = found.pop("ratios"), found.pop("copies")
    median, low, high = median_interval(ratios)
    report.line("step", **found, pairs=len(ratios), interval=[round(low, 4), round(high, 4)])
    if high - low > WIDTH and not low <= median <= high < RATIO:
        report.line(
            "not resolved", name="a step beside stock Megatron's", value=round(median, 4), width=round(high - low, 4)
        )
    else:
        report.at_most("a step beside stock Megatron's", round(median, 4), RATIO)
    if found["memory_ratio"] is not None:
        report.at_most("memory beside stock Megatron's", found["memory_ratio"], MEMORY_RATIO)
    report.at_most("a step with copies in memory by default beside one without", copies.pop("ratio"), COPIES_RATIO,
                   **copies)  # fmt: skip


def build(sizes: argparse.Namespace, tensor: int, pipeline: int) -> tuple[Any, Any]:
    """Build the model and its optimizer, as a script does."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16, bf16=True, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, use_cpu_initialization=not torch.cuda.is_available(),
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    gpt = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=sizes.vocabulary, max_sequence_length=sizes.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).to(_device())  # fmt: skip
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Float16Module(config, gpt)
    )
    settings = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16)
    return model, get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Loop:
    """One micro-batch after the other, through Megatron's schedule."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        shape = (sizes.samples, sizes.sequence + 1)
        self._tokens = [torch.randint(sizes.vocabulary, shape, generator=generator) for _ in range(sizes.micro_batches)]
        self._sizes = sizes

    def __call__(self, model: Any, micro_batches: Sequence[int]) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses: list[Any] = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=iter(micro_batches), model=[model],
            num_microbatches=len(micro_batches), seq_length=self._sizes.sequence,
            micro_batch_size=self._sizes.samples, forward_only=False,
        )  # fmt: skip
        return losses

    def _forward(self, micro_batches: Iterator[int], model: Any) -> tuple[Any, Callable[..., Any]]:
        import torch

        tokens = self._tokens[next(micro_batches)].to(_device())
        positions = torch.arange(self._sizes.sequence, device=tokens.device).expand(self._sizes.samples, -1)
        output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
        return output, partial(_loss, tokens[:, 1:].numel())


def _loss(tokens: int, output: Any) -> tuple[Any, Any, Any]:
    import torch

    total = output.float().sum()
    return total, torch.tensor(tokens, dtype=torch.int, device=total.device), total.detach() / tokens


def stock_step(loop: Loop, model: Any, optimizer: Any, micro_batches: int) -> float:
    """Do a step as Megatron-LM's training loop does; return the mean loss, which that loop logs."""
    import torch

    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = loop(model, range(micro_batches))
    optimizer.step()
    return float(torch.stack(losses).mean())


def time_pairs(sizes: argparse.Namespace) -> dict[str, Any]:
    """Return the paired ratios of times, the medians, and the ratio of the memory of the two."""
    import torch
    from megatron.core.distributed import finalize_model_grads

    import unicron

    cuda = torch.cuda.is_available()
    loop = Loop(sizes)
    run = unicron.attach(
        steps=10**6, micro_batches=sizes.micro_batches, build=partial(build, sizes), checkpoint_every=0,
        memory_every="auto",
    )  # fmt: skip
    snapshots = run._training.snapshots
    steps = run.steps()
    step = next(steps)
    snapshots.every = 0  # the generation that is joined by now has places for copies

    def ours() -> float:
        nonlocal step
        with step:
            for k in step.micro_batches():
                step.commit(k, loop(run.model, [k])[0], [k])
            step.reduce()
            run.optimizer.step()
        loss: float = step.loss
        step = next(steps)
        return loss

    def peak_bytes(action: Callable[[], Any]) -> int:
        """Return the largest memory of the device while something is done."""
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() if cuda else 0

    ours()
    ours_bytes, held_bytes = peak_bytes(ours), torch.cuda.memory_allocated() if cuda else 0
    model, optimizer = build(sizes, 1, 1)
    model.config.finalize_model_grads_func = finalize_model_grads
    ways: dict[str, Callable[[], float]] = {
        "stock": lambda: stock_step(loop, model, optimizer, sizes.micro_batches),
        "ours": ours,
    }
    ways["stock"]()
    stock_bytes = peak_bytes(ways["stock"]) - held_bytes
    for _ in range(WARM_UP):
        for way in ways.values():
            way()
    times: dict[str, list[float]] = {way: [] for way in ways}
    ends_s = time.monotonic() + sizes.seconds
    while time.monotonic() < ends_s or len(times["ours"]) < 4:
        for name in list(ways)[:: 1 if len(times["ours"]) % 2 else -1]:
            times[name].append(_timed(ways[name]))
    parameters = sum(p.numel() for p in model.parameters())
    medians = {way: round(statistics.median(found), 4) for way, found in times.items()}
    return {
        "parameters": parameters,
        "median_s": medians,
        "spread": {way: [round(min(found), 4), round(max(found), 4)] for way, found in times.items()},
        "ratios": [ours_s / stock_s for ours_s, stock_s in zip(times["ours"], times["stock"], strict=True)],
        "memory_ratio": round(ours_bytes / stock_bytes, 4) if cuda else None,
        "copies": time_copies(snapshots, ours, sizes.copies),
    }


def time_copies(snapshots: Snapshots, step: Callable[[], float], copies: int) -> dict[str, Any]:
    """Take copies in memory, one at a time; return what one costs, and the ratio of times at the interval by default.

    Args:
        snapshots: of the run.
        step: does a step and begins the next one: at that boundary a copy begins.
        copies: how many. The first one is not counted: its memory is made.
    """
    costs_s, counts, plain_s = [], [], []
    for _ in range(copies):
        before, snapshots.every = snapshots.stored, 1
        step()
        snapshots.every = 0
        copying_s = []
        while snapshots.stored == before:
            copying_s.append(_timed(step))
        plain_s += [_timed(step) for _ in copying_s]
        costs_s.append(sum(copying_s))
        counts.append(len(copying_s))
    step_s = statistics.median(plain_s)
    cost_s = statistics.median(total_s - count * step_s for total_s, count in zip(costs_s[1:], counts[1:], strict=True))
    exponent = best_exponent(
        cost_s=max(cost_s, 0.0),
        step_s=step_s,
        mtbf_s=loss_mtbf_s(environment.number(environment.MTBF_NODE_S), 1, replicated=False),
        checkpoint_every=0,
        replicated=False,
    )
    return {
        "ratio": round(1.0 + cost_s / (2**exponent * step_s), 4),
        "interval_steps": 2**exponent,
        "cost_s": round(cost_s, 4),
        "steps_of_a_copy": counts,
        "ratio_at_each_step": round(1.0 + cost_s / step_s, 4),
    }


def _timed(way: Callable[[], float]) -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    way()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def main() -> None:
    """Run the measurement in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    for name, default in (
        ("layers", 24), ("hidden", 1024), ("heads", 16), ("sequence", 1024), ("vocabulary", 50304),
        ("samples", 4), ("micro-batches", 8), ("copies", COPIES),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    print(json.dumps(time_pairs(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
