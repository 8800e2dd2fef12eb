"""The flat tables of ``unicron export``: typed columns with units in their names, filled from the interface's objects.

A column's type is that of its values in every row; None is a missing value of any type. Times are UTC. What is a list
in the interface is one text, its parts separated by spaces; what is an object is JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from cli.output import COST_PARTS
from cli.progress import remaining_s

Record = dict[str, Any]
"""A JSON object of the interface."""

Value = str | int | float | datetime | None
ColumnType = Literal["text", "integer", "real", "time"]


@dataclass(frozen=True)
class Column:
    """A column. ``name``: with its unit; ``of``: returns its value in the row of an object."""

    name: str
    type: ColumnType
    of: Callable[[Record], Value]


def rows(columns: Sequence[Column], objects: Iterable[Record]) -> Iterator[list[Value]]:
    """Yield the row of each object."""
    for one in objects:
        yield [column.of(one) for column in columns]


def time_of(at: str | None) -> datetime | None:
    """Return a time of the interface."""
    return None if at is None else datetime.fromisoformat(at).astimezone(UTC)


def _text(*path: str) -> Column:
    return Column("_".join(path), "text", lambda one: _joined(_at(one, path)))


def _integer(*path: str) -> Column:
    return Column("_".join(path), "integer", lambda one: _at(one, path))


def _real(*path: str) -> Column:
    return Column("_".join(path), "real", lambda one: _float(_at(one, path)))


def _time(*path: str) -> Column:
    return Column("_".join(path), "time", lambda one: time_of(_at(one, path)))


def _named(name: str, column: Column) -> Column:
    return Column(name, column.type, column.of)


def _at(one: Any, path: Sequence[str]) -> Any:
    """Return what is at a path of names in an object; None where an object on the way is missing."""
    for name in path:
        if one is None:
            return None
        one = one.get(name)
    return one


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _joined(value: Any) -> str | None:
    match value:
        case None | str():
            return value
        case list():
            return " ".join(map(str, value))
        case _:
            return json.dumps(value, ensure_ascii=False)


def _other_answer(answer: str, amount: str) -> Column:
    """Return the column of what an incident would have cost with another answer: a model."""

    def find(incident: Record) -> Value:
        found = [one[amount] for one in incident["counterfactuals"] if one["answer"] == answer]
        return _float(found[0]) if found else None

    return Column(f"model_{answer.replace('-', '_')}_{amount}", "real", find)


EVENTS = (
    _integer("position"),
    _text("stream"),
    _integer("stream_version"),
    _time("recorded_at"),
    _named("occurred_at", _time("event", "occurred_at")),
    _text("type"),
    _named("event_id", _text("event", "event_id")),
    *(_named(name, _text("event", name)) for name in ("task", "node", "worker", "incident", "plan")),
    _text("hash"),
    _named("event_json", Column("event", "text", lambda one: json.dumps(one["event"], ensure_ascii=False))),
)

INCIDENTS = (
    *(_text(name) for name in ("id", "kind", "severity", "method", "node", "worker", "task", "tasks")),
    _integer("rank"),
    _integer("step"),
    *(_time(f"{name}_at") for name in ("occurred", "detected", "planned", "resumed", "restored")),
    _text("response"),
    _text("plans"),
    _text("state_source"),
    _integer("steps_recomputed"),
    *(_named(name, _real("cost", name)) for name in (*COST_PARTS, "money", "failure_money")),
    *(
        _other_answer(answer, amount)
        for answer in ("plain-restart", "wait-for-the-node", "only-failed-task-shrinks")
        for amount in ("worker_s", "lost_flop")
    ),
    _time("closed_at"),
    Column("failed_tasks", "text", lambda one: _joined(list(one.get("failed_tasks", {})))),
)

TASKS = (
    *(_text(name) for name in ("name", "id", "owner", "state", "reason")),
    _integer("step"),
    _integer("steps"),
    _real("weight"),
    _integer("workers"),
    *(_named(name, _integer("layout", name)) for name in ("tensor", "pipeline", "data", "micro_batch")),
    _integer("generation"),
    _real("loss"),
    _real("step_s"),
    Column("remaining_s", "real", remaining_s),
    _real("throughput_flop_per_s"),
    _real("waf_flop_per_s"),
    _text("plan"),
    _text("checkpoint"),
    _integer("saved_step"),
    *(_time(f"{name}_at") for name in ("submitted", "started", "ended")),
)

PLANS = (
    *(_text(name) for name in ("id", "trigger", "cause", "incident", "response", "state", "supersedes")),
    _text("superseded_by"),
    _text("tasks"),
    _text("queued"),
    _time("decided_at"),
    _integer("position"),
)


def cost_columns(costs: Record) -> tuple[Column, ...]:
    """Return the columns of the cost table: the kinds of time are those of the report."""
    kinds = (_named(f"{kind}_worker_s", _real("categories", kind)) for kind in costs["categories"])
    return (
        _text("by"),
        _text("key"),
        *kinds,
        _real("allocated_worker_s"),
        _real("money"),
        _text("currency"),
        _time("window_start"),
        _time("window_end"),
    )


def cost_objects(costs: Record) -> Iterator[Record]:
    """Yield the whole allocated time (``by`` is ``all``), and each part of each breakdown of it."""
    window = {name: costs[name] for name in ("currency", "window_start", "window_end")}
    whole = {name: costs[name] for name in ("categories", "allocated_worker_s")}
    yield {"by": "all", "key": "", "money": costs["allocated_money"], **whole, **window}
    for by, shares in costs["breakdowns"].items():
        for share in shares:
            yield {"by": by, **share, **window}
