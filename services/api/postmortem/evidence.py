"""The evidence of an incident for its reader: statements, where each rank stood, and texts of processes. Pure.

The evidence is an open JSON object (docs/detector.md). An entry of a form that this version does not know is shown as
it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.api.postmortem.model import RankState
from services.api.postmortem.words import seconds

_LATE = {
    "stalled_s": "No rank had made progress for",
    "silence_s": "The node had been silent for",
    "listened_s": "The node had not been heard since the detector began to listen, for",
}
"""Times that the limit of the evidence is for, with the beginnings of their sentences."""

_TEXTS = {"stack": "stack at the signal", "traceback": "traceback", "last_output": "last lines of its output"}
"""Entries of several lines, with their headings."""

_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "stopped", "Z": "ended"}
"""The kernel's letters for the state of a process (proc(5))."""


def statements(evidence: Mapping[str, Any]) -> list[str]:
    """Return what the evidence says of the cause, a sentence each."""
    return list(_statements(evidence))


def _statements(evidence: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(name := evidence.get("exit"), str):
        yield f"The process ended by {name}." if name.startswith("SIG") else f"The process ended: {name}."
    if isinstance(error := evidence.get("error"), str):
        yield f"{error}: {evidence.get('detail') or 'no text'}"
    elif isinstance(reason := evidence.get("reason"), str):
        yield _sentence(reason)
    for name, what in _LATE.items():
        if isinstance(late_s := evidence.get(name), int | float):
            limit_s = evidence.get("limit_s")
            limit = f"; the limit was {seconds(limit_s)}" if isinstance(limit_s, int | float) else ""
            yield f"{what} {seconds(late_s)}{limit}."
    if isinstance(left_out := evidence.get("ranks_left_out"), int):
        most = found if isinstance(found := evidence.get("most_ranks"), dict) else {}
        place = f"phase {most.get('phase') or '-'} of step {most.get('step')}"
        yield f"{left_out} ranks are not listed; {most.get('count')} of all were in {place}."
    for found in _objects(evidence.get("collectives")):
        yield _collective(found)
    for worker, found in _mapping(evidence.get("without_stack")).items():
        yield f"{worker} (rank {found.get('rank')}) gave no stack: {found.get('detail') or 'no answer'}."
    if isinstance(advice := evidence.get("advice"), str):
        yield f"Advice for errors of the class {evidence.get('class')}: {advice}"


def _collective(found: Mapping[str, Any]) -> str:
    """Return a sentence about a collective that does not end."""
    what = f"{found.get('collective')} (number {found.get('sequence')} of group {found.get('group')})"
    parts = [f"{_ranks(found.get('entered'))} waited in {what}"]
    if found.get("missing"):
        parts.append(f"{_ranks(found['missing'])} had not entered it")
    if found.get("unknown"):
        parts.append(f"{_ranks(found['unknown'])} gave no answer")
    return _sentence("; ".join(parts if len(parts) > 1 else [*parts, "all ranks had entered it"]))


def _ranks(numbers: Any) -> str:
    ranks = [str(number) for number in numbers] if isinstance(numbers, list) else [str(numbers)]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"


def _sentence(words: str) -> str:
    text = words.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def rank_states(evidence: Mapping[str, Any]) -> list[RankState]:
    """Return where each rank stood when the fault was found, by rank."""
    found = [
        RankState(
            worker=worker,
            rank=_integer(of.get("rank")),
            step=_integer(of.get("step")),
            phase=str(of.get("phase") or "-"),
            process=_STATES.get(str(of.get("process_state")), str(of.get("process_state") or "-")),
            idle_s=float(of["progress_age_s"]) if isinstance(of.get("progress_age_s"), int | float) else None,
        )
        for worker, of in _mapping(evidence.get("ranks")).items()
    ]
    return sorted(found, key=lambda one: (one.rank is None, one.rank, one.worker))


def texts(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the texts of processes with their headings, stacks of all ranks first; last the whole object as JSON.

    The JSON is without what the texts before it have.
    """
    found = []
    left = dict(evidence)
    for one in _objects(left.pop("stacks", None)):
        ranks = ", ".join(map(str, one.get("ranks") or []))
        found.append((f"stacks of rank {ranks}", str(one.get("stack", ""))))
    for name, heading in _TEXTS.items():
        text = left.pop(name, None)
        if isinstance(text, str) and text.strip():
            found.append((heading, text.rstrip()))
    if left:
        as_json = json.dumps(left, indent=1, ensure_ascii=False, sort_keys=True)
        found.append(("the rest, as the log has it", as_json))
    return found


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _objects(found: Any) -> list[dict[str, Any]]:
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _mapping(found: Any) -> dict[str, dict[str, Any]]:
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}
