"""One frame of ``unicron top``: lines that fit a terminal's width and height. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cli.glance.status import summary
from cli.glance.top_look import Look
from cli.incidents.incident_show import kind_of, state_of
from cli.output import SHORT_ID, cropped, number, text, too_wide
from cli.progress import duration, eta
from cli.tasks.notable import notable
from unicron_client.answers import step_of

if TYPE_CHECKING:
    from rich.text import Text

Record = dict[str, Any]

_BARS = "▁▂▃▄▅▆▇█"
"""Eighths of a line, from the Unicode block elements."""

_MOST_BARS = 60
"""Columns of the last hour's WAF: a minute each."""

_LEAST_BARS = 10
"""Fewer columns show no course."""

_LEAST_LINES = 3
"""Lines of a section that says something: an empty one, its headings and a row."""

_SHARE = 4
"""Incidents, and plans, have this part of the lines at most while there are more tasks than fit."""

_GAP = "  "


@dataclass
class _Section:
    """A table. ``title``: heading of its first column, and what its rows are; ``least``: as of ``too_wide``."""

    columns: tuple[str, ...]
    rows: list[Sequence[object]]
    least: tuple[str, ...] = ()
    lines: int = field(default=0, init=False)
    """How many it may have."""

    @property
    def wanted(self) -> int:
        """Lines of all that it has; none without rows."""
        return len(self.rows) + 2 if self.rows else 0


def frame(look: Look, columns: int, lines: int | None, notice: str = "") -> list[Text]:
    """Return the lines of one frame.

    Args:
        look: what the server has answered.
        columns: most characters of a line.
        lines: most lines; None: as many as there are.
        notice: what is wrong with the connection now; takes the place of the time's line.
    """
    from rich.text import Text

    now = datetime.fromisoformat(look.waf["window_end"])
    first = Text(f"unicron {look.server}{_GAP}{now:%Y-%m-%d %H:%M:%S} UTC")
    if notice:
        first = Text(notice, "bold red")
    parts = Text(summary(look.status), "" if look.status["ready"] else "bold red")
    head = [first, parts, Text(_cluster(look.nodes)), Text(_waf(look, columns))]
    for line in head:
        line.plain = cropped(" ".join(text(line.plain).split()) if line is parts else line.plain, columns)
    sections = [_tasks(look.tasks), _incidents(look.incidents, now), _plans(look.plans, now)]
    _divide(sections, None if lines is None else max(lines - len(head), 0))
    return [*head, *(line for section in sections for line in _lines(section, columns))][:lines]


def _cluster(nodes: Sequence[Record]) -> str:
    """Return the line of nodes and workers."""
    states = Counter(node["state"] for node in nodes)
    workers = Counter(_use(node, worker) for node in nodes for worker in node["workers"])
    total = sum(count for use, count in workers.items() if use != "left")
    uses = [f"{workers.pop(use, 0)} {use}" for use in ("in use", "idle", "lost")]
    uses += [f"{count} {use}" for use, count in sorted(workers.items())]
    named = ", ".join(f"{count} {state}" for state, count in states.most_common()) or "none"
    return f"nodes {len(nodes)}: {named}{_GAP}workers {total}: {', '.join(uses)}"


def _use(node: Record, worker: Record) -> str:
    """Return what becomes of a worker's time: in use, idle, lost, or the state of a node that takes no work."""
    if worker["task"] is not None:
        return "in use"
    if node["recorded_state"] in ("lost", "isolated"):
        return "lost"
    return "idle" if node["state"] == "ready" else str(node["state"])


def _waf(look: Look, columns: int) -> str:
    """Return the line of WAF: now, that of the healthy line, and the last hour."""
    now = sum(task["waf_flop_per_s"] for task in look.tasks)
    done, possible = look.waf["waf_flop_per_s"], look.waf["healthy_flop_per_s"]
    healthy = possible[-1] if possible else 0.0
    line = f"WAF {number(now)} FLOP/s"
    if healthy:
        line += f" of {number(healthy)} FLOP/s with all workers healthy ({100 * now / healthy:.0f}%)"
    bars = min(columns - len(line) - len("  last hour "), _MOST_BARS, len(done))
    if bars < _LEAST_BARS or not any(done):
        return line
    return f"{line}{_GAP}last hour {_course(done, bars, max(*possible, *done))}"


