"""The constants that are fitted and not read from a data sheet. ``calibration.json`` has their values.

``benchmarks/calibrate_throughput.py`` fits them and writes that file. They describe a software stack on hardware of
known data-sheet numbers, not single measurements.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Calibration(NamedTuple):
    """Fitted constants and facts of one training stack.

    matmul_fraction: share of the sustained matrix rate that a long chain of large products keeps inside training.
    inner_half: inner dimension at which a tile reaches half of its rate (filling and draining its pipeline).
    unaligned_fraction: share of the rate left where a dimension is odd (rows not aligned to 4 bytes).
    memory_fraction: share of the data-sheet memory bandwidth that element-wise kernels reach.
    kernel_s: time of a kernel beyond its bytes or products: the gap before it, its ramp and its drain.
    host_layer_s: time the host needs to launch one layer's forward pass; a backward pass takes twice that.
    host_spread: share of the shorter of launching and running that a tensor group loses, per doubling of its size.
    cross_entropy_bytes: bytes moved per logit, forward and backward. Counted for Megatron-LM of 2021, in fp32: cast 6,
        maximum 4, subtraction 8, exponential 8, sum 4, division 8; backward product 8, cast 6.
    optimizer_bytes: bytes moved per parameter. Counted for the fused Adam: gradient, weight and two moments read, the
        latter three written, in fp32.
    gradient_bytes: bytes per gradient element in the data-parallel reduction.
    attention_scores: whether the s x s scores go through memory (unfused attention).
    collective_s: fixed time of a collective.
    intra_fraction, inter_fraction: share of the link bandwidth that large collectives reach.
    tensor_overlap: share of tensor-parallel communication hidden behind products.
    pipeline_overlap: share of the interleaved schedule's transfers hidden behind compute.
    data_overlap: share of the data-parallel reduction that the last backward pass may hide.
    """

    matmul_fraction: float
    inner_half: float
    unaligned_fraction: float
    memory_fraction: float
    kernel_s: float
    host_layer_s: float
    host_spread: float
    cross_entropy_bytes: float
    optimizer_bytes: float
    gradient_bytes: float
    attention_scores: bool
    collective_s: float
    intra_fraction: float
    inter_fraction: float
    tensor_overlap: float
    pipeline_overlap: float
    data_overlap: float


@cache
def stack(name: str) -> Calibration:
    """Return the constants of a training stack. With a ``base``, a stack states only the differences from it."""
    text = files(__package__).joinpath("calibration.json").read_text(encoding="utf-8")
    stacks = json.loads(text)
    values = dict(stacks[name])
    while "base" in values:
        base = values.pop("base")
        values = {**stacks[base], **values}
    return Calibration(**values)
