"""Whether a node computes and remembers correctly: checks in a process of its own, forked by ``unicron.forkserver``.

The process prints one line of JSON: a list of checks, each with its name, whether it passed, the measured value, the
bound, the unit and a detail. ``services/agent/cluster/self_test.py`` reads it. The load is bounded: one thread at the
lowest priority, ``COMPUTE_S`` of computing for each device and the processor, and ``memory_bytes`` of memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any

COMPUTE_S = 0.3
"""How long products are computed, in all, on the processor and on each device: some hundred of them."""

MEMORY_S = 3.0
"""Longest time for the test of memory: 256 MiB take one second on a core of the slowest machine that was measured."""

SIDE = 256
"""Rows and columns of the matrices. Their entries are integers of magnitude 8 at most, so each sum of products stays
below 2^15: exact in fp32, and in TF32's products, in whatever order it is added. One digest holds on every machine."""

DIGEST = "279ad0dbff4550d57c86eff5c523fce33320d3c0fddb8f379583b675b76770c7"
"""SHA-256 of the product as little-endian fp32, which the same product in 64-bit integers confirms (tests)."""

PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
"""Number of bytes that are written and read back: each bit is once set and once not, and neighbours differ."""

NICE = 19
"""The lowest priority: ranks that train on the node come first."""


def run(request: dict[str, Any]) -> int:
    """Do the checks that a request asks for, and print them; return the exit code 0, also where one fails.

    Args:
        request: ``memory_bytes``: how much memory is tested, in bytes, of the host and of each device. ``devices``:
            whether CUDA devices are tested, which takes a context on each.
    """
    os.nice(NICE)
    import torch

    torch.set_num_threads(1)
    size = max(1 << 20, int(request.get("memory_bytes") or 0))
    places = [torch.device("cpu")]
    if request.get("devices") and torch.cuda.is_available():
        places += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    checks: list[dict[str, Any]] = []
    for place in places:
        for name in ("compute", "memory"):
            suffix = "" if place.type == "cpu" else f" {place}"
            try:
                found = compute(place) if name == "compute" else memory(place, size)
                checks.append({"name": f"{name}{suffix}", **found})
            except (RuntimeError, MemoryError) as err:
                checks.append({"name": f"{name}{suffix}", "ok": False, "detail": f"{type(err).__name__}: {err}"[:200]})
    print(json.dumps(checks), flush=True)
    return 0


def matrices(device: Any) -> tuple[Any, Any]:
    """Return the two matrices, as fp32: entries of a linear congruential sequence, from -8 to 8."""
    import torch

    index = torch.arange(SIDE * SIDE, dtype=torch.int64)
    parts = [((index * 1103515245 + 12345 * seed) >> 7) % 17 - 8 for seed in (1, 2)]
    one, other = (part.reshape(SIDE, SIDE).to(device, torch.float32) for part in parts)
    return one, other


def digest(product: Any) -> str:
    """Return the SHA-256 of a matrix as little-endian fp32."""
    return hashlib.sha256(product.cpu().numpy().astype("<f4").tobytes()).hexdigest()


def compute(device: Any) -> dict[str, Any]:
    """Return whether a product is what it must be, bit by bit; each time it is computed for ``COMPUTE_S``."""
    import torch

    one, other = matrices(device)
    wrong = rounds = 0
    began = time.monotonic()
    first = one @ other
    if digest(first) != DIGEST:
        return {"ok": False, "value": 1.0, "bound": 0.0, "unit": "wrong products", "detail": "another digest"}
    while rounds == 0 or time.monotonic() - began < COMPUTE_S:
        wrong += int(not torch.equal(one @ other, first))
        rounds += 1
    detail = f"of {rounds} products of {SIDE} x {SIDE}"
    return {"ok": wrong == 0, "value": float(wrong), "bound": 0.0, "unit": "wrong products", "detail": detail}


def memory(device: Any, size: int) -> dict[str, Any]:
    """Return whether memory holds patterns, and the number of each word in the word, within ``MEMORY_S``."""
    import torch

    words = torch.empty(size // 8, dtype=torch.int64, device=device)
    numbers = torch.arange(words.numel(), dtype=torch.int64, device=device)
    bad, done, began = 0, 0, time.monotonic()
    for pattern in (*PATTERNS, None):
        if done and time.monotonic() - began > MEMORY_S:
            break
        expected = int.from_bytes(bytes([pattern]) * 8, "little", signed=True) if pattern is not None else None
        words.fill_(expected) if expected is not None else words.copy_(numbers)
        bad += int((words != (expected if expected is not None else numbers)).sum())
        done += 1
    detail = f"of {words.numel()} words, {done} of {len(PATTERNS) + 1} patterns"
    return {"ok": bad == 0, "value": float(bad), "bound": 0.0, "unit": "wrong words", "detail": detail}
