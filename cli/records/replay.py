"""``unicron replay``: rebuild the planner's state from a log, decide every plan in it again, or ask what if."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cli.options import log_url
from cli.progress import number_bar
from cli.records.what_if import history, print_history
from services.planner.replay.replay import Place, Replayer
from services.planner.replay.verification import Report
from shared.archive.signed_heads import anchors_of, read_heads, read_key
from shared.errors import Corrupt, InvalidInput, NewerVersion
from shared.log.anchors import Anchor, Defect, parse_anchor
from shared.log.segments import is_segment, segments_in
from shared.settings.model import read_settings
from simulator.policies import SOLVES

T = TypeVar("T")


class Output(StrEnum):
    """How to print."""

    TEXT = "text"
    JSON = "json"


def replay(
    log: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG",
            help="The log: a live one or a copied .db file, or a database's URL (postgresql+psycopg://...); before it, "
            "or alone, archived segments in order (.jsonl, .jsonl.gz), or their folder. "
            "Default: the log of the settings, UNICRON_LOG_URL.",
        ),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder with the log, where LOG is not given.")] = None,
    at: Annotated[int | None, typer.Option(min=0, help="Show the state after this position.")] = None,
    verify_plans: Annotated[
        bool,
        typer.Option("--verify", help="Decide every plan again, compare byte for byte, check hash chain and events."),
    ] = False,
    expect_head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[POSITION:]HASH", help="With --verify: a head noted earlier, which the log must have. Repeatable."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="With --verify: number of processes. The report is the same with any number.")
    ] = 1,
    heads: Annotated[
        Path | None,
        typer.Option(help="With --verify: a file of signed heads. The key is that of UNICRON_LOG_KEY_FILE."),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Simulate the whole history with other policies, spares, times, weights, limits, settings or prices, "
            "and compare (docs/evaluation.md): policy, spares, node_timeout_s, weight.TASK and more.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="With --what-if: pairs of simulations to take the mean of.")
    ] = 1,
    output: Annotated[Output, typer.Option("--output", "-o", help="text or json")] = Output.TEXT,
) -> None:
    """Rebuild the state at a position of a log, verify every plan in it, or ask what if. Needs no server.

    Exit status of --verify: 0 if all is right, 6 if something is wrong, 4 if nothing is but not all could be judged: a
    newer version of Unicron wrote a part, which was skipped, or the log begins behind segments that were not given.
    """
    if what_if is not None and (verify_plans or at is not None):
        raise InvalidInput("--what-if: not with --verify or --at")
    if what_if is not None and not what_if.strip():
        problem = "must be KEY=VALUE,..."
        raise InvalidInput(f"--what-if: {what_if!r} {problem}", [_wrong(what_if, problem)])
    if what_if is not None:
        _what_if(what_if, _replayer(log or [], run_dir), _name(log or []), seeds, output)
        return
    replayer = _replayer(log or [], run_dir)
    if verify_plans:
        anchors, defects = _signed(heads)
        anchors += [parse_anchor(text) for text in expect_head or ()]
        _verify(_watched(replayer, lambda log: log.verify(anchors, defects, jobs, SOLVES)), output)
        return
    place = _watched(replayer, lambda log: log.place_at(at))
    typer.echo(_place_json(place) if output is Output.JSON else _place_text(place))


def _wrong(what_if: str, problem: str) -> dict[str, str]:
    return {"field": "--what-if", "value": what_if, "problem": problem}


def _watched(replayer: Replayer, work: Callable[[Replayer], T]) -> T:
    """Do something with a log, and show how far it has come, where standard error is a terminal."""
    with number_bar("events replayed") as seen:
        return work(replayer.watched(seen))


def _signed(heads: Path | None) -> tuple[list[Anchor], list[Defect]]:
    """Return what a file of signed heads says of the log."""
    if heads is None:
        return [], []
    key = read_settings().log_key_file
    if key is None:
        raise InvalidInput("--heads needs the key that signed them: UNICRON_LOG_KEY_FILE names its file")
    return anchors_of(read_heads(heads), read_key(key))


def _what_if(asked: str, replayer: Replayer, name: str, seeds: int, output: Output) -> None:
    """Answer a what-if: the whole history of a log, simulated with changes."""
    found = history(asked, replayer, name, seeds)
    if output is Output.JSON:
        typer.echo(found.model_dump_json())
    else:
        print_history(found)


def _name(log: Sequence[str]) -> str:
    """Return what reports call a log: the name of its last file, never a URL, which may hold a password."""
    return Path(log[-1]).name if log and "://" not in log[-1] else "log"


def _verify(report: Report, output: Output) -> None:
    typer.echo(json.dumps(report.model_dump(mode="json")) if output is Output.JSON else _report_text(report))
    if not report.ok:
        raise typer.Exit(NewerVersion.exit_code if report.sound else Corrupt.exit_code)


def _replayer(parts: Sequence[str], run_dir: Path | None) -> Replayer:
    """Return the replayer of the log in these parts.

    Raises:
        InvalidInput: something stands behind the live log.
    """
    segments: list[Path] = []
    live: list[str] = []
    for part in parts:
        path = Path(part)
        if live:
            raise InvalidInput(f"{part}: the live log, {live[0]}, is the last part of a log; segments stand before it")
        if "://" not in part and path.is_dir():
            segments += segments_in(path)
        elif "://" not in part and is_segment(path):
            segments.append(path)
        else:
            live.append(part)
    if not segments:
        return Replayer.of_url(log_url(live[0] if live else None, run_dir))
    return Replayer.of_segments(segments, log_url(live[0], None) if live else "")


def _report_text(report: Report) -> str:
    older = f", {report.older} of an older decider passed its checks" if report.older else ""
    lines = [
        f"{report.events} events, {report.plans} plans, {report.verified} decided again with the same result{older}",
        f"hash chain: {'intact' if report.chain_ok else 'BROKEN'}, head {report.head}",
    ]
    if report.begins_after:
        lines.append(
            f"begins behind position {report.begins_after}, archived: no plan was judged; give the segments' folder too"
        )
    lines += [problem.what for problem in report.problems]
    lines += [f"position {m.position}: {m.plan or 'event'}: {m.problem}" for m in report.mismatches]
    lines += [f"skipped: {part.what}" for part in report.skipped]
    if report.skipped:
        lines.append("a newer version of Unicron wrote what was skipped; what follows it may be judged wrongly")
    return "\n".join(lines)


def _place_json(place: Place) -> str:
    state = place.state.model_dump(mode="json", by_alias=True, exclude={"tasks", "ended", "ended_corrections"})
    tasks = {
        task.name: task.model_dump(mode="json", by_alias=True, exclude={"number"}) for task in place.state.every_task()
    }
    return json.dumps(
        {**state, "tasks": tasks, "position": place.position, "head": place.hash, "skipped": _skipped(place)}
    )


def _skipped(place: Place) -> list[str]:
    return [part.what for part in place.skipped]


def _place_text(place: Place) -> str:
    state = place.state
    lines = [f"{state.plans} plans, {state.losses} nodes lost"]
    for node in state.nodes.values():
        status = "usable" if node.usable else f"not usable: {node.reason}"
        lines.append(f"node {node.name} (domain {node.domain}): {len(node.workers)} workers, {status}")
    for task in state.every_task():
        lines.append(
            f"task {task.name}: {task.life}, generation {task.generation}, step {task.step} of {task.spec.steps}, "
            f"workers {' '.join(task.members) or '-'}"
            + (f", plan {task.plan} under way" if task.change else "")
            + (f", queued: {task.queued}" if task.queued else "")
        )
    lines.append(f"head {place.position}:{place.hash}")
    lines += [f"skipped: {what}" for what in _skipped(place)]
    return "\n".join(lines)
