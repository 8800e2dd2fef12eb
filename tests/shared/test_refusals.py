"""A database that refuses is told from one that is away by codes, whatever language the server speaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

from shared.errors import AccessDenied, Unavailable
from shared.log import refusals
from shared.log.log import EventLog
from tests.postgres import PostgresServer, find_binaries


@pytest.fixture(scope="module", params=["de", *(pytest.param(name, marks=pytest.mark.slow) for name in ("en", "ja"))])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server in which roles need passwords over TCP, ``locked`` may not enter, and ``many`` may connect once."""
    if find_binaries() is None:
        pytest.skip("no server binaries of PostgreSQL are installed")
    with PostgresServer(language=request.param) as server:
        server.execute("CREATE ROLE reader LOGIN PASSWORD 'right'")
        server.execute("CREATE ROLE guest LOGIN PASSWORD 'right'")
        server.execute("CREATE ROLE locked LOGIN PASSWORD 'right'")
        server.execute("CREATE ROLE many LOGIN CONNECTION LIMIT 1")
        rules = server.folder / "data" / "pg_hba.conf"
        rules.write_text(
            "local all locked reject\nlocal all reader scram-sha-256\nlocal all guest md5\nlocal all all trust\n"
        )
        # The rules are read again when a start is asked for, and so before the next connection.
        server.kill()
        server.start()
        yield server


def as_role(server: PostgresServer, name: str, **changes: Any) -> str:
    return make_url(server.url).set(username=name, **changes).render_as_string(hide_password=False)


@pytest.mark.parametrize(
    ("role", "changes", "code"),
    [
        ("nobody", {}, "28000"),
        ("locked", {}, "28000"),
        ("reader", {"password": "wrong"}, "28P01"),
        ("guest", {"password": "wrong"}, "28P01"),
        ("postgres", {"database": "nowhere"}, "3D000"),
    ],
)
def test_a_refused_connection_is_a_refusal(
    server: PostgresServer, role: str, changes: dict[str, str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []
    known = refusals.sqlstate

    def noted(error: Any) -> str | None:
        found.append(known(error))
        return found[-1]

    monkeypatch.setattr(refusals, "sqlstate", noted)
    for _ in range(2):
        with pytest.raises(AccessDenied):
            EventLog(as_role(server, role, **changes))
    assert found == [code, code]


def test_a_missing_password_is_a_refusal(server: PostgresServer, tmp_path: Path) -> None:
    url = make_url(server.url).set(username="reader").update_query_dict({"passfile": str(tmp_path / "none")})
    with pytest.raises(AccessDenied):
        EventLog(url.render_as_string(hide_password=False))


def test_a_missing_privilege_is_a_refusal(server: PostgresServer) -> None:
    with pytest.raises(AccessDenied):
        EventLog(as_role(server, "guest", password="right"))


def test_a_role_with_too_many_connections_is_waited_for(server: PostgresServer) -> None:
    with psycopg.connect(f"host={server.folder} user=many dbname=postgres"), pytest.raises(Unavailable) as found:
        EventLog(as_role(server, "many"))
    assert not isinstance(found.value, AccessDenied)


def test_a_server_that_is_away_is_waited_for(server: PostgresServer, tmp_path: Path) -> None:
    url = make_url(server.url).update_query_dict({"host": str(tmp_path)}).render_as_string(hide_password=False)
    with pytest.raises(Unavailable) as found:
        EventLog(url)
    assert not isinstance(found.value, AccessDenied)


def test_the_servers_language_is_another_where_it_has_translations() -> None:
    """Otherwise the tests above are in English three times."""
    binaries = find_binaries()
    if binaries is None or not list(Path("/usr/share/locale/de/LC_MESSAGES").glob("postgres-*.mo")):
        pytest.skip("PostgreSQL has no German messages here")
    if Path("/usr/lib/postgresql") not in binaries.parents:
        pytest.skip("PostgreSQL is not Debian's")
    with PostgresServer(language="de") as server, pytest.raises(AccessDenied, match="existiert nicht"):
        EventLog(as_role(server, "nobody"))
