"""``unicron token``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from cli.options import Format, Output
from cli.output import clock, print_json, print_table, printed_json
from shared.errors import InvalidInput
from shared.model import utc_now
from shared.names import is_name
from shared.service import tokens
from shared.service.tokens import NODE_PATTERN, Scope
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
        typer.Option(
            help="read; submit: tasks of one's own too; operate: everybody's tasks, and nodes. "
            "report: troubles of the nodes that --node names, and nothing else."
        ),
    ] = Scope.SUBMIT,
    nodes: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NODE", help="With --scope report: of which nodes, repeatable; * for any part."),
    ] = None,
    run_dir: RunDir = None,
    output: Output = Format.TEXT,
) -> None:
    """Make a token and print it. It is shown this once: the server keeps a digest.

    Clients send it as `Authorization: Bearer TOKEN`; the command line takes it from UNICRON_TOKEN.
    """
    if not is_name(name):
        raise InvalidInput.of("NAME", name, "must be 1 to 63 lower-case letters, digits and hyphens")
    _check_nodes(scope, nodes or [])
    made = tokens.add(_file(run_dir), name, scope, utc_now(), nodes or [])
    if not printed_json({"name": name, "scope": scope, "nodes": nodes or [], "token": made}, output):
        print(made)


def _check_nodes(scope: Scope, nodes: list[str]) -> None:
    """Refuse a monitor's token without nodes, another one with some, and what is no pattern of a name.

    Raises:
        InvalidInput: it is one of these.
    """
    wrong = [one for one in nodes if re.fullmatch(NODE_PATTERN, one) is None]
    if wrong:
        problem = "must be the name of a node: up to 63 lower-case letters, digits and hyphens, and * for any part"
        raise InvalidInput.of("--node", wrong[0], problem)
    if (scope is Scope.REPORT) != bool(nodes):
        problem = "goes with --scope report, which needs it: of which nodes the bearer may report"
        raise InvalidInput.of("--node", nodes, problem, f"--node {problem}")


@app.command(name="list")
def show(run_dir: RunDir = None, output: Output = Format.TEXT) -> None:
    """List the tokens, without their text."""
    found = [token.model_dump(mode="json", exclude={"sha256"}) for token in tokens.read(_file(run_dir))]
    if printed_json(found, output):
        return
    of_nodes = any(one["nodes"] for one in found)
    rows = [
        (one["name"], one["scope"], *([" ".join(one["nodes"]) or None] if of_nodes else []), clock(one["created_at"]))
        for one in found
    ]
    columns = ("NAME", "SCOPE", *(["NODES"] if of_nodes else []), "CREATED (UTC)")
    print_table(columns, rows, empty="no tokens", least=("CREATED (UTC)",), wide=output is Format.WIDE)


@app.command()
def remove(name: TokenName, run_dir: RunDir = None, output: Output = Format.TEXT) -> None:
    """Remove a token: whoever bears it is refused from now on."""
    tokens.remove(_file(run_dir), name)
    if output is Format.JSON:
        print_json({"name": name})
