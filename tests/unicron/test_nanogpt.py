"""``examples/nanogpt.py`` heals, in a step and in its evaluation: weights and evaluations are those of a run alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from services.api.task_metrics.series import Submission, read_lines
from tests.unicron.changed_examples import changed_example
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.zygote import zygote

FEWER = {
    "STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 300, 8, 8": "STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 4, 6, 4",
    "WARMUP_STEPS, CLIP = 3e-3, 3e-4, 20, 1.0": "WARMUP_STEPS, CLIP = 3e-3, 3e-4, 2, 1.0",
    "EVALUATE_EVERY, EVALUATION_BATCHES = 50, 16": "EVALUATE_EVERY, EVALUATION_BATCHES = 2, 5",
    # Logged by ranks that then leave the step.
    "        step.reduce()": "        run.log({'number': torch.tensor(step.number)}); step.reduce()",
    # Sums whose rounding Adam does not enlarge.
    "unicron.attach(": "unicron.attach(deterministic_sums=True, ",
}


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Return what ranks have logged: metric, step and value."""
    found = Submission()
    for path in sorted(folder.glob("**/metrics/*.jsonl"), reverse=True):  # in whatever order they are read
        generation = int(path.parts[-3].rpartition("-")[2]) if path.parts[-3].startswith("generation-") else 1
        found.take(generation, list(read_lines(path.read_bytes())))
    return {name: dict(zip(series.steps, series.values, strict=True)) for name, series in found.series.items()}


def evaluations(*outputs: Path) -> dict[str, str]:
    """Return what was printed of the evaluations, by step; the last one counts."""
    lines = (line for path in outputs for line in path.read_text().splitlines() if line.startswith("step "))
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.slow
async def test_it_heals_in_a_step_and_in_its_evaluation(tmp_path: Path, spec_file: SpecFile) -> None:
    script = changed_example("nanogpt.py", FEWER.items(), tmp_path)
    (folder := tmp_path / "alone").mkdir()
    await asyncio.to_thread(zygote().run, [str(script)], folder)
    expected = folder / "unicron-run" / "result" / "parameters.safetensors"
    printed = evaluations(folder / "output")
    assert printed.keys() == {"step 2", "step 4"}
    metrics = logged(folder)
    steps = {key: [1, 2, 3, 4] for key in ("number", "grad_norm", "lr")}
    steps |= {key: [2, 4] for key in ("train_loss", "validation_loss")}
    assert {name: [*values] for name, values in metrics.items()} == steps

    spec = spec_file(script=str(script), steps=4, batch={"global": 24, "micro": 4}, exact=False)
    async with agent(tmp_path / "run") as a:
        workers = ["w0", "w1", "w2"]
        faults = {"UNICRON_FAIL_AT": "1:1:1:hang,2:2:section:kill"}
        await asyncio.gather(*(a.fork(worker, spec, faults) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"))
        await a.lose("w1", 1)
        await a.hold(["w0", "w2"])
        await a.resumed(await a.configure({"w0": "live", "w2": "live"}, stage="interrupted"))
        await a.until(lambda: "w2" in a.exits)
        await a.hold(["w0"])
        await a.fork("w3", spec)
        await a.configure({"w3": "take", "w0": "live"}, fault_step=3)
        finished = await a.finished(2)
        assert {error.kind for error in a.errors()} <= {"communication"}
        assert not [*a.folder.glob("generation-1/metrics/*")]  # it has done no step
        assert logged(a.folder) == {name: pytest.approx(values, rel=1e-5) for name, values in metrics.items()}
        assert evaluations(*(a.folder / f"{worker}.log" for worker in ("w0", "w3"))) == printed
    assert largest_difference(finished.parameters_path, expected) <= 1e-6
    weights = load_file(finished.parameters_path)
    assert weights["output.weight"].equal(weights["tokens.weight"])
