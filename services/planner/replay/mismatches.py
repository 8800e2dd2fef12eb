"""Mismatches: where a log contradicts the planner, and how a recorded answer differs from the one decided again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from shared.events.union import Event, PlanDecided, Recorded
from shared.model import Model


class Mismatch(Model):
    """A place where the log contradicts the planner.

    ``position``: of the plan, or of the cause where the log has no plan. ``plan``: the plan's name, empty if there is
    none. ``problem``: the contradiction, in words.
    """

    position: int
    plan: str
    problem: str


def differences(cause: Recorded, recorded: Sequence[Recorded], decided: Sequence[Event]) -> list[Mismatch]:
    """Return the differences between the recorded answer to a cause and the answer decided now."""
    found = []
    for there, here in zip_longest(recorded, decided):
        if there is None:
            found.append(
                Mismatch(position=cause.position, plan=plan_name(here), problem="decided again, not in the log")
            )
        elif here is None:
            found.append(Mismatch(position=there.position, plan=plan_name(there.event), problem="not decided again"))
        elif there.event.canonical() != here.canonical():
            problem = _difference(there.event.canonical(), here.canonical())
            found.append(Mismatch(position=there.position, plan=plan_name(there.event), problem=problem))
    return found


def plan_name(event: Event | None) -> str:
    """Return the name of a plan; empty for other events."""
    return event.plan if isinstance(event, PlanDecided) else ""


def _difference(there: str, here: str) -> str:
    """Return the first place at which two canonical texts differ, with the text around it."""
    at = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    start = max(0, at - 40)
    return f"byte {at}: recorded ...{there[start : at + 40]!r}, decided again ...{here[start : at + 40]!r}"
