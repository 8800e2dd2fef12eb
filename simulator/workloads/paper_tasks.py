"""The tasks of the Unicron paper's evaluation: GPT-3 of five sizes, six at a time in the five cases of its table 3.

Which sizes and weights a case has is recalled, not read (``data/unicron_evaluation.csv``). Assumed, where the paper is
not known: batches as in GPT-3, the micro-batch that the throughput model finds fastest, selective recomputation
and sequence parallelism as in Megatron-LM at the time (Korthikanti et al., arXiv 2205.05198), and one node as the least
that a task is worth running on.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.errors import InvalidInput
from shared.tasks.specification import Batch, ModelShape, Parallel, TaskSpec, Workers

SEQUENCE_LENGTH = 2048
"""Tokens of a sample (Brown et al., "Language Models are Few-Shot Learners", arXiv 2005.14165, table 2.1)."""

VOCABULARY = 51_200
"""GPT-2's 50,257 tokens, padded for tensor parallelism (Narayanan et al., SC'21, arXiv 2104.04473, section 5)."""

MOST_STEPS = 1_000_000_000
"""Greatest number of steps of a specification (``shared.tasks.specification.Steps``)."""

DATA = "simulated"
"""The training data of a task that only the simulator runs."""


class Gpt(NamedTuple):
    """A model and its batch. ``batch``, ``micro``: samples of an update and of a forward pass."""

    layers: int
    hidden: int
    heads: int
    batch: int
    micro: int


SIZES: dict[str, Gpt] = {
    # arXiv 2005.14165, table 2.1: 1M tokens a batch. Its 24 heads of 128 do not make up 2,048; Megatron-LM has 16.
    "1.3B": Gpt(24, 2048, 16, 512, 4),
    # Table 2.1, "6.7B": 2M tokens a batch.
    "7B": Gpt(32, 4096, 32, 1024, 2),
    # Table 2.1: 2M tokens a batch. Its 5,140 is no multiple of 40 heads; Megatron-LM has 5,120.
    "13B": Gpt(40, 5120, 40, 1024, 1),
    # GPT-3 has no such size: that of LLaMA-2 70B (arXiv 2307.09288) as a GPT, with the batch of 175B.
    "70B": Gpt(80, 8192, 64, 1536, 1),
    # Table 2.1: 3.2M tokens a batch; SC'21, section 5.1, runs it with 1,536 samples.
    "175B": Gpt(96, 12288, 96, 1536, 1),
}
"""Name of a size -> its numbers."""

_MIXED = ("1.3B", "1.3B", "1.3B", "7B", "7B", "13B")
_EQUAL = (1.0,) * 6
_RISING = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)

CASES: dict[int, tuple[tuple[str, ...], tuple[float, ...]]] = {
    1: (("7B",) * 6, _EQUAL),
    2: (_MIXED, _EQUAL),
    3: (("7B",) * 6, _RISING),
    4: (_MIXED, _RISING[::-1]),
    5: (_MIXED, _RISING),
}
"""Case of table 3 -> sizes and weights of its six tasks."""

DEFAULT_CASE = 1
"""The case without a choice of sizes and weights. Which one the paper's section on traces uses is not known."""

PAPER_WORKERS = 128
"""Workers for which the cases are made."""

LARGE_SIZES = ("7B", "13B", "70B", "175B")
"""Sizes of the tasks of larger clusters: six of 1.3B to 13B cannot use thousands of workers."""

MOST_TASKS = 64
"""Tasks of a large cluster: as many as 256 workers each on 16,384."""

LEAST_WORKERS = 8
"""``workers.min`` of every task: one node."""


def task(name: str, size: str, *, weight: float = 1.0, steps: int = MOST_STEPS) -> TaskSpec:
    """Return a task that trains a GPT-3 of this size.

    Raises:
        InvalidInput: no such size.
    """
    if size not in SIZES:
        raise InvalidInput.of("size", size, f"must be one of {', '.join(SIZES)}")
    layers, hidden, heads, batch, micro = SIZES[size]
    return TaskSpec(
        name=name,
        model=ModelShape(
            layers=layers, hidden=hidden, heads=heads, sequence_length=SEQUENCE_LENGTH, vocabulary=VOCABULARY
        ),
        batch=Batch.model_validate({"global": batch, "micro": micro}),
        steps=steps,
        data=DATA,
        weight=weight,
        workers=Workers(min=LEAST_WORKERS),
        parallel=Parallel(recompute="selective", sequence_parallel=True),
        bf16=True,
    )


def six_tasks(case: int = DEFAULT_CASE) -> tuple[TaskSpec, ...]:
    """Return the six concurrent tasks of a case of table 3, with the most steps that a task may have.

    Raises:
        InvalidInput: no such case.
    """
    sizes, weights = _case(case)
    rows = enumerate(zip(sizes, weights, strict=True), start=1)
    return tuple(task(_name(size, number), size, weight=weight) for number, (size, weight) in rows)


def tasks_for(workers: int, case: int = DEFAULT_CASE) -> tuple[TaskSpec, ...]:
    """Return tasks for a cluster of so many workers: a case's six up to twice the paper's cluster.

    Larger clusters get six for each 128 workers, at most ``MOST_TASKS``, of ``LARGE_SIZES`` and the case's weights in
    turn.

    Raises:
        InvalidInput: no such case.
    """
    _, weights = _case(case)
    if workers <= 2 * PAPER_WORKERS:
        return six_tasks(case)
    count = min(MOST_TASKS, 6 * workers // PAPER_WORKERS)
    sizes = [LARGE_SIZES[number % len(LARGE_SIZES)] for number in range(count)]
    return tuple(
        task(_name(size, number + 1), size, weight=weights[number % len(weights)]) for number, size in enumerate(sizes)
    )


def outlasting(tasks: tuple[TaskSpec, ...], horizon_s: float, peak_flop_per_s: float) -> bool:
    """Return whether no task can end within the horizon, even alone on all workers at their peak rate together."""
    return all(
        spec.steps * spec.batch.global_ * spec.model.flop_per_sample() > horizon_s * peak_flop_per_s for spec in tasks
    )


def _name(size: str, number: int) -> str:
    return f"gpt-{size.lower().replace('.', '-')}-{number}"


def _case(case: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
    if case not in CASES:
        raise InvalidInput.of("case", case, f"must be from {min(CASES)} to {max(CASES)}")
    return CASES[case]
