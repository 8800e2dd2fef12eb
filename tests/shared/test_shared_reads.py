"""Reads that are shared: no answer is older than its question, and no read is made for each who asks."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import Unavailable
from shared.service.shared_reads import SharedRead


class Source:
    """Something that is read. ``began``: reads that have begun; ``gate``: what they wait for."""

    def __init__(self) -> None:
        self.began, self.gate, self.error = 0, asyncio.Event(), False
        self.shared = SharedRead[int]()

    async def read(self) -> int:
        self.began += 1
        number = self.began
        await self.gate.wait()
        if self.error:
            raise Unavailable("away")
        return number

    async def asking(self, number: int) -> list[asyncio.Task[int]]:
        """Have so many ask."""
        before = self.began
        tasks = [asyncio.create_task(self.shared.value(self.read)) for _ in range(number)]
        for _ in range(5):  # turns of the event loop
            await asyncio.sleep(0)
        assert self.began <= before + 1
        return tasks


async def test_who_asks_during_a_read_shares_the_next() -> None:
    source = Source()
    first = await source.asking(3)
    others = await source.asking(50)
    assert source.began == 1
    source.gate.set()
    assert await asyncio.gather(*first) == [1] * 3
    assert await asyncio.gather(*others) == [2] * 50
    assert await source.shared.value(source.read) == 3


async def test_an_error_is_raised_for_all_who_share_the_read_and_the_next_is_made() -> None:
    source = Source()
    first = await source.asking(2)
    source.error = True
    source.gate.set()
    for asked in first:
        with pytest.raises(Unavailable):
            await asked
    source.error = False
    assert await source.shared.value(source.read) == 2


async def test_one_who_waits_no_more_ends_nobody_elses_read() -> None:
    source = Source()
    first, second = await source.asking(2)
    first.cancel()
    source.gate.set()
    assert await second == 1
