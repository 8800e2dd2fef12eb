"""``unicron backup``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from cli.options import Format, LogFolder, LogPlace, Output, SegmentEnding, SegmentFormat, log_url
from cli.output import print_json


def backup(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of the backup; is made if there is none.")
    ],
    log: LogPlace = None,
    run_dir: LogFolder = None,
    ending: SegmentFormat = SegmentEnding.COMPRESSED,
    output: Output = Format.TEXT,
) -> None:
    """Write the whole log to a folder, while the services run; again: what has been added since.

    Prints the head, to be noted elsewhere: `unicron replay --verify --expect-head HEAD` checks a backup, or what was
    restored from it. Needs no server.
    """
    from cli.progress import counted
    from shared.archive.backup import back_up
    from shared.log.log import EventLog
    from shared.settings.model import read_settings

    url = log_url(log, run_dir)
    with (
        closing(EventLog(url, read_only=True, segments=read_settings().log_segments)) as opened,
        counted("backup", opened.last_position()) as watch,
    ):
        done = back_up(opened, folder, f".{ending.value}", watch)
    if output is Format.JSON:
        added = done.added.model_dump(mode="json") if done.added is not None else None
        print_json({"folder": str(folder), "position": done.position, "head": done.head, "segment": added})
        return
    if done.added is None:
        print(f"{folder} has all events already")
    else:
        places = f"positions {done.added.first_position} to {done.added.last_position}"
        print(f"{folder / done.added.file}: {places}, {done.added.size_bytes} bytes")
    print(f"head {done.position}:{done.head}")
