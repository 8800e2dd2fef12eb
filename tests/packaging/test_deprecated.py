"""Names that users were told before work on for this version, and warn."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import unicron
from unicron.protocol import Configure
from unicron.run import Run

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", *arguments],
        env={"PYTHONPATH": str(ROOT), "UNICRON_NODE_TIMEOUT_S": "not a number"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "name", "successor"),
    [
        ("unicron.corpus", "write", "unicron.trainer.corpus"),
        ("unicron.clipping", "clip", "unicron.megatron.clipping"),
        ("unicron.model", "each_backward", "unicron.megatron.schedule"),
    ],
)
def test_a_former_module_warns_and_has_the_same_object(module: str, name: str, successor: str) -> None:
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=f"{module} is deprecated"):
        former = importlib.import_module(module)
    assert getattr(former, name) is getattr(importlib.import_module(successor), name)


def test_the_former_command_of_the_corpus_works_and_warns(tmp_path: Path) -> None:
    result = run("unicron.corpus", str(tmp_path / "corpus.txt"), "--bytes", "1000")
    assert result.returncode == 0
    assert "use unicron.trainer.corpus" in result.stderr
    assert (tmp_path / "corpus.txt").stat().st_size >= 1000


@pytest.mark.parametrize(
    ("former", "successor"),
    [("services.detector.agent", "services.agent.main"), ("services.detector.monitor", "services.detector.main")],
)
def test_the_former_command_of_a_service_runs_its_successor(former: str, successor: str) -> None:
    """A setting that is refused ends either at once, with the same words and the same exit code."""
    before, now = run(former), run(successor)
    assert f"use {successor}" in before.stderr
    assert "node_timeout_s" in now.stderr
    assert now.stderr.partition("settings:")[2] == before.stderr.partition("settings:")[2]
    assert before.returncode == now.returncode == 2


class _Training:
    configure = Configure(
        generation=3, stage="boundary", rank=1, world_size=2, tensor=1, pipeline=2, store_host="", store_port=0,
        members=[],
    )  # fmt: skip
    link = object()


def test_former_attributes_of_a_run() -> None:
    run_ = Run(_Training())  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="use run.generation"):
        assert run_.configure is _Training.configure
    with pytest.warns(DeprecationWarning, match="use step.clip_gradients"):
        assert run_.runtime is _Training.link
    found = run_.generation
    assert (found.number, found.rank, found.world_size, found.tensor, found.pipeline) == (3, 1, 2, 1, 2)


def test_public_names_and_version() -> None:
    for name in unicron.__all__:
        assert getattr(unicron, name) is not None
    assert f'version = "{unicron.__version__}"' in (ROOT / "pyproject.toml").read_text()
    with pytest.raises(AttributeError, match="no attribute 'loop'"):
        unicron.loop  # noqa: B018
