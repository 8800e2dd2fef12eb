"""Messages of every kind, mutated, repeated and in another order, to whoever subscribes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from shared.bus.connection import Bus
from shared.errors import Undecodable
from tests.fuzz.samples import Target
from tests.versions.kit import ill_formed

ANSWER_S = 60.0
"""Within this time every request is answered, also on a busy machine."""

LATER = 16
"""A message is sent again behind so many others."""


def readable(target: Target, data: bytes) -> bool:
    """Return whether a message can be read."""
    try:
        target.codec.decode(data)
    except Undecodable:
        return False
    return True


async def course(
    bus: Bus,
    targets: Sequence[Target],
    *,
    examples: int,
    seed: int,
    wanted: Callable[[Target, bytes], bool] = lambda target, data: True,
) -> Counter[str]:
    """Send so many messages to each target, each of them twice; return how many each has had.

    Args:
        bus: connected.
        targets: who gets messages.
        examples: for each.
        seed: another one, other messages.
        wanted: whether a message may be sent. One that can be read is carried out.
    """
    loop, sent = asyncio.get_running_loop(), Counter[str]()
    again: deque[tuple[Target, bytes]] = deque()

    async def send(target: Target, data: bytes) -> None:
        sent[target.subject] += 1
        if target.answers:
            assert await bus.request(target.subject, data, timeout_s=ANSWER_S)
        else:
            await bus.send(target.subject, data)

    def take(target: Target, data: bytes) -> None:
        if len(data) > bus.max_payload_bytes or not wanted(target, data):
            return
        again.append((target, data))
        due = [(target, data)] + ([again.popleft()] if len(again) > LATER else [])
        for one in due:
            asyncio.run_coroutine_threadsafe(send(*one), loop).result()

    def draw() -> None:
        strategy = st.sampled_from(targets).flatmap(
            lambda target: st.tuples(st.just(target), ill_formed(list(target.samples)) | st.just(b"x" * 1_000_000))
        )

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=examples * len(targets),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(strategy)
        def drawn(one: tuple[Target, bytes]) -> None:
            take(*one)

        drawn()

    await asyncio.to_thread(draw)
    return sent
