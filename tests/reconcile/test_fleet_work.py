"""What one event costs the cores of the services in a large fleet: counts, on ``benchmarks.fleet.cores``."""

from __future__ import annotations

from benchmarks.fleet.cores import STEP_S, Cores
from services.detector.decide import decide as detect
from services.detector.decisions.inputs import Echo, Tick
from shared.events.union import ErrorDetected, PlanDecided, parsed
from shared.messages.signals import HEARTBEATS, ProcessExited, StepReport
from shared.service.core import Append
from tests.counted_work import instructions


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


def test_a_tick_asks_little_of_each_node_that_was_heard_and_is_calm() -> None:
    """Ticks are ten in a second, and look at thousands of nodes."""

    def work(nodes: int) -> int:
        cores = training(nodes, 8)

        def tick() -> object:
            return detect(cores.detector.state, Tick(), cores.now, cores.detector_limits)

        detect(cores.detector.state, Echo(), cores.now, cores.detector_limits)
        tick()  # what was heard since the one before is summed up
        return instructions(tick)

    assert work(40) - work(20) < 20 * 120


def test_a_heartbeat_of_this_version_is_read_without_a_call_for_each_field() -> None:
    cores = training(4, 8)
    cores.pass_time(2 * STEP_S)
    heartbeat = cores.detector.state.nodes[cores.names[2]].heartbeat
    assert heartbeat is not None
    data = HEARTBEATS.request.encode(heartbeat)
    steps = sum(len(status.steps) for status in heartbeat.workers)
    made = instructions(lambda: [StepReport(*step) for status in heartbeat.workers for step in status.steps])
    assert steps == 16
    assert instructions(lambda: HEARTBEATS.request.decode(data)) < 2 * made


def test_the_stages_of_plans_share_their_members() -> None:
    """Thousands of new objects for each plan, in each service, would also be work for the garbage collector."""
    cores = training(4, 8)
    cores.exit_rank()
    (plan,) = [r.event for r in cores.log if isinstance(r.event, PlanDecided) and r.event.incident is not None]
    read = parsed(plan.type, plan.canonical())
    assert isinstance(read, PlanDecided)
    (change,), (again,) = plan.changes, read.changes
    assert change.interrupted is not None
    assert change.target is not None
    assert again.target is not None
    kept = [same for same in zip(change.interrupted.members, change.target.members, strict=False) if same[0] == same[1]]
    assert kept
    assert all(one is other for one, other in kept)
    assert all(one is other for one, other in zip(change.target.members, again.target.members, strict=True))
