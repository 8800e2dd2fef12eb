"""``unicron cost``."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from cli.options import Server, connected
from cli.output import COST_PARTS, number, print_json, print_table

_PART_COLUMNS = ("DETECTION", "TRANSITION", "RECOMPUTE", "SUB-HEALTHY", "OF IT LOST", "LOST WEIGHTED FLOP")
_SERVICE = ("availability", "goodput_fraction", "waf_fraction")
_TIME_FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]


class CostFormat(StrEnum):
    """How the report is printed."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    CSV = "csv"


class Period(StrEnum):
    """The length of a bucket."""

    DAY = "day"
    WEEK = "week"


class Dimension(StrEnum):
    """What the breakdown of the allocated time is grouped by."""

    TASK = "task"
    NODE = "node"
    HARDWARE = "hardware"
    CAUSE = "cause"
    INCIDENT = "incident"


_Output = Annotated[
    CostFormat,
    typer.Option(
        "--output",
        "-o",
        help="text; wide: all columns; json: the whole report; csv: rows by --by or --bucket, columns by kind of time.",
    ),
]
_From = Annotated[
    datetime | None, typer.Option("--from", formats=_TIME_FORMATS, help="Account for the time from here on (UTC).")
]
_To = Annotated[datetime | None, typer.Option("--to", formats=_TIME_FORMATS, help="And up to here (UTC).")]
_Bucket = Annotated[Period | None, typer.Option(help="Also by day or week, in UTC.")]
_By = Annotated[Dimension | None, typer.Option(help="Also by task, node, hardware, cause or incident.")]


def cost(
    server: Server = None,
    output: _Output = CostFormat.TEXT,
    start: _From = None,
    end: _To = None,
    bucket: _Bucket = None,
    by: _By = None,
) -> None:
    """Report where worker-seconds went, and what failures cost.

    Every allocated second of a worker has one kind; docs/costs.md defines them.
    """
    asked = {"from": _utc(start), "to": _utc(end), "bucket": bucket.value if bucket is not None else None}
    with connected(server) as client:
        costs = client.get("/v1/costs", asked)
    if output is CostFormat.JSON:
        print_json(costs)
    elif output is CostFormat.CSV:
        _print_csv(costs, by)
    else:
        _print_text(costs, by, wide=output is CostFormat.WIDE)


def _utc(at: datetime | None) -> str | None:
    return None if at is None else at.replace(tzinfo=UTC).isoformat()


def _breakdown_rows(costs: dict[str, Any], by: Dimension | None) -> tuple[str, list[dict[str, Any]]]:
    """Return what the rows' keys are called, and the rows: those of ``by``, or of the buckets, or one of the total."""
    if by is not None:
        return by.value, costs["breakdowns"][by.value]
    if costs["buckets"]:
        return "from", costs["buckets"]
    whole = {"key": "all", "money": costs["allocated_money"]}
    return "", [whole | {name: costs[name] for name in ("categories", "allocated_worker_s", "service")}]


def _print_csv(costs: dict[str, Any], by: Dimension | None) -> None:
    """Print the kinds of one breakdown: a row for each key, worker-seconds in full precision."""
    name, rows = _breakdown_rows(costs, by)
    kinds = list(costs["categories"])
    writer = csv.writer(sys.stdout, lineterminator="\n")
    levels = list(costs["service"]) if any("service" in row for row in rows) else []
    writer.writerow([name or "time", *kinds, "allocated_worker_s", f"money_{costs['currency']}", *levels])
    for row in rows:
        times = (row["categories"][kind] for kind in kinds)
        service = (row["service"][level] for level in levels)
        writer.writerow([row["key"], *times, row["allocated_worker_s"], row["money"], *service])


