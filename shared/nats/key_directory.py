"""The key directory: who may use NATS, as an operator keeps it.

    identities.json       the public key of each identity, and the servers that new credentials name
    authorization.conf    the part of nats-server's configuration that follows from it (``shared.nats.rights``)
    tls.conf              another part: the server's certificate, once there is one (``shared.nats.certificates``)
    ca.pem, ca-key.pem    the authority that vouches for the server; server.pem, server-key.pem: the certificate
    <service>.json        the credential of a service
    nodes/<name>.json     the credential of a node: the one file that is copied there

The server's own configuration includes the two parts, and reads them again on SIGHUP. A reload that adds a node
disturbs nothing; one that removes a node closes its connections.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, ValidationError

from shared.bus import credentials
from shared.bus.credentials import PUBLIC_KEY, Credential, new_seed
from shared.bus.identities import SERVICES, Identity, node_identity, node_of
from shared.errors import Conflict, Corrupt, NotFound, Unavailable
from shared.machine.durable_files import replace_file
from shared.model import Model
from shared.nats import certificates
from shared.nats.rights import RightsOf, authorization, rights

SERVER_NAME = "nats-server"
"""The process that a reload signals; the number in a pid file may be another process's by now."""

PID_FILE = "nats.pid"
"""Where the server's pid is expected (``nats-server --pid``)."""

_TLS = "tls.conf"
_CA = "ca.pem"


class Identities(Model):
    """The file ``identities.json``.

    ``keys``: identity -> public key. ``servers``: the servers that new credentials name.
    """

    servers: list[str] = Field(default_factory=list)
    keys: dict[Identity, Annotated[str, Field(pattern=PUBLIC_KEY)]] = Field(default_factory=dict)


