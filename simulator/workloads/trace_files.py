"""Traces as files: a general CSV format, which is written too, and the spot traces of Bamboo.

The general format has a header line and a line for each event:

    time_s,node,event,kind,slowdown,task
    0,n0,up,,,
    0,n1,up,,,
    7200.5,n1,error,hang,,gpt
    86400,n0,down,ECC errors,,
    90000,n0,up,,,

``time_s``: seconds from the start of the trace. ``event``: ``up``, ``down``, ``degraded`` or ``error``
(``simulator.workloads.trace.Change``). ``kind``: of an ``error``, one of ``LIGHTER`` or nothing; of others, a cause in
words. ``slowdown``: of ``degraded``, above 1. ``task``: of an ``error``, whose process fails, wherever that task runs
then; nothing: that of any task on the node. The last three columns may be missing. Lines may be in any order. A node is
there from the start if it is up at 0, or if the first that is known of it is something else than ``up``. Lines that
begin with ``#`` are comments; ``# name: TEXT`` and ``# horizon_s: SECONDS`` give its name and length. Without a length,
the trace ends with the day (of 86,400 s) in which the last event is.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn, get_args

from shared.errors import InvalidInput, NotFound
from shared.events.severities import SEVERITY, ErrorKind, Severity
from shared.names import LABEL
from simulator.workloads.trace import Change, Occurrence, Trace

DAY_S = 86_400.0

LIGHTER = tuple(
    kind.value
    for kind in ErrorKind
    if SEVERITY[kind] is not Severity.SEV1 and kind not in (ErrorKind.TRANSITION_FAILED, ErrorKind.DIFFERENCE)
)
"""Kinds that an ``error`` may have. What takes the node is ``down``; a transition fails in the simulator itself, and a
difference is no matter of machines."""

CHANGES: tuple[Change, ...] = get_args(Change)

REQUIRED = ("time_s", "node", "event")
COLUMNS = (*REQUIRED, "kind", "slowdown", "task")

MAX_TRACE_BYTES = 64 << 20
"""The largest file; a line is some 30 bytes, so two million events. Anything larger is another file, most likely."""


class _Line(NamedTuple):
    """An event of a file, with the number of its line."""

    number: int
    occurrence: Occurrence


def read_trace(path: Path) -> Trace:
    """Return the trace in a file, of either format: Bamboo's has no header line.

    Raises:
        NotFound: no such file.
        InvalidInput: naming the line, the field, the value and what is allowed.
    """
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise InvalidInput(f"{path}: more than {MAX_TRACE_BYTES} bytes; that is no trace")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as err:
        raise NotFound(f"no trace {path}") from err
    except (OSError, UnicodeDecodeError) as err:
        raise InvalidInput(f"{path}: cannot be read as text: {err}") from err
    is_spot = any(f",{word}," in text.split("\n", 1)[0] for word in ("add", "remove"))
    parse = parse_spot_trace if is_spot else parse_trace
    return parse(text, name=path.stem, source=path.name)


def parse_trace(text: str, *, name: str = "", source: str = "") -> Trace:
    """Return the trace in text of the general format. ``name``: where the text has none.

    Raises:
        InvalidInput: naming the line, the field, the value and what is allowed.
    """
    comments, rows = _split(text)
    lines = sorted(_lines(rows), key=lambda line: (line.occurrence.at_s, line.occurrence.node))
    if not lines:
        raise InvalidInput("a trace without events; allowed are one or more lines")
    horizon_s = _horizon_s(comments, lines[-1].occurrence.at_s)
    if lines[-1].occurrence.at_s > horizon_s:
        _refuse(lines[-1].number, "time_s", f"{lines[-1].occurrence.at_s:g}", f"up to the horizon, {horizon_s:g} s")
    nodes, present = _nodes(lines)
    occurrences = tuple(_consistent(lines, set(nodes[:present])))
    return Trace(comments.get("name", (0, name))[1], nodes, present, occurrences, horizon_s, source)


def parse_spot_trace(text: str, *, name: str = "", source: str = "") -> Trace:
    """Return the trace in text of Bamboo's format: lines ``time_ms,add|remove,node`` without a header.

    Nodes are there from the start if they are added at 0. The trace ends with its last line.

    Raises:
        InvalidInput: naming the line, the field, the value and what is allowed.
    """
    words: dict[str, Change] = {"add": "up", "remove": "down"}
    lines = []
    for number, line in enumerate(_text_lines(text), start=1):
        if not line.strip():
            continue
        if len(fields := _fields(number, line)) != 3:
            _refuse(number, "line", line, "time_ms,add|remove,node")
        time_ms, word, node = fields
        if word not in words:
            _refuse(number, "event", word, ", ".join(words))
        at_s = _number(number, "time_ms", time_ms, least=0.0) / 1000
        lines.append(_Line(number, Occurrence(at_s, _name(number, "node", node), words[word])))
    if not lines:
        raise InvalidInput("a trace without events; allowed are one or more lines")
    lines.sort(key=lambda line: (line.occurrence.at_s, line.occurrence.node))
    nodes, present = _nodes(lines)
    occurrences = tuple(_consistent(lines, set(nodes[:present])))
    return Trace(name, nodes, present, occurrences, lines[-1].occurrence.at_s, source)


def write_trace(trace: Trace) -> str:
    """Return the trace in the general format, from which ``parse_trace`` makes an equal one.

    Nodes that never join are not written, and later ones are read in the order in which they join.
    """
    out = io.StringIO()
    out.write(f"# name: {trace.name}\n# horizon_s: {trace.horizon_s!r}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for node in trace.nodes[: trace.present]:
        writer.writerow((0, node, "up", "", "", ""))
    for each in trace.occurrences:
        slowdown = repr(each.slowdown) if each.change == "degraded" else ""
        writer.writerow((repr(each.at_s), each.node, each.change, each.kind, slowdown, each.task))
    return out.getvalue()


def _split(text: str) -> tuple[dict[str, tuple[int, str]], list[tuple[int, str]]]:
    """Return the comments of the form ``# key: value`` and the other lines, with their numbers."""
    comments: dict[str, tuple[int, str]] = {}
    rows = []
    for number, line in enumerate(_text_lines(text), start=1):
        if line.startswith("#"):
            key, colon, value = line[1:].partition(":")
            if colon:
                comments[key.strip()] = (number, value.strip())
        elif line.strip():
            rows.append((number, line))
    return comments, rows


