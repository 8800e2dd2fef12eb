from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.report.summary import compare, percentile
from tests.simulator.report_kit import DAY_S, outcome

FIELDS = {
    "name",
    "accumulated_waf_flop",
    "ratio_to_megatron",
    "ratio_to_oracle",
    "interval",
    "worker_s",
    "transitions",
    "recovery_p50_s",
    "recovery_p99_s",
}


def test_the_document_has_the_fields_of_the_contract_and_no_others() -> None:
    runs = {name: [outcome(name)] for name in ("megatron", "unicron", "oracle")}
    document = json.loads(json.dumps(compare("small", runs, 1.5, endless=True).document()))
    assert document.keys() == {"trace", "seeds", "policies", "wall_s"}
    assert (document["trace"], document["seeds"], document["wall_s"]) == ("small", 1, 1.5)
    assert [line["name"] for line in document["policies"]] == ["megatron", "unicron", "oracle"]
    assert all(line.keys() == FIELDS for line in document["policies"])
    unicron = document["policies"][1]
    value = 3.5 * DAY_S * 1e15
    assert unicron["interval"] == [value, value]
    assert (unicron["transitions"], unicron["recovery_p50_s"], unicron["recovery_p99_s"]) == (3, 6.0, 8.0)


def test_ratios_are_of_the_means() -> None:
    runs = {
        "megatron": [outcome("megatron", s, rate=w) for s, w in enumerate((1e15, 3e15))],
        "unicron": [outcome("unicron", s, rate=w) for s, w in enumerate((2e15, 3e15))],
        "oracle": [outcome("oracle", s, rate=4e15) for s in range(2)],
    }
    _, unicron, oracle = compare("small", runs, 0.0, endless=True).policies
    assert unicron.ratio_to_megatron == pytest.approx(5 / 4)
    assert unicron.ratio_to_oracle == pytest.approx(5 / 8)
    assert oracle.ratio_to_oracle == 1.0
    assert unicron.interval[0] < unicron.accumulated_waf_flop < unicron.interval[1]


def test_a_ratio_to_what_was_not_run_is_missing() -> None:
    (line,) = compare("small", {"unicron": [outcome()]}, 0.0, endless=True).policies
    assert (line.ratio_to_megatron, line.ratio_to_oracle) == (None, None)


def test_where_tasks_end_completion_times_are_reported() -> None:
    runs = {
        "unicron": [
            outcome(seed=0, completed_s={"gpt-a": 100.0, "gpt-b": 50.0}, recovery_s=[]),
            outcome(seed=1, completed_s={"gpt-a": 200.0}, transitions=4, recovery_s=[]),
        ]
    }
    (line,) = compare("small", runs, 0.0, endless=False).document()["policies"]
    assert line.keys() == FIELDS | {"completed_s"}
    assert line["completed_s"] == {"gpt-a": 150.0}, "gpt-b has not ended in every run"
    assert (line["transitions"], line["recovery_p50_s"]) == (3.5, None)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(0, 100))
def test_a_percentile_is_a_value_that_as_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(sorted(values), percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values)
    assert sum(value < found for value in values) * 100 < percent * len(values) or found == min(values)
