"""The search over layouts and the checked entry point."""

import itertools
import time
from typing import Any

import pytest

from shared.errors import InvalidInput
from shared.planning.performance import Pins, measured, model_shape, profile, table, throughput
from shared.planning.performance.calibration import stack
from shared.planning.performance.gpt import Shape, model_flop
from shared.planning.performance.parallel_config import RECOMPUTES, ParallelConfig
from shared.planning.performance.search import estimate, useful_data_sizes

GPT3 = model_shape(layers=96, hidden=12288, heads=96, sequence_length=2048, vocabulary=51200)
SMALL = model_shape(layers=24, hidden=2048, heads=16, sequence_length=1024, vocabulary=51200)
PINNED: dict[str, Any] = {
    "tensor": 8, "pipeline": 12, "micro_batch": 1, "recompute": "full", "interleave": 1,
    "sequence_parallel": False, "distributed_optimizer": False,
}  # fmt: skip


def test_the_pinned_layout_is_the_one_evaluated() -> None:
    answer = throughput(GPT3, global_batch=1536, workers=768, **PINNED)
    assert PINNED.items() <= answer["layout"].items()
    assert answer["layout"]["data"] == 8
    assert answer["fits"]
    assert answer["iteration_s"] == pytest.approx(sum(answer["breakdown"].values()))
    assert answer["mfu"] == pytest.approx(answer["flop_per_s_per_worker"] / 312e12)
    assert answer["hardware_flop_per_s_per_worker"] > answer["flop_per_s_per_worker"]
    assert answer["memory_bytes"] == pytest.approx(sum(answer["memory"].values()), abs=10)


@pytest.fixture(scope="module")
def free() -> dict[str, Any]:
    """The search with nothing pinned."""
    return throughput(GPT3, global_batch=1536, workers=768)


@pytest.mark.parametrize("name", list(PINNED))
def test_what_is_pinned_is_kept_and_the_rest_is_searched(name: str, free: dict[str, Any]) -> None:
    answer = throughput(GPT3, global_batch=1536, workers=768, **{name: PINNED[name]})
    assert answer["layout"][name] == PINNED[name]
    assert answer["fits"]
    assert free["iteration_s"] <= answer["iteration_s"]


def test_a_pinned_layout_that_does_not_fit_is_evaluated_and_says_so() -> None:
    answer = throughput(GPT3, global_batch=1536, workers=16, tensor=16, pipeline=1, micro_batch=1, recompute="none")
    assert answer["iteration_s"] > 0
    assert not answer["fits"]
    assert answer["memory_bytes"] > 80 * 2**30
    assert any("GB" in reason for reason in answer["reasons"])
    assert any("cross nodes" in reason for reason in answer["reasons"])


def test_more_replicas_than_micro_batches() -> None:
    answer = throughput(SMALL, global_batch=4, workers=8, tensor=1, pipeline=1, micro_batch=1)
    assert not answer["fits"]
    assert any("4 micro-batches" in reason for reason in answer["reasons"])
    assert throughput(SMALL, global_batch=1, workers=24 * 8 * 2 + 1)["iteration_s"] is None


