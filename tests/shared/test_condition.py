"""The one wait of the tests: it returns the condition's value, and an error says what was waited for and seen last."""

from __future__ import annotations

import asyncio

import pytest

from tests.condition import until, until_blocking


async def test_a_wait_returns_what_its_condition_returns() -> None:
    values = iter([0, [], "", "there"])
    assert await until(lambda: next(values)) == "there"
    assert until_blocking(iter([None, 3]).__next__) == 3
    answers = iter([False, True])

    async def answered() -> bool:
        await asyncio.sleep(0)
        return next(answers)

    assert await until(answered) is True


async def test_the_error_says_what_was_waited_for_and_what_was_seen_last() -> None:
    found: list[int] = []
    with pytest.raises(AssertionError, match=r"waited 0\.01 s in vain for: .*len\(found\) > 2.*; seen last: False"):
        await until(lambda: len(found) > 2, limit_s=0.01)
    with pytest.raises(AssertionError, match=r"waited 0 s in vain for: three are found; seen last: \[\]"):
        until_blocking(lambda: len(found) > 2, "three are found", limit_s=0.0, seen=lambda: found)


async def test_a_condition_that_raises_ends_the_wait() -> None:
    with pytest.raises(ZeroDivisionError):
        await until(lambda: 1 / 0)
