"""A comparison as one HTML page: no script, no font and no picture from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from shared.text import prefix_of
from simulator.outcome import Outcome
from simulator.policies.parameters import COMMON, parameters
from simulator.policy import Policy
from simulator.report.plots import draw
from simulator.report.summary import Comparison, PolicyLine
from simulator.workloads.workload import Workload


def si(value: float, unit: str) -> str:
    """Return an amount with four significant digits, such as ``62.15 ZFLOP``."""
    scale, prefix = prefix_of(value)
    return f"{value / scale:.4g} {prefix}{unit}"


def seconds(value: float | None) -> str:
    """Return a time with three significant digits, in the unit that a person would use; ``-`` for none."""
    if value is None:
        return "-"
    for unit, length_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * length_s:
            return f"{value / length_s:.3g} {unit}"
    return f"{value:.3g} s"


@dataclass(frozen=True)
class Material:
    """What a page is made of.

    Attributes:
        comparison: the means of all seeds.
        workload: of the first seed.
        outcomes: by policy, of the first seed.
        policies: what is known of each policy; the oracle is none.
        command: the command that makes the page again.
    """

    comparison: Comparison
    workload: Workload
    outcomes: Mapping[str, Outcome]
    policies: Mapping[str, Policy]
    command: str


def page(material: Material) -> str:
    """Return the page.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    comparison, workload = material.comparison, material.workload
    lines, trace = comparison.policies, workload.trace
    pictures = {
        name: _inline(name, picture.decode()) for name, picture in draw(trace, material.outcomes, lines, "svg").items()
    }
    several = comparison.seeds > 1
    template = Template(files("simulator.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"{comparison.trace}: {len(lines)} policies"),
        subtitle=escape(_subtitle(comparison, workload)),
        command=escape(material.command),
        results=_results(lines),
        results_note=escape(_results_note(comparison)),
        completions="" if comparison.endless else _completions(lines),
        trace_source=escape(trace.source),
        trace_note='<p class="note">The trace of the first seed.</p>' if several else "",
        first_seed=", for the first seed" if several else "",
        cost_note="Means of all seeds." if several else "",
        picture_trace=pictures["trace"],
        picture_waf=pictures["waf"],
        picture_accumulated=pictures["accumulated-waf"],
        picture_cost=pictures.get("cost", ""),
        kinds=_kinds(lines),
        tasks=_tasks(workload),
        policies=_policies(material),
    )


def _subtitle(comparison: Comparison, workload: Workload) -> str:
    trace = workload.trace
    seeds = "1 seed" if comparison.seeds == 1 else f"{comparison.seeds} seeds"
    return (
        f"{workload.workers} workers ({workload.hardware}) on {trace.present} nodes, {len(workload.tasks)} tasks, "
        f"{seconds(trace.horizon_s)}, {seeds}; simulated in {seconds(comparison.wall_s)}"
    )


def _results(lines: Sequence[PolicyLine]) -> str:
    heads = ("policy", "accumulated WAF", "95% interval of the mean", "to Megatron", "to the oracle", "transitions",
             "recovery, median", "recovery, 99%")  # fmt: skip
    rows = [
        (
            line.name,
            si(line.accumulated_waf_flop, "FLOP"),
            f"{si(line.interval[0], 'FLOP')} to {si(line.interval[1], 'FLOP')}",
            _ratio(line.ratio_to_megatron),
            _ratio(line.ratio_to_oracle),
            f"{line.transitions:.4g}",
            seconds(line.recovery_p50_s),
            seconds(line.recovery_p99_s),
        )
        for line in lines
    ]
    return _table(heads, rows)


def _results_note(comparison: Comparison) -> str:
    note = "Recovery: from a fault that stops a task to the task's next training step."
    if comparison.seeds > 1:
        note += " Amounts are means of one run; the interval is Student's t over the seeds; times are of all seeds."
    if not comparison.endless:
        note += " Tasks end in this workload, so the best allocation of each instant is no bound: there is no oracle."
    return note


def _completions(lines: Sequence[PolicyLine]) -> str:
    tasks = sorted({task for line in lines for task in line.completed_s})
    rows = [(line.name, *(seconds(line.completed_s.get(task)) for task in tasks)) for line in lines]
    return f'<h2>Completion times</h2><div class="wide">{_table(("policy", *tasks), rows)}</div>'


def _kinds(lines: Sequence[PolicyLine]) -> str:
    kinds = list(dict.fromkeys(kind for line in lines for kind in line.worker_s))
    rows = []
    for line in lines:
        total = sum(line.worker_s.values())
        if total:
            rows.append((line.name, *(f"{100 * line.worker_s.get(kind, 0.0) / total:.2f}%" for kind in kinds)))
    return _table(("policy", *(kind.replace("_", " ") for kind in kinds)), rows)


def _tasks(workload: Workload) -> str:
    rows = [
        (
            spec.name,
            f"{spec.weight:g}",
            f"{spec.model.layers} x {spec.model.hidden}",
            f"{spec.batch.global_}",
            f"{spec.workers.min} to {spec.workers.max if spec.workers.max is not None else 'any'}",
        )
        for spec in workload.tasks
    ]
    return _table(("task", "weight", "layers x hidden size", "samples of an update", "workers"), rows)


def _policies(material: Material) -> str:
    shown = [material.policies[line.name] for line in material.comparison.policies if line.name in material.policies]
    common = f"<h3>Of several policies</h3>{_parameters(COMMON)}" if shown else ""
    return "\n".join([*map(_policy, shown), common])


def _policy(policy: Policy) -> str:
    assumptions = "".join(f"<li>{escape(each)}</li>" for each in policy.assumptions)
    return (
        f"<h3>{escape(policy.title)} (<code>{escape(policy.name)}</code>)</h3>"
        f"<p>{escape(policy.source)}</p><ul>{assumptions}</ul>{_parameters(policy.name)}"
    )


def _parameters(policy: str) -> str:
    rows = [
        (name.replace("_", " "), f"{each.value:g}", each.unit, each.known, each.source)
        for name, each in parameters(policy).items()
    ]
    return f'<div class="wide">{_table(("parameter", "value", "unit", "known", "source"), rows, numbers=1)}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int | None = None) -> str:
    """Return a table; its first column is text, ``numbers`` columns after it (None: all) are right-aligned."""
    last = len(heads) - 1 if numbers is None else numbers

    def row(cell: str, texts: Sequence[str]) -> str:
        classes = [" class=n" if 0 < column <= last else "" for column in range(len(texts))]
        cells = (f"<{cell}{kind}>{escape(text)}</{cell}>" for kind, text in zip(classes, texts, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "\n".join(row("td", texts) for texts in rows)
    return f"<table><thead>{row('th', heads)}</thead><tbody>\n{body}</tbody></table>"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _inline(name: str, svg: str) -> str:
    """Return a picture as an element of a page: without its prolog, with ids that no other picture of the page has."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', element)
    element = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
