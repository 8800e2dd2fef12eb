"""Options that the verbs share."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shared.key_directory import KeyDirectory


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


KeyPlace = Annotated[
    Path | None, typer.Option("--keys", help="The key directory. Default: UNICRON_NATS_KEYS or .unicron/nats/keys.")
]
PidFile = Annotated[
    Path | None,
    typer.Option(help="File with the pid of nats-server, which is reloaded. Default: nats.pid there."),
]


def key_directory(path: Path | None) -> KeyDirectory:
    """Return the key directory that is meant: the one given, or that of the settings."""
    from shared.key_directory import KeyDirectory
    from shared.settings import read_settings

    return KeyDirectory(read_settings().key_directory if path is None else path)


def tell_reload(directory: KeyDirectory, pid_file: Path | None, *, quiet: bool = False) -> bool:
    """Have nats-server read its keys again, and return whether it was found; say so on standard error if it was not."""
    found = directory.reload(pid_file)
    if not found and not quiet:
        print("unicron: no nats-server was found; have it read its configuration again (SIGHUP)", file=sys.stderr)
    return found
