"""How a service or an agent comes onto the bus: the settings, completed by what its credential says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shared.bus import credentials
from shared.bus.credentials import Credential
from shared.bus.identities import SERVICES, node_of
from shared.errors import InvalidInput
from shared.names import host_label
from shared.settings.endpoints import check_servers
from shared.settings.model import Settings

CREDENTIAL = "UNICRON_NATS_CREDENTIAL"
"""Variable of the setting ``nats_credential``."""

CREDENTIAL_FD = "UNICRON_NATS_CREDENTIAL_FD"
"""Variable of the setting ``nats_credential_fd``."""


def credential_of(settings: Settings) -> Credential:
    """Return the credential that the settings name, with the certificates that they name.

    Raises:
        InvalidInput: they name none, or a file cannot be used.
    """
    if settings.nats_credential_fd is not None:
        found = credentials.read_descriptor(settings.nats_credential_fd)
    elif settings.nats_credential is not None:
        found = credentials.read(settings.nats_credential)
    else:
        raise _refused("nats_credential", None, "is needed: the file that `unicron node add` or `unicron keys` made")
    if settings.nats_ca_file is None:
        return found
    try:
        return found.model_copy(update={"ca": settings.nats_ca_file.read_text()})
    except (OSError, UnicodeDecodeError) as err:
        raise _refused("nats_ca_file", settings.nats_ca_file, f"cannot be read: {err}") from err


def joined(settings: Settings, credential: Credential) -> Settings:
    """Return the settings with the servers and the node's name of the credential, where these are not set.

    Raises:
        InvalidInput: the setting names another node.
    """
    changes: dict[str, Any] = {}
    if "nats_url" not in settings.model_fields_set and credential.servers:
        changes["nats_url"] = check_servers(",".join(credential.servers))
    node = node_of(credential.identity)
    if node is not None and settings.node != node:
        if "node" in settings.model_fields_set:
            problem = f"is not the node {node!r}, whose credential nats_credential names"
            raise _refused("node", settings.node, problem)
        changes["node"] = node
    return settings.model_copy(update=changes)


def check_identity(credential: Credential, service: str) -> None:
    """Refuse the credential of another part, with which hardly a message would arrive.

    Args:
        credential: the credential of this process.
        service: this process, by its name on the bus; empty: an agent.

    Raises:
        InvalidInput: the credential is of a service, and this is another; or of a node, and this is a service.
    """
    identity = credential.identity
    if (identity in SERVICES and identity != service) or (service and node_of(identity) is not None):
        raise _refused("nats_credential", identity, f"is not the credential of {service or 'a node'}")


def node_name() -> str:
    """Return the name of this machine's node before the settings are read: errors in them are logged under it."""
    if given := os.environ.get("UNICRON_NODE"):
        return given
    try:
        if descriptor := os.environ.get(CREDENTIAL_FD):
            return node_of(credentials.read_descriptor(int(descriptor)).identity) or host_label()
        if path := os.environ.get(CREDENTIAL):
            return node_of(credentials.read(Path(path)).identity) or host_label()
    except (InvalidInput, ValueError):
        pass  # the error is reported when the settings are used
    return host_label()


def _refused(field: str, value: object, problem: str) -> InvalidInput:
    shown = None if value is None else str(value)
    text = f"settings refused: {field} (UNICRON_{field.upper()}) {problem}"
    return InvalidInput.of(field, shown, problem, text if shown is None else f"{text} (given: {shown!r})")
