"""Options that the verbs share."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import here
from cli.completion import fault_ids, incident_ids, node_names, plan_ids, task_names

if TYPE_CHECKING:
    from shared.nats.key_directory import KeyDirectory
    from unicron_client.resources import Client


class Format(StrEnum):
    """How results are printed."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"


class SegmentEnding(StrEnum):
    """Ending of a segment's file."""

    PLAIN = "jsonl"
    COMPRESSED = "jsonl.gz"


_SERVER: Any = {"envvar": "UNICRON_SERVER"}

GivenServer = Annotated[
    str | None, typer.Option("--server", help="Address of the server. Default: http://127.0.0.1:8642", **_SERVER)
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        help="Address of the server. Default: that of what runs in .unicron here, else http://127.0.0.1:8642",
        callback=lambda given: given or here.address(),
        **_SERVER,
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="WHEN", help="Only from then on: 90s, 10m, 3h or 2d ago, or a time as 2026-03-01T14:00 (UTC)."
    ),
]
Output = Annotated[
    Format,
    typer.Option("--output", "-o", help="text; wide: all columns; json: standard output has JSON and nothing else."),
]
Ship = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Send this folder along, without what .gitignore names: the nodes need not have it."
    ),
]
ShipFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--ship-file", metavar="NAME", help="Send this file, too, which looks like a secret. May be repeated."
    ),
]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="The task's name.", autocompletion=task_names)]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.", autocompletion=node_names)]
IncidentId = Annotated[
    str,
    typer.Argument(
        metavar="INCIDENT",
        help="Its id, as `unicron incidents` lists it, or the beginning.",
        autocompletion=incident_ids,
    ),
]
FaultId = Annotated[
    str,
    typer.Argument(
        metavar="INCIDENT",
        help="Its id, as `unicron incidents` or `unicron slow-workers` lists it, or the beginning; or a slow worker's "
        "name.",
        autocompletion=fault_ids,
    ),
]
PlanId = Annotated[
    str, typer.Argument(metavar="PLAN", help="The plan's id, or the beginning of it.", autocompletion=plan_ids)
]


LogPlace = Annotated[
    str | None, typer.Option(help="The log: a .db file or a database's URL. Default: UNICRON_LOG_URL.")
]
LogFolder = Annotated[Path | None, typer.Option(help="Folder with the log, where --log is not given.")]
SegmentFormat = Annotated[SegmentEnding, typer.Option("--format", help="jsonl.gz is compressed.")]


def log_url(log: str | None, run_dir: Path | None) -> str:
    """Return the URL of the log that is meant: a URL, a file, that in a run directory, or that of the settings."""
    from shared.settings.model import read_settings

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


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def connected(server: str | None) -> Client:
    """Return the client of a server. Its modules are loaded only here, so that ``--help`` of a verb is fast."""
    from unicron_client.resources import Client

    return Client(server)


def moment(since: str | None) -> str | None:
    """Return the time that ``--since`` means, as the interface takes it; None: it was not given.

    Raises:
        InvalidInput: it is no time.
    """
    from datetime import UTC, datetime, timedelta

    from shared.errors import InvalidInput

    if since is None:
        return None
    try:
        if since[-1:] in _UNITS_S:
            return (datetime.now(UTC) - timedelta(seconds=float(since[:-1]) * _UNITS_S[since[-1]])).isoformat()
        at = datetime.fromisoformat(since)
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).isoformat()
    except (ValueError, OverflowError):
        problem = "must be like 90s, 10m, 3h, 2d, or a time like 2026-03-01T14:00"
        raise InvalidInput.of("--since", since, problem) from None


def given(**options: Any) -> dict[str, Any]:
    """Return the settings that were given as options: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def key_directory(path: Path | None) -> KeyDirectory:
    """Return the key directory that is meant: the one given, or that of the settings."""
    from shared.nats.key_directory import KeyDirectory
    from shared.settings.model import read_settings

    return KeyDirectory(read_settings().key_directory if path is None else path)


def tell_reload(directory: KeyDirectory, pid_file: Path | None, *, quiet: bool = False) -> bool:
    """Have nats-server read its keys again, and return whether it was found; say so on standard error if it was not."""
    found = directory.reload(pid_file)
    if not found and not quiet:
        print("unicron: no nats-server was found; have it read its configuration again (SIGHUP)", file=sys.stderr)
    return found


def checked_node(name: str) -> str:
    """Return a node's name that was given.

    Raises:
        InvalidInput: it is none.
    """
    from shared.errors import InvalidInput
    from shared.names import NAME_RULE, is_name

    if not is_name(name):
        raise InvalidInput.of("NODE", name, NAME_RULE)
    return name
