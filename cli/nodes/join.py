"""The agent that ``unicron agent --join FILE`` becomes: this process, with the settings that follow from the file."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from services.agent.machine import hardware
from services.agent.machine.hardware import VISIBLE_VARIABLE
from shared.bus import credentials
from shared.bus.credentials import Credential
from shared.errors import InvalidInput
from shared.service.joining import CREDENTIAL, CREDENTIAL_FD, check_identity, joined
from shared.settings.model import Settings, read_settings

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
    return InvalidInput(f"--join: {file} {problem}", [{"field": "--join", "value": str(file), "problem": problem}])
