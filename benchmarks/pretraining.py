"""What the adapter of Megatron-LM costs beside stock ``train()``: CPU-seconds of a step. JSON lines.

    .venv/bin/python -m benchmarks.pretraining CHECKOUT [--layouts NAME ...] [--pairs 5] [--steps 60]

``pretrain_gpt.py`` of a checkout of Megatron-LM runs as two ranks on this machine's processors, stock and with the
adapter in turns, each pair in the other order: a GPT of 0.84 million parameters, 1,024 tokens a micro-batch, two
micro-batches a replica (four in the pipeline). A step is everything from one call of ``training_log`` to the next, the
adapter's boundary section included. Of each pair, the ratio is that of the medians of the steps' CPU-seconds, both
ranks together; the bound is on the geometric mean of these ratios. CPU-seconds, since other processes lengthen a step's
wall time and take turns.

Exit status 1 if the bound is missed, 2 where the checkout lacks something (``tests/megatron_lm`` says what it needs).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.intervals import LEAST_RATIOS, REASON, interval
from benchmarks.ranks import run_ranks
from benchmarks.report import Report, at_least, run

BOUND = 1.01
"""What the adapter may cost: at most 1% of stock's step at 1,024 tokens a micro-batch, which are few; with more of them
the same work between the passes is a smaller share."""

RANKS = 2

SETTLING_STEPS = 10
"""Steps at the beginning that do not count: memory is allocated and caches are filled."""

LAYOUTS = {
    "dp2": "",
    "dp2-overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "tp2-sequence": "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 16",
    "pp2": "--pipeline-model-parallel-size 2",
}
"""Name -> arguments. A pipeline has more micro-batches: with two its stages would idle half the time."""

ARGUMENTS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 8 --global-batch-size 32 --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 "
    "--clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --attention-dropout 0 "
    "--hidden-dropout 0 --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --no-persist-layer-norm --log-interval 10 --eval-iters 0 --eval-interval 1000 --num-workers 0 "
    "--use-cpu-initialization --attention-backend unfused"
)

ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there before the first rank
}


def median_step_s(mode: str, checkout: Path, arguments: list[str]) -> float:
    """Run the script as all ranks; return the median of its steps' CPU-seconds, all ranks together."""
    with tempfile.TemporaryDirectory(prefix="unicron-pretraining-") as folder:
        own = ENVIRONMENT | {"UNICRON_MEGATRON_LM_DIRECTORY": f"{folder}/run"}
        command = [mode, str(checkout / "pretrain_gpt.py"), folder, *arguments]
        ranks: list[list[float]] = run_ranks(
            "benchmarks.pretraining_rank", command, Path(folder), RANKS, environment=lambda rank: own
        )
    return statistics.median(map(sum, zip(*(steps[SETTLING_STEPS:] for steps in ranks), strict=True)))


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print."""
    for name in options.layouts:
        arguments = [*ARGUMENTS.split(), *LAYOUTS[name].split(), "--train-iters", str(SETTLING_STEPS + options.steps)]
        ratios = []
        for number in range(options.pairs):
            order = ("stock", "unicron") if number % 2 else ("unicron", "stock")
            found = {mode: median_step_s(mode, options.checkout.resolve(), arguments) for mode in order}
            ratios.append(found["unicron"] / found["stock"])
            report.line("pair", name=name, cpu_s={mode: round(s, 5) for mode, s in found.items()})
        mean, low, high = (round(value, 4) for value in interval(ratios))
        report.at_most(f"{name}: ratio of CPU-seconds", mean, BOUND, interval_95=[low, high])


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.pretraining", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of Megatron-LM")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS], default=[*LAYOUTS], metavar="NAME")
    parser.add_argument("--pairs", type=at_least(LEAST_RATIOS, REASON), default=5, help="of runs, for each layout")
    parser.add_argument("--steps", type=at_least(5), default=60, help="of a run")
    options = parser.parse_args()
    return run(lambda report: measure(options, report))


if __name__ == "__main__":
    sys.exit(main())
