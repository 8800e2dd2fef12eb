"""The examples run alone, under torchrun, and heal under an agent: to the same parameters each time."""

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
from tests.unicron.zygote import ROOT

pytestmark = pytest.mark.timeout(120)


def run(folder: Path, *command: str) -> dict[str, Any]:
    """Run a script in a folder of its own; return the summary of its result."""
    folder.mkdir()
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
    subprocess.run([sys.executable, *command], check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    result = folder / "unicron-run" / "result"
    summary: dict[str, Any] = json.loads((result / "summary.json").read_text())
    return summary | {"parameters": result / "parameters.safetensors"}


SCRIPTS: list[tuple[str, dict[str, Any]]] = [
    ("plain_pytorch", {"steps": 200, "batch": {"global": 128, "micro": 16}}),
    ("megatron_gpt", {"steps": 60, "batch": {"global": 16, "micro": 2}}),
]


@pytest.mark.parametrize(("name", "fields"), SCRIPTS)
async def test_an_example_gives_the_same_result_alone_under_torchrun_and_through_a_failure(
    tmp_path: Path, spec_file: SpecFile, name: str, fields: dict[str, Any]
) -> None:
    script = str(ROOT / "examples" / f"{name}.py")
    alone = await asyncio.to_thread(run, tmp_path / "alone", script)
    assert alone["steps"] == fields["steps"]
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    together = await asyncio.to_thread(run, tmp_path / "torchrun", *launch)
    assert together["samples_sha256"] == alone["samples_sha256"]
    assert largest_difference(together["parameters"], alone["parameters"]) <= 1e-5

    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=script, exact=False, **fields)
        workers = ["w0", "w1"]
        await asyncio.gather(*(a.fork(w, spec, {"UNICRON_FAIL_AT": "1:5:2:kill"}) for w in workers))
        await a.configure(dict.fromkeys(workers, "initial"))
        await a.until(lambda: "w1" in a.exits)
        await a.hold(["w0"])
        (resumed,) = await a.resumed(await a.configure({"w0": "live"}, stage="interrupted"))
        assert resumed.step == 5
        finished = await a.finished(1)
    assert finished.samples_sha256 == alone["samples_sha256"]
    assert largest_difference(finished.parameters_path, alone["parameters"]) <= 1e-5
