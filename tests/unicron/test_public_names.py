"""What ``unicron`` offers by name: every public name is there, and a run tells the generation that it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

import unicron
from unicron.protocol.messages import Configure
from unicron.training.run import Run

ROOT = Path(__file__).resolve().parents[2]


class _Training:
    configure = Configure(
        generation=3, stage="boundary", rank=1, world_size=2, tensor=1, pipeline=2, store_host="", store_port=0,
        members=[],
    )  # fmt: skip


def test_a_run_tells_its_generation() -> None:
    found = Run(_Training()).generation  # type: ignore[arg-type]
    assert (found.number, found.rank, found.world_size, found.tensor, found.pipeline) == (3, 1, 2, 1, 2)


def test_public_names_and_version() -> None:
    for name in unicron.__all__:
        assert getattr(unicron, name) is not None
    assert f'version = "{unicron.__version__}"' in (ROOT / "unicron" / "pyproject.toml").read_text()
    with pytest.raises(AttributeError, match="no attribute 'loop'"):
        unicron.loop  # noqa: B018
