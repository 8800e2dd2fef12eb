"""Who may do what: users of this machine, bearers of tokens, and everybody else."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from fastapi.routing import APIRoute

from services.api import main
from services.api.access.socket_owners import end, uid_of
from services.api.http.methods import CHANGES
from services.api.main import ROUTERS, check_exposure
from shared.bus.connection import Bus
from shared.errors import Conflict, Corrupt, Forbidden, InvalidInput, NotFound, Unavailable
from shared.events.union import TaskStopRequested, TaskSubmitted
from shared.log.journal import Journal
from shared.model import utc_now
from shared.service import tokens
from shared.service.http_server import listen
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import Server, bearer, client_of, offline_gateway, serving, spec_dict
from unicron_client.resources import Client

ANYBODY = frozenset({"/v1/plan/solve", "/v1/browser-links", "/v1/browser-sessions"})
"""Paths that change nothing, or nothing but the browsers' sessions of whoever asks."""

NOBODY_UID = 65534

_AS_ANOTHER_USER = """
import encodings.idna, json, os, sys, urllib.error, urllib.request  # another user need not be able to read them
os.setgroups([]); os.setgid(UID); os.setuid(UID)
for path in sys.argv[2:]:
    request = urllib.request.Request(sys.argv[1] + path, method="POST" if path.endswith("stop") else "GET")
    try:
        print(urllib.request.urlopen(request).status)
    except urllib.error.HTTPError as err:
        print(err.code, json.load(err)["code"])
""".replace("UID", str(NOBODY_UID))


