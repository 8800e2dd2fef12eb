"""How late heartbeats come, and how long a node may be silent for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detector.nodes.silence_limits import SilenceLimit
from services.detector.state.arrivals import WARM_UP, WINDOW, Arrivals
from tests.detector.kit import LIMITS, Cluster, at
from tests.detector.world import TICK_S, World
from tests.examples import examples

INTERVAL_S = LIMITS.heartbeat_interval_s
TIMEOUT_S = LIMITS.node_timeout_s
FLOOR_S, BOUND_S = 0.8 * TIMEOUT_S, 2.0 * TIMEOUT_S

LATE = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=2 * WINDOW)


def arrivals(late_s: list[float], scale: float = 1.0) -> Arrivals:
    found = Arrivals()
    for seconds in late_s:
        found.note((INTERVAL_S + seconds) * scale, INTERVAL_S * scale)
    return found


@settings(deadline=None, derandomize=True)
@given(LATE, st.lists(st.floats(0.0, 20.0), min_size=2, max_size=20))
def test_suspicion_never_falls_while_a_node_is_silent(late_s: list[float], silences: list[float]) -> None:
    known = arrivals(late_s)
    degrees = [known.phi(silence_s) for silence_s in sorted(silences)]
    assert degrees == sorted(degrees)
    assert known.phi(INTERVAL_S) == 0.0


@settings(deadline=None, derandomize=True)
@given(LATE, st.floats(2.5, 20.0))
def test_the_silence_of_a_degree_is_the_first_that_has_it(late_s: list[float], phi: float) -> None:
    known = arrivals(late_s)
    silence_s = known.silence_s(phi)
    assert known.phi(silence_s * 1.0001) >= phi - 1e-6
    longest_s = INTERVAL_S + known.longest_s
    assert silence_s >= longest_s - 1e-9
    assert silence_s <= longest_s + 1e-9 or known.phi(silence_s * 0.999) <= phi


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(0.05, 2.0), min_size=WARM_UP, max_size=WINDOW), st.floats(1.0, 100.0))
def test_the_estimate_has_no_scale_of_its_own(late_s: list[float], scale: float) -> None:
    """But for its grain, which is below any of these delays only where they differ."""
    late_s = [seconds + 2.0 * (index % 10 == 0) for index, seconds in enumerate(late_s)]
    one, other = arrivals(late_s), arrivals(late_s, scale)
    assert other.silence_s(10.0) == pytest.approx(scale * one.silence_s(10.0))
    assert other.phi(5.0 * scale) == pytest.approx(one.phi(5.0))


def test_heartbeats_that_come_together_after_a_pause_do_not_narrow_the_estimate() -> None:
    known = arrivals([0.0, 0.2, 0.05, 0.4] * 20)
    before = known.silence_s(10.0)
    for _ in range(WINDOW):
        known.note(0.001, INTERVAL_S)
    assert known.silence_s(10.0) == before


def test_what_a_node_has_got_used_to_is_forgotten() -> None:
    known = arrivals([0.0] * WARM_UP + [0.5] + [0.0] * (WINDOW - 1))
    assert known.silence_s(10.0) >= 0.75
    known.note(INTERVAL_S, INTERVAL_S)
    for _ in range(8):
        known.note(INTERVAL_S, INTERVAL_S)
    assert known.silence_s(10.0) < 0.4


def limit_of(cluster: Cluster, name: str = "n1") -> SilenceLimit:
    return cluster.monitor.limits.silence.of(cluster.monitor.state.nodes[name])


def hear(cluster: Cluster, late_s: list[float], begin_s: float = 0.0) -> float:
    """Heartbeats of ``n1`` that come late by these times, with the detector's own; return when the last one came."""
    seconds = begin_s
    for late in late_s:
        due_s = seconds + INTERVAL_S + late
        while seconds < due_s:
            seconds = min(seconds + 0.1, due_s)
            cluster.monitor.echo(at(seconds))
        cluster.beat("n1", seconds)
    return seconds


@settings(deadline=None, derandomize=True, max_examples=examples(50))
@given(st.lists(st.floats(0.0, 5.0), max_size=80))
def test_the_limits_of_a_node_are_within_their_bounds(late_s: list[float]) -> None:
    cluster = Cluster()
    hear(cluster, late_s)
    limit = limit_of(cluster)
    assert FLOOR_S <= limit.limit_s <= BOUND_S
    assert INTERVAL_S < limit.ask_s <= TIMEOUT_S / 3
    assert limit.ask_s < limit.limit_s


def test_until_enough_heartbeats_have_come_the_setting_is_the_limit() -> None:
    cluster = Cluster()
    last_s = hear(cluster, [0.0] * (WARM_UP - 1))
    assert limit_of(cluster) == SilenceLimit(0.375, TIMEOUT_S, "warm-up")
    hear(cluster, [0.0], last_s)
    limit = limit_of(cluster)
    assert (limit.limit_s, limit.source) == (FLOOR_S, "floor")
    assert limit.ask_s < 0.32


@pytest.mark.parametrize(("longest_s", "source"), [(0.2, "floor"), (0.8, "accrual"), (2.6, "bound")])
def test_a_node_whose_heartbeats_come_late_is_given_more_time(longest_s: float, source: str) -> None:
    cluster = Cluster()
    hear(cluster, [longest_s * part / WARM_UP for part in range(1, WARM_UP + 1)] * 2)
    limit = limit_of(cluster)
    assert limit.source == source
    assert INTERVAL_S + longest_s <= limit.limit_s <= BOUND_S


def test_a_detector_that_starts_anew_begins_with_the_setting() -> None:
    cluster = Cluster()
    hear(cluster, [0.0] * WARM_UP)
    successor = Cluster()
    assert limit_of(cluster).source == "floor"
    assert limit_of(successor).source == "warm-up"


@pytest.mark.parametrize("pause_s", [1.0, 60.0])
def test_a_pause_of_the_bus_is_no_delay_of_the_nodes(pause_s: float) -> None:
    cluster = Cluster()
    last_s = hear(cluster, [0.0] * WARM_UP)
    before = limit_of(cluster)
    for burst in range(5):
        cluster.tick(last_s + pause_s + burst / 1000)
        cluster.beat("n1", last_s + pause_s + burst / 1000)
    hear(cluster, [0.0], last_s + pause_s)
    assert limit_of(cluster) == before


def test_a_quiet_node_whose_machine_is_off_is_found_sooner_than_by_the_setting() -> None:
    world = World(3)
    world.run(0.2 * WARM_UP)
    world.off = {"n1"}
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n1"}
    assert found["n1"] <= FLOOR_S + 2 * TICK_S
    evidence = world.events[-1].evidence
    assert (evidence["limit_s"], evidence["limit_source"]) == (FLOOR_S, "floor")
    assert evidence["phi"] > 10.0


def test_a_quiet_node_whose_agent_says_nothing_may_wait_for_a_cpu() -> None:
    world = World(3)
    world.run(0.2 * WARM_UP)
    world.stopped = {"n1"}
    found = world.run_until_lost(10.0)
    assert found.keys() == {"n1"}
    assert world.events[-1].evidence["silence_s"] > TIMEOUT_S + TICK_S / 2


def test_quiet_nodes_are_kept_while_the_control_plane_is_cut_off() -> None:
    world = World(3)
    world.run(0.2 * WARM_UP)
    world.cut_control()
    assert world.run(10.0) == []
    world.heal()
    assert world.run(10.0) == []
    assert world.unreachable() == {}
