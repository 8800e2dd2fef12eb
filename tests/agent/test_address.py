"""The address of a node: what is found by itself, what can be set, and what is refused."""

from __future__ import annotations

import ipaddress

import pytest

from services.agent.machine import address
from shared.errors import InvalidInput, UnreachableAddress
from shared.settings.model import Settings

PRESENT = {"lo": ["127.0.0.1", "::1"], "eth0": ["198.51.100.7", "fe80::1"], "ib0": ["198.51.100.71"]}
REMOTE = "198.51.100.200"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with these interfaces, whose own name stands for a loopback address first."""
    names = {"m7": ["127.0.1.1", "198.51.100.7"], "only-loopback": ["127.0.1.1"], "elsewhere": [REMOTE]}
    names |= {"bus-here": ["127.0.1.1", "198.51.100.7"], "bus-there": [REMOTE], "localhost": ["127.0.0.1"]}

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        try:
            ips = [str(ipaddress.ip_address(host))]
        except ValueError:
            if host not in names:
                raise OSError("Name or service not known") from None
            ips = names[host]
        return [(None, None, None, "", (ip, 0)) for ip in ips]

    monkeypatch.setattr(address, "interfaces", lambda: PRESENT)
    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setattr(address, "route", {REMOTE: "198.51.100.71"}.__getitem__)


def find(*, local: str = "198.51.100.7", server: str = REMOTE, **settings: str) -> address.NodeAddress:
    return address.find(Settings.model_validate(settings), local, server)


def test_the_address_is_the_local_end_of_the_connection() -> None:
    found = find()
    assert (found.ip, found.interface, found.store_host, found.store_ip) == (
        "198.51.100.7",
        "eth0",
        "198.51.100.7",
        "198.51.100.7",
    )


@pytest.mark.parametrize(
    ("given", "ip", "interface"),
    [("198.51.100.71", "198.51.100.71", "ib0"), ("ib0", "198.51.100.71", "ib0"), ("m7", "198.51.100.7", "eth0")],
)
def test_an_address_a_name_or_an_interface_can_be_set(given: str, ip: str, interface: str) -> None:
    found = find(address=given)
    assert (found.ip, found.interface, found.store_host) == (ip, interface, ip)


def test_the_host_of_stores_can_be_set_alone() -> None:
    found = find(store_host="m7")
    assert found.store_host == "m7"
    assert found.by_setting == {"address": "198.51.100.7", "store_host": "198.51.100.7"}


@pytest.mark.parametrize("local", ["127.0.0.1", "127.0.0.2", "::1"])
def test_a_loopback_connection_gives_the_loopback_interface(local: str) -> None:
    assert find(local=local, server=local).interface == "lo"


def test_a_machine_that_reaches_nats_by_its_own_address_may_have_a_loopback_address() -> None:
    assert find(address="127.0.0.1", server="198.51.100.7").ip == "127.0.0.1"


@pytest.mark.parametrize("local", ["127.0.0.1", "127.0.1.1"])
def test_of_several_servers_the_one_on_this_machine_gives_no_loopback_address(local: str) -> None:
    found = find(local=local, server=local, nats_url="nats://unknown:4222,nats://bus-here:4222,nats://bus-there:4222")
    assert (found.ip, found.interface) == ("198.51.100.71", "ib0")
    assert found.store_host == "198.51.100.71"


def test_several_servers_on_this_machine_give_the_loopback_address() -> None:
    assert (
        find(local="127.0.0.1", server="127.0.0.1", nats_url="nats://bus-here:1,nats://localhost:2").ip == "127.0.0.1"
    )


def test_a_loopback_address_with_one_of_several_servers_on_another_machine_is_refused() -> None:
    with pytest.raises(UnreachableAddress, match=REMOTE):
        find(server="127.0.0.1", nats_url="nats://localhost:4222,nats://bus-there:4222", address="127.0.0.1")


@pytest.mark.parametrize("setting", ["address", "store_host"])
def test_a_loopback_address_with_nats_on_another_machine_is_refused(setting: str) -> None:
    with pytest.raises(UnreachableAddress) as caught:
        find(**{setting: "only-loopback"})
    assert (caught.value.code, caught.value.exit_code) == ("unreachable-address", 2)
    assert f"UNICRON_{setting.upper()}" in caught.value.detail
    assert caught.value.extra["errors"][0]["value"] == "127.0.1.1"


@pytest.mark.parametrize("setting", ["address", "store_host"])
@pytest.mark.parametrize("value", [REMOTE, "elsewhere", "no-such-host", "0.0.0.0", "fe80::1"])
def test_what_is_no_address_of_this_machine_is_refused_by_name(setting: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find(**{setting: value})
    [error] = caught.value.extra["errors"]
    assert (error["field"], error["value"]) == (setting, value)
    assert f"UNICRON_{setting.upper()}" in caught.value.detail


def test_a_connection_that_shows_no_address_needs_the_setting() -> None:
    with pytest.raises(InvalidInput, match="set UNICRON_ADDRESS"):
        find(local="", server="")
    assert find(local="", server="", address="eth0").ip == "198.51.100.7"


def test_variables_of_gloo_and_nccl_that_the_operator_has_set_stay() -> None:
    assert address.socket_environment("eth0", {}) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert address.socket_environment("eth0:1", {"GLOO_SOCKET_IFNAME": "ib0"}) == {"NCCL_SOCKET_IFNAME": "=eth0"}
