"""Options that the verbs share."""

from __future__ import annotations

from enum import StrEnum
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
