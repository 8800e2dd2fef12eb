"""The post-mortem as a page: one HTML file that needs no other, or Markdown. Both say what the model says."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from services.api.postmortem import evidence, words
from services.api.postmortem.model import PostMortem, SlowWorkerPostMortem
from services.api.postmortem.words import clock, seconds, taken
from shared.text import flop


def html(found: PostMortem | SlowWorkerPostMortem) -> str:
    """Return the page as one HTML document without scripts, fonts or pictures from elsewhere."""
    return _template(f"{_name(found)}.html.j2").render(page=found, style=_style(), **_terms(found))


def markdown(found: PostMortem | SlowWorkerPostMortem) -> str:
    """Return the page as Markdown."""
    return _template(f"{_name(found)}.md.j2").render(page=found, **_terms(found))


def _name(found: PostMortem | SlowWorkerPostMortem) -> str:
    return "incident" if isinstance(found, PostMortem) else "slow"


def _terms(found: PostMortem | SlowWorkerPostMortem) -> dict[str, Any]:
    """Return what both forms of a page use beside the model: texts of processes, and what words mean that occur."""
    parts = {part for moment in found.timeline for part in moment.durations_s}
    terms: dict[str, Any] = {
        "texts": evidence.texts(found.evidence),
        "parts": {name: meaning for name, meaning in words.PARTS.items() if name in parts},
        "sources": words.SOURCES,
    }
    if isinstance(found, PostMortem):
        terms["failure_worker_s"] = words.failure_worker_s(found.incident.cost)
    else:
        terms["plans_in_short"] = ", ".join(f"plan {plan.id}" for plan in found.plans) or "no plan has answered it"
    return terms


def content_security_policy() -> str:
    """Return the policy under which the HTML page is shown: its own style, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    own = f"style-src 'sha256-{digest}'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def load() -> None:
    """Load all templates. An installation may be replaced while the gateway runs: the files on disk are others then."""
    for name in _environment().list_templates():
        if name.endswith(".j2"):
            _template(name)
    _style()


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("services.api.postmortem"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    made.filters |= {"flop": flop, "seconds": seconds, "clock": clock, "taken": taken, "cell": cell, "fenced": fenced}
    made.filters |= {
        "fewer": words.fewer,
        "replanned": words.replanned,
        "difference": words.difference,
        "happened": words.happened,
    }
    return made


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)


@cache
def _style() -> str:
    return files(__package__).joinpath("templates/page.css").read_text(encoding="utf-8")


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
