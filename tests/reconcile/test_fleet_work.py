"""What one event costs the cores of the services in a large fleet: counts, on ``benchmarks.fleet.cores``."""

from __future__ import annotations

from benchmarks.fleet.cores import Cores
from services.detector.decide import decide as detect
from shared.events.union import ErrorDetected
from shared.messages.signals import ProcessExited
from shared.service.core import Append
from tests.counted_work import instructions

TICK_S = 0.1


def training(nodes: int, workers: int) -> Cores:
    """A fleet that trains one task, and of whose ranks each has been heard."""
    cores = Cores(nodes, workers)
    cores.pass_time(cores.interval_s)
    cores.submit()
    cores.pass_time(2 * cores.interval_s)
    return cores


def test_the_error_of_a_rank_that_ends_does_not_look_at_all_ranks() -> None:
    def work(workers: int) -> int:
        cores = training(10, workers)
        found = []
        signal = cores.exit_of(cores.names[3], 2)
        assert isinstance(signal, ProcessExited)
        count = instructions(
            lambda: found.extend(detect(cores.detector.state, signal, cores.now, cores.detector_limits)[1])
        )
        assert any(isinstance(e, ErrorDetected) for each in found if isinstance(each, Append) for e in each.events)
        return count

    assert work(64) < 1.2 * work(16)
