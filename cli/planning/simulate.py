"""``unicron simulate``: what a history of failures costs a cluster under each policy. Needs no server."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from simulator.runs import Run, WorkloadOf


class SimulateFormat(StrEnum):
    """How the results are printed."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"


class PlotFormat(StrEnum):
    """Format of pictures."""

    SVG = "svg"
    PNG = "png"


ALL = "all"

_Trace = Annotated[
    str,
    typer.Option(
        metavar="FILE|NAME|LOG",
        help="A trace by name: trace-a, trace-b, fig3, short-outages, spot-p3, spot-g4dn or infinitehbd; a CSV file "
        "(time_s, node, event, kind); or the log of a cluster, a .db file or a database's URL.",
    ),
]
_Policy = Annotated[str, typer.Option(metavar="all|NAME,...", help="The policies to compare, by name.")]
_Seeds = Annotated[int, typer.Option(min=1, max=10_000, help="How many traces to draw, or runs to make of a file.")]
_FirstSeed = Annotated[int, typer.Option(min=0, help="The first seed; the others follow it.")]
_Case = Annotated[int, typer.Option(min=1, max=5, help="Which of the paper's five mixes of tasks and weights.")]
_Jobs = Annotated[
    int | None, typer.Option(min=1, help="Number of processes; the results are the same with any. Default: the cores.")
]


def simulate(
    trace: _Trace,
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="The cluster: YAML.")] = None,
    tasks: Annotated[Path | None, typer.Option(metavar="FILE", help="The tasks: YAML.")] = None,
    policy: _Policy = ALL,
    seeds: _Seeds = 1,
    first_seed: _FirstSeed = 0,
    case: _Case = 1,
    jobs: _Jobs = None,
    output: Annotated[
        SimulateFormat,
        typer.Option("--output", "-o", help="table; json: the last line is the result; html: one page with plots."),
    ] = SimulateFormat.TABLE,
    output_file: Annotated[Path | None, typer.Option(help="Where to write it. Default: standard output.")] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each run's event log there; `unicron replay` reads it.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write each plot there as a file.")] = None,
    plot_format: Annotated[PlotFormat, typer.Option(help="svg or png")] = PlotFormat.SVG,
) -> None:
    """Simulate what a history of failures costs a cluster under each policy.

    The planner, the cost accounting and the events are those of the running system; docs/evaluation.md compares the
    results with published ones.
    """
    from cli.planning.simulate_output import Results, show, write_plots
    from cli.progress import progress_bar
    from simulator.report.plots import check_installed
    from simulator.runs import make_all

    if output is SimulateFormat.HTML or plots is not None:
        check_installed()
    workload_of = requested_workload(trace, cluster, tasks, case)
    first = workload_of(first_seed)
    names = chosen_policies(policy, endless=first.endless)
    runs = requested_runs(workload_of, names, range(first_seed, first_seed + seeds), log)
    began_s = time.perf_counter()
    with progress_bar(f"{len(runs)} runs") as progress:
        outcomes = make_all(runs, jobs or len(os.sched_getaffinity(0)), progress)
    results = Results(
        workload=first,
        outcomes={name: outcomes[number :: len(names)] for number, name in enumerate(names)},
        wall_s=time.perf_counter() - began_s,
        command=command_line(
            trace=trace, cluster=cluster, tasks=tasks, policy=policy, seeds=seeds, first_seed=first_seed, case=case,
            output=output.value,
        ),
    )  # fmt: skip
    with standard_output_to(output_file):
        show(results, output.value)
    if plots is not None:
        write_plots(results, plots, plot_format.value)


def requested_workload(trace: str, cluster: Path | None, tasks: Path | None, case: int) -> WorkloadOf:
    """Return the workload of each seed. A file or a log is read once, here."""
    from simulator.runs import Fixed
    from simulator.workload_inputs import resolve
    from simulator.workloads.paper_workloads import NAMES

    if trace in NAMES:
        return partial(resolve, trace, cluster=cluster, tasks=tasks, case=case)
    return Fixed(resolve(trace, cluster=cluster, tasks=tasks, case=case))


def chosen_policies(text: str, *, endless: bool) -> list[str]:
    """Return the policies that are asked for; of all, the oracle only where it is a bound.

    Raises:
        InvalidInput: one does not exist, is named twice, or is the oracle where tasks end.
    """
    from shared.errors import InvalidInput
    from simulator.policies import POLICIES
    from simulator.report.summary import ORACLE
    from simulator.runs import checked_policy

    if text == ALL:
        return [*POLICIES, *([ORACLE] if endless else [])]
    names = [checked_policy(name.strip()) for name in text.split(",")]
    if len(set(names)) < len(names):
        raise InvalidInput(f"policy: {text!r} names one twice; each is run once")
    if ORACLE in names and not endless:
        raise InvalidInput("policy: oracle; it is a bound only where tasks outlast the horizon, and here tasks end")
    return names


def requested_runs(
    workload_of: WorkloadOf, names: Sequence[str], seeds: Sequence[int], folder: Path | None
) -> list[Run]:
    """Return the runs to make: seed by seed, all policies of each. ``folder``: for their logs; the oracle has none."""
    from simulator.report.summary import ORACLE
    from simulator.runs import Run

    return [
        Run(workload_of, name, seed, log=None if folder is None or name == ORACLE else folder / f"{name}-{seed}.db")
        for seed in seeds
        for name in names
    ]


def command_line(*, seeds: int, first_seed: int, case: int, **options: str | Path | None) -> str:
    """Return the command that gives the same results: what is not its default, and what was given."""
    named = {**options, "seeds": seeds, "first_seed": first_seed, "case": case}
    words = ["unicron", "simulate"]
    for name, value in named.items():
        if value is not None and (name, value) not in _DEFAULTS.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


_DEFAULTS = {"policy": ALL, "seeds": 1, "first_seed": 0, "case": 1}


@contextmanager
def standard_output_to(path: Path | None) -> Iterator[None]:
    """Have what is printed written to a file, if one is given.

    Raises:
        InvalidInput: it cannot be written.
    """
    from shared.errors import InvalidInput

    if path is None:
        yield
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as err:
        raise InvalidInput(f"output-file: cannot write {path}: {err.strerror or err}") from err
    with file, redirect_stdout(file):
        yield