def refused(answer: httpx.Response, status: int, code: str) -> str:
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    detail: str = answer.json()["detail"]
    return detail


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user: run as root")
async def test_another_user_of_this_machine_needs_a_token(api: Server) -> None:
    command = [sys.executable, "-I", "-c", _AS_ANOTHER_USER, api.url, "/healthz", "/v1/tasks", "/v1/tasks/gpt/stop"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().splitlines() == ["200", "401 unauthenticated", "401 unauthenticated"]
    # This user, without a token.
    assert (await api.http.get("/v1/tasks")).status_code == 200


async def test_a_peer_without_address_or_token_is_refused(tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway:
        async with client_of(gateway) as client:
            assert (await client.get("/v1/nodes")).status_code == 200
            for given_ in ({}, {"Authorization": "Bearer unicron_x"}, {"Authorization": "Basic dTpw"}):
                client.headers = httpx.Headers(given_)
                answer = await client.get("/v1/nodes")
                refused(answer, 401, "unauthenticated")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert (await client.get("/healthz")).status_code == 200


async def test_a_token_that_is_removed_is_refused_at_once(tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway:
        path = gateway.settings.token_file
        async with client_of(gateway) as client:
            token = tokens.add(path, "alice", Scope.READ, utc_now())
            headers = {"Authorization": f"Bearer {token}"}
            assert (await client.get("/v1/nodes", headers=headers)).status_code == 200
            tokens.remove(path, "alice")
            refused(await client.get("/v1/nodes", headers=headers), 401, "unauthenticated")


async def test_every_change_needs_more_than_to_read(tmp_path: Path) -> None:
    """Of all paths of the interface: one that is added without a right is found here."""
    changes = [
        (method, route.path.replace("{name}", "one").replace("{incident}", "one"))
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in (route.methods or set()) & set(CHANGES)
        if route.path not in ANYBODY
    ]
    assert len(changes) >= 6
    with offline_gateway(tmp_path) as gateway:
        reader, submitter = (bearer(gateway.settings, scope) for scope in (Scope.READ, Scope.SUBMIT))
        async with client_of(gateway) as client:
            for method, path in changes:
                refused(await client.request(method, path, headers=reader), 403, "forbidden")
                if path.startswith("/v1/nodes"):
                    refused(await client.request(method, path, headers=submitter), 403, "forbidden")


async def test_tasks_belong_to_whoever_submits_them(api: Server, settings: Settings) -> None:
    alice, bob = ({"Authorization": f"Bearer {tokens.add(settings.token_file, name, Scope.SUBMIT, utc_now())}"}
                  for name in ("alice", "bob"))  # fmt: skip
    made = await api.http.post("/v1/tasks", json=api.spec(), headers=alice)
    assert (made.status_code, made.json()["owner"]) == (201, "token/alice")
    detail = refused(await api.http.post("/v1/tasks/gpt/stop", headers=bob), 403, "forbidden")
    assert "token/alice" in detail
    assert (await api.http.post("/v1/tasks/gpt/stop", headers=alice)).status_code == 202
    # One that stops belongs to its owner too: its checkpoint is what the next one of the name begins with.
    assert (await api.http.post("/v1/tasks", json=api.spec("other"))).json()["owner"] == f"uid/{os.getuid()}"
    refused(await api.http.post("/v1/tasks/other/stop", headers=bob), 403, "forbidden")
    events = [record.event for record in api.journal.log.read()]
    assert [e.actor for e in events if isinstance(e, TaskSubmitted)] == ["token/alice", f"uid/{os.getuid()}"]
    assert [e.actor for e in events if isinstance(e, TaskStopRequested)] == ["token/alice"]


async def test_requests_for_nodes_record_who_asks(api: Server) -> None:
    await api.join("n0")
    assert (await api.http.post("/v1/nodes/n0/cordon", json={"reason": "fan"})).status_code == 200
    assert api.journal.log.read()[-1].event.model_dump()["actor"] == f"uid/{os.getuid()}"


def test_the_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = tokens.add(path, "alice", Scope.READ, utc_now())
    assert path.stat().st_mode & 0o777 == 0o600
    assert token not in path.read_text()
    with pytest.raises(Conflict, match="alice"):
        tokens.add(path, "alice", Scope.OPERATE, utc_now())
    with pytest.raises(NotFound, match="bob"):
        tokens.remove(path, "bob")
    (known,) = tokens.read(path)
    assert tokens.find([known], token) == known
    assert tokens.find([known], token + "x") is None
    assert tokens.find([known], "\ud800") is None
    path.write_text("{")
    with pytest.raises(Corrupt, match=r"tokens\.json"):
        tokens.read(path)


def test_it_listens_elsewhere_with_tls_and_a_token_only(tmp_path: Path) -> None:
    def settings(**changes: object) -> Settings:
        return Settings(run_dir=tmp_path, **changes)  # type: ignore[arg-type]

    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2"):
        check_exposure(settings(host=host))
    for host in ("0.0.0.0", "::", "198.51.100.1", "host.example"):
        with pytest.raises(InvalidInput, match="UNICRON_TLS_CERTIFICATE"):
            check_exposure(settings(host=host))
        check_exposure(settings(host=host, insecure=True))
        with pytest.raises(InvalidInput, match="unicron token add"):
            check_exposure(settings(host=host, tls_certificate="/c", tls_key="/k"))
    with pytest.raises(InvalidInput, match="together"):
        check_exposure(settings(tls_certificate="/c"))
    tokens.add(settings().token_file, "alice", Scope.READ, utc_now())
    check_exposure(settings(host="0.0.0.0", tls_certificate="/c", tls_key="/k"))
    assert main.check_exposure is check_exposure


def test_ends_that_are_not_on_this_machine() -> None:
    own, other = end("127.0.0.1", 8642), end("198.51.100.1", 5)
    assert own is not None
    assert other is not None
    assert uid_of(other, own) is None
    assert uid_of(own, other) is None
    assert end("::ffff:127.0.0.1", 7) == end("127.0.0.1", 7)
    assert end("testclient", 7) is None


def test_a_closed_socket_is_nobody() -> None:
    """The kernel still knows a socket that its owner has closed, with uid 0, which is not root's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            ends = [end(*one) for one in (accepted.getpeername(), accepted.getsockname())]
            assert uid_of(*ends) == os.getuid()  # type: ignore[arg-type]
            client.close()
            assert accepted.recv(1) == b""
            assert uid_of(*ends) is None  # type: ignore[arg-type]
        assert uid_of(*ends) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1"])
async def test_the_owner_of_a_real_connection(host: str) -> None:
    found: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [end(*writer.get_extra_info(name)[:2]) for name in ("peername", "sockname")]
        found.set_result(uid_of(*ends))  # type: ignore[arg-type]
        writer.close()

    try:
        server = await asyncio.start_server(connected, host, 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        assert await asyncio.wait_for(found, 20) == os.getuid()
        assert await reader.read() == b""
        writer.close()


async def test_a_specification_of_a_submission_does_not_name_its_owner(api: Server) -> None:
    answer = await api.http.post("/v1/tasks", json={**spec_dict(data=str(api.data)), "owner": "token/bob"})
    assert answer.status_code == 422


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 and its key; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "unicron")])
    now = utc_now()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return paths


async def test_with_a_certificate_it_speaks_https(
    settings: Settings, bus: Bus, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path)
    changed = settings.model_copy(update={"tls_certificate": certificate, "tls_key": key})
    async with serving(changed, bus, journal) as api:
        url = api.url.replace("http:", "https:")
        with Client(url) as client, pytest.raises(Unavailable, match="certificate"):
            await asyncio.to_thread(client.get, "/v1/tasks")
        monkeypatch.setenv("UNICRON_CA_FILE", str(certificate))
        monkeypatch.setenv("UNICRON_TOKEN", tokens.add(settings.token_file, "alice", Scope.READ, utc_now()))
        with Client(url) as client:
            assert (await asyncio.to_thread(client.get, "/v1/tasks"))["items"] == []
            with pytest.raises(Forbidden, match="token/alice"):
                await asyncio.to_thread(client.post, "/v1/tasks", api.spec())


def test_answers_are_sent_at_once() -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
