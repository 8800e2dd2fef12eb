"""The demo's report: incidents, tasks, costs and checks, as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.demo.postmortem import shown
from cli.demo.straggler import Straggler

TOLERANCE = 1e-5
"""Largest absolute parameter difference (fp32) between a run with failures and one without."""


@dataclass(frozen=True)
class Check:
    """A property that the demo promises, and whether it holds."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class TaskComparison:
    """A task's result beside that of its failure-free run."""

    name: str
    steps: int
    expected_steps: int
    max_abs_parameter_difference: float
    samples_identical: bool

    @property
    def holds(self) -> bool:
        """Whether parameters and samples are those of the failure-free run."""
        return self.samples_identical and self.max_abs_parameter_difference <= TOLERANCE


@dataclass
class Report:
    """Everything the demo prints at its end."""

    incidents: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)
    comparisons: list[TaskComparison] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    postmortems: list[Path] = field(default_factory=list)
    replay_verified: bool = False
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there are checks and all of them hold."""
        return bool(self.checks) and all(c.ok for c in self.checks)

    def summary(self) -> dict[str, Any]:
        """Return the object that ``-o json`` prints."""
        return {
            "ok": self.ok,
            "incidents": self.incidents,
            "tasks": [
                {
                    "name": c.name,
                    "steps": c.steps,
                    "max_abs_parameter_difference": c.max_abs_parameter_difference,
                    "samples_identical": c.samples_identical,
                }
                for c in self.comparisons
            ],
            "checks": [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in self.checks],
            "stragglers": [asdict(straggler) for straggler in self.stragglers],
            "postmortems": [shown(page) for page in self.postmortems],
            "replay_verified": self.replay_verified,
            "wall_s": round(self.wall_s, 3),
        }


def compare_parameters(left: Path, right: Path) -> float:
    """Return the largest absolute difference between two files of full parameters.

    Raises:
        ValueError: they contain different tensors.
    """
    import numpy as np
    from safetensors.numpy import load_file

    a, b = load_file(left), load_file(right)
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape for k in a):
        raise ValueError(f"{left} and {right} contain different tensors")
    return max(float(np.max(np.abs(a[k].astype(np.float64) - b[k].astype(np.float64)))) for k in a)


def _between(incident: dict[str, Any], start: str, end: str) -> str:
    if not incident.get(start) or not incident.get(end):
        return "-"
    seconds = (datetime.fromisoformat(incident[end]) - datetime.fromisoformat(incident[start])).total_seconds()
    return f"{seconds:.3f}"


def incident_table(incidents: list[dict[str, Any]]) -> Table:
    """Return the table of incidents; times in seconds."""
    table = Table(title="Incidents", title_justify="left")
    for name in ("what", "severity", "found by", "task", "where", "detection s", "step done s", "restored s"):
        table.add_column(name, justify="right" if name.endswith(" s") else "left")
    for name in ("steps lost", "state from", "response"):
        table.add_column(name)
    for i in incidents:
        table.add_row(
            i["kind"],
            i["severity"],
            i["method"],
            i["task"] or "-",
            i["worker"] or i["node"] or "-",
            _between(i, "occurred_at", "detected_at"),
            _between(i, "detected_at", "resumed_at"),
            _between(i, "detected_at", "restored_at"),
            str(i["steps_recomputed"]),
            i["state_source"] or "-",
            i["response"] or "-",
        )
    return table


def incident_cost_table(incidents: list[dict[str, Any]]) -> Table:
    """Return the table of incidents' costs, in worker-seconds, FLOP and money."""
    table = Table(title="Cost of each incident", title_justify="left")
    columns = ("detection", "transition", "recompute", "sub-healthy")
    table.add_column("what")
    for name in (*(f"{c} worker-s" for c in columns), "lost weighted FLOP", "money"):
        table.add_column(name, justify="right")
    for i in incidents:
        cost = i["cost"]
        table.add_row(
            i["kind"],
            *(f"{cost[c.replace('-', '_') + '_worker_s']:.2f}" for c in columns),
            f"{cost['lost_flop']:.3g}",
            f"{cost['money']:.5f}",
        )
    return table


def straggler_table(stragglers: list[Straggler]) -> Table:
    """Return the table of slow workers; times in seconds from the slowdown's record in the log."""
    table = Table(title="Slow workers", title_justify="left")
    for name in ("task", "where", "times as slow", "found s", "moved s", "left out"):
        table.add_column(name)
    for s in stragglers:
        times = (f"{s.slowdown:.2f}", f"{s.found_s:.3f}", f"{s.moved_s:.3f}")
        table.add_row(s.task, s.worker, *times, "yes" if s.left else "NO")
    return table


def task_table(costs: dict[str, Any], comparisons: list[TaskComparison]) -> Table:
    """Return the table of tasks: what each cost and how it compares with its failure-free run."""
    table = Table(title="Tasks", title_justify="left")
    table.add_column("task")
    for name in ("worker-s", "FLOP", "money", "steps", "largest difference", "same samples"):
        table.add_column(name, justify="right")
    by_name = {t["task"]: t for t in costs.get("tasks", [])}
    for c in comparisons:
        cost = by_name.get(c.name, {})
        table.add_row(
            c.name,
            f"{cost.get('worker_s', 0.0):.1f}",
            f"{cost.get('flop', 0.0):.3g}",
            f"{cost.get('money', 0.0):.5f}",
            str(c.steps),
            f"{c.max_abs_parameter_difference:.2e}",
            "yes" if c.samples_identical else "NO",
        )
    return table


def print_report(report: Report, console: Console) -> None:
    """Print the tables and the checks."""
    console.print()
    console.print(incident_table(report.incidents))
    console.print(incident_cost_table(report.incidents))
    console.print(straggler_table(report.stragglers))
    console.print(task_table(report.costs, report.comparisons))
    for check in report.checks:
        verdict = "[green]holds[/]" if check.ok else "[red bold]FAILS[/]"
        console.print(f"{verdict}  {check.name}: {check.detail}")
    print_postmortems(report.postmortems, console)
    console.print(f"{'All of it holds' if report.ok else 'The demo FAILED'} after {report.wall_s:.0f} s.")


def print_postmortems(pages: list[Path], console: Console) -> None:
    """Print the paths of the post-mortems, one a line and unbroken, so that they can be copied."""
    if not pages:
        return
    console.print("Post-mortems, one page for each fault; they need no running system:")
    for page in pages:
        console.print(f"  {shown(page)}", highlight=False, soft_wrap=True)
