"""``unicron keys``: on the machine of NATS and the services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.options import Format, KeyPlace, Output, PidFile, checked_node, key_directory, tell_reload
from cli.output import print_json, printed_json
from shared.bus.identities import SERVICES, node_identity
from shared.errors import InvalidInput
from shared.model import utc_now
from shared.settings.endpoints import check_servers

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def keys() -> None:
    """Make the keys with which services and nodes use NATS."""


@app.command()
def make(
    server: Annotated[
        str | None,
        typer.Option(
            help="Where services and nodes find NATS, for their credentials: nats://HOST:4222, several with commas."
        ),
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node that is to have a credential, too; repeatable.")
    ] = None,
    keys: KeyPlace = None,
    pid_file: PidFile = None,
    output: Output = Format.TEXT,
) -> None:
    """Make the credentials of the services and the authorization of nats-server, and print where they are.

    What is there stays. After an upgrade this writes the authorization anew, by the table of the new version.
    """
    nodes = [checked_node(name) for name in node or ()]
    directory = key_directory(keys)
    directory.make(None if server is None else check_servers(server).split(","), [node_identity(n) for n in nodes])
    reloaded = tell_reload(directory, pid_file, quiet=True)
    if output is Format.JSON:
        files = {service: str(directory.credential_file(service).resolve()) for service in SERVICES}
        print_json({"directory": str(directory.path.resolve()), "credentials": files, "reloaded": reloaded})
    else:
        print(directory.path.resolve())


@app.command()
def tls(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Host names and addresses under which NATS is reached.")
    ],
    keys: KeyPlace = None,
    mounted: Annotated[
        Path | None, typer.Option(help="Where nats-server has the key directory, if not here: in a container.")
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Give NATS a certificate, by an authority of the cluster's own, and have all credentials here ask for it.

    Start NATS again afterwards, then the services, and copy the credentials of nodes anew. Another call, with other
    names, makes another certificate by the same authority; credentials stay as they are then.
    """
    directory = key_directory(keys)
    if mounted is not None and not mounted.is_absolute():
        raise InvalidInput.of("--mounted", str(mounted), "must be an absolute path")
    directory.certify(names, utc_now(), mounted)
    if not printed_json({"ca": str((directory.path / "ca.pem").resolve()), "names": names}, output):
        print("start NATS again, then the services, and copy the credentials of nodes")
