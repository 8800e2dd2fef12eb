"""``unicron archive``."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Format, LogFolder, LogPlace, Output, SegmentEnding, SegmentFormat, log_url
from cli.output import printed_json
from shared.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from shared.log.segments import Manifest


def archive(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of the log's segments; is made if there is none.")
    ],
    before: Annotated[
        str, typer.Option(metavar="POSITION|DATE", help="The first position, or the day in UTC, that stays out.")
    ],
    cut: Annotated[
        bool,
        typer.Option(
            "--cut", help="Then let the log begin there, and set the old one aside; no service may run meanwhile."
        ),
    ] = False,
    log: LogPlace = None,
    run_dir: LogFolder = None,
    ending: SegmentFormat = SegmentEnding.COMPRESSED,
    output: Output = Format.TEXT,
) -> None:
    """Write what a log has and a folder of segments has not as one more segment.

    The log is checked up to there, and stays as it is: nothing is removed from it. `unicron replay FOLDER LOG` reads
    segments and log as one. With --cut the log then begins there; the old one is set aside, and nothing of it is
    removed. Needs no server.
    """
    from cli.progress import counted
    from shared.archive.writing import archive as write
    from shared.log.log import EventLog

    end = _end(before)
    url = log_url(log, run_dir)
    with closing(EventLog(url, read_only=True)) as opened:
        with counted("archive", opened.last_before(end)) as watch:
            manifest = write(opened, folder, end, f".{ending.value}", watch)
        last = opened.last_before(end) if cut else 0
    done: dict[str, object] = {"segment": manifest.model_dump(mode="json") if manifest is not None else None}
    if cut:
        done |= _cut(url, folder, last)
    if printed_json(done if cut else done["segment"], output):
        return
    _print_segment(folder, before, manifest)
    if cut:
        aside = f"; what it was is {done['set_aside']}" if done["set_aside"] else " already"
        print(f"the log begins behind position {last}{aside}")


def _cut(url: str, folder: Path, last: int) -> dict[str, object]:
    """Let the log begin behind a position, up to which it is archived; return what was done.

    Raises:
        Conflict: it may not be cut there.
        Archived: a segment is not in the folder.
        Corrupt: segments or log have a defect.
    """
    from services.planner.replay.cut_limit import cut_limit
    from services.planner.replay.segments import SegmentsSource
    from shared.archive.cutover import cut
    from shared.log.archived import verified_base
    from shared.log.log import EventLog
    from shared.log.segments import segments_in

    if last == 0:
        raise InvalidInput("--before: no event lies before it")
    base = verified_base(folder, last)
    limit = cut_limit(SegmentsSource(segments_in(folder), partial(EventLog, url, read_only=True)))
    if last > limit.position:
        raise Conflict(
            f"the log cannot begin behind position {last}, only behind {limit.position} or before (--before "
            f"{limit.position + 1}): {limit.reason}",
            furthest=limit.position,
        )
    return {"begins_after": last, "set_aside": cut(url, base)}


def _print_segment(folder: Path, before: str, manifest: Manifest | None) -> None:
    if manifest is None:
        print(f"{folder} has all events before {before}")
    else:
        places = f"positions {manifest.first_position} to {manifest.last_position}, {manifest.events} events"
        print(f"{folder / manifest.file}: {places}, head {manifest.last_position}:{manifest.head}")


def _end(before: str) -> int | datetime:
    """Return a position, or the beginning of a day."""
    if before.isdecimal() and len(before) <= 18:  # as many digits as a position may have
        return int(before)
    try:
        return datetime.strptime(before, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as err:
        raise InvalidInput(f"--before: {before!r} is neither a position nor a date, YYYY-MM-DD") from err