def _text_lines(text: str) -> list[str]:
    """Return the lines of a text, whatever ends them; no field has a line break in it."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _fields(number: int, line: str) -> list[str]:
    """Return the fields of a line."""
    try:
        return [field.strip() for field in next(csv.reader([line], strict=True))]
    except csv.Error as err:
        _refuse(number, "line", line[:80], f"fields of CSV ({err})")


def _lines(rows: list[tuple[int, str]]) -> Iterator[_Line]:
    """Yield the events of the lines behind the header."""
    if not rows:
        return
    header_number, header = rows[0]
    columns = _fields(header_number, header)
    if unknown := [column for column in columns if column not in COLUMNS]:
        _refuse(header_number, "column", unknown[0], ", ".join(COLUMNS))
    if len(set(columns)) < len(columns) or (missing := [column for column in REQUIRED if column not in columns]):
        wrong = header if len(set(columns)) < len(columns) else f"no {missing[0]}"
        _refuse(header_number, "columns", wrong, f"each of {', '.join(REQUIRED)} once, and kind, slowdown and task")
    for number, line in rows[1:]:
        values = _fields(number, line)
        if len(values) > len(columns) or len(values) < len(REQUIRED):
            _refuse(number, "line", line, f"{len(columns)} fields: {','.join(columns)}")
        fields = dict(zip(columns, values, strict=False))
        yield _Line(number, _occurrence(number, fields))


def _occurrence(number: int, fields: dict[str, str]) -> Occurrence:
    """Return the event of one line."""
    change = next((known for known in CHANGES if known == fields.get("event")), None)
    if change is None:
        _refuse(number, "event", fields.get("event", ""), ", ".join(CHANGES))
    kind, slowdown = fields.get("kind", ""), fields.get("slowdown", "")
    if change == "error" and kind and kind not in LIGHTER:
        _refuse(number, "kind", kind, f"of an error, {', '.join(LIGHTER)} or nothing")
    if change == "degraded":
        factor = _number(number, "slowdown", slowdown)
        if factor <= 1:
            _refuse(number, "slowdown", slowdown, "numbers above 1")
    elif slowdown and _number(number, "slowdown", slowdown) != 1:
        _refuse(number, "slowdown", slowdown, f"no values for the event {change}")
    task = fields.get("task", "")
    if task and change != "error":
        _refuse(number, "task", task, f"no task for the event {change}")
    return Occurrence(
        at_s=_number(number, "time_s", fields.get("time_s", ""), least=0.0),
        node=_name(number, "node", fields.get("node", "")),
        change=change,
        kind=kind,
        slowdown=factor if change == "degraded" else 1.0,
        task=_name(number, "task", task) if task else "",
    )


def _name(number: int, field: str, name: str) -> str:
    if re.fullmatch(LABEL, name) is None:
        _refuse(
            number, field, name, "names of 1 to 63 lower-case letters, digits and hyphens, with neither end a hyphen"
        )
    return name


def _number(number: int, field: str, text: str, least: float = -math.inf) -> float:
    """Return the finite number in a field of a line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        _refuse(number, field, text, "numbers" if least == -math.inf else f"numbers of at least {least:g}")
    return value


def _horizon_s(comments: dict[str, tuple[int, str]], last_s: float) -> float:
    if "horizon_s" in comments:
        number, value = comments["horizon_s"]
        return _number(number, "horizon_s", value, least=0.0)
    return (math.floor(last_s / DAY_S) + 1) * DAY_S


def _nodes(lines: list[_Line]) -> tuple[tuple[str, ...], int]:
    """Return all nodes, those first that are there at the start, and how many of them are."""
    first: dict[str, Occurrence] = {}
    for line in lines:
        first.setdefault(line.occurrence.node, line.occurrence)
    there = [node for node, each in first.items() if each.change != "up" or each.at_s == 0]
    later = [node for node, each in first.items() if each.change == "up" and each.at_s > 0]
    return (*there, *later), len(there)


def _consistent(lines: list[_Line], present: set[str]) -> Iterator[Occurrence]:
    """Yield what happens, without what only says that a node is there from the start.

    Raises:
        InvalidInput: something happens at a node that is not there.
    """
    there = set(present)
    for number, each in lines:
        if each.change == "up":
            known = each.at_s == 0 and each.node in there
            there.add(each.node)
            if known:
                continue
        elif each.node not in there:
            _refuse(number, "event", each.change, f"up, since node {each.node!r} is not there at {each.at_s:g} s")
        if each.change == "down":
            there.discard(each.node)
        yield each


def _refuse(number: int, field: str, value: str, allowed: str) -> NoReturn:
    """Raise the error of a line."""
    problem = f"allowed are {allowed}"
    raise InvalidInput.of(field, value, problem, f"line {number}: {field}: {value!r}; {problem}")
