"""The control plane's machine: nats-server and PostgreSQL with the shipped configuration, and the four services."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import urllib.parse
from collections.abc import Iterable, Mapping

import httpx

from cli.stack.children import SERVICES
from shared.bus.identities import node_identity
from shared.log.log import EventLog
from shared.log.relay import STREAM
from shared.nats.key_directory import KeyDirectory
from shared.nats.nats_server import find_binary
from tests.cluster import relay
from tests.cluster.holder import DISK
from tests.cluster.machine import Machine, MachineFailed, Process
from tests.cluster.network import ROOT
from tests.condition import until_blocking
from tests.postgres import find_binaries

START_S = 60.0
"""A service starts in a few seconds, of which most are imports; several share the cores."""

RUN_DIR = f"{DISK}/unicron"
POSTGRES = f"{DISK}/postgres"
NATS = f"{DISK}/nats"
API_SOCKET = f"{DISK}/api.sock"
API_PORT = 8642


def service_environment(**more: str) -> dict[str, str]:
    """Return the variables of a service or an agent: the test's, except for settings, and those given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    # One thread for each process, as in the embedded stack: sums are the same everywhere.
    return {**inherited, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "UNICRON_RUN_DIR": RUN_DIR, **more}


class Control:
    """NATS, PostgreSQL and the services on one machine, each started and stopped by name.

    Args:
        machine: where they run; it is on.
        settings: ``UNICRON_*`` variables of all services.
        nodes: those that may use NATS from the start on.
    """

    def __init__(self, machine: Machine, settings: Mapping[str, str], nodes: Iterable[str]) -> None:
        self.machine = machine
        self.keys = KeyDirectory(machine.folder / "keys")
        self.keys.make([self.nats_url], [node_identity(node) for node in nodes])
        self._password = secrets.token_hex(16)
        self._settings = dict(settings)
        self._running: dict[str, Process] = {}
        binaries = find_binaries()
        assert binaries is not None, "requirements.missing() looks for them"
        self._binaries = binaries

    @property
    def nats_url(self) -> str:
        """Where agents reach NATS."""
        return f"nats://{self.machine.name}:4222"

    def start(self) -> None:
        """Start everything but NATS, which is to run; return when all is ready and the API can be reached."""
        self.make_database_cluster()
        self.start_postgres()
        self._make_log_database()
        # The log's first opener creates its table; the others find it.
        self.start_service("detector")
        for name in SERVICES.keys() - {"detector"}:
            self._begin_service(name)
        for name in SERVICES:
            self._wait_service(name)
        self.start_relay()

    def start_relay(self) -> None:
        """Let the test reach the API."""
        command = [sys.executable, relay.__file__, API_SOCKET, "127.0.0.1", str(API_PORT)]
        self.machine.wait_for_line(self.machine.start(command, output="relay.log"), "ready", START_S)

    def transport(self) -> httpx.BaseTransport:
        """Return how an HTTP client of the test reaches the API."""
        return httpx.HTTPTransport(uds=str(self.machine.path(API_SOCKET)))

    def kill(self, name: str) -> None:
        """Kill a service, ``nats`` or ``postgres``; return when it has ended."""
        process = self._running.pop(name)
        self.machine.kill(process.pid)
        self.machine.wait(process, START_S)

    # ---- services

    def start_service(self, name: str) -> None:
        """Start a service, and wait until it is ready."""
        self._begin_service(name)
        self._wait_service(name)

    def ended(self) -> dict[str, int]:
        """Return the exit codes of all that has ended by itself."""
        codes = {name: self.machine.exit_code(process) for name, process in self._running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def _begin_service(self, name: str) -> None:
        environment = service_environment(
            UNICRON_NATS_CREDENTIAL=self.credential(name),
            UNICRON_LOG_URL=self.log_url,
            UNICRON_PORT=str(API_PORT),
            **self._settings,
        )
        command = [sys.executable, "-P", "-m", SERVICES[name]]
        self._running[name] = self.machine.start(command, output=f"{name}.log", environment=environment)

    def _wait_service(self, name: str) -> None:
        """Wait until a service that was begun is ready."""
        self.machine.wait_for_line(self._running[name], "ready", START_S)

    # ---- NATS

    def start_nats(self) -> None:
        """Start nats-server, with the store that it may have; return when JetStream is ready.

        Its configuration is beside the key directory, as an operator has it.
        """
        text = (ROOT / "deploy" / "nats" / "nats.conf").read_text()
        assert text.count('"/data"') == 1
        config = self.machine.folder / "nats.conf"
        config.write_text(text.replace('"/data"', f'"{NATS}"'))
        process = self._running["nats"] = self.machine.start(
            [str(find_binary()), "--config", str(config)],
            output="nats.log",
            environment={},
        )
        healthy = [
            sys.executable,
            "-c",
            "import urllib.request as r; r.urlopen('http://127.0.0.1:8222/healthz', timeout=3)",
        ]
        self._until_succeeds(healthy, "nats", process)

    def credential(self, identity: str) -> str:
        """Return the file of a credential, which all machines see."""
        return str(self.keys.credential_file(identity))

    def node_credential(self, node: str) -> str:
        """Return the file of a node's credential; a node that has none gets one, and the running NATS knows it."""
        identity = node_identity(node)
        if identity not in self.keys.identities().keys:
            self.keys.add_node(node)
            self.machine.signal(self._running["nats"].pid, signal.SIGHUP)
        return self.credential(identity)

    def lose_nats_data(self) -> None:
        """Remove the store of NATS, which does not run."""
        shutil.rmtree(self.machine.path(NATS))

    def relayed(self) -> int:
        """Return how many events the log's stream has, which are all from the first on."""
        url = "http://127.0.0.1:8222/jsz?streams=true"
        program = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=3).read().decode())"
        report = json.loads(self.machine.run([sys.executable, "-c", program], output="jsz.json"))
        streams = [s for account in report.get("account_details", ()) for s in account.get("stream_detail", ())]
        states = [stream["state"] for stream in streams if stream["name"] == STREAM]
        assert all(state["messages"] == state["last_seq"] for state in states)
        return sum(state["messages"] for state in states)

    # ---- PostgreSQL

    @property
    def log_url(self) -> str:
        """SQLAlchemy URL of the log."""
        return f"postgresql+psycopg://unicron:{urllib.parse.quote(self._password)}@{self.machine.name}:5432/unicron"

    def start_postgres(self) -> None:
        """Start PostgreSQL on the data that it has; return when it answers."""
        command = [str(self._binaries / "postgres"), "-D", POSTGRES, "-k", DISK, "-h", "*"]
        query = [str(self._binaries / "psql"), "-h", DISK, "-U", "postgres", "-c", "SELECT 1"]

        def answers() -> bool:
            process = self._running.get("postgres")
            # The processes of a killed server have its memory until they have noticed; a new one does not start before.
            if process is None or self.machine.exit_code(process) is not None:
                self._running["postgres"] = self.machine.start(command, output="postgres.log", not_root=True)
            attempt = self.machine.start(query, output="postgres-probe.log")
            return self.machine.wait(attempt, START_S) == 0

        until_blocking(answers, "postgres is ready", limit_s=START_S)

    def open_log(self) -> EventLog:
        """Return the log, opened by the test for reading."""
        return EventLog(f"postgresql+psycopg://postgres@/unicron?host={self.machine.path(DISK)}", read_only=True)

    def make_database_cluster(self) -> None:
        """Make an empty PostgreSQL, whose socket is on the machine's disk."""
        command = [str(self._binaries / "initdb"), "-D", POSTGRES, "-U", "postgres", "--encoding=UTF8", "--no-sync"]
        trust = ["--auth-local=trust", "--auth-host=scram-sha-256"]
        self.machine.run([*command, *trust], output="initdb.log", not_root=True)
        with (self.machine.path(POSTGRES) / "pg_hba.conf").open("a") as rules:
            for clients in ("127.0.0.1/32", "198.51.100.0/24"):
                rules.write(f"host unicron unicron {clients} scram-sha-256\n")

    def _make_log_database(self) -> None:
        script = ["sh", str(ROOT / "deploy" / "postgres" / "10-unicron.sh")]
        path = f"PATH={self._binaries}:{os.environ['PATH']}"
        variables = [path, "POSTGRES_USER=postgres", f"LOG_PASSWORD={self._password}", f"PGHOST={DISK}"]
        self.machine.run(["env", *variables, *script], output="create-database.log")

    def _until_succeeds(self, command: list[str], what: str, process: Process) -> None:
        """Repeat a command until it succeeds while a server starts."""

        def succeeds() -> bool:
            if self.machine.exit_code(process) is not None:
                raise MachineFailed(f"in vain: {what} is ready")
            attempt = self.machine.start(command, output=f"{what}-probe.log")
            return self.machine.wait(attempt, START_S) == 0

        until_blocking(succeeds, f"{what} is ready", limit_s=START_S)
