"""``unicron agent``: a node's agent, in the foreground; and one that works elsewhere, started again.

With ``--join FILE`` this process becomes the agent, with the settings that follow from the file.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer

from cli.options import Format, NodeName, Output, Server, connected, given
from cli.output import printed_json
from services.agent.machine import hardware
from services.agent.machine.hardware import VISIBLE_VARIABLE
from shared.bus import credentials
from shared.bus.credentials import Credential
from shared.errors import Conflict, InvalidInput
from shared.service.joining import CREDENTIAL, CREDENTIAL_FD, check_identity, joined
from shared.settings.model import Settings, read_settings

app = typer.Typer(no_args_is_help=True, add_completion=False)

TIMEOUT_S = 60.0
"""An agent starts in one to two seconds, on a busy machine in ten. It may have to wait for NATS or the detector."""


MODULE = "services.agent.main"
"""The node's main process."""


def run_agent(file: Path, changes: Mapping[str, Any]) -> NoReturn:
    """Become the node's main process. Its settings are checked before, so that whoever called has the error.

    Args:
        file: the node's credential.
        changes: settings that were given as options.

    Raises:
        InvalidInput: the file cannot be used, or a setting is not allowed.
    """
    variables = agent_environment(file, changes)
    # One process: whoever started the command signals the supervisor itself.
    os.execve(sys.executable, [sys.executable, "-P", "-m", MODULE], variables)  # nosec B606 # fixed program


def agent_environment(file: Path, changes: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of the node's main process.

    Args:
        file: the node's credential.
        changes: settings that were given as options.

    Raises:
        InvalidInput: the file cannot be used, or a setting is not allowed.
    """
    credential = _read(file)
    settings = joined(read_settings(**changes), credential)
    if not credential.servers and "nats_url" not in settings.model_fields_set:
        raise _refused(
            file,
            "does not say where NATS is: `unicron keys make --server nats://HOST:4222` beside NATS writes that into "
            "all files there, to copy anew; or set UNICRON_NATS_URL",
        )
    found = {**changes, **_workers(settings)}
    variables = {name: value for name, value in os.environ.items() if name != CREDENTIAL_FD}
    return variables | {
        **{f"UNICRON_{field.upper()}": str(value) for field, value in found.items()},
        CREDENTIAL: str(file.absolute()),
    }


def _read(file: Path) -> Credential:
    """Return the credential of a node in a file that nobody else can read."""
    try:
        mode = file.stat().st_mode
    except OSError as err:
        raise _refused(file, f"cannot be read: {err.strerror or err}") from err
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise _refused(file, f"is open to every user (mode {stat.S_IMODE(mode):04o}): `chmod 600 {file}`")
    try:
        credential = credentials.read(file)
        check_identity(credential, "")
    except InvalidInput as err:
        raise _refused(file, f"is not a node's credential as `unicron node add` made it: {err.detail}") from err
    return credential


def _workers(settings: Settings) -> dict[str, int]:
    """Return how many workers the node has, if its devices say so and no setting does."""
    if "workers_per_node" in settings.model_fields_set:
        return {}
    devices = hardware.device_count(os.environ.get(VISIBLE_VARIABLE), settings.hardware)
    return {"workers_per_node": devices} if devices else {}


def _refused(file: Path, problem: str) -> InvalidInput:
    return InvalidInput.of("--join", str(file), problem, f"--join: {file} {problem}")


@app.callback(invoke_without_command=True)
def agent(
    context: typer.Context,
    join: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The node's credential, which `unicron node add` has made.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker slots. Default: UNICRON_WORKERS_PER_NODE, the GPUs that are found, or 2."),
    ] = None,
    domain: Annotated[
        str | None, typer.Option(help="Failure domain, such as the rack. Default: UNICRON_DOMAIN or default.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for what the node writes. Default: UNICRON_RUN_DIR or .unicron.")
    ] = None,
) -> None:
    """Run this machine's node agent, or have a node's agent started again.

    With --join FILE this is the agent of the node that FILE is for: its name, where NATS is and whose certificates that
    has are in there. It runs in the foreground; SIGTERM and Ctrl-C drain the node first.
    """
    changes = given(workers_per_node=workers, domain=domain, run_dir=run_dir)
    if context.invoked_subcommand is not None:
        if join is not None or changes:
            raise InvalidInput(f"--join and the options beside it do not go with {context.invoked_subcommand}")
        return
    if join is None:
        raise InvalidInput("--join is needed: FILE, which `unicron node add` has made for this node")
    run_agent(join, changes)


@app.command("restart")
def restart(
    node: NodeName,
    timeout_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for the next agent.")] = TIMEOUT_S,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Start a node's agent again, of the program that is installed now; ranks train on, and no step is lost.

    The node's supervisor, fork server and ranks stay as they are. To replace these, drain the node and restart its
    service.
    """
    from cli.waiting import wait_for_successor

    begun_s = time.monotonic()
    with connected(server) as client:
        before = client.post(f"/v1/nodes/{quote(node, safe='')}/agent/restart")
    after = wait_for_successor(server, before["name"], before["incarnation"], timeout_s)
    if after["incarnation"] == before["incarnation"]:
        raise Conflict(f"node {node!r} is {after['state']}: {after['reason']}", state=after["state"])
    if printed_json(after, output):
        return
    ranks = sum(worker["task"] is not None for worker in after["workers"])
    taken_s = time.monotonic() - begun_s
    agent_pid = after["agent_pid"]
    print(f"{after['name']}: {after['state']}, agent {agent_pid} after {taken_s:.1f} s, with {ranks} ranks")
