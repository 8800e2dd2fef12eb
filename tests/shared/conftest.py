"""A PostgreSQL server for the tests of the log, where one can be had."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from shared.parent import die_with_parent
from tests.postgres import find_binaries

GIVEN_URL = "UNICRON_TEST_POSTGRES_URL"


def _unprivileged() -> dict[str, str]:
    """PostgreSQL refuses to run as root: whom to run it as instead."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = next(name for name in ("postgres", "nobody") if name in names)
    return {"user": user}


def _wait_until_it_answers(dsn: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(dsn).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, "the PostgreSQL server ended"
            assert time.monotonic() < deadline, "the PostgreSQL server does not answer"
            time.sleep(0.02)


def _end_with_us() -> None:
    die_with_parent(signal.SIGQUIT)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a server: the one given in the environment, or an own one on a Unix socket; skips without either."""
    if url := os.environ.get(GIVEN_URL):
        yield url
        return
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(f"no PostgreSQL: {GIVEN_URL} is not set and no server binaries are installed")
    who = _unprivileged()
    # Not under pytest's folder: the server's user could not enter it. Short, for the socket's path.
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    try:
        if who:
            shutil.chown(folder, who["user"])
        data = folder / "data"
        command = [str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync"]
        subprocess.run([*command, "--encoding=UTF8"], check=True, capture_output=True, cwd=folder, **who)  # type: ignore[call-overload]
        server: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
            [str(binaries / "postgres"), "-D", str(data), "-k", str(folder), "-h", "", "-F"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_us,
            **who,
        )
        try:
            _wait_until_it_answers(f"host={folder} user=postgres dbname=postgres", server)
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """URL of an empty schema."""
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


@pytest.fixture(params=["sqlite", "postgresql"])
def log_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty log, in both databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return str(request.getfixturevalue("postgres_url"))
