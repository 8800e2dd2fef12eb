"""The judgement of what a preflight has measured."""

from __future__ import annotations

import pytest

from shared.events.measurements import NEIGHBOUR, Measurement, Quantity, Rate
from shared.planning.performance.hardware import profile
from shared.preflight.judgement import LEAST_LIKE, judge
from shared.preflight.published import LINK_REACHED, MEMORY_REACHED, PROFILES, published

H100 = "NVIDIA H100 80GB HBM3"


def measured(*rates: Rate, device: str = "a processor", count: int = 2, problems: tuple[str, ...] = ()) -> Measurement:
    return Measurement(device=device, count=count, rates=list(rates), problems=list(problems))


def products(*values: float) -> list[Rate]:
    return [Rate(quantity="matrix products", device=number, value=value) for number, value in enumerate(values)]


def test_a_device_is_compared_with_its_data_sheet_and_its_figures_are_said() -> None:
    found = judge(measured(*products(780e12, 500e12), device=H100, count=8), [])
    assert found.verdict == "refused"
    assert [rate.is_slow for rate in found.rates] == [False, True]
    assert found.reason == (
        "matrix products of device 1: 500 TFLOP/s, at least 513 TFLOP/s expected "
        "(0.7 of 0.74 of 989 TFLOP/s, the data sheet of h100)"
    )
    assert judge(measured(*products(780e12, 514e12), device=H100, count=8), []).verdict == "accepted"


def test_only_exactly_the_device_of_a_data_sheet_has_published_rates() -> None:
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "a processor"):
        assert judge(measured(*products(1.0), device=name), []).verdict == "reported"
    for name in PROFILES.values():
        assert profile(name).peak_flop_per_s > 1e14


@pytest.mark.parametrize(
    ("quantity", "count", "expected"),
    [
        ("device memory", 1, 3.35e12 * MEMORY_REACHED),
        ("all-reduce", 8, 450e9 * LINK_REACHED),
        ("all-reduce", 2, None),  # which links are between two devices is not known
        ("host memory", 8, None),
    ],
)
def test_what_is_published(quantity: Quantity, count: int, expected: float | None) -> None:
    found = published(quantity, measured(device=H100, count=count))
    assert (found.value if found is not None else None) == expected


def others(*values: float, **of: object) -> list[Measurement]:
    return [measured(Rate(quantity="host memory", value=value), **of) for value in values]  # type: ignore[arg-type]


def test_without_a_data_sheet_the_median_of_its_like_counts() -> None:
    slow = measured(Rate(quantity="host memory", value=4.9e9))
    found = judge(slow, others(1e9, 10e9, 11e9))
    assert (found.verdict, found.rates[0].bound) == ("refused", 5e9)
    assert "0.5 of 10 GB/s, the median of 3 nodes with 2 x a processor" in found.reason
    assert judge(measured(Rate(quantity="host memory", value=5.1e9)), others(1e9, 10e9, 11e9)).verdict == "accepted"


def test_with_too_few_of_its_like_it_is_only_reported() -> None:
    slow = measured(Rate(quantity="host memory", value=1.0))
    few = others(*[10e9] * (LEAST_LIKE - 1))
    for known in (few, [*few, *others(10e9, count=4)], [*few, *others(10e9, device="another")], [*few, measured()]):
        found = judge(slow, known)
        assert (found.verdict, found.rates[0].bound) == ("reported", None)
        assert "2 of 3 nodes that are alike are known" in found.reason


def test_of_a_node_with_several_devices_the_typical_one_counts() -> None:
    eight = [measured(*products(100.0, 100.0, 10.0), device="X", count=3) for _ in range(LEAST_LIKE)]
    found = judge(measured(*products(100.0, 69.0, 71.0), device="X", count=3), eight)
    assert [rate.is_slow for rate in found.rates] == [False, True, False]


def test_what_was_not_measured_refuses_no_node() -> None:
    found = judge(measured(problems=("not measured: process 7 belongs to a task",)), [])
    assert found == ("reported", [], "not measured: process 7 belongs to a task")


def with_neighbours(**rates: float) -> Measurement:
    return measured(*(Rate(quantity=NEIGHBOUR, value=value, peer=peer) for peer, value in rates.items()))


@pytest.mark.parametrize(
    ("rates", "verdict", "slow", "said"),
    [
        ({"n1": 0.6e9, "n2": 0.5e9}, "refused", [True, True], ""),
        ({"n1": 0.6e9, "n2": 0.9e9}, "accepted", [False, False], "slow, but another one is fast"),
        ({"n1": 0.6e9}, "reported", [False], "slow, but one neighbour does not say which of the two is slow"),
        ({"n1": 0.8e9}, "accepted", [False], ""),
    ],
)
def test_a_node_is_slow_if_it_is_so_with_two_neighbours(
    rates: dict[str, float], verdict: str, slow: list[bool], said: str
) -> None:
    like = [with_neighbours(n7=1e9, n8=0.1e9), *[with_neighbours(n9=1e9)] * 2]  # n8 is slow, not what was with it
    found = judge(with_neighbours(**rates), like)
    assert (found.verdict, [rate.is_slow for rate in found.rates]) == (verdict, slow)
    assert said in found.rates[0].basis
    assert found.rates[0].name == "all-reduce with a neighbour, n1"
    assert ("at least 700 MB/s expected (0.7 of 1 GB/s, the median of 3" in found.reason) == (verdict == "refused")
