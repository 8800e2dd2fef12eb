"""Time of one update in one layout, broken down."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shared.planning.performance.calibration import Calibration
from shared.planning.performance.collectives import Group, all_reduce_s, half_s, point_to_point_s
from shared.planning.performance.gpt import Shape, layer_parameters, position_parameters, word_parameters
from shared.planning.performance.hardware import Hardware
from shared.planning.performance.layer import Cost, embedding_cost, layer_cost, logits_cost
from shared.planning.performance.layout import Layout
from shared.planning.performance.sums import total


class Breakdown(NamedTuple):
    """Seconds of one update on the most loaded worker; they add up to the iteration time."""

    compute_s: float
    recompute_s: float
    tensor_comm_s: float
    pipeline_comm_s: float
    bubble_s: float
    data_comm_s: float
    optimizer_s: float

    @property
    def iteration_s(self) -> float:
        """The iteration time."""
        return total(self)


class Pass(NamedTuple):
    """One micro-batch through the pipeline: what the slowest stage does with it, and what a ramp adds."""

    compute_s: float
    recompute_s: float
    tensor_comm_s: float
    pipeline_comm_s: float
    forward_s: float
    backward_s: float
    ramp_s: float

    @property
    def steady_s(self) -> float:
        """Seconds a micro-batch occupies the slowest stage."""
        return self.compute_s + self.recompute_s + self.tensor_comm_s + self.pipeline_comm_s


@lru_cache(maxsize=65536)
def stage_layers(layers: int, pipeline: int, interleave: int, first: float, last: float) -> tuple[int, ...]:
    """Layers of each stage. ``first``, ``last``: the embedding's and the logits' time in layers.

    Even where the stages divide the layers, as Megatron-LM does; otherwise each layer beyond a stage's first goes to
    the stage that is then the least loaded (the earliest of equals), which makes the slowest stage as fast as can be.
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


