"""Time of a matrix product by its shape.

The product is cut into tiles, the tiles are dealt to the multiprocessors in waves, and a last wave that is not full
costs as much as a full one (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantisation). A
tile's rate saturates with its sides (operand traffic) and with the inner dimension (pipeline fill). Of several tiles
and splits of the inner dimension the fastest counts, as the library's heuristics choose. Never faster than memory
allows (roofline: Williams et al., CACM 2009).
"""

from __future__ import annotations

from functools import lru_cache

from shared.planning.performance.calibration import Calibration
from shared.planning.performance.hardware import Hardware

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tile sizes of the vendor's 16-bit kernels."""

SPLITS = (1, 2, 4, 8)
"""Ways the inner dimension is split over multiprocessors where there are too few tiles."""

ELEMENT_BYTES = 2
"""fp16 and bf16."""

ALIGNMENT = 2
"""Elements; rows that start at odd multiples of 2 bytes keep operands out of the wide loads (same guide)."""


@lru_cache(maxsize=65536)
def product_s(m: int, n: int, k: int, batch: int, hardware: Hardware, constants: Calibration) -> float:
    """Seconds of ``batch`` products (m x k) (k x n), each result written once."""
    units = hardware.multiprocessors
    best = float("inf")
    half, inner = constants.tile_half, constants.inner_half
    reference = 128.0 * 256.0 / (128 + 256)
    for tile_m, tile_n in TILES if units > 1 else ((1, 1),):
        tiles = -(-m // tile_m) * -(-n // tile_n) * batch
        side = tile_m * tile_n / (tile_m + tile_n)
        rate = side / (side + half) * (reference + half) / reference if units > 1 else 1.0
        for split in SPLITS:
            part = k / split
            waves = -(-tiles * split // units)
            # Work of the busiest multiprocessor: its tiles, each with its share of k and the fill of its pipeline.
            work = waves * tile_m * tile_n * (part + inner) / rate
            if work < best:
                best = work
            if tiles * split >= 2 * units or part < 256:
                break
    flop_per_s = hardware.peak_flop_per_s * hardware.sustained_fraction * constants.matmul_fraction / units
    if m % ALIGNMENT or n % ALIGNMENT or k % ALIGNMENT:
        flop_per_s *= constants.unaligned_fraction
    moved = ELEMENT_BYTES * batch * (m * k + k * n + m * n)
    memory_s = moved / (hardware.memory_bytes_per_s * constants.memory_fraction)
    return max(2.0 * best / flop_per_s, memory_s) + constants.kernel_s


def linear_s(tokens: int, inputs: int, outputs: int, hardware: Hardware, constants: Calibration) -> tuple[float, float]:
    """Seconds of a linear layer's forward product and of its two backward products (input and weight gradients)."""
    forward = product_s(tokens, outputs, inputs, 1, hardware, constants)
    data = product_s(tokens, inputs, outputs, 1, hardware, constants)
    weight = product_s(inputs, outputs, tokens, 1, hardware, constants)
    return forward, data + weight
