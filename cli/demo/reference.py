"""The demo's reference: each task trained once more by one process, without failures, and compared with its result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from cli.demo.report import TaskComparison, compare_parameters
from cli.stack.processes import run_module
from cli.stack.run_directory import RunDirectory
from cli.waiting import Record
from services.agent.machine.hardware import VISIBLE_VARIABLE


async def compare(
    specs: list[Record], tasks: list[Record], run_dir: Path, devices: Sequence[str] = ()
) -> list[TaskComparison]:
    """Train every specification without failures; return how the tasks' results compare.

    The stack has ended by then. The folder stays locked until the comparison is done: another demo would empty it.

    Args:
        specs: of the demo's tasks; each lies in ``<run_dir>/<name>.json`` too.
        tasks: as the interface shows them after their end.
        run_dir: the demo's folder; references go below ``reference/``.
        devices: ``CUDA_VISIBLE_DEVICES`` of each node of the demo; empty: it trained on the CPU.

    Raises:
        Conflict: another process uses the folder.
        Unavailable: a reference could not be trained.
    """
    by_name = {task["name"]: task for task in tasks}
    with RunDirectory(run_dir):
        shown = devices or [""] * len(specs)
        await asyncio.gather(*(_train(s["name"], run_dir, its) for s, its in zip(specs, shown, strict=False)))
        return [_comparison(spec, by_name[spec["name"]]["result"] or {}, run_dir) for spec in specs]


def _comparison(spec: Record, result: Record, run_dir: Path) -> TaskComparison:
    reference = run_dir / "reference" / spec["name"] / "result"
    difference = compare_parameters(Path(result["parameters_path"]), reference / "parameters.safetensors")
    summary = json.loads((reference / "summary.json").read_text())
    return TaskComparison(
        name=spec["name"],
        steps=result["steps"],
        expected_steps=spec["steps"],
        max_abs_parameter_difference=difference,
        samples_identical=summary["samples_sha256"] == result["samples_sha256"],
    )


async def _train(name: str, run_dir: Path, device: str) -> None:
    directory = run_dir / "reference" / name
    directory.mkdir(parents=True)
    arguments = ("--spec", str(run_dir / f"{name}.json"), "--directory", str(directory))
    await run_module("unicron.train", *arguments, **{VISIBLE_VARIABLE: device})
