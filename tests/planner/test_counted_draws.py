"""Random numbers that every machine draws alike."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.planning.counted_draws import Draws, logarithm, mixed, seed_of, stratified


def test_the_mixing_is_that_of_splitmix64() -> None:
    gamma = 0x9E3779B97F4A7C15
    # The first outputs of Vigna's splitmix64.c for the seed 0.
    outputs = [mixed(n * gamma) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_draws_are_those_of_every_other_machine() -> None:
    draws = Draws(seed_of("e1"), 3)
    assert [draws.uniform().hex(), draws.exponential().hex()] == [
        "0x1.2e444cfac5623p-1",
        "0x1.bb6c2eb7f76fdp-1",
    ]


@given(st.floats(min_value=2.0**-60, max_value=2.0**60))
def test_the_logarithm_is_within_its_last_bits(value: float) -> None:
    assert logarithm(value) == pytest.approx(math.log(value), rel=4e-16, abs=2e-16)


def test_streams_differ_and_are_spread_as_they_should_be() -> None:
    number = 20_000
    streams = [Draws(7, i) for i in range(number)]
    uniform = [draws.uniform() for draws in streams]
    assert len(set(uniform)) == number
    assert all(0.0 < value < 1.0 for value in uniform)
    # Standard errors: 0.29 / sqrt(20000) = 0.002, and 1 / sqrt(20000) = 0.007.
    assert sum(uniform) / number == pytest.approx(0.5, abs=0.01)
    exponential = [draws.exponential() for draws in streams]
    assert sum(exponential) / number == pytest.approx(1.0, abs=0.035)
    assert sum(value > 2.0 for value in exponential) / number == pytest.approx(math.exp(-2.0), abs=0.012)


@given(st.integers(0, 2**64 - 1), st.integers(1, 64))
def test_stratified_draws_are_one_from_each_part(seed: int, number: int) -> None:
    drawn = stratified(seed, 0, number)
    parts = sorted(int(math.exp(-value) * number) for value in drawn)
    assert parts == list(range(number))
    assert stratified(seed, 0, number) == drawn
    assert number == 1 or stratified(seed, 1, number) != drawn