def _print_text(costs: dict[str, Any], by: Dimension | None, *, wide: bool) -> None:
    currency = costs["currency"]
    _print_kinds(costs)
    if by is not None:
        _print_breakdown_rows(by.value, costs["breakdowns"][by.value], costs, wide=wide)
    if costs["buckets"]:
        _print_breakdown_rows("from", costs["buckets"], costs, wide=wide)
    rows = []
    for row in (*costs["tasks"], {"task": "total", **costs["totals"]}):
        goodput, ettr = _percent(row["goodput_fraction"]), _percent(row.get("ettr"))
        times = (row["worker_s"], row["training_worker_s"], row["planned_worker_s"])
        prices = (row["money"], row["failure_money"])
        rows.append((row["task"], *times, *(row[p] for p in COST_PARTS), row["weighted_flop"], goodput, ettr, *prices))
    columns = ("TASK", "WORKER-S", "TRAINING", "PLANNED", *_PART_COLUMNS, "WEIGHTED FLOP", "GOODPUT", "ETTR")
    least = ("ETTR", "OF IT LOST", *_PART_COLUMNS, "PLANNED", f"FAILURES {currency}", "WEIGHTED FLOP")
    print_table((*columns, currency, f"FAILURES {currency}"), rows, empty="no tasks", least=least, wide=wide)
    print()
    incidents = [
        (
            row["incident"],
            row["kind"],
            row["severity"],
            *(row[part] for part in COST_PARTS),
            row["failure_money"],
            list(row["failed_tasks"]),
        )
        for row in costs["incidents"]
    ]
    print_table(
        ("INCIDENT", "WHAT", "SEV", *_PART_COLUMNS, f"FAILURES {currency}", "FAILED TASKS"),
        incidents,
        empty="no incidents",
        ids=("INCIDENT",),
        least=("OF IT LOST", "LOST WEIGHTED FLOP", "RECOMPUTE", "TRANSITION", "DETECTION", "SUB-HEALTHY"),
        wide=wide,
    )
    check = costs["sum_check"]
    print(
        f"\nsum check {'ok' if check['ok'] else 'FAILED'}: kinds {check['categories_worker_s']:.3f} worker-s, "
        f"allocated {check['allocated_worker_s']:.3f}; failures {check['by_task_worker_s']:.3f} by task, "
        f"{check['by_incident_worker_s']:.3f} by incident; parts {check['parts_worker_s']:.3f}, "
        f"held {check['held_worker_s']:.3f}; {costs['price_per_worker_hour']:g} {currency} per worker-hour"
    )


def _print_kinds(costs: dict[str, Any]) -> None:
    """Print the allocated time by kind, with the share and the price of each."""
    allocated, price = costs["allocated_worker_s"], costs["price_per_worker_hour"] / 3600
    kinds = {**costs["categories"], "allocated": allocated}
    rows = [
        (kind.replace("_", " "), seconds, f"{100 * seconds / allocated:.2f}%" if allocated else None, seconds * price)
        for kind, seconds in kinds.items()
    ]
    print_table(("KIND", "WORKER-S", "SHARE", costs["currency"]), rows)
    service = costs["service"]
    print(
        f"\navailability {_percent(service['availability'])}, goodput {_percent(service['goodput_fraction'])}; "
        f"weighted FLOP {number(service['achieved_flop'])} of {number(service['healthy_flop'])} "
        f"with all workers healthy ({_percent(service['waf_fraction'])})\n"
    )


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.2f}%"


def _print_breakdown_rows(name: str, shares: list[dict[str, Any]], costs: dict[str, Any], *, wide: bool) -> None:
    """Print a breakdown: a row for each key, a column for each kind."""
    kinds = list(costs["categories"])
    columns = [name.upper(), "WORKER-S", *(kind.replace("_", " ").upper() for kind in kinds), costs["currency"]]
    rows = [
        [row["key"], row["allocated_worker_s"], *(row["categories"][kind] for kind in kinds), row["money"]]
        for row in shares
    ]
    if any("service" in row for row in shares):
        columns += [name.replace("_", " ").upper() for name in _SERVICE]
        rows = [
            [*row, *(_percent(share["service"][n]) for n in _SERVICE)] for row, share in zip(rows, shares, strict=True)
        ]
    kinds_left_out = (
        "transition planned",
        "unscheduled",
        "idle",
        "recompute",
        "transition incident",
        "detection",
        "lost",
    )
    least = [*(level.replace("_", " ").upper() for level in _SERVICE[:2]), *(kind.upper() for kind in kinds_left_out)]
    print_table(columns, rows, least=least, wide=wide)
    print()
