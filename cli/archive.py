"""``unicron archive``."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.options import Format, Output, log_url
from cli.output import print_json
from shared.errors import InvalidInput


class Ending(StrEnum):
    """Ending of a segment's file."""

    PLAIN = "jsonl"
    COMPRESSED = "jsonl.gz"


def archive(
    folder: Annotated[Path, typer.Argument(help="The folder of the log's segments; is made if there is none.")],
    before: Annotated[
        str, typer.Option(metavar="POSITION|DATE", help="The first position, or the day in UTC, that stays out.")
    ],
    log: Annotated[
        str | None, typer.Option(help="The log: a .db file or a database's URL. Default: UNICRON_LOG_URL.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder with the log, where --log is not given.")] = None,
    ending: Annotated[Ending, typer.Option("--format", help="jsonl.gz is compressed.")] = Ending.COMPRESSED,
    output: Output = Format.TEXT,
) -> None:
    """Write what a log has and a folder of segments has not as one more segment.

    The log is checked up to there, and stays as it is: nothing is removed from it. `unicron replay FOLDER LOG` reads
    segments and log as one. Needs no server.
    """
    from shared.log.archive import archive as write
    from shared.log.log import EventLog

    end = _end(before)
    with closing(EventLog(log_url(log, run_dir), read_only=True)) as opened:
        manifest = write(opened, folder, end, f".{ending.value}")
    if output is Format.JSON:
        print_json(manifest.model_dump(mode="json") if manifest is not None else None)
    elif manifest is None:
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
