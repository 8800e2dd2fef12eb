"""A PostgreSQL server for tests, where one can be had."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import psycopg
from sqlalchemy.engine import make_url

from shared.machine.process import die_with_parent
from tests.condition import until_blocking

START_S = 30.0
"""A server starts in a fraction of a second; the machine may be busy. After a kill it first recovers."""

PROGRAMS = ("postgres", "initdb", "psql")


def find_binaries() -> Path | None:
    """Return the folder of a PostgreSQL server's programs: on PATH, the newest of Debian's, or the wheel pgserver's."""
    found = [Path(path).resolve().parent for path in [shutil.which("postgres")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    # Found, not imported: the import makes folders for servers of its own.
    wheel = importlib.util.find_spec("pgserver")
    if wheel is not None and wheel.submodule_search_locations:
        found.append(Path(wheel.submodule_search_locations[0]) / "pginstall" / "bin")
    return next((path for path in found if all((path / name).exists() for name in PROGRAMS)), None)


class PostgresServer:
    """A server of its own on a Unix socket, that can be killed and started again; a context manager.

    ``url``: SQLAlchemy URL of its database ``postgres``. ``folder``: of its socket.

    Args:
        language: of the server's messages, as in ``LANGUAGE``; English where the server has no translation.
        of: the running server of which this one is a replica, without which that one commits nothing from then on.
    """

    def __init__(self, language: str = "en", of: PostgresServer | None = None) -> None:
        self._language, self._of = language, of
        binaries = find_binaries()
        assert binaries is not None, "the caller looks for them"
        self._binaries, self._who = binaries, _unprivileged()
        self._server: subprocess.Popen[bytes] | None = None
        # Not under pytest's folder: the server's user could not enter it. Short, for the socket's path.
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        self.url = f"postgresql+psycopg://postgres@/postgres?host={self.folder}"

    def __enter__(self) -> Self:
        try:
            if self._who:
                shutil.chown(self.folder, self._who["user"])
            data = ["-D", str(self.folder / "data"), "-U", "postgres"]
            if self._of is None:
                self._run("initdb", *data, "--auth=trust", "--no-sync", "--encoding=UTF8")
            else:
                self._run("pg_basebackup", *data, "-h", str(self._of.folder), "--write-recovery-conf", "--no-sync")
            self.start()
            if self._of is not None:
                self._of.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                self._of.execute("SELECT pg_reload_conf()")
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(START_S)
        shutil.rmtree(self.folder)

    def start(self) -> None:
        """Start the server on the data that it has; return when it answers.

        Not to be called in a thread: the server ends with the thread that has started it.
        """
        command = ["-D", str(self.folder / "data"), "-k", str(self.folder), "-h", "", "-F"]
        # gettext translates in the locale C.UTF-8, which every glibc has, and not in C.
        command += ["-c", f"lc_messages={'C' if self._language == 'en' else 'C.UTF-8'}"]
        server: subprocess.Popen[bytes] = subprocess.Popen(
            [str(self._binaries / "postgres"), *command],
            cwd=self.folder,
            env={**os.environ, "LANGUAGE": self._language},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_us,
            **self._who,
        )
        self._server = server

        def answers() -> bool:
            try:
                psycopg.connect(f"host={self.folder} user=postgres dbname=postgres").close()
            except psycopg.OperationalError:
                assert server.poll() is None, "the PostgreSQL server ended"
                return False
            return True

        until_blocking(answers, "the PostgreSQL server answers", limit_s=START_S)

    def kill(self) -> None:
        """Kill the server and the processes of its connections; return when they have ended."""
        server, self._server = self._server, None
        assert server is not None
        children = psutil.Process(server.pid).children()
        server.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends by itself when the server has ended
                child.kill()
        server.wait(START_S)
        # The kernel's memory that they share is free only then.
        psutil.wait_procs(children, START_S)

    def execute(self, statement: str) -> None:
        """Run a statement as the database's owner, in a session of its own."""
        with psycopg.connect(f"host={self.folder} user=postgres dbname=postgres", autocommit=True) as connection:
            connection.execute(statement.encode())

    def promote(self) -> None:
        """Have this replica be the server."""
        self.execute("SELECT pg_promote()")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder, **self._who)


@contextlib.contextmanager
def empty_schema(postgres_server: str) -> Iterator[str]:
    """Give the URL of an empty schema of a server, which is dropped afterwards."""
    schema = f"test_{uuid.uuid4().hex}"
    dsn = make_url(postgres_server).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}".encode())
    yield (
        make_url(postgres_server)
        .update_query_dict({"options": f"-csearch_path={schema}"})
        .render_as_string(hide_password=False)
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {schema} CASCADE".encode())


def _unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root: whom to run it as instead."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = next(name for name in ("postgres", "nobody") if name in names)
    return {"user": user}


def _end_with_us() -> None:
    die_with_parent(signal.SIGQUIT)
