"""``unicron replay``: rebuild the planner's state from a log, or decide every plan in it again."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.planner.replay import Replayer, Report
from services.planner.state import State
from shared.errors import Corrupt
from shared.settings import read_settings


class Output(StrEnum):
    """How to print."""

    TEXT = "text"
    JSON = "json"


def replay(
    log: Annotated[
        str | None,
        typer.Argument(
            help="The log: a live one or a copied .db file, or a database's URL (postgresql+psycopg://...). "
            "Default: that of the settings, UNICRON_LOG_URL."
        ),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder with the log, where LOG is not given.")] = None,
    at: Annotated[int | None, typer.Option(min=0, help="Show the state after this position.")] = None,
    verify_plans: Annotated[
        bool, typer.Option("--verify", help="Decide every plan again, compare byte for byte, check the hash chain.")
    ] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="text or json")] = Output.TEXT,
) -> None:
    """Rebuild the state at a position of a log, or verify every plan in it. Needs no server."""
    replayer = Replayer.of_url(_url(log, run_dir))
    if verify_plans:
        report = replayer.verify()
        typer.echo(_report_json(report) if output is Output.JSON else _report_text(report))
        if not report.ok:
            raise typer.Exit(Corrupt.exit_code)
    else:
        state = replayer.state_at(at)
        typer.echo(_state_json(state) if output is Output.JSON else _state_text(state))


def _url(log: str | None, run_dir: Path | None) -> str:
    """Return the URL of the log that is meant."""
    if log is not None and "://" in log:
        return log
    if log is not None:
        return f"sqlite:///{Path(log).resolve()}"
    return read_settings(run_dir=run_dir, log_url="").log_database_url if run_dir else read_settings().log_database_url


def _report_json(report: Report) -> str:
    return json.dumps(report.model_dump(mode="json"))


def _report_text(report: Report) -> str:
    lines = [
        f"{report.events} events, {report.plans} plans, {report.verified} decided again with the same result, "
        f"{report.older} of an older decider passed its checks",
        f"hash chain: {'intact' if report.chain_ok else 'BROKEN'}",
    ]
    lines += [f"position {m.position}: {m.plan or 'event'}: {m.problem}" for m in report.mismatches]
    return "\n".join(lines)


def _state_json(state: State) -> str:
    return json.dumps(state.model_dump(mode="json", by_alias=True))


def _state_text(state: State) -> str:
    lines = [f"{state.plans} plans, {state.losses} nodes lost"]
    for node in state.nodes.values():
        status = "usable" if node.usable else f"not usable: {node.reason}"
        lines.append(f"node {node.name} (domain {node.domain}): {len(node.workers)} workers, {status}")
    for task in state.tasks.values():
        lines.append(
            f"task {task.name}: {task.life}, generation {task.generation}, step {task.step} of {task.spec.steps}, "
            f"workers {' '.join(task.members) or '-'}"
            + (f", plan {task.plan} under way" if task.change else "")
            + (f", queued: {task.queued}" if task.queued else "")
        )
    return "\n".join(lines)
