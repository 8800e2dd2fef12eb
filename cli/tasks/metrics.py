"""``unicron metrics``."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.options import Format, Output, Server, TaskName, connected
from cli.output import print_table, printed_json
from unicron_client.answers import step_of

if TYPE_CHECKING:
    from unicron_client.resources import Client

_MOST = {"points": 2000}
"""Values of a metric that are asked for: as many as the interface gives."""

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 16
"""Characters of a course."""

Answer = dict[str, Any]
Series = dict[int, float | None]
"""Step -> value, by rising step; None: not finite."""


def metrics(
    task: TaskName,
    names: Annotated[list[str] | None, typer.Argument(metavar="METRIC", help="Show these, step by step.")] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Number of the submission; without it the present one.")
    ] = None,
    against: Annotated[
        int | None, typer.Option(min=1, help="Show beside it what this submission had at the same steps.")
    ] = None,
    points: Annotated[int, typer.Option(min=1, help="So many steps of each METRIC, evenly spread.")] = 20,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Show what a task's script logs, and its loss and throughput, over its steps.

    @loss and @samples/s (@steps/s of a script whose batch is its own) are what the ranks report to the log; the others
    are what the script logs. LEAST, MOST and COURSE are of up to 2000 values, evenly spread.

    OF N: what submission N had by the same step. With METRICs the steps are those of the first one, and of the others
    the newest values by then are shown.
    """
    with connected(server) as client:
        shown = client.get(_path(task))
        number = shown["attempt"] if attempt is None else attempt
        answers = [_answer(client, task, one, names or []) for one in (number, against) if one is not None]
    if printed_json(answers[0] if against is None else {**answers[0], "against": answers[1]}, output):
        return
    each = [_series(answer, shown["spec"]) for answer in answers]
    _check(names or [], {*each[0], *answers[0]["names"]})
    other = each[1] if against is not None else None
    now = f", {shown['state']} at step {step_of(shown)}" if number == shown["attempt"] else ""
    print(f"{shown['name']}, submission {number} of {shown['attempt']}{now}")
    wide = output is Format.WIDE
    if names:
        _print_steps(names, each[0], other, points, f" OF {against}", wide=wide)
    else:
        _print_all(each[0], other, f"OF {against}", wide=wide)
    for text in _left_out(answers[0]):
        print(text)


def _path(task: str) -> str:
    return f"/v1/tasks/{quote(task, safe='')}"


def _answer(client: Client, task: str, attempt: int, names: Sequence[str]) -> Answer:
    """Return the metrics of a submission, of these names or of all, and how far its ranks said they were."""
    wanted: Answer = {**_MOST, "attempt": attempt}
    path = f"{_path(task)}/metrics"
    asked = names or client.get(path, {"attempt": attempt})["names"]
    found: Answer = client.get(path, {**wanted, "metric": [name for name in asked if not name.startswith("@")]})
    return {**found, "progress": client.get(f"{_path(task)}/progress", wanted)["points"]}


def _series(answer: Answer, spec: dict[str, Any]) -> dict[str, Series]:
    """Return the values of each metric, those of the log first."""
    batch = spec["batch"]["global"] if spec.get("batch") else None
    newest: list[Answer] = []
    for point in reversed(answer["progress"]):  # steps that were done again count as they were done last
        if not newest or point["step"] < newest[-1]["step"]:
            newest.append(point)
    said = {point["step"]: point for point in reversed(newest)}
    rates = {step: (batch or 1) / one["step_s"] for step, one in said.items() if one["step_s"] > 0}
    of_log: dict[str, Series] = {
        "@loss": {step: one["loss"] for step, one in said.items() if one["loss"] is not None},
        "@steps/s" if batch is None else "@samples/s": {**rates},
    }
    logged = {one["name"]: dict(zip(one["steps"], one["values"], strict=True)) for one in answer["series"]}
    return {name: series for name, series in {**of_log, **logged}.items() if series}


def _check(names: Sequence[str], known: Collection[str]) -> None:
    """Refuse names that the submission does not have.

    Raises:
        NotFound: there is one.
    """
    from shared.errors import NotFound
    from shared.unknown_names import nearest

    for name in names:
        if name not in known:
            raise NotFound(f"no metric {name!r}{nearest(name, known)}", field="METRIC", value=name)


def _by_then(series: Series, step: int) -> float | None:
    steps = list(series)
    at = bisect_right(steps, step)
    return series[steps[at - 1]] if at else None


def _spread(steps: Sequence[int], most: int) -> Sequence[int]:
    """Return up to so many steps, evenly spread, the newest among them."""
    return steps[:: -max(1, math.ceil(len(steps) / most))][::-1]


def _print_all(shown: dict[str, Series], other: dict[str, Series] | None, heading: str, *, wide: bool) -> None:
    rows = []
    for name, series in shown.items():
        step = list(series)[-1]
        finite = [value for value in series.values() if value is not None]
        beside = [] if other is None else [_by_then(other.get(name, {}), step)]
        ends = (min(finite, default=None), max(finite, default=None))
        rows.append((name, _course(series), step, *ends, *beside, series[step]))
    columns = ("METRIC", "COURSE", "STEP", "LEAST", "MOST", *([] if other is None else [heading]), "VALUE")
    print_table(columns, rows, empty="no metrics", least=("COURSE", "MOST", "LEAST"), wide=wide)


def _course(series: Series) -> str:
    """Return the values as bars; a space stands for one that is not finite."""
    values = [series[step] for step in _spread(list(series), _WIDTH)]
    finite = [value for value in values if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else _BARS[round((value - low) * scale)] for value in values)


def _print_steps(
    names: Sequence[str],
    shown: dict[str, Series],
    other: dict[str, Series] | None,
    points: int,
    heading: str,
    *,
    wide: bool,
) -> None:
    columns, each = ["STEP"], []
    for name in names:
        columns += [name] if other is None else [name, f"{name}{heading}"]
        each += [one.get(name, {}) for one in (shown, other) if one is not None]
    steps = _spread(list(each[0]), points)
    rows = [(step, *(_by_then(series, step) for series in each)) for step in steps]
    print_table(columns, rows, least=columns[:1:-1], wide=wide)


def _left_out(answer: Answer) -> Iterator[str]:
    """Yield what is not shown."""
    if (every := max((one["every"] for one in answer["series"]), default=1)) > 1:
        yield f"of {every} steps one is kept"
    if answer["left_out"]:
        yield f"{answer['left_out']} values of further names are left out"
    if answer["silent"]:
        yield f"{', '.join(answer['silent'])}: no answer, newer values may be missing"
