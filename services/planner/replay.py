"""Replay: the planner's state at any position of a log, and the check of every plan in the log.

    report = Replayer.of_file("run/log.db").verify()
    if not report.ok:
        print(report.mismatches)

``Replayer`` folds the log as the planner's service does (``log_fold``) and judges each recorded plan by its decider:

- A plan of this program's decider (``decide.DECIDER``) is decided again and must be equal byte for byte.
- A plan of an older decider cannot be decided again. Its recorded problem is solved again and must give the recorded
  objective, and what is true of every plan must be true of it (``invariants``). The recorded plan is folded.
- A plan of a newer decider is a mismatch: a newer version of this program can check it.

The decider never falls along a log. So a forged plan cannot escape the comparison by the number of an older decider:
after a plan of this decider that number is refused, and before one the plan must pass the checks of older plans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Self

from pydantic import Field

from services.planner.decide import DECIDER
from services.planner.invariants import answer_problems, execution_problems
from services.planner.log_fold import Fold, answers_to, recorded_answers
from services.planner.state import State
from shared.errors import NotFound
from shared.events import Event, PlanDecided, Recorded, StateMoved
from shared.log.log import EventLog
from shared.model import Model
from shared.planning.solver import solve_with_alternatives


class Mismatch(Model):
    """A place where the log contradicts the planner.

    ``position``: of the plan, or of the cause where the log has no plan. ``plan``: the plan's name, empty if there is
    none. ``problem``: the contradiction, in words.
    """

    position: int
    plan: str
    problem: str


class Report(Model):
    """Result of a verification.

    ``verified``: plans of this program's decider that were decided again with the same bytes. ``older``: plans of an
    older decider that passed the checks for those. ``chain_ok``: whether the hash chain is intact; true where records
    without a log were verified.
    """

    events: int
    plans: int
    verified: int
    older: int = 0
    mismatches: list[Mismatch] = Field(default_factory=list)
    chain_ok: bool = True

    @property
    def ok(self) -> bool:
        """Whether the chain is intact and every plan is verified, or is older and passed the checks."""
        return self.chain_ok and not self.mismatches and self.verified + self.older == self.plans


class Replayer:
    """A log in memory, ready to be folded and verified. Public: a test suite or a CI job uses it on a log file.

    Args:
        records: the log from its first position on, in order.
        chain_ok: whether the hash chain of the log is intact.
        decider: the decider whose plans are compared byte for byte; another value than the default serves tests.
    """

    def __init__(self, records: Iterable[Recorded], *, chain_ok: bool = True, decider: int = DECIDER) -> None:
        self.records = list(records)
        self._chain_ok = chain_ok
        self._decider = decider

    @classmethod
    def of_log(cls, log: EventLog) -> Self:
        """Return a replayer of an open log, as far as it is written now.

        Raises:
            Corrupt: a record cannot be read. (A broken hash chain of readable records is reported by ``verify``.)
        """
        chain = log.verify()
        return cls(log.read_all(), chain_ok=chain.ok)

    @classmethod
    def of_file(cls, path: Path | str) -> Self:
        """Return a replayer of an SQLite log file: a live one or a copy. The file is not changed.

        Raises:
            NotFound: there is no such file.
            Corrupt: the file is no event log, or a record cannot be read.
        """
        return cls.of_url(f"sqlite:///{Path(path).resolve()}")

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return a replayer of the log at a URL, as the setting ``log_url`` has it. Nothing is changed there.

        Raises:
            InvalidInput: not a URL of SQLite or PostgreSQL.
            NotFound: there is no such file.
            Corrupt: the database has no event log, or a record cannot be read.
            AccessDenied: the database refuses.
            Unavailable: the database does not answer.
        """
        log = EventLog(url, read_only=True)
        try:
            return cls.of_log(log)
        finally:
            log.close()

    def verify(self) -> Report:
        """Judge every plan in the log.

        A cause at the very end without an answer is no mismatch: a live log may be read between the two.
        """
        return _Verification(self.records, self._decider).report(self._chain_ok)

    def state_at(self, position: int | None = None) -> State:
        """Return the planner's state after the record at ``position`` (None: the last) and its recorded answer.

        Raises:
            NotFound: the log has no such position.
        """
        last = self.records[-1].position if self.records else 0
        if position is not None and not 0 <= position <= last:
            raise NotFound(f"position {position}: the log ends at {last}")
        answers = recorded_answers(self.records)
        fold = Fold()
        for record in self.records:
            if position is not None and record.position > position:
                break
            if fold.take(record):
                fold.answer(record, [r.event for r in answers_to(record, answers)])
        return fold.state


def verify(log: EventLog) -> Report:
    """Return the verification of an open log; see ``Replayer``."""
    return Replayer.of_log(log).verify()


def verify_records(records: Iterable[Recorded]) -> Report:
    """Return the verification of records without a log; see ``Replayer``."""
    return Replayer(records).verify()


