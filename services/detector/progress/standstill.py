"""What ranks do while their task seems to stand still: whom to ask, and what the answers say. Pure.

Once the ranks of a task have made no progress for a half of their limit, the agents of its nodes are asked for their
stacks (``shared/messages/stacks.py``). If the limit passes, the answers that are there by then are in the evidence of
the error; no decision waits for them, and none depends on them. Progress makes them obsolete.

What torch's flight recorder has on each rank shows which ranks are missing from which collective. The ranks of a group
enter its collectives in one order and count them. A collective that some ranks have entered and that has not ended
waits for the ranks whose count is lower. A rank that did not answer may be one of them. Sends and receives count on the
two ranks that they are between alone, so a group that has both could be misread; Megatron's have either.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.detector.progress import calm, hangs
from services.detector.state.cluster import DetectorState
from services.detector.state.stalls import StallLimits
from services.detector.state.task import Standstill
from shared.events.evidence import MISSING_COLLECTIVES, REPORTED_RANKS, STACKS_CHARACTERS
from shared.messages.stacks import MAX_TIMEOUT_S, GroupRecord, RankReport, StacksReply

AGAIN_S = 10.0
"""Pause between two requests while a task stands still: what its ranks do may have changed, within a limit of
minutes."""

SUSPICION = 0.5
"""Part of a limit after which ranks are asked. With the least limit, half a second, that leaves one heartbeat (0.25 s)
for the answers, which take 30 ms. A task within its limits is asked only in the slowest of its steps."""

LEAST_TIMEOUT_S = 0.1
"""Least time-out of a request: a rank writes its stacks within 30 ms, if it can."""

_ADDRESS = re.compile(r"0x[0-9a-f]+")
"""An identifier of a thread: different in processes that do the same."""


Records = Mapping[int, Sequence[GroupRecord]]
"""Rank -> its groups, for the ranks that answered."""


def missing(records: Records) -> list[dict[str, Any]]:
    """Return, for each group, the oldest collective that has not ended and who is missing from it.

    Each is ``collective``, ``group``, ``sequence`` (its number in the group), ``entered`` (the ranks that wait in it),
    ``missing`` (ranks that have not entered it) and ``unknown`` (ranks of the group that did not answer). Where nobody
    is missing and all answered, all ranks have entered the collective, and it does not end. Collectives with missing
    ranks come first.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, GroupRecord]] = defaultdict(dict)
    for rank, own in records.items():
        for record in own:
            groups[record.group, tuple(record.ranks)][rank] = record
    found = [one for (name, ranks), answers in groups.items() if (one := _oldest(name, ranks, answers)) is not None]
    found.sort(key=lambda one: (not one["missing"], not one["unknown"], len(one["entered"]), one["group"]))
    return found[:MISSING_COLLECTIVES]


def _oldest(name: str, ranks: tuple[int, ...], answers: Mapping[int, GroupRecord]) -> dict[str, Any] | None:
    """Return the oldest collective of a group that waits for a rank; else the oldest that has not ended, if any."""
    waits: dict[int, str] = {}
    for answer in answers.values():
        waits.update({wait.sequence: wait.name for wait in answer.waits})
    described = [_described(name, ranks, answers, sequence, waits[sequence]) for sequence in sorted(waits)]
    return next((one for one in described if one["missing"]), described[0] if described else None)


def _described(
    name: str, ranks: tuple[int, ...], answers: Mapping[int, GroupRecord], sequence: int, operation: str
) -> dict[str, Any]:
    return {
        "collective": operation,
        "group": name,
        "sequence": sequence,
        "entered": sorted(r for r, one in answers.items() if any(wait.sequence == sequence for wait in one.waits)),
        "missing": sorted(r for r, one in answers.items() if one.entered < sequence),
        "unknown": sorted(set(ranks) - set(answers)),
    }


@dataclass(frozen=True, slots=True)
class StacksQuestion:
    """A request to a node's agent for the stacks of a task's ranks."""

    node: str
    task: str
    generation: int
    timeout_s: float


