"""The order of the samples in an epoch that is appended to a task's order of samples. Pure.

The order is a permutation that is computed for one index at a time (a Feistel network on the least even number of bits,
walked until the result is in range: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It takes neither
memory nor time in advance, whatever the size of the data: a rank that enters a new epoch in the midst of training does
not stop.
"""

from __future__ import annotations

import hashlib

ROUNDS = 6
"""Number of rounds of the network. Four make it indistinguishable from a random permutation (Luby and Rackoff, 1988);
two more are added, since an epoch of few samples has rounds of few bits."""


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """Return the sample at a place of an epoch.

    Args:
        index: the place, from 0.
        size: samples in the epoch; more than ``index``.
        seed: the task's.
        epoch: its number among those that are appended, from 0.
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = index >> bits, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mixed(seed, epoch, number, right) & mask)
        index = left << bits | right
        if index < size:
            return index


def _mixed(*numbers: int) -> int:
    """Return 64 bits that depend on all of the numbers."""
    content = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
