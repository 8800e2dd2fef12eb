"""Time of one micro-batch in one layer, in the embedding and in the logits, on one worker.

Matrix products count by their shape, all other kernels by the bytes they move; both are limited by the host that
launches them. Tensor-parallel collectives are added. The kernels are those of Megatron-LM's GPT layer.

The time of a matrix product follows from its shape. The product is cut into tiles, the tiles are distributed to the
multiprocessors in waves, and a last wave that is not full costs as much as a full one (NVIDIA, "Matrix Multiplication
Background User's Guide", tile and wave quantisation). The rate of a tile saturates with the inner dimension, which
fills the pipeline of the tile. The library has tiles of many sizes and several splits of the inner dimension, and
chooses well among them. In the model, the fastest split of the smallest tile at the full rate represents all of them,
because a rate that falls with smaller tiles went to the lower edge of its range in the fit. The product is never faster
than memory allows (roofline: Williams et al., CACM 2009).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shared.planning.performance.calibration import Calibration
from shared.planning.performance.collectives import Group, all_reduce_s, half_s
from shared.planning.performance.gpt import Shape
from shared.planning.performance.hardware import Hardware
from shared.planning.performance.parallel_config import Recompute

# Bytes per element of an s x b x h tensor moved by 16-bit kernels with one-byte dropout masks, forward and backward.
# Two layer norms (2 + 2; 10 with both parameter gradients) and two bias-dropout-residual kernels (2 + 2 + 2 + mask 1;
# 2 + mask 1 + 2, and 6 to add the residual's gradient): whole on every worker unless sequence parallel.
NORM_FORWARD, NORM_BACKWARD = 22.0, 42.0
# The context's transposition (4; 8), the concatenation of the query, key and value gradients (12) and bias gradients
# (6); bias and GELU over 4 h (16; 24, bias gradient 8): always split by tensor parallelism.
SPLIT_FORWARD, SPLIT_BACKWARD = 20.0, 58.0
# Per element of the a x s x s scores: masked softmax (2 + 2; 2 + 2 + 2) and dropout (2 + 2 + mask 1; 2 + mask 1 + 2).
SCORE_FORWARD, SCORE_BACKWARD = 9.0, 11.0
# Embedding: gather, add positions, dropout; backward scatters into a whole gradient.
EMBEDDING_FORWARD, EMBEDDING_BACKWARD = 15.0, 15.0
KERNELS_FORWARD, KERNELS_BACKWARD = 25, 60
"""Kernels besides products in one layer."""

KERNELS_EMBEDDING, KERNELS_LOGITS = 5, 15
"""Kernels in the embedding and in the logits with the cross-entropy, in each direction."""

FUSED_ATTENTION_RATE = 0.6
"""Fused attention reaches about this share of large products' rate (Dao, FlashAttention-2, 2023, and -3, 2024)."""


TILE = 64
"""Side of the tile, in elements: the smallest of the vendor's 16-bit kernels."""

SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which the inner dimension is split over multiprocessors where there are too few tiles."""

MIN_PART = 256
"""Inner dimension below which a further split does not help, because it hardly fills the pipeline of a tile."""

ELEMENT_BYTES = 2
"""Bytes of an element in fp16 and bf16."""

ALIGNMENT = 2
"""Elements. Rows that start at odd multiples of 2 bytes exclude the wide loads (same guide)."""


@lru_cache(maxsize=65536)
def product_s(m: int, n: int, k: int, batch: int, hardware: Hardware, constants: Calibration) -> float:
    """Return the seconds of ``batch`` products (m x k) (k x n), each result written once."""
    units = hardware.multiprocessors
    side = TILE if units > 1 else 1
    tiles = -(-m // side) * -(-n // side) * batch
    best = float("inf")
    for split in SPLITS:
        part = k / split
        waves = -(-tiles * split // units)
        # Work of the busiest multiprocessor: its tiles, each with its share of k and the fill of its pipeline.
        best = min(best, waves * side * side * (part + constants.inner_half))
        if tiles * split >= 2 * units or part < MIN_PART:
            break
    flop_per_s = hardware.peak_flop_per_s * hardware.sustained_fraction * constants.matmul_fraction / units
    if m % ALIGNMENT or n % ALIGNMENT or k % ALIGNMENT:
        flop_per_s *= constants.unaligned_fraction
    moved = ELEMENT_BYTES * batch * (m * k + k * n + m * n)
    memory_s = moved / (hardware.memory_bytes_per_s * constants.memory_fraction)
    return max(2.0 * best / flop_per_s, memory_s) + constants.kernel_s


def linear_s(tokens: int, inputs: int, outputs: int, hardware: Hardware, constants: Calibration) -> tuple[float, float]:
    """Return the seconds of a linear layer's forward product, and of its two backward products (inputs and weights)."""
    forward = product_s(tokens, outputs, inputs, 1, hardware, constants)
    data = product_s(tokens, inputs, outputs, 1, hardware, constants)
    weight = product_s(inputs, outputs, tokens, 1, hardware, constants)
    return forward, data + weight