class KeyDirectory:
    """The files below one folder.

    Args:
        path: the folder; it is made with the first key.
        rights_of: returns the rights of an identity.
    """

    def __init__(self, path: Path, rights_of: RightsOf = rights) -> None:
        self.path = path
        self._rights_of = rights_of

    def credential_file(self, identity: str) -> Path:
        """Return where the credential of an identity is, if the directory has one."""
        node = node_of(identity)
        return self.path / f"{identity}.json" if node is None else self.path / "nodes" / f"{node}.json"

    def identities(self) -> Identities:
        """Return what the directory knows; nothing if there is none.

        Raises:
            Corrupt: the file is none of identities.
            Unavailable: it cannot be read.
        """
        path = self.path / "identities.json"
        try:
            return Identities.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return Identities()
        except OSError as err:
            raise Unavailable(f"{path}: {err.strerror or err}") from err
        except ValidationError as err:
            raise Corrupt(f"{path}: {err.errors(include_url=False, include_input=False)[0]['msg']}") from err

    def make(self, servers: Sequence[str] | None = None, more: Sequence[str] = ()) -> None:
        """Make the credentials of the services that have none, and write the server's configuration anew.

        Args:
            servers: URLs of NATS for all credentials here and later ones; None: as they are.
            more: further identities to make.

        Raises:
            Corrupt, Unavailable: as ``identities``; or a file cannot be written.
        """
        with self._changing() as known:
            if servers is not None:
                known.servers[:] = servers
            for identity in (*SERVICES, *more):
                if identity not in known.keys:
                    self._make(known, identity)
            self._complete(known)

    def add_node(self, name: str) -> Path:
        """Make the credential of a node; return its file. The server has to be reloaded.

        Raises:
            Conflict: the node has one.
            NotFound: the services have none: this is no key directory.
            Corrupt, Unavailable: as ``make``.
        """
        identity = node_identity(name)
        with self._changing() as known:
            self._check(known)
            if identity in known.keys:
                raise Conflict(f"node {name!r} has a credential; to replace it, remove the node first")
            self._make(known, identity)
        return self.credential_file(identity)

    def remove_node(self, name: str) -> None:
        """Take a node's rights away. The server has to be reloaded.

        Raises:
            NotFound: the node has none.
            Corrupt, Unavailable: as ``make``.
        """
        identity = node_identity(name)
        with self._changing() as known:
            self._check(known)
            if known.keys.pop(identity, None) is None:
                raise NotFound(f"node {name!r} has no credential in {self.path}")
        self.credential_file(identity).unlink(missing_ok=True)

    def certify(self, names: Sequence[str], now: datetime, mounted: Path | None = None) -> None:
        """Have the server use TLS, and all credentials here know who vouches for it. The server has to be started anew.

        Another call makes another certificate by the same authority: credentials that were copied stay valid.

        Args:
            names: host names and IP addresses under which clients reach the server.
            now: the time, with its zone.
            mounted: where the server finds this directory, as in a container; None: where it is.

        Raises:
            InvalidInput: there is no name, or one is no name of a host.
            NotFound, Corrupt, Unavailable: as ``add_node``.
        """
        with self._changing() as known:
            self._check(known)
            ca, ca_key = self.path / _CA, self.path / "ca-key.pem"
            if ca_key.exists():
                authority = certificates.Pair(ca.read_text(), ca_key.read_text())
            else:
                authority = certificates.new_authority(now)
            issued = certificates.issue(authority, names, now)
            replace_file(ca, authority.certificate.encode(), mode=0o644)
            replace_file(ca_key, authority.key.encode(), mode=0o600)
            certificate, key = self.path / "server.pem", self.path / "server-key.pem"
            replace_file(certificate, issued.certificate.encode(), mode=0o644)
            replace_file(key, issued.key.encode(), mode=0o600)
            place = self.path.resolve() if mounted is None else mounted
            text = certificates.server_configuration(place / certificate.name, place / key.name)
            replace_file(self.path / _TLS, text.encode(), mode=0o644)
            known.servers[:] = [f"tls://{server.partition('://')[2]}" for server in known.servers]
            self._complete(known)

    def reload(self, pid_file: Path | None = None) -> bool:
        """Have the server read its configuration again; return whether one was found.

        Args:
            pid_file: the file with the server's pid; None: ``PID_FILE`` in the directory.
        """
        path = self.path / PID_FILE if pid_file is None else pid_file
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            server = psutil.Process(int(path.read_text()))
            if server.name() == SERVER_NAME:
                server.send_signal(signal.SIGHUP)
                return True
        return False

    def _check(self, known: Identities) -> None:
        if not known.keys:
            raise NotFound(f"{self.path} has no keys: `unicron keys make` makes those of the services")

    def _make(self, known: Identities, identity: str) -> None:
        made = Credential(identity=identity, seed=new_seed(), servers=known.servers, ca=self._ca())
        credentials.write(self.credential_file(identity), made)
        known.keys[identity] = made.public_key

    def _complete(self, known: Identities) -> None:
        """Write the present servers and certificates into all credentials that are here."""
        for identity in known.keys:
            path = self.credential_file(identity)
            if path.exists():
                changed = {"servers": list(known.servers), "ca": self._ca()}
                credentials.write(path, credentials.read(path).model_copy(update=changed))
        if not (self.path / _TLS).exists():
            replace_file(self.path / _TLS, b"# No TLS: `unicron keys tls` changes that.\n", mode=0o644)

    def _ca(self) -> str:
        path = self.path / _CA
        return path.read_text() if path.exists() else ""

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Identities]:
        """Give what is known, and write what the caller makes of it, with the authorization: one caller at a time."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise Unavailable(f"{self.path}: {err.strerror or err}") from err
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = self.identities()
            yield known
            replace_file(self.path / "identities.json", known.model_dump_json(indent=1).encode() + b"\n", mode=0o600)
            # Public keys, which the server's user has to read.
            text = authorization(known.keys, self._rights_of)
            replace_file(self.path / "authorization.conf", text.encode(), mode=0o644)
        except OSError as err:
            raise Unavailable(f"{err.filename or self.path}: {err.strerror or err}") from err
        finally:
            os.close(lock)