def stages(shape: Shape, layout: Layout, hardware: Hardware, constants: Calibration) -> tuple[int, ...]:
    """Layers of each stage of ``layout``."""
    if shape.layers % (layout.pipeline * layout.interleave) == 0:
        return (shape.layers // layout.pipeline,) * layout.pipeline
    layer, first, last = _costs(shape, layout, hardware, constants)
    one = layer.total_s
    return stage_layers(shape.layers, layout.pipeline, layout.interleave, first.total_s / one, last.total_s / one)


def _costs(shape: Shape, layout: Layout, hardware: Hardware, constants: Calibration) -> tuple[Cost, Cost, Cost]:
    t, b, sp = layout.tensor, layout.micro_batch, layout.sequence_parallel
    return (
        layer_cost(shape, t, b, layout.recompute, sp, hardware, constants),
        embedding_cost(shape, t, b, sp, hardware, constants),
        logits_cost(shape, t, b, sp, hardware, constants),
    )


def micro_batch_pass(
    shape: Shape,
    layout: Layout,
    counts: tuple[int, ...],
    inter_node: bool,
    hardware: Hardware,
    constants: Calibration,
) -> Pass:
    """One micro-batch through the pipeline of ``layout``, whose stages have ``counts`` layers.

    1F1B: Narayanan et al., SC'21, section 2.2: every stage once for the ramp and (m - 1) times the slowest. The
    interleaved schedule shortens the ramp by ``interleave`` and sends that many times as often.
    """
    layer, first, last = _costs(shape, layout, hardware, constants)
    p = layout.pipeline
    hop = 0.0
    if p > 1:
        size = 2.0 * shape.sequence_length * layout.micro_batch * shape.hidden / layout.tensor
        # Scatter-gather (SC'21, section 4.1): each tensor rank sends its part, the receiver gathers inside the node.
        hop = point_to_point_s(size, inter_node, hardware, constants)
        if not layout.sequence_parallel:
            hop += half_s(size * layout.tensor, Group(layout.tensor, 1), hardware, constants)
    one = layer.total_s
    times = [count * one for count in counts]
    times[0] += first.total_s
    times[-1] += last.total_s
    slowest = max(times)
    stage = times.index(slowest)
    parts = [(layer, counts[stage])]
    parts += [(first, 1)] if stage == 0 else []
    parts += [(last, 1)] if stage == p - 1 else []
    compute = total((c.forward_s + c.backward_s) * n for c, n in parts)
    forward = total(c.forward_s * n for c, n in parts)
    backward = total(c.backward_s * n for c, n in parts)
    again = total(c.recompute_s * n for c, n in parts)
    comm = total(c.tensor_comm_s * n for c, n in parts)
    v = layout.interleave
    exposed = 1.0 - (constants.pipeline_overlap if v > 1 else 0.0)
    steady = 2.0 * v * hop * exposed
    ramp = (total(times) - slowest) / v + 2.0 * (p - 1) * hop
    return Pass(compute, again, comm, steady, forward, backward, ramp)


def heaviest_parameters(shape: Shape, layout: Layout, counts: tuple[int, ...]) -> float:
    """Parameters on a worker of the stage that holds most of them."""
    one = layer_parameters(shape, layout.tensor)
    words = word_parameters(shape, layout.tensor)
    first = counts[0] * one + words + position_parameters(shape)
    last = counts[-1] * one + 2.0 * shape.hidden + (words if layout.pipeline > 1 else 0.0)
    if layout.pipeline == 1:
        return first + 2.0 * shape.hidden
    return max(first, last, max(counts) * one)


def update_s(
    shape: Shape,
    layout: Layout,
    parameters: float,
    one: Pass,
    micro_batches: int,
    hardware: Hardware,
    constants: Calibration,
) -> tuple[float, float]:
    """Seconds of gradient reduction that nothing hides, and of the optimizer step, for the heaviest worker."""
    t, d = layout.tensor, layout.data
    group = Group(d, t)
    size = constants.gradient_bytes * parameters
    ahead, back = _overlap_windows_s(one, layout, micro_batches)
    if layout.distributed_optimizer:
        # Reduce-scatter of gradients, all-gather of 16-bit parameters (Rajbhandari et al., ZeRO-1).
        comm = _exposed_s(half_s(size, group, hardware, constants), back, constants)
        comm += _exposed_s(half_s(2.0 * parameters, group, hardware, constants), ahead, constants)
    else:
        comm = _exposed_s(all_reduce_s(size, group, hardware, constants), back, constants)
    if layout.pipeline > 1:
        # First and last stage hold the same word embedding and add its gradients (Megatron-LM).
        tied = Group(2, t * d * (layout.pipeline - 1))
        comm += all_reduce_s(constants.gradient_bytes * word_parameters(shape, t), tied, hardware, constants)
    owned = parameters / d if layout.distributed_optimizer else parameters
    return comm, constants.optimizer_bytes * owned / (hardware.memory_bytes_per_s * constants.memory_fraction)


def _overlap_windows_s(one: Pass, layout: Layout, micro_batches: int) -> tuple[float, float]:
    """Seconds of forward compute that may hide the parameters' all-gather, of backward the gradients' reduction.

    Without interleaving gradients are final only in the last micro-batch's backward. With it the last p micro-batches
    pass through one chunk after the other, so the first chunk's gradients are final while v - 1 chunks still have up
    to p micro-batches to go; mirrored for the parameters that the next forward needs.
    """
    v = layout.interleave
    passes = 1.0 + (min(layout.pipeline, micro_batches) - 1) * (v - 1) / v
    return passes * one.forward_s, passes * one.backward_s


def _exposed_s(comm_s: float, window_s: float, constants: Calibration) -> float:
    return comm_s - min(constants.data_overlap * comm_s, window_s)


def compose(one: Pass, micro_batches: int, data_comm_s: float, optimizer_s: float) -> Breakdown:
    """Put an update together: ``micro_batches`` through the pipeline, then the gradients and the optimizer."""
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


def iteration(shape: Shape, global_batch: int, layout: Layout, hardware: Hardware, constants: Calibration) -> Breakdown:
    """Time of one update of ``global_batch`` sequences, broken down; the most loaded replica counts."""
    counts = stages(shape, layout, hardware, constants)
    inter_node = layout.workers > hardware.workers_per_node
    one = micro_batch_pass(shape, layout, counts, inter_node, hardware, constants)
    parameters = heaviest_parameters(shape, layout, counts)
    n = layout.micro_batches(global_batch)
    comm, step = update_s(shape, layout, parameters, one, n, hardware, constants)
    return compose(one, n, comm, step)
