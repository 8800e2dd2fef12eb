"""Device memory of a worker: weights, gradients, optimizer, activations."""

from __future__ import annotations

from typing import NamedTuple

from shared.planning.performance.calibration import Calibration
from shared.planning.performance.gpt import Shape
from shared.planning.performance.hardware import Hardware
from shared.planning.performance.iteration import heaviest_parameters
from shared.planning.performance.ordered_sum import ordered_sum
from shared.planning.performance.parallel_config import ParallelConfig

STATE_BYTES = 18
"""Bytes of a parameter: weight 2, gradient 4, master copy 4, two Adam moments 8 (Megatron-LM, bf16, fp32 gradients)."""

SHARDED_BYTES = 12
"""Part of these bytes that the distributed optimizer divides by the data-parallel size (Megatron-LM: 6 + 12 / d)."""

RESERVED_BYTES = 2.5 * 2**30
"""Estimate of the CUDA context, communicator buffers, cuBLAS work space, and unusable parts of the allocator."""

CPU_RESERVED_BYTES = 0.5 * 2**30
"""Estimate of the interpreter and libraries of a process without a GPU."""


class DeviceMemory(NamedTuple):
    """Bytes on the most loaded worker, by use."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    working_bytes: float
    reserved_bytes: float

    @property
    def total_bytes(self) -> float:
        """Sum of all uses."""
        return ordered_sum(self)


def layer_activation_bytes(shape: Shape, config: ParallelConfig, scores: bool) -> float:
    """Return the bytes of activations that one layer keeps for one micro-batch, on one worker.

    Korthikanti et al., table 2: s b h (10 + 24 / t + 5 a s / h t) with tensor parallelism alone; the 10 is divided by t
    too with sequence parallelism; the last term is absent with selective recomputation or fused attention; and only the
    input, 2 s b h, with full recomputation (whole on every tensor rank unless sequence parallel).
    """
    s, h, t = shape.sequence_length, shape.hidden, config.tensor
    unit = float(s) * config.micro_batch * h
    sequence = t if config.sequence_parallel else 1
    if config.recompute == "full":
        return 2.0 * unit / sequence
    core = 5.0 * shape.heads * s / h if config.recompute == "none" and scores else 0.0
    return unit * (10.0 / sequence + (24.0 + core) / t)


def device_memory(
    shape: Shape,
    global_batch: int,
    config: ParallelConfig,
    counts: tuple[int, ...],
    hardware: Hardware,
    constants: Calibration,
) -> DeviceMemory:
    """Return the memory of the most loaded worker; ``counts``: the layers of each stage.

    The first stage keeps activations of min(p, m) micro-batches, and (1 + (p - 1) / p v) times as many when interleaved
    (Korthikanti et al., section 4.2.3).
    """
    t, p, v, d = config.tensor, config.pipeline, config.interleave, config.data
    s, h, b = shape.sequence_length, shape.hidden, config.micro_batch
    parameters = heaviest_parameters(shape, config, counts)
    m = config.micro_batches(global_batch)
    sequence = t if config.sequence_parallel else 1
    unit = float(s) * b * h
    kept = layer_activation_bytes(shape, config, constants.attention_scores)
    # Stage i of p keeps p - i micro-batches, so with uneven counts a later stage may need more.
    heaviest = 0.0
    for stage, count in enumerate(counts):
        flight = float(min(p - stage, m))
        if v > 1:
            flight = min(p * (1.0 + (p - 1.0 - 2.0 * stage) / (p * v)), float(m))
        stored = flight * count * kept
        if stage == 0:
            stored += flight * unit / sequence  # Dropout mask of the embedding.
        heaviest = max(heaviest, stored)
    # Activations of one layer while it is recomputed; its gradient buffers otherwise.
    working = 4.0 * unit / sequence + 8.0 * unit / t
    if config.recompute != "none":
        again = config._replace(recompute="none")
        working += layer_activation_bytes(shape, again, constants.attention_scores) - kept
    # Logits in 16 bits, their fp32 copy and its gradient: alive while the last stage has one micro-batch.
    logits = 10.0 * s * b * shape.vocabulary / t
    last = counts[-1] * kept * (v if v > 1 else 1) * (1 if p > 1 else 0) / max(v, 1)
    if p == 1:
        heaviest += logits + 4.0 * unit / sequence
    else:
        heaviest = max(heaviest, last + logits)
    shards = d if config.distributed_optimizer else 1
    gpu = hardware.multiprocessors > 1
    return DeviceMemory(
        2.0 * parameters,
        4.0 * parameters,
        SHARDED_BYTES * parameters / shards,
        heaviest,
        working,
        RESERVED_BYTES if gpu else CPU_RESERVED_BYTES,
    )
