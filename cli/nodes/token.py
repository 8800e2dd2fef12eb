"""``unicron token``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.options import Format, Output
from cli.output import clock, print_json, print_table
from shared.errors import InvalidInput
from shared.model import utc_now
from shared.names import is_name
from shared.service import tokens
from shared.service.tokens import Scope
from shared.settings.model import read_settings

app = typer.Typer(no_args_is_help=True, add_completion=False)

RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of the server's run. Default: UNICRON_TOKENS_FILE or .unicron.")
]
TokenName = Annotated[str, typer.Argument(metavar="NAME", help="Of whoever bears the token: letters, digits, hyphens.")]


def _file(run_dir: Path | None) -> Path:
    return (read_settings() if run_dir is None else read_settings(run_dir=run_dir)).token_file


@app.callback()
def token() -> None:
    """Make and remove tokens, with which others may use the server."""


@app.command()
def add(
    name: TokenName,
    scope: Annotated[
        Scope,
        typer.Option(help="read; submit: tasks of one's own too; operate: everybody's tasks, and nodes."),
    ] = Scope.SUBMIT,
    run_dir: RunDir = None,
    output: Output = Format.TEXT,
) -> None:
    """Make a token and print it. It is shown this once: the server keeps a digest.

    Clients send it as `Authorization: Bearer TOKEN`; the command line takes it from UNICRON_TOKEN.
    """
    if not is_name(name):
        problem = "must be 1 to 63 lower-case letters, digits and hyphens"
        raise InvalidInput(f"NAME: {name!r} {problem}", [{"field": "NAME", "value": name, "problem": problem}])
    made = tokens.add(_file(run_dir), name, scope, utc_now())
    if output is Format.JSON:
        print_json({"name": name, "scope": scope, "token": made})
    else:
        print(made)


@app.command(name="list")
def show(run_dir: RunDir = None, output: Output = Format.TEXT) -> None:
    """List the tokens, without their text."""
    found = [token.model_dump(mode="json", exclude={"sha256"}) for token in tokens.read(_file(run_dir))]
    if output is Format.JSON:
        print_json(found)
        return
    rows = [(one["name"], one["scope"], clock(one["created_at"])) for one in found]
    columns = ("NAME", "SCOPE", "CREATED (UTC)")
    print_table(columns, rows, empty="no tokens", least=("CREATED (UTC)",), wide=output is Format.WIDE)


@app.command()
def remove(name: TokenName, run_dir: RunDir = None, output: Output = Format.TEXT) -> None:
    """Remove a token: whoever bears it is refused from now on."""
    tokens.remove(_file(run_dir), name)
    if output is Format.JSON:
        print_json({"name": name})
