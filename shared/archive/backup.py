"""Backups: a folder of segments with the whole log, up to its last event at that moment.

A backup has the format of an archive (``segments``), so that ``unicron replay`` reads it, one format serves both
databases, and a second backup to the same folder writes only what the first one has not. A backup is taken in one read
transaction, which keeps no writer waiting: the rows of a log never change, so a consistent copy is a prefix of it.
``restoration`` makes a log of it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from shared.archive.writing import Watch, add_segment, last_segment, locked, unwatched
from shared.errors import NotFound
from shared.log.base import START
from shared.log.log import EventLog
from shared.log.schema import StoredRow
from shared.log.segments import ENDINGS, Manifest


class Backup(NamedTuple):
    """What a folder has after a backup: all events up to ``position``, whose hash is ``head``.

    ``added``: manifest of the segment that this backup wrote; None if the folder had all before.
    """

    position: int
    head: str
    added: Manifest | None


def back_up(log: EventLog, folder: Path, ending: str = ENDINGS[1], watch: Watch = unwatched) -> Backup:
    """Write the events that a log has and a folder lacks as one more segment.

    The log may be in use, and stays as it is.

    If the log was cut over, what is archived goes into the folder too.

    Args:
        log: the log; every row of its table is checked as it is read.
        folder: the backup's folder, which is made if there is none. The folder may be the one to which the log is
            archived.
        ending: the file's ending: ``.jsonl`` or ``.jsonl.gz``.
        watch: wraps the rows as they are read.

    Raises:
        NotFound: the log has no event.
        Corrupt: a row is wrong, or the folder has the backup of another log, or of events that this log no longer has.
        Conflict: another program writes to the folder.
        Archived: the log was cut over, and a segment is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        last = last_segment(folder)
        # Events of an archived part that the folder has are not read again.
        base = log.base if last is not None and last.last_position >= log.base.position else START
        with closing(_rows(log, from_start=base is START)) as stored:
            added = add_segment(folder, base, watch(stored), None, ending)
        if (last := added or last) is None:
            raise NotFound("the log has no event: there is nothing to back up")
        return Backup(last.last_position, last.head, added)


def _rows(log: EventLog, *, from_start: bool) -> Generator[StoredRow]:
    """Yield the rows of a log's table, and of what is archived before it."""
    with closing(log.rows()) as rows:
        yield from itertools.chain(log.archived_rows() if from_start else (), rows)
