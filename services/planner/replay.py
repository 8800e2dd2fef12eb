"""Deciding every plan of a log again (DESIGN section 7). The same fold as the service's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from pydantic import Field

from services.planner.fold import Fold, answers_to, recorded_answers
from services.planner.state import State
from shared.errors import NotFound
from shared.events import Event, PlanDecided, Recorded
from shared.log import EventLog
from shared.model import Model

_PAGE = 1000
"""Records read at once."""


class Mismatch(Model):
    """A recorded answer that is not what is decided again. ``problem``: where the two differ, in words."""

    position: int
    plan: str
    problem: str


class Report(Model):
    """What was checked. ``verified``: plans that are byte for byte what is decided again."""

    events: int
    plans: int
    verified: int
    mismatches: list[Mismatch] = Field(default_factory=list)
    chain_ok: bool = True

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return self.chain_ok and not self.mismatches and self.verified == self.plans


def read_all(log: EventLog) -> Iterator[Recorded]:
    """Return every record of the log, in order."""
    position = 0
    while page := log.read(after=position, limit=_PAGE):
        yield from page
        position = page[-1].position


def verify(log: EventLog) -> Report:
    """Check the log's hash chain and decide every plan in it again.

    Raises:
        Corrupt: a record cannot be read back. (A chain that is broken but readable is reported, not raised.)
    """
    chain = log.verify()
    report = verify_records(list(read_all(log)))
    return report.model_copy(update={"chain_ok": chain.ok})


def verify_records(records: list[Recorded]) -> Report:
    """Decide every plan in the records (from the first position on) again; ``chain_ok`` is not looked at.

    A cause at the very end that has no answer yet is no mismatch: a live log may be read between the two.
    """
    answers = recorded_answers(records)
    fold = Fold()
    explained: set[str] = set()
    mismatches: list[Mismatch] = []
    unanswered: list[Mismatch] = []
    for record in records:
        if not fold.take(record):
            continue
        decided = fold.decide(record)
        recorded = answers_to(record, answers)
        explained.update(r.event.event_id for r in recorded)
        if decided and not recorded:
            unanswered.append(Mismatch(position=record.position, plan="", problem="has no plan in the log"))
            fold.answer(record, decided)
            continue
        if recorded:
            # The planner answers in order: an earlier cause without an answer was passed over.
            mismatches += unanswered
            unanswered = []
        mismatches += _compare(record, recorded, decided)
        fold.answer(record, [r.event for r in recorded])
    plans = [r for r in records if isinstance(r.event, PlanDecided)]
    mismatches += [
        Mismatch(position=r.position, plan=_name(r.event), problem="nothing in the log calls for it")
        for r in plans
        if r.event.event_id not in explained
    ]
    wrong = {m.position for m in mismatches}
    return Report(
        events=len(records),
        plans=len(plans),
        verified=sum(r.position not in wrong for r in plans),
        mismatches=mismatches,
    )


def state_at(records: Iterable[Recorded], position: int | None = None) -> State:
    """Return the planner's state after the record at ``position`` (None: the last), its recorded answer included.

    Raises:
        NotFound: the log has no such position.
    """
    everything = list(records)
    last = everything[-1].position if everything else 0
    if position is not None and not 0 <= position <= last:
        raise NotFound(f"position {position}: the log ends at {last}")
    answers = recorded_answers(everything)
    fold = Fold()
    for record in everything:
        if position is not None and record.position > position:
            break
        if fold.take(record):
            fold.answer(record, [r.event for r in answers_to(record, answers)])
    return fold.state


def _compare(cause: Recorded, recorded: list[Recorded], decided: list[Event]) -> list[Mismatch]:
    """Return the differences between the recorded answer to a cause and the one decided now."""
    found = []
    for there, here in zip_longest(recorded, decided):
        if there is None:
            found.append(Mismatch(position=cause.position, plan=_name(here), problem="decided again, not in the log"))
        elif here is None:
            found.append(Mismatch(position=there.position, plan=_name(there.event), problem="not decided again"))
        elif there.event.canonical() != here.canonical():
            problem = _difference(there.event.canonical(), here.canonical())
            found.append(Mismatch(position=there.position, plan=_name(there.event), problem=problem))
    return found


def _name(event: Event | None) -> str:
    return event.plan if isinstance(event, PlanDecided) else ""


def _difference(there: str, here: str) -> str:
    """Return where two canonical texts part, with what stands there."""
    at = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    start = max(0, at - 40)
    return f"byte {at}: recorded ...{there[start : at + 40]!r}, decided again ...{here[start : at + 40]!r}"
