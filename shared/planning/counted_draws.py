"""Random numbers that every machine draws alike: a counter is mixed with integers, and logarithms are made by + - * /.

A draw is a function of a seed and two counters, so draws have no order, no state and no thread. The mixing is that of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17). IEEE 754
fixes every bit of the four operations, which it does not for a library's logarithm.
"""

from __future__ import annotations

import hashlib
from itertools import count
from math import frexp
from typing import Final

_MASK: Final = 2**64 - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
"""The increment of SplitMix64: 2**64 over the golden ratio, odd."""

_LN2: Final = 0.6931471805599453
"""The natural logarithm of 2, to float64."""

_TERMS: Final = 17
"""Terms of the series for the logarithm: with |z| <= 1/3 the next one is below 3**-35 / 35, less than 2**-60."""


def seed_of(text: str) -> int:
    """Return the seed that belongs to a text, 64 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def mixed(value: int) -> int:
    """Return 64 bits that differ in half of their bits for neighbouring values (the finaliser of SplitMix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Draws:
    """The draws of one stream, one after another."""

    def __init__(self, seed: int, stream: int) -> None:
        """``seed``, ``stream``: streams of one seed are as independent as those of different seeds."""
        self._start = mixed(seed + mixed((stream + 1) * _GAMMA))
        self._next = count(1)

    def uniform(self) -> float:
        """Return a number in (0, 1): the middle of one of 2**52 equal parts."""
        bits = mixed(self._start + next(self._next) * _GAMMA) >> 12
        return (bits + 0.5) / 2.0**52

    def exponential(self) -> float:
        """Return a draw of the exponential distribution of mean 1."""
        return -logarithm(self.uniform())


def stratified(seed: int, stream: int, number: int) -> list[float]:
    """Return as many draws of the exponential distribution of mean 1, one from each of equally likely parts of it.

    Their order is random (a column of a Latin hypercube: McKay, Beckman and Conover, Technometrics 21, 1979). A mean
    over them scatters less, and rare long times are in it as often as they should be.
    """
    draws = Draws(seed, stream)
    order = sorted((draws.uniform(), place) for place in range(number))
    return [-logarithm((place + draws.uniform()) / number) for _, place in order]


def logarithm(value: float) -> float:
    """Return the natural logarithm of a positive number, by + - * / alone.

    ``value`` = m 2**e with m in [1/2, 1), and ln m = 2 atanh(z) = 2 (z + z**3 / 3 + z**5 / 5 + ...) with
    z = (m - 1) / (m + 1).
    """
    mantissa, exponent = frexp(value)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = z * z, 0.0
    for term in range(_TERMS - 1, -1, -1):
        total = total * square + 1.0 / (2 * term + 1)
    return exponent * _LN2 + 2.0 * z * total
