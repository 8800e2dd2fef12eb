"""Time of a matrix product by its shape.

The product is cut into tiles, the tiles are distributed to the multiprocessors in waves, and a last wave that is not
full costs as much as a full one (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantisation).
The rate of a tile saturates with the inner dimension, which fills the pipeline of the tile. The library has tiles of
many sizes and several splits of the inner dimension, and chooses well among them. In the model, the fastest split of
the smallest tile at the full rate represents all of them, because a rate that falls with smaller tiles went to the
lower edge of its range in the fit. The product is never faster than memory allows (roofline: Williams et al., CACM
2009).
"""

from __future__ import annotations

from functools import lru_cache

from shared.planning.performance.calibration import Calibration
from shared.planning.performance.hardware import Hardware

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
