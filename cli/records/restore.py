"""``unicron restore``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.options import Format, Output, log_url
from cli.output import printed_json


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a backup.")],
    log: Annotated[
        str | None,
        typer.Option(help="The new log: a .db file or the URL of an empty database. Default: UNICRON_LOG_URL."),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for the log, where --log is not given.")] = None,
    at: Annotated[int | None, typer.Option(min=1, help="Position of the last event. Default: all events.")] = None,
    output: Output = Format.TEXT,
) -> None:
    """Make a log of a backup, in an empty database; nothing is overwritten.

    Agents and services are stopped, and start on the new log. Needs no server.
    """
    from cli.progress import counted
    from shared.archive.restoration import restore as write
    from shared.log.schema import sqlite_path

    url = log_url(log, run_dir)
    with counted("restore, events written") as watch:
        place = write(folder, url, at, watch)
    where = sqlite_path(url)
    if not printed_json({"position": place.position, "head": place.hash}, output):
        print(f"{where or 'the database'} has positions 1 to {place.position}")
        print(f"head {place.position}:{place.hash}")
