"""The services of a control plane, each a child process of this one, with a NATS and a log that others run.

A service that ends is started again, at once and then after longer and longer pauses. If it is refused as it starts
again, or keeps ending, everything ends with its exit status, for whoever started this to decide. If this process is
killed, each service gets a parent-death signal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict
from ipaddress import ip_address

from cli.here import PORT
from cli.stack.child import Child
from cli.stack.children import SERVICES, STOP_ORDER, Children
from cli.stack.run_directory import RunDirectory
from services.agent.succession.restarts import MAX_RESTARTS, WINDOW_S, Restarts
from shared.bus import credentials
from shared.errors import InvalidInput, Unavailable, UnicronError
from shared.machine.process import PARENT_DEATH_VARIABLE
from shared.nats.key_directory import KeyDirectory
from shared.service.joining import CREDENTIAL, CREDENTIAL_FD, check_identity
from shared.settings.endpoints import LOOPBACK, listening
from shared.settings.model import Settings

logger = logging.getLogger(__name__)


class ControlPlane:
    """The four services.

    Args:
        settings: of all of them. ``nats_keys``: folder with the credential of each, under its name.

    Raises:
        InvalidInput: a service has no credential there, or one that cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.run_directory = RunDirectory(settings.run_dir)
        keys = KeyDirectory(settings.key_directory.resolve())
        self._restarts: defaultdict[str, Restarts] = defaultdict(Restarts)
        self._children = Children(self._pause_s)
        for name, module in SERVICES.items():
            _check_credential(keys, name)
            # Folding a long log takes as long as it takes, and the service itself limits how long it waits for others.
            child = Child(name, module, self._environment(keys, name), None, start_timeout_s=None)
            self._children.add(child)
        self.url = ""

    async def start(self) -> None:
        """Start the services; return when all of them work.

        Raises:
            Conflict: the run directory is in use.
            Unavailable: the port is in use.
            UnicronError: a service was refused; of the kind that its exit status says.
        """
        from shared.service.http_server import check_free

        self.run_directory.acquire()
        check_free(self._settings.host, self._settings.port)
        await self._children.start()
        port = (self.run_directory.path / PORT).read_text().strip()
        # An api that is started again must listen where its clients know it.
        self._children["api"].environment["UNICRON_PORT"] = port
        scheme = "http" if self._settings.tls_certificate is None else "https"
        self.url = f"{scheme}://{_reached_at(self._settings.host)}:{port}"

    async def stop(self) -> None:
        """Stop the services, in order; return when none is left."""
        await self._children.stop(STOP_ORDER)
        self.run_directory.release()

    @property
    def failed(self) -> asyncio.Future[UnicronError]:
        """A future that is done, with the reason, when a service is not started again."""
        return self._children.failed

    def _environment(self, keys: KeyDirectory, service: str) -> dict[str, str]:
        variables = {name: value for name, value in os.environ.items() if name != CREDENTIAL_FD}
        return variables | {
            # The pid, not 1: a child then notices a parent that ended while the child was starting.
            PARENT_DEATH_VARIABLE: str(os.getpid()),
            "UNICRON_RUN_DIR": str(self.run_directory.path),
            "UNICRON_PORT": str(self._settings.port),
            "UNICRON_METRICS_ADDRESS": metrics_address(self._settings.metrics_address, service),
            CREDENTIAL: str(keys.credential_file(service)),
        }

    def _pause_s(self, child: Child, reason: UnicronError) -> float:
        """Return how long to wait before a service that has ended is started again.

        Raises:
            UnicronError: it was refused as it started again, or has ended too often.
        """
        # A service that worked before may end with any status, and then starts from the log as it is.
        if child.refused and not isinstance(reason, Unavailable):
            raise reason
        pause_s = self._restarts[child.name].pause_s(time.monotonic())
        if pause_s is None:
            raise Unavailable(f"{child.name}: {reason.detail}, after {MAX_RESTARTS} restarts in {WINDOW_S:g} s")
        logger.error("%s: %s; it is started again in %g s", child.name, reason.detail, pause_s)
        return pause_s


def metrics_address(setting: str, service: str) -> str:
    """Return where a service serves its metrics: each at a port of its own, from the setting's on; the api where it is.

    Args:
        setting: ``metrics_address``.
        service: one of ``SERVICES``.
    """
    found = listening(setting)
    if found is None or service == "api":
        return ""
    host, port = found
    port += [name for name in SERVICES if name != "api"].index(service) if port else 0
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_credential(keys: KeyDirectory, service: str) -> None:
    path = keys.credential_file(service)
    try:
        check_identity(credentials.read(path), service)
    except InvalidInput as err:
        problem = f"{err.detail}: `unicron keys make` makes the services' credentials in a key directory"
        raise InvalidInput.of(
            "nats_keys", str(keys.path), problem, f"settings refused: nats_keys (UNICRON_NATS_KEYS, --keys): {problem}"
        ) from err


def _reached_at(host: str) -> str:
    """Return under which name this machine reaches what listens at an address."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return LOOPBACK
    return f"[{address}]" if address.version == 6 else host
