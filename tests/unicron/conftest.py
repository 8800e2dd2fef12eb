"""What the tests of real training processes share."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.unicron.zygote import zygote
from unicron import train
from unicron.trainer import corpus

SpecFile = Callable[..., Path]

MODEL = {"layers": 1, "hidden": 32, "heads": 2, "sequence_length": 32}
"""The smallest that has each kind of parameter: most of a test's time is its ranks' computing."""
TWO_LAYERS = MODEL | {"layers": 2}
"""A model that two pipeline stages can share."""


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus."""
    return corpus.write(tmp_path_factory.mktemp("corpus") / "corpus.txt", size_bytes=50_000)


@pytest.fixture(scope="session")
def megatron() -> None:
    """Import megatron-core once: what it imports warns of its own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train.imports()


@pytest.fixture
def spec_file(tmp_path: Path, text: Path) -> SpecFile:
    """Writes a specification: a tiny model, 12 micro-batches a step; fields can be replaced."""

    def write(*, exact: bool = True, **fields: Any) -> Path:
        spec = {
            "name": "a",
            "model": MODEL,
            "batch": {"global": 12},
            "steps": 6,
            "data": str(text),
            "checkpoint": {"every": 0},
            "exact": exact,
        }
        path = tmp_path / "spec.json"
        path.write_text(json.dumps(spec | fields))
        return path

    return write


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder in shared memory, gone afterwards."""
    folder = Path("/dev/shm") / f"unicron-test-{uuid4().hex}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def train_alone(spec: Path, directory: Path) -> dict[str, Any]:
    """Train without an agent, in one process; return the summary of the result."""
    directory.mkdir()
    zygote().run(["-m", "unicron.train", "--spec", str(spec), "--directory", str(directory)], directory)
    summary: dict[str, Any] = json.loads((directory / "result" / "summary.json").read_text())
    return summary | {"parameters": directory / "result" / "parameters.safetensors"}


def largest_difference(one: Path | str, other: Path | str, except_for: str = "") -> float:
    """Return the largest absolute difference between two files of parameters, except for names with an ending."""
    from safetensors.torch import load_file

    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a if not (except_for and k.endswith(except_for)))