def suspect(state: DetectorState, limits: StallLimits, now: datetime) -> list[StacksQuestion]:
    """Return the questions about tasks that seem to stand still; forget the answers of those that have gone on."""
    questions: list[StacksQuestion] = []
    seen: set[str] = set()
    for task in (*state.running(), *state.moving()):
        if calm.is_calm(state, task, limits, SUSPICION):
            continue
        if (found := hangs.suspected(state, task, limits, SUSPICION, now)) is None:
            continue
        statuses, age_s = found
        seen.add(task.name)
        generation = max(status.generation or 0 for status in statuses.values())
        questions += _ask(state, task.name, generation, statuses, age_s, now)
    for name in state.standstills.keys() - seen:
        del state.standstills[name]
    return questions


def _ask(
    state: DetectorState, task: str, generation: int, workers: Iterable[str], age_s: float, now: datetime
) -> list[StacksQuestion]:
    """Note and return the questions that are due about a task whose ranks have made no progress for ``age_s``."""
    known = state.standstills.get(task)
    if known is not None and known.generation == generation and (now - known.asked_at).total_seconds() < AGAIN_S:
        return []
    reports = known.reports if known is not None and known.generation == generation else {}
    state.standstills[task] = Standstill(generation, now, reports)
    nodes = sorted({worker.rpartition("/")[0] for worker in workers})
    present = [name for name in nodes if (node := state.nodes.get(name)) is not None and node.present]
    # The time-out is a half of what is left of the limit.
    timeout_s = min(MAX_TIMEOUT_S, max(LEAST_TIMEOUT_S, age_s * SUSPICION))
    return [StacksQuestion(name, task, generation, timeout_s) for name in present]


def take(state: DetectorState, question: StacksQuestion, reply: StacksReply) -> None:
    """Note an answer, unless the task has gone on."""
    known = state.standstills.get(question.task)
    if known is not None and known.generation == question.generation and reply.node == question.node:
        own = {w: r for w, r in reply.workers.items() if w.rpartition("/")[0] == question.node}
        known.reports.update(own)


def evidence(known: Standstill | None, generation: int, blamed: Sequence[str]) -> dict[str, Any]:
    """Return the entries of an error's evidence: what the ranks do, and who is missing from which collective.

    Args:
        known: what is known of the task; None: nothing.
        generation: of the error.
        blamed: the workers to blame, whose stacks come first.
    """
    if known is None or known.generation != generation or not known.reports:
        return {}
    reports = known.reports
    order = sorted(reports, key=lambda worker: (worker not in blamed, _number(reports[worker].rank), worker))
    stacks, left_out = _stacks(reports, order)
    recorded = {r.rank: r.groups for r in reports.values() if r.rank is not None and r.groups is not None}
    found: dict[str, Any] = {"stacks": stacks}
    if left_out:
        found["stacks_left_out"] = left_out
    if unsaid := {w: _state(reports[w]) for w in order[:REPORTED_RANKS] if not reports[w].stack}:
        found["without_stack"] = unsaid
    if collectives := missing(recorded):
        found["collectives"] = collectives
    return found


def _number(rank: int | None) -> int:
    return -1 if rank is None else rank


def _state(report: RankReport) -> dict[str, Any]:
    return {"rank": report.rank, "state": report.state, "waits_in": report.waits_in, "detail": report.detail}


def _stacks(reports: Mapping[str, RankReport], order: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the stacks with the workers that have each, the rarest of healthy ranks first; and the number left out."""
    by_stack: dict[str, list[str]] = {}
    for worker in order:
        if stack := reports[worker].stack:
            by_stack.setdefault(_ADDRESS.sub("0x", stack), []).append(worker)
    found: list[dict[str, Any]] = []
    left, left_out = STACKS_CHARACTERS, 0
    for stack, workers in by_stack.items():
        left -= len(stack)
        if left < 0:
            left_out += 1
            continue
        ranks = [reports[worker].rank for worker in workers[:REPORTED_RANKS]]
        found.append({"workers": workers[:REPORTED_RANKS], "ranks": ranks, "stack": stack})
    return found, left_out
