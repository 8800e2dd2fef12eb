"""The post-mortem as a page: one HTML file that needs no other, or Markdown. Both say what the model says."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from services.api.flop_text import flop
from services.api.postmortem import evidence, sentences, words
from services.api.postmortem.durations import seconds
from services.api.postmortem.model import PostMortem


def html(found: PostMortem) -> str:
    """Return the page as one HTML document without scripts, fonts or pictures from elsewhere."""
    return _template("page.html.j2").render(page=found, style=_style(), **_shared(found))


def markdown(found: PostMortem) -> str:
    """Return the page as Markdown."""
    return _template("page.md.j2").render(page=found, **_shared(found))


def _shared(found: PostMortem) -> dict[str, Any]:
    """Return what both templates use beside the model: texts of processes, and the meaning of words that occur."""
    cost = found.incident.cost
    parts = {part for moment in found.timeline for part in moment.durations_s}
    return {
        "failure_worker_s": sum(
            (cost.detection_worker_s, cost.transition_worker_s, cost.recompute_worker_s, cost.sub_healthy_worker_s)
        ),
        "texts": evidence.texts(found.evidence),
        "parts": {name: meaning for name, meaning in words.PARTS.items() if name in parts},
        "sources": words.SOURCES,
    }


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
    made.filters |= {
        "fewer": sentences.fewer,
        "replanned": sentences.replanned,
        "difference": sentences.difference,
        "happened": sentences.happened,
    }
    return made


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)


@cache
def _style() -> str:
    return files(__package__).joinpath("templates/page.css").read_text(encoding="utf-8")


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
