"""A detector that is behind: it loses no node whose heartbeats it has not read, and finds real losses afterwards."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from datetime import UTC, datetime
from typing import Any, Self

import pytest

from services.detector.decide import decide
from shared.bus.connection import Bus
from shared.events.union import ErrorDetected, NodeJoined
from shared.log.journal import Journal
from shared.messages.limits_in_force import LIMITS, LimitsRequest
from shared.messages.signals import HEARTBEATS, SIGNALS, Heartbeat, RankFinished
from shared.settings.model import Settings
from tests.condition import until
from tests.detector.conftest import patient, watching
from tests.nats_server import OpenServer

NODES = 200
INTERVAL_S = 0.25
TIMEOUT_S = 1.5


class Fleet:
    """Nodes that beat over a connection of their own, in a thread: nothing that the detector does delays them.

    ``silent``: those that do not any more.
    """

    def __init__(self, nats: OpenServer) -> None:
        self._nats = nats
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._beat()))
        self.silent: set[str] = set()

    async def _beat(self) -> None:
        bus = await Bus.connect(self._nats.url, credential=self._nats.credential, name="fleet")
        for sequence in itertools.count(1):
            for number in range(NODES):
                if (name := f"n{number}") not in self.silent:
                    await bus.publish(HEARTBEATS, heartbeat(name, sequence), name)
            if await asyncio.to_thread(self._ended.wait, INTERVAL_S):
                break
        await bus.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def heartbeat(node: str, sequence: int) -> Heartbeat:
    return Heartbeat(
        node=node,
        incarnation=f"i-{node}",
        agent_pid=4,
        sequence=sequence,
        sent_at=datetime.now(UTC),
        interval_s=INTERVAL_S,
        workers=[],
    )


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How long the detector computes for each heartbeat, in seconds: as if there were so many more of them."""
    taking = {"s": 0.0, "heartbeats": 0.0}

    def slowly(state: Any, item: Any, *rest: Any) -> Any:
        if isinstance(item, Heartbeat):
            taking["heartbeats"] += 1
            time.sleep(taking["s"])
        return decide(state, item, *rest)

    monkeypatch.setattr("services.detector.main.decide", slowly)
    # Or else a round would be one block, in which no echo is heard, and nobody is judged for that reason alone.
    monkeypatch.setattr("services.detector.main._HEARTBEATS_A_TURN", 1)
    return taking


@pytest.mark.slow
async def test_a_detector_that_is_behind_loses_no_living_node_and_finds_a_lost_one_then(
    settings: Settings, nats: OpenServer, bus: Bus, journal: Journal, slow: dict[str, float]
) -> None:
    settings = settings.model_copy(update={"node_timeout_s": TIMEOUT_S, "heartbeat_interval_s": INTERVAL_S})
    async with watching(settings, bus, journal) as watch:
        with Fleet(nats) as fleet:
            await watch.until(lambda events: sum(isinstance(event, NodeJoined) for event in events) == NODES)
            # Each node's turn comes after 2.4 s, which is more than its time-out: ten times what can be read.
            slow["s"] = 2.4 / NODES
            before = slow["heartbeats"]
            await until(lambda: slow["heartbeats"] >= before + 3 * NODES, seen=lambda: slow)
            fleet.silent.add("n7")
            slow["s"] = 0.0
            events = await watch.until(lambda events: any(isinstance(event, ErrorDetected) for event in events))
    assert [event.node for event in events if isinstance(event, ErrorDetected)] == ["n7"]


async def test_a_repeat_of_a_signal_has_the_answer_to_the_first(
    settings: Settings, bus: Bus, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[Any] = []

    def noting(state: Any, item: Any, *rest: Any) -> Any:
        if isinstance(item, RankFinished):
            decided.append(item)
        return decide(state, item, *rest)

    behind = asyncio.Event()

    async def position_now() -> int:
        await behind.wait()
        return 0

    monkeypatch.setattr("services.detector.main.decide", noting)
    monkeypatch.setattr(journal, "position_now", position_now)
    signal = RankFinished(
        signal_id="s", node="n0", incarnation="i", occurred_at=datetime.now(UTC), task="gpt", worker="n0/0",
        generation=1, rank=0, step=1, samples_sha256="", parameters_path="/p", loss=None,
    )  # fmt: skip
    async with watching(patient(settings), bus, journal):
        asking = [asyncio.create_task(bus.call(SIGNALS, signal, "n0", timeout_s=40.0)) for _ in range(3)]
        # The answer to a later request, for which the detector does not read the log, shows that all three have come.
        await asyncio.create_task(bus.call(LIMITS, LimitsRequest(nodes=[]), timeout_s=40.0))
        behind.set()
        first, given_up, newest = asking
        assert (await first, await newest) == (None, None)
        assert len(decided) == 1
        given_up.cancel()
        assert await bus.call(SIGNALS, signal, "n0", timeout_s=40.0) is None
        assert len(decided) == 2