class _Verification:
    """One pass over a log."""

    def __init__(self, records: Sequence[Recorded], decider: int) -> None:
        self._records = records
        self._decider = decider
        self._answers = recorded_answers(records)
        plans = [(r.position, r.event.decider) for r in records if isinstance(r.event, PlanDecided)]
        self._positions = [position for position, _ in plans]
        self._deciders = [decider for _, decider in plans]
        self._fold = Fold()
        self._mismatches: list[Mismatch] = []
        self._judged: dict[str, Recorded] = {}
        """Plans that a cause calls for, by event id."""
        self._older: dict[str, Recorded] = {}
        """Plans of older deciders, by the plan's name."""
        self._unanswered: list[Mismatch] = []
        """Causes without an answer since the last answered one."""

    def report(self, chain_ok: bool) -> Report:
        plans = [r for r in self._records if isinstance(r.event, PlanDecided)]
        self._check_order_of_deciders(plans)
        for record in self._records:
            try:
                self._judge(record)
            except Exception as err:
                # A forged log may have what no state of the planner allows; its fold fails anywhere.
                problem = f"cannot be folded, and no later record be checked: {type(err).__name__} {err}"
                self._mismatch(record, record.event, problem)
                break
        else:
            for plan in plans:
                if plan.event.event_id not in self._judged:
                    self._mismatch(plan, plan.event, "nothing in the log calls for it")
        wrong = {mismatch.position for mismatch in self._mismatches}
        right = [r.event for r in self._judged.values() if r.position not in wrong]
        deciders = [event.decider for event in right if isinstance(event, PlanDecided)]
        return Report(
            events=len(self._records),
            plans=len(plans),
            verified=sum(decider == self._decider for decider in deciders),
            older=sum(decider < self._decider for decider in deciders),
            mismatches=self._mismatches,
            chain_ok=chain_ok,
        )

    def _check_order_of_deciders(self, plans: Sequence[Recorded]) -> None:
        newest = 0
        for record in plans:
            assert isinstance(record.event, PlanDecided)
            decider = record.event.decider
            if decider < newest:
                self._mismatch(record, record.event, f"decider {decider} after a plan of decider {newest}")
            if decider > self._decider:
                problem = (
                    f"decider {decider} is newer than this program's, {self._decider}: verify with a newer version"
                )
                self._mismatch(record, record.event, problem)
            newest = max(newest, decider)

    def _decider_at(self, position: int) -> int:
        """Return the decider at work at a position: that of the next plan, or this program's after the last plan."""
        at = bisect_right(self._positions, position)
        return self._deciders[at] if at < len(self._deciders) else self._decider

    def _judge(self, cause: Recorded) -> None:
        """Fold one record with its recorded answer, and judge that answer."""
        self._check_execution(cause)
        if not self._fold.take(cause):
            return
        recorded = answers_to(cause, self._answers)
        if not recorded and self._decider_at(cause.position) != self._decider:
            return  # another decider may leave unanswered what this one answers
        if recorded and recorded[0].position < cause.position:
            self._mismatch(recorded[0], recorded[0].event, f"recorded before its cause, position {cause.position}")
        self._judged.update({r.event.event_id: r for r in recorded if isinstance(r.event, PlanDecided)})
        decider = max((r.event.decider for r in recorded if isinstance(r.event, PlanDecided)), default=self._decider)
        if decider == self._decider:
            self._judge_again(cause, recorded)
        elif decider < self._decider:
            self._judge_older(cause, recorded)
        else:
            self._fold.answer(cause, [r.event for r in recorded])

    def _judge_again(self, cause: Recorded, recorded: Sequence[Recorded]) -> None:
        """Decide again and compare; what was recorded is folded, so that each plan is judged on its own."""
        decided = self._fold.decide(cause)
        if decided and not recorded:
            self._unanswered.append(Mismatch(position=cause.position, plan="", problem="has no plan in the log"))
            self._fold.answer(cause, decided)
            return
        if recorded:
            # The planner answers in order: it passed over an earlier cause without an answer.
            self._mismatches += self._unanswered
            self._unanswered = []
        self._mismatches += _differences(cause, recorded, decided)
        self._fold.answer(cause, [r.event for r in recorded])

    def _judge_older(self, cause: Recorded, recorded: Sequence[Recorded]) -> None:
        """Check what is true of every plan."""
        before = self._fold.state
        answer = [r.event for r in recorded]
        self._fold.answer(cause, answer)
        for problem in answer_problems(before, cause, answer, self._fold.state, solve_with_alternatives):
            self._mismatch(recorded[0], answer[0], problem)
        self._older[_name(answer[0])] = recorded[0]

    def _check_execution(self, record: Recorded) -> None:
        """Check a report of a plan's execution against the plan, where the plan is of an older decider."""
        event = record.event
        plan = self._older.get(event.plan) if isinstance(event, StateMoved) else None
        if isinstance(event, StateMoved) and plan is not None and isinstance(plan.event, PlanDecided):
            for problem in execution_problems(plan.event, event):
                self._mismatch(plan, plan.event, f"position {record.position} contradicts it: {problem}")

    def _mismatch(self, record: Recorded, event: Event, problem: str) -> None:
        self._mismatches.append(Mismatch(position=record.position, plan=_name(event), problem=problem))


def _differences(cause: Recorded, recorded: Sequence[Recorded], decided: Sequence[Event]) -> list[Mismatch]:
    """Return the differences between the recorded answer to a cause and the answer decided now."""
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
    """Return the first place at which two canonical texts differ, with the text around it."""
    at = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    start = max(0, at - 40)
    return f"byte {at}: recorded ...{there[start : at + 40]!r}, decided again ...{here[start : at + 40]!r}"
