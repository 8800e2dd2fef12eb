"""The post-mortem as a page: one HTML file that needs no other, or Markdown. Both say what the model says."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from services.api.flop_text import flop
from services.api.postmortem.model import PostMortem

_TEXTS = {"stack": "stack at the signal", "traceback": "traceback", "last_output": "last output"}
"""Entries of the evidence of several lines, with their headings."""


def html(found: PostMortem) -> str:
    """Return the page as one HTML document without scripts, fonts or pictures from elsewhere."""
    return _template("page.html.j2").render(page=found, style=_style(), evidence=_evidence(found.evidence))


def markdown(found: PostMortem) -> str:
    """Return the page as Markdown."""
    return _template("page.md.j2").render(page=found, evidence=_evidence(found.evidence))


def content_security_policy() -> str:
    """Return the policy under which the HTML page is shown: its own style, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    own = f"style-src 'sha256-{digest}'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("services.api.postmortem"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"flop": flop, "seconds": seconds, "clock": clock, "cell": cell, "fenced": fenced}
    return made


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)


@cache
def _style() -> str:
    return files(__package__).joinpath("templates/page.css").read_text(encoding="utf-8")


def _evidence(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the texts of the evidence with their headings: stacks of all ranks first, everything else last."""
    found = []
    left = dict(evidence)
    stacks = left.pop("stacks", None)
    for one in stacks if isinstance(stacks, list) else []:
        if isinstance(one, dict):
            ranks = ", ".join(map(str, one.get("ranks") or []))
            found.append((f"stacks of rank {ranks}", str(one.get("stack", ""))))
    for name, heading in _TEXTS.items():
        text = left.pop(name, None)
        if isinstance(text, str) and text.strip():
            found.append((heading, text.rstrip()))
    if left:
        found.append(("everything else", json.dumps(left, indent=1, ensure_ascii=False, sort_keys=True)))
    return found


def seconds(value: float | None) -> str:
    """Return a duration as people read it: milliseconds, seconds, minutes or hours."""
    if value is None:
        return "-"
    if abs(value) < 1.0:
        return f"{value * 1e3:.0f} ms"
    if abs(value) < 120.0:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def clock(at: datetime | None) -> str:
    """Return a time as date and time of day to the millisecond, in UTC."""
    return "-" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}"


def cell(text: object) -> str:
    """Return a text as a cell of a Markdown table, where nothing in it is markup."""
    line = " ".join(str(text).split())
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#" else c for c in line) or "-"


def fenced(text: str) -> str:
    """Return a text as a code block of Markdown, whose fence is longer than any in the text."""
    longest = max((len(run) for line in text.splitlines() for run in _runs(line)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _runs(line: str) -> list[str]:
    """Return the runs of backticks in a line."""
    return ["`" * len(run) for run in "".join(c if c == "`" else " " for c in line).split()]