def test_the_search_finds_what_trying_everything_finds() -> None:
    shape, hardware = Shape.of(SMALL), profile("a100-40")
    fastest = min(
        found.iteration_s
        for t, p, b, v, r, o in itertools.product(
            (1, 2, 4, 8), (1, 2, 3, 4, 6, 8), (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8), RECOMPUTES, (False, True)
        )
        if 24 % (t * p) == 0
        and 64 // b >= 24 // (t * p)
        and (v == 1 or (p > 1 and 24 % (p * v) == 0 and -(-64 // b // (24 // t // p)) % p == 0))
        for found in [
            estimate(shape, 64, ParallelConfig(t, p, 24 // (t * p), b, v, r, t > 1, o), hardware, stack(hardware.stack))
        ]
        if found.memory.total_bytes <= hardware.memory_bytes
    )
    answer = throughput(SMALL, global_batch=64, workers=24, hardware="a100-40")
    assert answer["iteration_s"] <= fastest * (1 + 1e-9)


def test_the_search_is_deterministic_and_fits() -> None:
    for workers, hardware in itertools.product((1, 3, 8, 40, 96), ("v100", "a100-40", "h100")):
        first = throughput(SMALL, global_batch=192, workers=workers, hardware=hardware)
        assert first == throughput(SMALL, global_batch=192, workers=workers, hardware=hardware)
        if first["fits"]:
            assert first["memory_bytes"] <= profile(hardware).memory_bytes
            layout = first["layout"]
            assert layout["tensor"] * layout["pipeline"] * layout["data"] == workers


def test_uneven_stages() -> None:
    answer = throughput(SMALL, global_batch=64, workers=5, tensor=1, pipeline=5, micro_batch=1)
    counts = answer["layout"]["stage_layers"]
    assert sum(counts) == 24
    assert counts[-1] == 4, "the stage with the logits has fewer"
    assert any("uneven" in reason for reason in answer["reasons"])


def test_table_agrees_with_the_search_and_rises() -> None:
    found = table(Shape.of(SMALL), 24, 28, profile("a100-40"))
    assert list(found.values()) == sorted(found.values())
    for workers, flop_per_s in found.items():
        answer = throughput(SMALL, global_batch=24, workers=workers, hardware="a100-40")
        assert flop_per_s == pytest.approx(model_flop(Shape.of(SMALL), 24) / answer["iteration_s"])
    left_out = set(range(1, 29)) - set(found)
    assert len(left_out) > 4
    assert len(found) > 8
    for workers in left_out:
        answer = throughput(SMALL, global_batch=24, workers=workers, hardware="a100-40")
        better = max((value for count, value in found.items() if count < workers), default=0.0)
        if answer["fits"]:
            assert answer["flop_per_s_per_worker"] * workers <= better * 1.01


def test_a_large_table_takes_seconds() -> None:
    begin = time.perf_counter()
    found = table(Shape.of(GPT3), 1536, 16_384, profile("a100-80"))
    assert time.perf_counter() - begin < 10
    assert len(found) > 20
    assert max(found) <= 16_384


def test_pins_hold_in_the_table() -> None:
    found = table(Shape.of(SMALL), 64, 64, profile("a100-80"), Pins(tensor=2, pipeline=2))
    assert all(workers % 4 == 0 for workers in found)


@pytest.mark.parametrize("micro_batches", [1, 2, 7, 12, 96, 1000])
def test_useful_data_sizes_are_the_steps_of_the_load(micro_batches: int) -> None:
    loads = [-(-micro_batches // d) for d in range(1, micro_batches + 1)]
    steps = [d for d in range(1, micro_batches + 1) if d == 1 or loads[d - 1] < loads[d - 2]]
    assert list(useful_data_sizes(micro_batches, 10**9)) == steps


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": 10**12}, "workers"),
        ({"workers": 2.5}, "workers"),
        ({"workers": True}, "workers"),
        ({"workers": float("nan")}, "workers"),
        ({"global_batch": -1}, "global_batch"),
        ({"tensor": 5, "workers": 10}, "tensor"),
        ({"pipeline": 97, "workers": 97}, "pipeline"),
        ({"pipeline": 0}, "pipeline"),
        ({"micro_batch": 5}, "micro_batch"),
        ({"tensor": 8, "workers": 12}, "workers"),
        ({"interleave": 9, "pipeline": 12}, "interleave"),
        ({"interleave": 2, "pipeline": 1}, "interleave"),
        ({"recompute": "some"}, "recompute"),
        ({"hardware": "z80"}, "hardware"),
    ],
)
def test_bad_input_names_the_field_at_once(changed: dict[str, Any], field: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(InvalidInput) as caught:
        throughput(GPT3, **{"global_batch": 1536, "workers": 768, **changed})
    assert time.perf_counter() - begin < 1
    assert field in {error["field"] for error in caught.value.extra["errors"]}
    assert field in caught.value.detail


def test_bad_sizes_of_a_model() -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 8, "heads": 2, "sequence_length": 8, "vocabulary": 8}
    for field in sizes:
        for bad in (0, -1, 10**12, float("inf")):
            with pytest.raises(InvalidInput, match=field):
                model_shape(**{**sizes, field: bad})
    with pytest.raises(InvalidInput, match="heads"):
        throughput(model_shape(**{**sizes, "heads": 3}), global_batch=1, workers=1)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_measured_numbers(bad: float) -> None:
    with pytest.raises(InvalidInput, match="peak_flop_per_s"):
        measured(profile("cpu"), peak_flop_per_s=bad)
    with pytest.raises(InvalidInput, match="speed"):
        measured(profile("cpu"), speed=1.0)
