"""What ``unicron incidents INCIDENT`` prints of an incident's evidence, for a reader at a terminal.

The evidence is an open JSON object (docs/detector.md); whatever an older or a newer detector wrote in another form is
left to ``-o json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cli.output import printable, text

_FIELDS = ("class", "advice", "error", "detail", "exit", "parameter", "micro_batch", "stalled_s", "limit_s")
"""Entries that are one value, in the order in which they are printed."""

_TEXTS = {"stack": "stacks at the signal", "traceback": "traceback", "last_output": "last output"}
"""Entries of several lines, with their headings."""


def fields(evidence: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the entries that are one value, by name."""
    return [(f"evidence.{name}", text(evidence[name])) for name in _FIELDS if evidence.get(name) is not None]


def paragraphs(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rest: who is missing from which collective, what the ranks do, and texts of processes."""
    for found in _objects(evidence, "collectives"):
        yield printable(_collective(found))
    for worker, found in _mapping(evidence, "without_stack").items():
        yield printable(f"{worker} (rank {found.get('rank')}, state {found.get('state')}): {found.get('detail')}")
    for found in _objects(evidence, "stacks"):
        ranks, workers = text(found.get("ranks")), text(found.get("workers"))
        yield printable(f"stacks of rank {ranks} ({workers}):\n{found.get('stack')}")
    if left_out := evidence.get("stacks_left_out"):
        yield f"{text(left_out)} more stacks are left out"
    for name, heading in _TEXTS.items():
        if isinstance(lines := evidence.get(name), str) and lines.strip():
            yield printable(f"{heading}:\n{lines.rstrip()}")


def _collective(found: Mapping[str, Any]) -> str:
    """Return one line about a collective that does not end."""
    what = f"{found.get('collective')} (number {found.get('sequence')} of group {found.get('group')})"
    lines = [f"rank {text(found.get('entered'))} waits in {what}"]
    if found.get("missing"):
        lines.append(f"rank {text(found['missing'])} has not entered it")
    if found.get("unknown"):
        lines.append(f"rank {text(found['unknown'])} gave no answer")
    return "; ".join(lines if len(lines) > 1 else [*lines, "all ranks have entered it"])


def _objects(evidence: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = evidence.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _mapping(evidence: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    found = evidence.get(name)
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}