class Cost(NamedTuple):
    """Seconds of one micro-batch. ``recompute_s``: compute that is repeated for the backward pass."""

    forward_s: float
    backward_s: float
    recompute_s: float
    tensor_comm_s: float

    @property
    def total_s(self) -> float:
        """Sum of all parts."""
        return self.forward_s + self.backward_s + self.recompute_s + self.tensor_comm_s


@lru_cache(maxsize=65536)
def layer_cost(
    shape: Shape,
    tensor: int,
    micro_batch: int,
    recompute: Recompute,
    sequence_parallel: bool,
    hardware: Hardware,
    constants: Calibration,
) -> Cost:
    """Return the cost of one layer for one micro-batch."""
    s, h, t = shape.sequence_length, shape.hidden, tensor
    tokens = s * micro_batch
    forward, backward = _linears(shape, t, tokens, hardware, constants)
    core_forward, core_backward = _attention(shape, t, micro_batch, hardware, constants)
    rate = hardware.memory_bytes_per_s * constants.memory_fraction
    elements = float(tokens) * h
    norm = elements / t if sequence_parallel else elements
    forward += (NORM_FORWARD * norm + SPLIT_FORWARD * elements / t) / rate + KERNELS_FORWARD * constants.kernel_s
    backward += (NORM_BACKWARD * norm + SPLIT_BACKWARD * elements / t) / rate + KERNELS_BACKWARD * constants.kernel_s
    forward += core_forward
    backward += core_backward
    # Fused attention already recomputes its scores in its backward kernel.
    selective = recompute == "selective" and constants.attention_scores
    one = _collective_pair_s(t, elements, sequence_parallel, hardware, constants)
    spread = constants.host_spread * (t.bit_length() - 1)
    host = constants.host_layer_s
    ahead, ahead_comm = _launched(forward, 2.0 * one, host, spread)
    back, back_comm = _launched(backward, 2.0 * one, 2.0 * host, spread)
    again, again_comm = core_forward if selective else 0.0, 0.0
    if recompute == "full":
        again, again_comm = ahead, ahead_comm
    return Cost(ahead, back, again, ahead_comm + back_comm + again_comm)


def _launched(device_s: float, comm_s: float, host_s: float, spread: float) -> tuple[float, float]:
    """Return the seconds of kernels and of the collectives among them, with the launches by the host.

    The host runs ahead of the device, so the longer of both counts. Collectives make the workers of a tensor group wait
    for each other, which loses the share ``spread`` of the shorter: a delay on either side of any worker delays all.
    """
    alone = max(device_s, host_s) + spread * min(device_s, host_s)
    device_s += comm_s
    return alone, max(device_s, host_s) + spread * min(device_s, host_s) - alone


def _linears(shape: Shape, tensor: int, tokens: int, hardware: Hardware, constants: Calibration) -> tuple[float, float]:
    """Return the forward and backward seconds of the four linear layers."""
    h, t = shape.hidden, tensor
    forward = backward = 0.0
    for inputs, outputs in ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h)):
        ahead, back = linear_s(tokens, inputs, outputs, hardware, constants)
        forward += ahead
        backward += back
    return forward, backward


