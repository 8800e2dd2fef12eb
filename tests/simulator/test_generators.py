"""Generated traces: as many failures as published, at any number of nodes, equal for equal seeds."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidInput
from shared.events.severities import SEVERITY, Severity
from simulator.workloads import failure_mix, generators
from simulator.workloads.draws import Draws
from simulator.workloads.generators import DAY_S, WEEK_S, Failures
from simulator.workloads.paper_workloads import REAL, workload
from simulator.workloads.trace import Trace
from tests.examples import examples


def changes(trace: Trace) -> Counter[str]:
    return Counter(each.change for each in trace.occurrences)


def outages(trace: Trace) -> list[float]:
    """Seconds for which nodes were away, of those that came back."""
    gone: dict[str, float] = {}
    found = []
    for each in trace.occurrences:
        if each.change == "down":
            gone[each.node] = each.at_s
        elif each.change == "up":
            found.append(each.at_s - gone.pop(each.node))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_published_counts(seed: int) -> None:
    a, b, fig3 = generators.trace_a(seed), generators.trace_b(seed), generators.fig3(seed)
    assert (len(a.nodes), a.present, a.horizon_s) == (16, 16, 8 * WEEK_S)
    assert (changes(a)["down"], changes(a)["error"]) == (10, 33)
    assert (len(b.nodes), b.horizon_s) == (16, WEEK_S)
    assert (changes(b)["down"], changes(b)["error"]) == (26, 80)
    assert changes(b)["up"] <= 26
    assert (len(fig3.nodes), changes(fig3)["down"], changes(fig3)["error"]) == (8, 10, 0)
    assert all(DAY_S <= away_s <= 7 * DAY_S for away_s in outages(a))
    assert all(120 <= away_s <= 1800 for away_s in outages(generators.short_outages(seed)))


def test_readings_of_trace_b() -> None:
    """Losses come at the same times; only how long nodes are away differs."""
    returned, repaired = generators.trace_b(1), generators.trace_b(1, generators.TRACE_B_REPAIRED)
    times = [[each.at_s for each in trace.occurrences if each.change == "down"] for trace in (returned, repaired)]
    assert times[0] == times[1]
    assert max(outages(repaired)) <= 8.4 * 3600 < max(outages(returned))


def test_rates_per_node_are_kept() -> None:
    large = generators.trace_a(0, 2048)
    assert (changes(large)["down"], changes(large)["error"]) == (1280, 4224)
    assert len(set(large.nodes)) == 2048


def test_known_draws() -> None:
    """The first failures of seed 0, which no version of Python or of a library may change."""
    first = generators.trace_a(0).occurrences[:3]
    assert [(each.at_s, each.node, each.change, each.kind) for each in first] == KNOWN


KNOWN = [
    (11976.3, "n05", "down", "ECC errors"),
    (147344.352, "n12", "error", "connection"),
    (205382.763, "n13", "down", "invalid DMA mapping"),
]


def test_equal_seeds_equal_traces() -> None:
    assert generators.trace_b(7) == generators.trace_b(7)
    assert generators.trace_b(7) != generators.trace_b(8)


@settings(deadline=None, max_examples=examples(60))
@given(
    nodes=st.integers(1, 6),
    losses=st.integers(0, 30),
    lighter=st.integers(0, 30),
    repair_s=st.none() | st.just((60.0, 2 * DAY_S)),
    seed=st.integers(0, 1000),
)
def test_only_nodes_that_are_there_fail(
    nodes: int, losses: int, lighter: int, repair_s: tuple[float, float] | None, seed: int
) -> None:
    trace = generators.generated("t", Failures(nodes, WEEK_S, losses, lighter, repair_s), seed)
    there = set(trace.nodes)
    for each in trace.occurrences:
        assert (each.node in there) == (each.change != "up")
        if each.change == "down":
            there.remove(each.node)
        elif each.change == "up":
            there.add(each.node)
        else:
            assert SEVERITY[each.error] is not Severity.SEV1
    assert changes(trace)["down"] <= losses
    assert changes(trace)["error"] <= lighter


def test_causes_are_drawn_by_their_shares() -> None:
    """10,000 draws of each: within 5 standard deviations of the table."""
    draws = Draws("test", 0)
    number = 10_000
    for shares in (failure_mix.node_losses(), {cause.name: share for cause, share in failure_mix.lighter().items()}):
        found = Counter(draws.weighted(shares) for _ in range(number))
        for name, share in shares.items():
            expected = share / sum(shares.values())
            assert abs(found[name] / number - expected) < 5 * (expected * (1 - expected) / number) ** 0.5


def test_table_of_causes_is_whole() -> None:
    assert sum(cause.share for cause in failure_mix.causes()) == pytest.approx(1, abs=0.002)
    for cause in failure_mix.causes():
        assert (cause.kind is None) == (cause.severity is Severity.SEV1)
        if cause.kind is not None:
            assert SEVERITY[cause.kind] is cause.severity


@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_is_the_same_for_every_seed(name: str) -> None:
    """Its run draws nothing either: what a seed chooses are the tasks and workers that lighter failures hit."""
    assert workload(name, 0) == workload(name, 1)
    assert all(occurrence.change != "error" for occurrence in workload(name).trace.occurrences)


def test_a_number_of_nodes_that_is_none() -> None:
    with pytest.raises(InvalidInput, match=r"nodes: 0 must be from 1 to 100000"):
        generators.trace_a(0, 0)
