"""The key directory, its files, and how a process comes onto the bus with a credential."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shared.bus import credentials
from shared.bus.credentials import Credential, new_seed
from shared.bus.identities import SERVICES, node_identity, node_of
from shared.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from shared.nats.key_directory import PID_FILE, KeyDirectory
from shared.nats.nats_server import NatsServer
from shared.service.joining import check_identity, credential_of, joined, node_name
from shared.settings.model import read_settings


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    """A key directory with the services."""
    made = KeyDirectory(tmp_path / "keys")
    made.make(["nats://control:4222"])
    return made


def test_the_services_have_credentials_that_their_owner_alone_can_read(keys: KeyDirectory) -> None:
    known = keys.identities()
    assert set(known.keys) == set(SERVICES)
    for service in SERVICES:
        path = keys.credential_file(service)
        found = credentials.read(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert (found.identity, found.servers) == (service, ["nats://control:4222"])
        assert found.public_key == known.keys[service]
        assert found.seed not in repr(found)
        assert found.seed not in (keys.path / "authorization.conf").read_text()
        assert found.seed not in (keys.path / "identities.json").read_text()


def test_making_again_changes_servers_and_no_key(keys: KeyDirectory) -> None:
    keys.add_node("n0")
    before = keys.identities().keys
    keys.make(["nats://one:4222", "nats://two:4222"])
    assert keys.identities().keys == before
    for identity in before:
        assert credentials.read(keys.credential_file(identity)).servers == ["nats://one:4222", "nats://two:4222"]
    keys.make()
    assert keys.identities().servers == ["nats://one:4222", "nats://two:4222"]


def test_a_node_has_one_credential_at_a_time(keys: KeyDirectory) -> None:
    path = keys.add_node("n0")
    assert node_of(credentials.read(path).identity) == "n0"
    key = keys.identities().keys[node_identity("n0")]
    assert key in (keys.path / "authorization.conf").read_text()
    with pytest.raises(Conflict, match="'n0' has a credential"):
        keys.add_node("n0")
    keys.remove_node("n0")
    assert not path.exists()
    assert key not in (keys.path / "authorization.conf").read_text()
    with pytest.raises(NotFound, match="'n0' has no credential"):
        keys.remove_node("n0")


def test_a_folder_without_keys(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="unicron keys make"):
        KeyDirectory(tmp_path / "none").add_node("n0")


@pytest.mark.parametrize("text", ["", "{", '{"keys": {"detector": "U1"}}', '{"keys": {"../x": ""}}'])
def test_a_damaged_file_of_identities_is_changed_by_nobody(keys: KeyDirectory, text: str) -> None:
    (keys.path / "identities.json").write_text(text)
    with pytest.raises(Corrupt, match=r"identities\.json"):
        keys.add_node("n0")
    assert (keys.path / "identities.json").read_text() == text
    assert not keys.credential_file("node/n0").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable):
        KeyDirectory(tmp_path / "file" / "keys").make()


def test_only_a_nats_server_is_signalled(keys: KeyDirectory) -> None:
    """The number in the file may belong to another process by now."""
    assert not keys.reload(), "there is no file"
    with subprocess.Popen(["sleep", "600"]) as other:
        (keys.path / PID_FILE).write_text(str(other.pid))
        assert not keys.reload()
        assert other.poll() is None
        other.kill()
    (keys.path / PID_FILE).write_text("no number")
    assert not keys.reload()


async def test_the_embedded_server_is_found(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        assert server.keys.reload()
        assert (server.keys.path / PID_FILE).read_text().strip() == str(server.pid)


@pytest.mark.parametrize("text", ["", "SUAM", '{"identity": "api"}', '{"identity": "a/b", "seed": "S"}', "[]"])
def test_what_is_no_credential_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "credential.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="is no credential") as caught:
        credentials.read(path)
    assert "SUAM" not in str(caught.value.problem())
    with pytest.raises(InvalidInput, match="No such file"):
        credentials.read(tmp_path / "none")


def test_a_seed_with_a_wrong_checksum_is_refused() -> None:
    seed = new_seed()
    damaged = seed[:-1] + ("A" if seed[-1] != "A" else "B")
    try:
        found = Credential(identity="api", seed=damaged).public_key
    except InvalidInput as err:
        assert damaged not in str(err)  # noqa: PT017
    else:
        assert found.startswith("U"), "the last letter has bits that mean nothing"


def test_a_node_has_its_name_and_servers_from_its_credential(
    keys: KeyDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("UNICRON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UNICRON_NATS_CREDENTIAL", str(keys.add_node("n7")))
    settings = read_settings()
    found = joined(settings, credential_of(settings))
    assert (found.node, found.nats_servers, node_name()) == ("n7", ["nats://control:4222"], "n7")
    monkeypatch.setenv("UNICRON_NATS_URL", "nats://other:4222")
    settings = read_settings()
    assert joined(settings, credential_of(settings)).nats_servers == ["nats://other:4222"]
    monkeypatch.setenv("UNICRON_NODE", "n8")
    settings = read_settings()
    assert node_name() == "n8"
    with pytest.raises(InvalidInput, match=r"UNICRON_NODE.*is not the node 'n7'"):
        joined(settings, credential_of(settings))


def test_a_credential_in_a_descriptor_counts_before_a_file(keys: KeyDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("UNICRON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UNICRON_NATS_CREDENTIAL", str(keys.credential_file("planner")))
    with keys.add_node("n7").open() as file:
        os.set_inheritable(file.fileno(), True)
        monkeypatch.setenv("UNICRON_NATS_CREDENTIAL_FD", str(file.fileno()))
        for _ in range(2):  # from the beginning each time
            assert node_name() == "n7"
            assert credential_of(read_settings()).identity == "node/n7"
        assert not os.get_inheritable(file.fileno())
    with pytest.raises(InvalidInput, match="Bad file descriptor"):
        credential_of(read_settings())
    assert node_name() != "n7"


def test_a_process_without_a_credential_is_refused_by_the_name_of_the_setting() -> None:
    with pytest.raises(InvalidInput, match="UNICRON_NATS_CREDENTIAL"):
        credential_of(read_settings(nats_credential=None))


@pytest.mark.parametrize(
    ("identity", "service", "right"),
    [
        ("planner", "planner", True),
        ("planner", "transition", False),
        ("planner", "", False),
        ("node/n0", "", True),
        ("node/n0", "planner", False),
    ],
)
def test_a_process_needs_the_credential_of_its_own_part(identity: str, service: str, right: bool) -> None:
    credential = Credential(identity=identity, seed=new_seed())
    if right:
        check_identity(credential, service)
    else:
        with pytest.raises(InvalidInput, match="is not the credential of"):
            check_identity(credential, service)