def _course(values: Sequence[float], bars: int, most: float) -> str:
    """Return values as bars of equal times each. ``most``: the value of a full bar."""
    edges = [len(values) * i // bars for i in range(bars + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(_BARS[min(int(mean / most * len(_BARS)), len(_BARS) - 1)] if mean else " " for mean in means)


def _tasks(tasks: Sequence[Record]) -> _Section:
    rows = [
        (
            task["name"],
            task["state"],
            step_of(task, "/"),
            eta(task),
            task["loss"],
            task["throughput_flop_per_s"] or None,
            task["workers"],
            "; ".join(filter(None, [task["reason"], *notable(task)])),
        )
        for task in tasks
    ]
    columns = ("TASK", "STATE", "STEP", "ETA", "LOSS", "FLOP/S", "WORKERS", "WAITS FOR, OR WHY")
    return _Section(columns, list(rows), ("LOSS", "WORKERS", "FLOP/S"))


def _incidents(incidents: Sequence[Record], now: datetime) -> _Section:
    rows = [
        (
            one["id"][:SHORT_ID],
            _age(one["occurred_at"], now),
            kind_of(one),
            one["severity"],
            one["worker"] or one["node"],
            one["response"],
            one["tasks"],
            state_of(one),
        )
        for one in incidents
    ]
    columns = ("OPEN INCIDENT", "AGE", "WHAT", "SEV", "WHERE", "RESPONSE", "TASKS", "STATE")
    return _Section(columns, list(rows), ("RESPONSE", "SEV"))


def _plans(plans: Sequence[Record], now: datetime) -> _Section:
    rows = [
        (
            plan["id"][:SHORT_ID],
            _age(plan["decided_at"], now),
            plan["trigger"],
            plan["response"],
            plan["state"],
            (plan["incident"] or "")[:SHORT_ID],
            plan["tasks"],
        )
        for plan in plans
    ]
    columns = ("PLAN", "AGE", "TRIGGER", "RESPONSE", "STATE", "INCIDENT", "TASKS")
    return _Section(columns, list(rows), ("INCIDENT", "RESPONSE"))


def _age(at: str, now: datetime) -> str:
    return duration((now - datetime.fromisoformat(at)).total_seconds())


def _divide(sections: Sequence[_Section], lines: int | None) -> None:
    """Divide lines among the sections: the first has what the others, with their share at most, leave."""
    if lines is None:
        for section in sections:
            section.lines = section.wanted
        return
    free = lines
    first, *others = sections
    for section in others:
        section.lines = _usable(min(section.wanted, lines // _SHARE))
        free -= section.lines
    first.lines = _usable(min(first.wanted, free))
    free -= first.lines
    for section in others:
        more = _usable(min(section.wanted, section.lines + free))
        free -= more - section.lines
        section.lines = more


def _usable(lines: int) -> int:
    return lines if lines >= _LEAST_LINES else 0


def _lines(section: _Section, columns: int) -> list[Text]:
    """Return a section's lines; the last one says how many rows are left out, if any are."""
    from rich.text import Text

    if not section.lines:
        return []
    room = section.lines - 2
    shown = section.rows if len(section.rows) <= room else section.rows[: room - 1]
    cells = [[" ".join(text(cell).split()) for cell in row] for row in shown]
    left_out = too_wide(section.columns, cells, section.least, columns) if cells else []
    kept = [i for i, name in enumerate(section.columns) if name not in left_out]
    widths = [max(len(section.columns[i]), *(len(row[i]) for row in cells), 0) for i in kept]
    lines = [Text(), Text(_line([section.columns[i] for i in kept], widths, columns), "bold")]
    lines += [Text(_line([row[i] for i in kept], widths, columns)) for row in cells]
    if len(shown) < len(section.rows):
        lines.append(Text(f"and {len(section.rows) - len(shown)} more"))
    return lines


def _line(cells: Sequence[str], widths: Sequence[int], columns: int) -> str:
    return cropped(_GAP.join(f"{cell:<{size}}" for cell, size in zip(cells, widths, strict=True)).rstrip(), columns)
