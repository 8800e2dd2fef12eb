"""The examples run alone, under torchrun, and heal under an agent: to the same parameters each time.

Each is run with fewer steps than it has, and is otherwise as a user finds it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.zygote import ROOT, zygote

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def result_in(folder: Path) -> dict[str, Any]:
    """Return the summary of the result of a script that ran in a folder."""
    result = folder / "unicron-run" / "result"
    summary: dict[str, Any] = json.loads((result / "summary.json").read_text())
    return summary | {"parameters": result / "parameters.safetensors"}


def alone(script: Path, folder: Path) -> dict[str, Any]:
    """Run a script as one process; return the summary of its result."""
    folder.mkdir()
    zygote().run([str(script)], folder)
    return result_in(folder)


def under_torchrun(script: Path, folder: Path) -> dict[str, Any]:
    """Run a script as two processes, each of which imports what it needs; return the summary of its result."""
    folder.mkdir()
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    subprocess.run([sys.executable, *launch], check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    return result_in(folder)


def shortened(name: str, steps: int, of: int, folder: Path) -> Path:
    """Return a copy of an example that has fewer steps, and sums whose rounding Adam does not enlarge.

    It writes one checkpoint on the way.
    """
    text = (ROOT / "examples" / f"{name}.py").read_text()
    constants, attach = "STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = ", "unicron.attach("
    assert text.count(f"{constants}{of},") == text.count(attach) == 1
    text = text.replace(f"{constants}{of},", f"{constants}{steps},")
    script = folder / f"{name}.py"
    script.write_text(text.replace(attach, f"{attach}deterministic_sums=True, "))
    return script


SCRIPTS: list[tuple[str, int, dict[str, Any]]] = [
    ("plain_pytorch", 200, {"steps": 60, "batch": {"global": 128, "micro": 16}}),
    ("nanogpt", 300, {"steps": 8, "batch": {"global": 64, "micro": 8}}),
    ("megatron_gpt", 60, {"steps": 24, "batch": {"global": 16, "micro": 2}}),
]


@pytest.mark.parametrize(("name", "steps", "fields"), SCRIPTS)
async def test_an_example_gives_the_same_result_alone_under_torchrun_and_through_a_failure(
    tmp_path: Path, spec_file: SpecFile, name: str, steps: int, fields: dict[str, Any]
) -> None:
    script = shortened(name, fields["steps"], steps, tmp_path)
    expected = await asyncio.to_thread(alone, script, tmp_path / "alone")
    assert expected["steps"] == fields["steps"]
    together = await asyncio.to_thread(under_torchrun, script, tmp_path / "torchrun")
    assert together["samples_sha256"] == expected["samples_sha256"]
    assert largest_difference(together["parameters"], expected["parameters"]) <= 1e-5

    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=str(script), exact=False, deterministic_sums=True, **fields)
        workers = ["w0", "w1"]
        await asyncio.gather(*(a.fork(w, spec, {"UNICRON_FAIL_AT": "1:5:2:hang"}) for w in workers))
        await a.configure(dict.fromkeys(workers, "initial"))
        await a.lose("w1", 5)
        await a.hold(["w0"])
        (resumed,) = await a.resumed(await a.configure({"w0": "live"}, stage="interrupted"))
        assert resumed.step == 5
        finished = await a.finished(1)
    assert finished.samples_sha256 == expected["samples_sha256"]
    assert largest_difference(finished.parameters_path, expected["parameters"]) <= 1e-5