def _attention(
    shape: Shape, tensor: int, micro_batch: int, hardware: Hardware, constants: Calibration
) -> tuple[float, float]:
    """Return the forward and backward seconds of the attention core: scores, softmax, dropout, context."""
    s, heads = shape.sequence_length, shape.heads // tensor
    width = shape.hidden // shape.heads
    batch = heads * micro_batch
    if constants.attention_scores:
        scores = product_s(s, s, width, batch, hardware, constants)
        context = product_s(s, width, s, batch, hardware, constants)
        moved = float(batch) * s * s / (hardware.memory_bytes_per_s * constants.memory_fraction)
        forward = scores + context + SCORE_FORWARD * moved + 2 * constants.kernel_s
        return forward, 2.0 * (scores + context) + SCORE_BACKWARD * moved + 2 * constants.kernel_s
    # Causal: the upper triangle is skipped. Backward: five products for the forward's two.
    flop = 4.0 * batch * s * s * width / 2.0
    rate = FUSED_ATTENTION_RATE * hardware.peak_flop_per_s * hardware.sustained_fraction * constants.matmul_fraction
    return flop / rate + constants.kernel_s, 2.5 * flop / rate + 2 * constants.kernel_s


def _collective_pair_s(
    tensor: int, elements: float, sequence_parallel: bool, hardware: Hardware, constants: Calibration
) -> float:
    """Return the seconds of one of a layer's all-reduces: two forward, two backward (Shoeybi et al., 2019).

    With sequence parallelism each is a reduce-scatter and an all-gather (Korthikanti et al., section 4.2.2).
    """
    if tensor == 1:
        return 0.0
    group = Group(tensor, 1)
    if sequence_parallel:
        one = 2.0 * half_s(2.0 * elements, group, hardware, constants)
    else:
        one = all_reduce_s(2.0 * elements, group, hardware, constants)
    return one * (1.0 - constants.tensor_overlap)


@lru_cache(maxsize=65536)
def embedding_cost(
    shape: Shape, tensor: int, micro_batch: int, sequence_parallel: bool, hardware: Hardware, constants: Calibration
) -> Cost:
    """Return the cost of the embedding for one micro-batch: gather, dropout, all-reduce over the vocabulary."""
    elements = float(shape.sequence_length) * micro_batch * shape.hidden
    rate = hardware.memory_bytes_per_s * constants.memory_fraction
    # The gradient of the whole table is written and added for every micro-batch.
    table = 6.0 * shape.vocabulary * shape.hidden / tensor
    collective = half_s if sequence_parallel else all_reduce_s
    comm = collective(2.0 * elements, Group(tensor, 1), hardware, constants)
    launches = KERNELS_EMBEDDING * constants.kernel_s
    forward = EMBEDDING_FORWARD * elements / rate + launches
    return Cost(forward, (EMBEDDING_BACKWARD * elements + table) / rate + launches, 0.0, comm)


@lru_cache(maxsize=65536)
def logits_cost(
    shape: Shape, tensor: int, micro_batch: int, sequence_parallel: bool, hardware: Hardware, constants: Calibration
) -> Cost:
    """Return the cost of the last norm, the logits and the cross-entropy for one micro-batch."""
    tokens = shape.sequence_length * micro_batch
    vocabulary = -(-shape.vocabulary // tensor)
    forward, backward = linear_s(tokens, shape.hidden, vocabulary, hardware, constants)
    entropy = constants.cross_entropy_bytes * tokens * vocabulary
    entropy /= hardware.memory_bytes_per_s * constants.memory_fraction
    comm = 0.0
    if tensor > 1:
        group = Group(tensor, 1)
        # The input's gradient, and three small all-reduces of maximum, sum and target.
        comm = all_reduce_s(2.0 * tokens * shape.hidden, group, hardware, constants)
        comm += 3.0 * all_reduce_s(4.0 * tokens, group, hardware, constants)
    # Three quarters of the cross-entropy's traffic are in its forward pass; the host launches half a layer's kernels.
    forward += 0.75 * entropy + KERNELS_LOGITS * constants.kernel_s
    backward += 0.25 * entropy + KERNELS_LOGITS * constants.kernel_s
    host = constants.host_layer_s / 2.0
    return Cost(max(forward, host), max(backward, 2.0 * host), 0.0, comm)
