"""Pictures of a comparison: WAF over time, accumulated WAF, cost by cause, and the trace. Drawn with matplotlib.

matplotlib is an extra (``plots``): no service of a cluster needs it.

A rate over time is a list of the points at which it changes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shared.errors import Unavailable
from shared.text import prefix_of
from simulator.outcome import Outcome, WafPoint
from simulator.report.summary import ORACLE, PolicyLine
from simulator.workloads.trace import Trace


def steps(points: Sequence[WafPoint], horizon_s: float) -> tuple[list[float], list[float]]:
    """Return the times and the rates of a step function from 0 to the horizon; each rate holds until the next time.

    The rate is 0 before the first point. The last time is the horizon, with the rate that holds there.
    """
    times, rates = [0.0], [0.0]
    for at_s, rate in points:
        if at_s > horizon_s:
            break
        if at_s <= times[-1]:
            rates[-1] = rate
        else:
            times.append(at_s)
            rates.append(rate)
    if times[-1] < horizon_s:
        times.append(horizon_s)
        rates.append(rates[-1])
    return times, rates


def accumulated(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Return times and the weighted FLOP done until then; between two times they grow evenly.

    Computed work counts here when it is done. What a recovery throws away is therefore too much in the curve, and the
    curve is scaled to end at what remains (``accumulated_waf_flop``).
    """
    times, rates = steps(outcome.waf, outcome.horizon_s)
    done = [0.0]
    for began_s, ended_s, rate in zip(times, times[1:], rates, strict=False):
        done.append(done[-1] + (ended_s - began_s) * rate)
    scale = outcome.accumulated_waf_flop / done[-1] if done[-1] else 0.0
    return times, [flop * scale for flop in done]


