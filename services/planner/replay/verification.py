"""The verification of a log: one pass in which every row, every event and every plan is judged.

``replay`` has the public side and says how plans are judged. Several passes may each judge a share of the answers
(``verification_jobs``); each pass finds everything else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from services.planner.replay.contradictions import Contradictions, differences, plan_name
from services.planner.replay.contradictions import Mismatch as Mismatch
from services.planner.replay.invariants import answer_problems, execution_problems
from services.planner.replay.log_fold import NO_POLICIES, Fold, Policies
from services.planner.replay.sources import AnsweredRows, Source
from services.planner.throughput.tables import table_problems
from shared.errors import Corrupt
from shared.events.union import ClusterConfigured, Event, PlanDecided, Recorded, StateMoved
from shared.log.anchors import Anchor, AnchorCheck, Defect
from shared.log.base import FIRST_HASH
from shared.log.scan import Row, Scan
from shared.model import Model

MOST_PROBLEMS = 100
"""Number of problems that a report names. One changed row makes a few; a log that is wrong all through would fill
memory."""


class LogProblem(Model):
    """Something wrong with the log itself.

    ``position``: where the defect is; 0: at no certain row. ``what``: the defect in words.
    """

    position: int
    what: str


class SkippedPart(Model):
    """An event of which a newer version wrote something that this one does not know: ``what`` was skipped, in words."""

    position: int
    type: str | None
    schema_version: int | None
    what: str


class Report(Model):
    """Result of a verification.

    Attributes:
        events: number of rows.
        plans: number of plans.
        verified: plans of this program's decider that were decided again with the same bytes.
        older: plans of an older decider that passed the checks for those.
        mismatches: plans, or missing plans, that contradict the planner.
        chain_ok: whether the hash chain is intact; true where records without a log were verified.
        head: hash of the last row before the first defect of the chain.
        problem: the first of ``problems``; None if there are none.
        problems: what is wrong with the log itself: its chain, its table, events other than plans; by position.
        skipped: what a newer version of the program wrote. Without it, what follows may be judged wrongly.
        begins_after: the log was verified from behind this position, up to which it is archived; no plan was judged.
    """

    events: int
    plans: int
    verified: int
    older: int = 0
    mismatches: list[Mismatch] = Field(default_factory=list)
    chain_ok: bool = True
    head: str = FIRST_HASH
    problem: LogProblem | None = None
    problems: list[LogProblem] = Field(default_factory=list)
    skipped: list[SkippedPart] = Field(default_factory=list)
    begins_after: int = 0

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong with what this program knows of the log."""
        return self.chain_ok and not self.mismatches and not self.problems

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong and nothing was skipped, and every plan is verified or is older and passed."""
        return self.sound and not self.skipped and self.verified + self.older == self.plans


SHARED_AT_ONCE = 16
"""Number of consecutive answers that one pass judges: neighbours ask for the same throughput tables, which each process
makes for itself. A log of a hundred plans still has work for each of several processes."""


class Share(NamedTuple):
    """A pass's share of the recorded answers: the ``number``-th ``SHARED_AT_ONCE`` of every ``of`` times as many."""

    number: int = 0
    of: int = 1


class Found(NamedTuple):
    """A mismatch, and its place in the report.

    ``row``: number of the row at which the pass found it. ``part``: 0 if every pass finds the mismatch; 1 if it is one
    of an answer that this pass has judged; 2 if the fold has failed.
    """

    row: int
    part: int
    mismatch: Mismatch


@dataclass(frozen=True)
class Findings:
    """What one pass has found; the fields are those of ``Report``.

    ``judged``: the deciders of plans that a cause calls for, by position. ``folded``: position of the last record that
    could be folded.
    """

    events: int
    plans: int
    judged: dict[int, int]
    folded: int
    found: list[Found]
    problems: list[Defect]
    skipped: list[SkippedPart]
    chain_ok: bool
    head: str
    begins_after: int = 0


def report_of(passes: Sequence[Findings], decider: int) -> Report:
    """Return the report of a verification.

    Args:
        passes: one pass that has judged everything, or one pass for each share, in the order of the shares.
        decider: the decider whose plans were compared byte for byte.
    """
    first = passes[0]
    found = [*first.found, *(each for other in passes[1:] for each in other.found if each.part == 1)]
    mismatches = [each.mismatch for each in sorted(found, key=lambda each: each[:2])]
    wrong = {mismatch.position for mismatch in mismatches}
    deciders = [number for position, number in first.judged.items() if position not in wrong]
    problems = [LogProblem(position=at, what=what) for at, what in sorted(first.problems)]
    return Report(
        events=first.events,
        plans=first.plans,
        verified=sum(number == decider for number in deciders),
        older=sum(number < decider for number in deciders),
        mismatches=mismatches,
        chain_ok=first.chain_ok,
        head=first.head,
        problem=problems[0] if problems else None,
        problems=problems[:MOST_PROBLEMS],
        skipped=first.skipped,
        begins_after=first.begins_after,
    )


