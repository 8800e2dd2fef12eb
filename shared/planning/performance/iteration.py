"""Time of one update in one parallelism configuration, by parts."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shared.planning.performance.calibration import Calibration
from shared.planning.performance.collectives import Group, all_reduce_s, half_s, point_to_point_s
from shared.planning.performance.gpt import Shape, layer_parameters, position_parameters, word_parameters
from shared.planning.performance.hardware import Hardware
from shared.planning.performance.layer import Cost, embedding_cost, layer_cost, logits_cost
from shared.planning.performance.ordered_sum import ordered_sum
from shared.planning.performance.parallel_config import ParallelConfig


class Breakdown(NamedTuple):
    """Seconds of one update on the most loaded worker, by part. The parts add up to the iteration time."""

    compute_s: float
    recompute_s: float
    tensor_comm_s: float
    pipeline_comm_s: float
    bubble_s: float
    data_comm_s: float
    optimizer_s: float

    @property
    def iteration_s(self) -> float:
        """Seconds of one update."""
        return ordered_sum(self)


class Pass(NamedTuple):
    """One micro-batch through the pipeline, seconds.

    ``compute_s`` to ``backward_s``: in the slowest stage. ``ramp_s``: added once per update, to fill and drain the
    pipeline.
    """

    compute_s: float
    recompute_s: float
    tensor_comm_s: float
    pipeline_comm_s: float
    forward_s: float
    backward_s: float
    ramp_s: float

    @property
    def steady_s(self) -> float:
        """Seconds that a micro-batch occupies the slowest stage."""
        return self.compute_s + self.recompute_s + self.tensor_comm_s + self.pipeline_comm_s


@lru_cache(maxsize=65536)
def stage_layers(layers: int, pipeline: int, interleave: int, first: float, last: float) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    The layers are spread evenly if the stages divide them, as in Megatron-LM. Otherwise each layer beyond the first of
    a stage goes to the stage that is then least loaded, the earliest of equals; this makes the slowest stage as fast as
    possible. ``first``, ``last``: the time of the embedding and of the logits, in layers.
    """
    if layers % (pipeline * interleave) == 0:
        return (layers // pipeline,) * pipeline
    counts = [1] * pipeline
    loads = [1.0] * pipeline
    loads[0] += first
    loads[-1] += last
    for _ in range(layers - pipeline):
        stage = min(range(pipeline), key=lambda i: (loads[i], i))
        counts[stage] += 1
        loads[stage] += 1.0
    return tuple(counts)


def stages(shape: Shape, config: ParallelConfig, hardware: Hardware, constants: Calibration) -> tuple[int, ...]:
    """Return the number of layers of each stage of the configuration."""
    if shape.layers % (config.pipeline * config.interleave) == 0:
        return (shape.layers // config.pipeline,) * config.pipeline
    layer, first, last = _costs(shape, config, hardware, constants)
    one = layer.total_s
    return stage_layers(shape.layers, config.pipeline, config.interleave, first.total_s / one, last.total_s / one)


def _costs(shape: Shape, config: ParallelConfig, hardware: Hardware, constants: Calibration) -> tuple[Cost, Cost, Cost]:
    """Return the costs of a layer, of the embedding, and of the logits."""
    t, b, sp = config.tensor, config.micro_batch, config.sequence_parallel
    return (
        layer_cost(shape, t, b, config.recompute, sp, hardware, constants),
        embedding_cost(shape, t, b, sp, hardware, constants),
        logits_cost(shape, t, b, sp, hardware, constants),
    )


def micro_batch_pass(
    shape: Shape,
    config: ParallelConfig,
    counts: tuple[int, ...],
    inter_node: bool,
    hardware: Hardware,
    constants: Calibration,
) -> Pass:
    """Return the times of one micro-batch in the pipeline; ``counts``: the layers of each stage.

    1F1B: Narayanan et al., SC'21, section 2.2: every stage once for the ramp, and (m - 1) times the slowest stage. The
    interleaved schedule shortens the ramp by the factor ``interleave`` and sends that many times as often.
    """
    layer, first, last = _costs(shape, config, hardware, constants)
    p = config.pipeline
    hop = 0.0
    if p > 1:
        size = 2.0 * shape.sequence_length * config.micro_batch * shape.hidden / config.tensor
        # Scatter-gather (SC'21, section 4.1): each tensor rank sends its part, the receiver gathers inside the node.
        hop = point_to_point_s(size, inter_node, hardware, constants)
        if not config.sequence_parallel:
            hop += half_s(size * config.tensor, Group(config.tensor, 1), hardware, constants)
    one = layer.total_s
    times = [count * one for count in counts]
    times[0] += first.total_s
    times[-1] += last.total_s
    slowest = max(times)
    stage = times.index(slowest)
    parts = [(layer, counts[stage])]
    parts += [(first, 1)] if stage == 0 else []
    parts += [(last, 1)] if stage == p - 1 else []
    compute = ordered_sum((c.forward_s + c.backward_s) * n for c, n in parts)
    forward = ordered_sum(c.forward_s * n for c, n in parts)
    backward = ordered_sum(c.backward_s * n for c, n in parts)
    again = ordered_sum(c.recompute_s * n for c, n in parts)
    comm = ordered_sum(c.tensor_comm_s * n for c, n in parts)
    v = config.interleave
    exposed = 1.0 - (constants.pipeline_overlap if v > 1 else 0.0)
    steady = 2.0 * v * hop * exposed
    ramp = (ordered_sum(times) - slowest) / v + 2.0 * (p - 1) * hop
    return Pass(compute, again, comm, steady, forward, backward, ramp)


def heaviest_parameters(shape: Shape, config: ParallelConfig, counts: tuple[int, ...]) -> float:
    """Return the parameters of a worker in the stage that has most of them."""
    one = layer_parameters(shape, config.tensor)
    words = word_parameters(shape, config.tensor)
    first = counts[0] * one + words + position_parameters(shape)
    last = counts[-1] * one + 2.0 * shape.hidden + (words if config.pipeline > 1 else 0.0)
    if config.pipeline == 1:
        return first + 2.0 * shape.hidden
    return max(first, last, max(counts) * one)


def update_s(
    shape: Shape,
    config: ParallelConfig,
    parameters: float,
    one: Pass,
    micro_batches: int,
    hardware: Hardware,
    constants: Calibration,
) -> tuple[float, float]:
    """Return the seconds of the exposed gradient reduction and of the optimizer step on the heaviest worker."""
    t, d = config.tensor, config.data
    group = Group(d, t)
    size = constants.gradient_bytes * parameters
    ahead, back = _overlap_windows_s(one, config, micro_batches) if config.overlap else (0.0, 0.0)
    if config.distributed_optimizer and not config.overlap:
        comm = all_reduce_s(size, group, hardware, constants) + half_s(2.0 * parameters, group, hardware, constants)
    elif config.distributed_optimizer:
        # Reduce-scatter of gradients, all-gather of 16-bit parameters (Rajbhandari et al., ZeRO-1).
        comm = _exposed_s(half_s(size, group, hardware, constants), back, constants)
        comm += _exposed_s(half_s(2.0 * parameters, group, hardware, constants), ahead, constants)
    else:
        comm = _exposed_s(all_reduce_s(size, group, hardware, constants), back, constants)
    if config.pipeline > 1:
        # First and last stage have the same word embedding and add its gradients (Megatron-LM).
        tied = Group(2, t * d * (config.pipeline - 1))
        comm += all_reduce_s(constants.gradient_bytes * word_parameters(shape, t), tied, hardware, constants)
    owned = parameters / d if config.distributed_optimizer else parameters
    return comm, constants.optimizer_bytes * owned / (hardware.memory_bytes_per_s * constants.memory_fraction)


def _overlap_windows_s(one: Pass, config: ParallelConfig, micro_batches: int) -> tuple[float, float]:
    """Return the compute that may hide data-parallel communication: forward and backward seconds.

    Forward compute may hide the all-gather of parameters, backward compute the reduction of gradients. Without
    interleaving, gradients are final only in the backward pass of the last micro-batch. With interleaving, the last p
    micro-batches pass through one chunk after the other, so the gradients of the first chunk are final while v - 1
    chunks still have up to p micro-batches to go. The same is true, mirrored, for the parameters of the next forward
    pass.
    """
    v = config.interleave
    passes = 1.0 + (min(config.pipeline, micro_batches) - 1) * (v - 1) / v
    return passes * one.forward_s, passes * one.backward_s


def _exposed_s(comm_s: float, window_s: float, constants: Calibration) -> float:
    """Return the seconds of communication that compute of ``window_s`` seconds does not hide."""
    return comm_s - min(constants.data_overlap * comm_s, window_s)


def compose(one: Pass, micro_batches: int, data_comm_s: float, optimizer_s: float) -> Breakdown:
    """Return the breakdown of an update: ``micro_batches`` through the pipeline, then gradients and optimizer."""
    n = micro_batches
    return Breakdown(
        one.compute_s * n,
        one.recompute_s * n,
        one.tensor_comm_s * n,
        one.pipeline_comm_s * n,
        one.ramp_s,
        data_comm_s,
        optimizer_s,
    )


def iteration(
    shape: Shape, global_batch: int, config: ParallelConfig, hardware: Hardware, constants: Calibration
) -> Breakdown:
    """Return the breakdown of one update of ``global_batch`` sequences. The most loaded replica determines it."""
    counts = stages(shape, config, hardware, constants)
    inter_node = config.workers > hardware.workers_per_node
    one = micro_batch_pass(shape, config, counts, inter_node, hardware, constants)
    parameters = heaviest_parameters(shape, config, counts)
    n = config.micro_batches(global_batch)
    comm, step = update_s(shape, config, parameters, one, n, hardware, constants)
    return compose(one, n, comm, step)
