"""What a script logs is written once its step is done: names, numbers, tensors, and how much."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unicron
from services.api.task_metrics import series
from unicron.errors import InvalidMetric, WrongLoop
from unicron.protocol.messages import Configure
from unicron.training import metrics as subject
from unicron.training.metrics import MOST_NAMES, Metrics


def generation(folder: Path, rank: int = 0) -> Configure:
    members = [[0, "n0/0", "live"], [1, "n1/3", "live"]]
    return Configure(
        generation=2, stage="boundary", rank=rank, world_size=2, tensor=1, pipeline=1, store_host="", store_port=0,
        members=members, directory=str(folder),
    )  # fmt: skip


def lines(folder: Path, worker: str = "n0-0") -> list[tuple[int, dict[str, float]]]:
    path = folder / "metrics" / f"{worker}.jsonl"
    read = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [(line["step"], line["values"]) for line in read]


def test_a_step_is_written_once_it_is_done(tmp_path: Path) -> None:
    metrics, here = Metrics(), generation(tmp_path, rank=1)
    metrics.begin()
    metrics.log({"loss": 3})
    metrics.end(here, 7, done=False)
    metrics.begin()
    metrics.log({"loss": 2, "lr": 0.5})
    metrics.log({"loss": 1})
    assert lines(tmp_path, "n1-3") == []
    metrics.end(here, 7, done=True)
    metrics.log({"eval": 9})  # behind the step
    metrics.end(here, 7, done=True)
    assert lines(tmp_path, "n1-3") == [(7, {"loss": 1.0, "lr": 0.5}), (7, {"eval": 9.0})]
    assert json.loads((tmp_path / "metrics" / "n1-3.jsonl").read_text().splitlines()[0])["rank"] == 1


def test_tensors_of_a_device_are_read_together_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "HOST", ())
    metrics, here = Metrics(), generation(tmp_path)
    metrics.begin()
    metrics.log({"norm": (norm := torch.tensor([1.5])), "lr": 0.1})
    norm.zero_()  # what the script does to its tensor afterwards does not matter
    metrics.end(here, 1, done=True)
    metrics.begin()
    metrics.log({"lr": 0.2})
    metrics.end(here, 2, done=True)
    assert lines(tmp_path) == []  # in their order
    metrics.begin()
    metrics.log({"norm": torch.tensor(4, dtype=torch.int32)})
    metrics.read()
    assert lines(tmp_path) == [(1, {"norm": 1.5, "lr": 0.1}), (2, {"lr": 0.2})]
    metrics.end(here, 3, done=True)
    assert lines(tmp_path)[2:] == [(3, {"norm": 4.0})]


def test_what_is_not_known_any_more_leaves_what_was_logged(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.begin(again=True)
    metrics.log({"norm": math.nan, "lr": 0.5})
    metrics.end(generation(tmp_path), 4, done=True)
    metrics.begin()
    metrics.log({"norm": math.inf})
    metrics.end(generation(tmp_path), 5, done=True)
    assert lines(tmp_path) == [(4, {"lr": 0.5}), (5, {"norm": math.inf})]


@pytest.mark.parametrize("value", [True, 3, 1e-300, np.float32(0.5), np.int64(7), torch.tensor([[2.0]])])
def test_numbers_are_kept(tmp_path: Path, value: Any) -> None:
    metrics = Metrics()
    metrics.begin()
    metrics.log({"loss/train: grad-norm (µ)": value})
    metrics.end(generation(tmp_path), 1, done=True)
    assert lines(tmp_path) == [(1, {"loss/train: grad-norm (µ)": float(value)})]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"a": "1.5"}, "metric 'a' is str: a number is needed"),
        ({"a": None}, "metric 'a' is NoneType"),
        ({"a": 10**400}, "metric 'a' is int"),
        ({"a": torch.zeros(2)}, "metric 'a' has shape [2]"),
        ({"": 1.0}, "'' is no name of a metric: 1 to 100 printable characters"),
        ({"a\nb": 1.0}, "'a\\nb' is no name"),
        ({"x" * 101: 1.0}, "is no name"),
        ({1: 1.0}, "1 is no name"),
        (["a"], "run.log takes a dictionary of names and numbers, not list"),
    ],
)
def test_anything_else_is_an_error_that_says_what_is_allowed(values: Any, said: str) -> None:
    metrics = Metrics()
    metrics.begin()
    with pytest.raises(InvalidMetric) as caught:
        metrics.log(values)
    assert said in str(caught.value)


def test_ranks_and_api_have_the_same_limits() -> None:
    """The api never imports the library's module, which has torch."""
    assert (subject.MOST_NAMES, subject.NAME_CHARACTERS) == (series.MOST_NAMES, series.NAME_CHARACTERS)


def test_there_are_no_more_names_than_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics()
    for step in (1, 2):
        metrics.begin()
        metrics.log({f"m{number}": step for number in range(MOST_NAMES + 2)})
        metrics.end(generation(tmp_path), step, done=True)
    assert [len(values) for _, values in lines(tmp_path)] == [MOST_NAMES, MOST_NAMES]
    assert capsys.readouterr().err.count("are left out, as 'm100'") == 1


def test_a_long_file_has_fewer_and_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject, "BAND_BYTES", 2000)
    metrics = Metrics()
    for step in range(1, 1001):
        metrics.begin()
        metrics.log({"loss": 0.25})
        metrics.end(generation(tmp_path), step, done=True)
    steps = [step for step, _ in lines(tmp_path)]
    assert steps[:20] == [*range(1, 21)]
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert gaps == sorted(gaps)
    assert {1, 2, 4, 8} <= {*gaps}
    assert "metrics are kept of one step in 2\n" in capsys.readouterr().err


def test_a_disk_that_takes_nothing_stops_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics").write_text("in the way")
    metrics = Metrics()
    for step in (1, 2):
        metrics.begin()
        metrics.log({"loss": 1.0})
        metrics.end(generation(tmp_path), step, done=True)
    assert capsys.readouterr().err.count("metrics cannot be written to") == 1


def test_there_is_nothing_to_log_before_the_first_step() -> None:
    run = unicron.attach(steps=1, micro_batches=1, build=lambda tensor, pipeline: (None, None))
    with pytest.raises(WrongLoop, match="there is no step yet"):
        run.log({"loss": 1.0})
