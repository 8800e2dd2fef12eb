"""Options that the verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


Server = Annotated[
    str | None,
    typer.Option("--server", envvar="UNICRON_SERVER", help="Address of the server. Default: http://127.0.0.1:8642"),
]
Output = Annotated[
    Format, typer.Option("--output", "-o", help="text, or json: standard output has JSON and nothing else.")
]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="The task's name.")]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]


def log_url(log: str | None, run_dir: Path | None) -> str:
    """Return the URL of the log that is meant: a URL, a file, that in a run directory, or that of the settings."""
    from shared.settings import read_settings

    if log is not None and "://" in log:
        return log
    if log is not None:
        return f"sqlite:///{Path(log).resolve()}"
    return read_settings(run_dir=run_dir, log_url="").log_database_url if run_dir else read_settings().log_database_url