class Verification:
    """One pass over a log.

    Args:
        source: the log.
        decider: the decider whose plans are compared byte for byte.
        anchors: hashes that the log must have.
        defects: what is known to be wrong already.
        share: which recorded answers are judged.
        policies: the functions of the policies that simulated histories name.
    """

    def __init__(
        self,
        source: Source,
        decider: int,
        anchors: Iterable[Anchor] = (),
        defects: Iterable[Defect] = (),
        share: Share = Share(),  # noqa: B008 (immutable)
        policies: Policies = NO_POLICIES,
    ) -> None:
        self._source = source
        self._decider = decider
        self._share = share
        self._answered = 0
        """Number of recorded answers up to now."""
        answers = list(source.answers())
        plans = [(answer.position, answer.decider) for answer in answers if answer.decider is not None]
        self._positions = [position for position, _ in plans]
        self._deciders = [decider for _, decider in plans]
        self._scan = Scan(base := source.base())
        self._rows = AnsweredRows(source.rows(self._scan), answers)
        self._anchors = AnchorCheck(anchors)
        self._anchors.begin(*base[:2])
        self._contradictions = Contradictions()
        self._fold = Fold(policies=policies)
        self._folding = not base.is_cut
        self._folded = 0
        """Position of the last record that could be folded."""
        self._newest = 0
        self._events = 0
        self._plans = 0
        self._last = self._begins_after = base.position
        self._problems = list(defects)
        self._skipped: list[SkippedPart] = []
        self._found: list[Found] = []
        self._judged: dict[int, int] = {}
        """The deciders of plans that a cause calls for, by position."""
        self._older: dict[str, Recorded] = {}
        """Plans of older deciders, by the plan's name."""
        self._unanswered: list[Mismatch] = []
        """Causes without an answer since the last answered one."""

    def findings(self) -> Findings:
        """Make the pass; return what it has found."""
        try:
            for row in self._rows:
                self._take(row)
        except Corrupt as err:
            self._scan.check.broken()
            self._problems.append(Defect(self._last + 1, f"position {self._last + 1}: {err.detail}"))
        self._events += 1  # what the end of the log shows comes behind what the last row shows
        for plan in self._rows.unclaimed():
            if plan.position <= self._folded:
                self._mismatch(plan, plan.event, "nothing in the log calls for it")
        self._problems += self._anchors.defects(self._last)
        self._problems += self._source.defects()
        return Findings(
            events=self._events - 1,
            plans=self._plans,
            judged=self._judged,
            folded=self._folded,
            found=self._found,
            problems=self._problems,
            skipped=self._skipped,
            chain_ok=self._scan.check.ok,
            head=self._scan.check.head,
            begins_after=self._begins_after,
        )

    def _take(self, row: Row) -> None:
        """Judge one row, and the event in it."""
        self._events += 1
        self._last = row.position
        self._anchors.next(row.position, row.hash, row.recorded_at)
        if row.problem:
            self._note(row.position, row.problem)
        if row.skipped is not None:
            part = row.skipped
            self._skipped.append(
                SkippedPart(position=part.position, type=part.type, schema_version=part.schema_version, what=part.what)
            )
        record = row.record
        if record is None:
            return
        if isinstance(record.event, ClusterConfigured) and record.event.decider == self._newest - 1:
            self._newest = record.event.decider  # the planner before the last upgrade has taken over again
        if isinstance(record.event, PlanDecided):
            self._plans += 1
            self._check_decider(record, record.event)
            if row.skipped is not None:
                self._mismatch(record, record.event, "parts of it are not known here: verify with a newer version")
        if not self._folding:
            return
        try:
            for problem in self._contradictions.of(self._fold.state, record.event):
                self._note(record.position, f"position {record.position}: {problem}")
            self._judge(record)
            self._folded = record.position
        except Exception as err:
            # A forged log may have what no state of the planner allows; its fold fails anywhere.
            problem = f"cannot be folded, and no later record be checked: {type(err).__name__} {err}"
            self._mismatch(record, record.event, problem, part=2)
            self._folding = False

    def _note(self, position: int, what: str) -> None:
        if len(self._problems) <= MOST_PROBLEMS:
            self._problems.append(Defect(position, what))

    def _check_decider(self, record: Recorded, plan: PlanDecided) -> None:
        if plan.decider < self._newest:
            self._mismatch(record, plan, f"decider {plan.decider} after a plan of decider {self._newest}")
        if plan.decider > self._decider:
            problem = (
                f"decider {plan.decider} is newer than this program's, {self._decider}: verify with a newer version"
            )
            self._mismatch(record, plan, problem)
        self._newest = max(self._newest, plan.decider)

    def _decider_at(self, position: int) -> int:
        """Return the decider at work at a position: that of the next plan, or this program's after the last plan."""
        at = bisect_right(self._positions, position)
        return self._deciders[at] if at < len(self._deciders) else self._decider

    def _judge(self, cause: Recorded) -> None:
        """Fold one record with its recorded answer, and judge that answer."""
        self._check_execution(cause)
        if not self._fold.take(cause):
            return
        recorded = self._rows.answers_to(cause)
        if not recorded and self._decider_at(cause.position) != self._decider:
            return  # another decider may leave unanswered what this one answers
        if recorded and recorded[0].position < cause.position:
            self._mismatch(recorded[0], recorded[0].event, f"recorded before its cause, position {cause.position}")
        deciders = {r.position: r.event.decider for r in recorded if isinstance(r.event, PlanDecided)}
        self._judged.update(deciders)
        for r in recorded:
            if isinstance(r.event, PlanDecided):
                for problem in table_problems(self._fold.state.tables, r.event):
                    self._mismatch(r, r.event, problem)
        decider = max(deciders.values(), default=self._decider)
        if not self._fold.knows_policy:
            self._judge_unknown(cause, recorded)
        elif decider == self._decider and not recorded:
            self._judge_silence(cause)
        elif decider == self._decider:
            self._judge_again(cause, recorded)
        elif decider < self._decider:
            self._judge_older(cause, recorded)
        else:
            self._fold.answer(cause, [r.event for r in recorded])

    def _is_mine(self) -> bool:
        """Count one more recorded answer; return whether this pass judges it."""
        turn = self._answered // SHARED_AT_ONCE
        self._answered += 1
        return turn % self._share.of == self._share.number

    def _judge_unknown(self, cause: Recorded, recorded: Sequence[Recorded]) -> None:
        """Fold an answer of an unknown policy without a judgement: no other policy may judge it."""
        for each in recorded:
            problem = f"decided by policy {self._fold.policy!r}, which this program does not know"
            self._mismatch(each, each.event, problem)
        self._fold.answer(cause, [r.event for r in recorded])

    def _judge_silence(self, cause: Recorded) -> None:
        """Decide on a cause that has no answer in the log, and fold what should be there."""
        decided = self._fold.decide(cause)
        if decided:
            self._unanswered.append(Mismatch(position=cause.position, plan="", problem="has no plan in the log"))
            self._fold.answer(cause, decided)

    def _judge_again(self, cause: Recorded, recorded: Sequence[Recorded]) -> None:
        """Decide again and compare; then fold what was recorded, so that each plan is judged on its own."""
        # The planner answers in order, so it passed over an earlier cause without an answer.
        for mismatch in self._unanswered:
            self._found.append(Found(self._events, 0, mismatch))
        self._unanswered = []
        if self._is_mine():
            for mismatch in differences(cause, recorded, self._fold.decide(cause)):
                self._found.append(Found(self._events, 1, mismatch))
        self._fold.answer(cause, [r.event for r in recorded])

    def _judge_older(self, cause: Recorded, recorded: Sequence[Recorded]) -> None:
        """Check what is true of every plan."""
        before = self._fold.state
        answer = [r.event for r in recorded]
        self._fold.answer(cause, answer)
        if self._is_mine():
            for problem in answer_problems(before, cause, answer, self._fold.state, self._fold.solve):
                self._mismatch(recorded[0], answer[0], problem, part=1)
        self._older[plan_name(answer[0])] = recorded[0]

    def _check_execution(self, record: Recorded) -> None:
        """Check a report of a plan's execution against the plan, where the plan is of an older decider."""
        event = record.event
        plan = self._older.get(event.plan) if isinstance(event, StateMoved) else None
        if isinstance(event, StateMoved) and plan is not None and isinstance(plan.event, PlanDecided):
            for problem in execution_problems(plan.event, event):
                self._mismatch(plan, plan.event, f"position {record.position} contradicts it: {problem}")

    def _mismatch(self, record: Recorded, event: Event, problem: str, part: int = 0) -> None:
        mismatch = Mismatch(position=record.position, plan=plan_name(event), problem=problem)
        self._found.append(Found(self._events, part, mismatch))
