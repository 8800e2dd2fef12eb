"""Replay: the planner's state at any position of a log, and the check of every plan in the log.

    report = Replayer.of_file("run/log.db").verify()
    if not report.ok:
        print(report.mismatches)

``Replayer`` folds the log as the planner's service does (``log_fold``) and judges each recorded plan by its decider:

- A plan of this program's decider (``decide.DECIDER``) is decided again and must be equal byte for byte.
- A plan of an older decider cannot be decided again. Its recorded problem is solved again and must give the recorded
  objective, and what is true of every plan must be true of it (``invariants``). The recorded plan is folded.
- A plan of a newer decider is a mismatch: a newer version of this program can check it.

The decider falls along a log only by one, behind a ``cluster.configured`` that says so: the planner before an upgrade
has taken over again. So a forged plan does not escape the comparison by the number of an older decider: after a plan of
this decider that number is refused elsewhere, and before one the plan must pass the checks of older plans.

A log is read in passes and never kept in memory. What a newer version of the program wrote into it is skipped, and the
report names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, Self

from services.planner.decide import DECIDER
from services.planner.replay import verification_jobs
from services.planner.replay.contradictions import Mismatch as Mismatch
from services.planner.replay.log_fold import NO_POLICIES, Fold, Policies
from services.planner.replay.segments import SegmentsSource
from services.planner.replay.sources import AnsweredRows, LogSource, RecordsSource, Source, WatchedSource
from services.planner.replay.verification import Report as Report
from services.planner.state.cluster import State
from shared.errors import Archived, NotFound
from shared.events.union import Recorded
from shared.log.anchors import Anchor, Defect
from shared.log.base import FIRST_HASH
from shared.log.log import EventLog
from shared.log.scan import Scan
from shared.log.unreadable import Skipped


class Place(NamedTuple):
    """The planner's state at a position.

    ``hash``: the hash of the event there. ``skipped``: what was skipped up to there.
    """

    state: State
    position: int
    hash: str
    skipped: list[Skipped]


class Replayer:
    """A log, ready to be folded and verified. Public: a test suite or a CI job uses it on a log file.

    Args:
        records: the log from its first position on, in order.
        chain_ok: whether the hash chain of the log is intact.
        decider: the decider whose plans are compared byte for byte; another value than the default serves tests.
    """

    def __init__(self, records: Iterable[Recorded], *, chain_ok: bool = True, decider: int = DECIDER) -> None:
        self._source: Source = RecordsSource(list(records), chain_ok=chain_ok)
        self._decider = decider

    @classmethod
    def of_log(cls, log: EventLog) -> Self:
        """Return a replayer of an open log, which is opened once more for each pass."""
        return cls.of_url(log.url)

    @classmethod
    def of_file(cls, path: Path | str, *, decider: int = DECIDER) -> Self:
        """Return a replayer of an SQLite log file: a live one or a copy. The file is not changed.

        Raises:
            NotFound: there is no such file.
            Corrupt: the file is no event log.
        """
        return cls.of_url(f"sqlite:///{Path(path).resolve()}", decider=decider)

    @classmethod
    def of_url(cls, url: str, *, decider: int = DECIDER) -> Self:
        """Return a replayer of the log at a URL, as the setting ``log_url`` has it. The log is not changed.

        Raises:
            InvalidInput: not a URL of SQLite or PostgreSQL.
            NotFound: there is no such file.
            Corrupt: the database has no event log.
            AccessDenied: the database refuses.
            Unavailable: the database does not answer.
        """
        opened = partial(EventLog, url, read_only=True)
        with closing(opened()):
            pass
        found = cls((), decider=decider)
        found._source = LogSource(opened)
        return found

    @classmethod
    def of_segments(cls, segments: Sequence[Path], url: str = "", *, decider: int = DECIDER) -> Self:
        """Return a replayer of a log that was archived in segments.

        Args:
            segments: their files, by position.
            url: the URL of the live log behind them; empty: none.
            decider: as for ``Replayer``.

        Raises:
            NotFound: a file is not there.
            InvalidInput, NotFound, Corrupt, AccessDenied, Unavailable: of the live log, as ``of_url``.
        """
        for path in segments:
            if not path.is_file():
                raise NotFound(f"no segment at {path}")
        opened = partial(EventLog, url, read_only=True) if url else None
        if opened is not None:
            with closing(opened()):
                pass
        found = cls((), decider=decider)
        found._source = SegmentsSource(segments, opened)
        return found

    def watched(self, seen: Callable[[int], None]) -> Self:
        """Return a replayer of the same log whose passes are watched. ``seen``: as of ``WatchedSource``."""
        found = type(self)((), decider=self._decider)
        found._source = WatchedSource(self._source, seen)
        return found

    @cached_property
    def records(self) -> list[Recorded]:
        """All records that can be read, collected in memory."""
        return [row.record for row in self._source.rows(Scan(self._source.base())) if row.record is not None]

    def verify(
        self,
        anchors: Iterable[Anchor] = (),
        defects: Iterable[Defect] = (),
        jobs: int = 1,
        policies: Policies = NO_POLICIES,
    ) -> Report:
        """Judge every event and every plan in the log.

        A cause at the very end without an answer is no mismatch: a live log may be read between the two.

        Args:
            anchors: hashes that the log must have.
            defects: what is known to be wrong already; part of the report.
            jobs: number of processes; the report is the same. A program that asks for several starts its main work
                below ``if __name__ == "__main__"``, as ``multiprocessing`` requires.
            policies: the functions of the policies that simulated histories name (``simulator.policies.SOLVES``). A
                plan of a policy that is not among them is a mismatch.
        """
        return verification_jobs.verify(self._source, self._decider, anchors, defects, jobs, policies)

    def state_at(self, position: int | None = None) -> State:
        """Return the planner's state after the record at ``position`` (None: the last) and its recorded answer.

        Raises:
            NotFound: the log has no such position.
            Archived: the log begins behind archived segments, which were not given.
            Corrupt: the database is damaged.
        """
        return self.place_at(position).state

    def place_at(self, position: int | None = None) -> Place:
        """Return the state as ``state_at`` does, with the place in the log."""
        self._require_whole()
        rows = AnsweredRows(self._source.rows(Scan()), self._source.answers())
        fold = Fold()
        last, head = 0, FIRST_HASH
        skipped = []
        for row in rows:
            if position is not None and row.position > position:
                break
            last, head = row.position, row.hash
            if row.skipped is not None:
                skipped.append(row.skipped)
            if row.record is not None and fold.take(row.record):
                fold.answer(row.record, [r.event for r in rows.answers_to(row.record)])
        else:
            if position is not None and not 0 <= position <= last:
                raise NotFound(f"position {position}: the log ends at {last}")
        return Place(fold.state, last, head, skipped)

    def _require_whole(self) -> None:
        """Refuse to fold a log that begins behind archived segments.

        Raises:
            Archived: the log begins behind archived segments.
        """
        if (base := self._source.base()).is_cut:
            raise Archived(
                f"the log begins behind position {base.position}; what is before was archived to {base.segments}: give "
                "that folder too, before the log"
            )


def verify(log: EventLog) -> Report:
    """Return the verification of an open log, as far as it is written now; see ``Replayer``."""
    return Replayer.of_log(log).verify()


def verify_records(records: Iterable[Recorded]) -> Report:
    """Return the verification of records without a log; see ``Replayer``."""
    return Replayer(records).verify()