def absences(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """Return by node of a trace the times in which it is not there, as (from, to)."""
    away_from = dict.fromkeys(trace.nodes[trace.present :], 0.0)
    found: dict[str, list[tuple[float, float]]] = {node: [] for node in trace.nodes}
    for each in trace.occurrences:
        if each.change == "down":
            away_from.setdefault(each.node, each.at_s)
        elif each.change == "up" and each.node in away_from:
            found[each.node].append((away_from.pop(each.node), each.at_s))
    for node, began_s in away_from.items():
        found[node].append((began_s, trace.horizon_s))
    return found


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PictureFormat = Literal["svg", "png"]

WIDTH_IN = 9.0
"""Width of a picture, inches: the text column of the page."""

DOTS_PER_IN = 150
"""The resolution of a PNG: sharp on a screen that draws a page at one and a half times its size."""

DAY_S = 86_400.0

LABELLED_NODES = 32
"""Up to so many rows of the trace's picture have room for the node's name."""

KIND_COLOURS = {
    "useful": "#4c9f70",
    "recompute": "#e8a33d",
    "detection": "#c8553d",
    "transition_incident": "#8e4585",
    "transition_planned": "#b79ac8",
    "lost": "#3b3b3b",
    "sub_healthy": "#7a8ba3",
    "unscheduled": "#d9d9d9",
    "idle": "#efefef",
}
"""The colour of each kind of time: what trains is green, what a failure costs is dark or warm, what nobody uses is
light."""

_METADATA: dict[PictureFormat, tuple[str, ...]] = {"svg": ("Creator", "Date", "Format", "Type"), "png": ("Software",)}
"""What matplotlib says of itself and of the time in a file: left out."""


def policy_colours(policies: Sequence[str]) -> dict[str, str]:
    """Return the colour of each policy: ten that differ (matplotlib's ``C0`` to ``C9``), and black for the bound."""
    return {name: "black" if name == ORACLE else f"C{number % 10}" for number, name in enumerate(policies)}


def check_installed() -> None:
    """Make sure that pictures can be drawn.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as err:
        raise Unavailable(f"{err.name} is not installed; `pip install 'unicron-cluster[plots]'` provides it") from None


def draw(
    trace: Trace, outcomes: Mapping[str, Outcome], lines: Sequence[PolicyLine], file_format: PictureFormat
) -> dict[str, bytes]:
    """Return the pictures of a comparison by name: ``trace``, ``waf``, ``accumulated-waf`` and ``cost``.

    Args:
        trace: of the first seed.
        outcomes: by policy, of the first seed.
        lines: means of all seeds.
        file_format: ``svg`` or ``png``.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    check_installed()
    colours = policy_colours([line.name for line in lines])
    drawn: dict[str, Callable[[Figure], None]] = {
        "trace": lambda figure: _trace(figure, trace),
        "waf": lambda figure: _waf(figure, outcomes, colours),
        "accumulated-waf": lambda figure: _accumulated(figure, outcomes, colours),
    }
    if any(line.worker_s for line in lines):
        drawn["cost"] = lambda figure: _cost(figure, [line for line in lines if line.worker_s])
    return {name: _picture(name, paint, file_format) for name, paint in drawn.items()}


def _picture(name: str, paint: Callable[[Figure], None], file_format: PictureFormat) -> bytes:
    """Return a picture as a file's content; equal data give equal bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {  # matplotlib declares its keys as literals
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "font.family": "sans-serif",
        "font.size": 9,
        "svg.fonttype": "none",  # text stays text: it can be searched, and has the page's font
        "svg.hashsalt": name,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH_IN, 3.2))
        paint(figure)
        file = io.BytesIO()
        figure.savefig(file, format=file_format, dpi=DOTS_PER_IN, metadata=dict.fromkeys(_METADATA[file_format]))
    return file.getvalue()


def _trace(figure: Figure, trace: Trace) -> None:
    """Draw a row for each node: a bar while it is away, a lighter one while it is slow, a mark for each fault."""
    away = absences(trace)
    rows = {node: row for row, node in enumerate(trace.nodes)}
    figure.set_size_inches(WIDTH_IN, min(6.0, max(1.6, 0.18 * len(rows) + 1.0)))
    axes = figure.subplots()
    for node, times in away.items():
        axes.broken_barh([(a / DAY_S, (b - a) / DAY_S) for a, b in times], (rows[node] - 0.4, 0.8), color="#c8553d")
    for node, times in _slow(trace).items():
        axes.broken_barh([(a / DAY_S, (b - a) / DAY_S) for a, b in times], (rows[node] - 0.2, 0.4), color="#e8a33d")
    errors = [each for each in trace.occurrences if each.change == "error"]
    axes.plot([e.at_s / DAY_S for e in errors], [rows[e.node] for e in errors], "|", color="#33507e", markersize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if len(rows) <= LABELLED_NODES:
        axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
    axes.set_ylabel("node")
    _days(axes, trace.horizon_s)
    axes.set_title("away (red), slow (amber), faults of processes (blue)", loc="left", fontsize=9)


def _slow(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """Return by node the times in which it is slow: from ``degraded`` to its next loss or return."""
    since: dict[str, float] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    for each in trace.occurrences:
        if each.change == "degraded":
            since.setdefault(each.node, each.at_s)
        elif each.change in {"up", "down"} and each.node in since:
            found.setdefault(each.node, []).append((since.pop(each.node), each.at_s))
    for node, began_s in since.items():
        found.setdefault(node, []).append((began_s, trace.horizon_s))
    return found


def _waf(figure: Figure, outcomes: Mapping[str, Outcome], colours: Mapping[str, str]) -> None:
    """Draw a panel for each policy, all of one scale; the grey line is the highest rate of any."""
    figure.set_size_inches(WIDTH_IN, 0.62 * len(outcomes) + 0.7)
    panels = figure.subplots(len(outcomes), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    rates = {name: steps(run.waf, run.horizon_s) for name, run in outcomes.items()}
    highest = max((max(values) for _, values in rates.values()), default=0.0)
    scale, prefix = prefix_of(highest)
    for axes, (name, (times, values)) in zip(panels, rates.items(), strict=True):
        days, scaled = [at_s / DAY_S for at_s in times], [value / scale for value in values]
        axes.fill_between(days, scaled, step="post", color=colours[name], alpha=0.75, linewidth=0)
        axes.axhline(highest / scale, color="#999999", linewidth=0.6)
        axes.set_ylim(0, 1.08 * highest / scale if highest else 1.0)
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
    _days(panels[-1], max(run.horizon_s for run in outcomes.values()))
    panels[0].set_title(f"WAF, {prefix}FLOP/s", loc="left", fontsize=9)


def _accumulated(figure: Figure, outcomes: Mapping[str, Outcome], colours: Mapping[str, str]) -> None:
    """Draw what each policy has achieved until each time, and its name at the end of its curve."""
    figure.set_size_inches(WIDTH_IN, 4.2)
    axes = figure.subplots()
    curves = {name: accumulated(run) for name, run in outcomes.items()}
    scale, prefix = prefix_of(max((done[-1] for _, done in curves.values()), default=0.0))
    for name, (times, done) in curves.items():
        style = "--" if name == ORACLE else "-"
        days = [at_s / DAY_S for at_s in times]
        axes.plot(days, [flop / scale for flop in done], style, color=colours[name], label=name, linewidth=1.4)
    ranked = sorted(curves, key=lambda name: -curves[name][1][-1])
    handles = dict(zip(axes.get_legend_handles_labels()[1], axes.get_legend_handles_labels()[0], strict=True))
    axes.legend([handles[name] for name in ranked], ranked, frameon=False, loc="upper left", fontsize=8)
    axes.set_ylabel(f"accumulated WAF, {prefix}FLOP")
    axes.set_ylim(bottom=0)
    _days(axes, max(run.horizon_s for run in outcomes.values()))


def _cost(figure: Figure, lines: Sequence[PolicyLine]) -> None:
    """Draw a bar for each policy: the share of the allocated time that each kind has."""
    figure.set_size_inches(WIDTH_IN, 0.3 * len(lines) + 1.5)
    axes = figure.subplots()
    names = [line.name for line in lines]
    totals = [sum(line.worker_s.values()) or 1.0 for line in lines]
    left = [0.0] * len(lines)
    for kind in dict.fromkeys([*KIND_COLOURS, *(kind for line in lines for kind in line.worker_s)]):
        shares = [100 * line.worker_s.get(kind, 0.0) / total for line, total in zip(lines, totals, strict=True)]
        if any(shares):
            colour = KIND_COLOURS.get(kind, "#ff00ff")
            axes.barh(names, shares, left=left, color=colour, label=kind.replace("_", " "), height=0.7)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the allocated worker-seconds")
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)


def _days(axes: Axes, horizon_s: float) -> None:
    axes.set_xlim(0, horizon_s / DAY_S)
    axes.set_xlabel("days")
