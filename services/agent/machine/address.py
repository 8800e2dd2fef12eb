"""The address of this node: under which IP address, on which interface and in which network stack peers reach it.

By itself it is the local end of the agent's connection to NATS: where NATS is reached, the other nodes are. If that is
the server on this machine, reached by a loopback address, the way to another server of the setting counts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from shared.errors import InvalidInput, UnreachableAddress
from shared.machine.network import network_stack
from shared.settings.model import Settings

_DISCARD_PORT = 9
"""The port to which a datagram socket is connected (discard, RFC 863). Any port would do: nothing is sent."""

Interfaces = Mapping[str, Sequence[str]]
"""Interface -> its IP addresses, without zones."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The address of a node.

    ``ip``: the node's IP address. ``interface``: the network interface that has it. ``store_host``: the host that is
    told to peers. ``store_ip``: the address that ``store_host`` has on this machine. ``network``: the machine's network
    stack (``shared.machine.network``).
    """

    ip: str
    interface: str
    store_host: str
    store_ip: str
    network: str

    @property
    def by_setting(self) -> dict[str, str]:
        """Setting -> the IP address that it amounts to (``shared.messages.admission.Hello``)."""
        return {"address": self.ip, "store_host": self.store_ip}


def find(settings: Settings, local: str, server: str) -> NodeAddress:
    """Return this node's address.

    Args:
        settings: ``address`` and ``store_host``; empty: found here. ``nats_url``.
        local: IP address of the local end of the connection to NATS; empty if unknown.
        server: IP address of the other end.

    Raises:
        InvalidInput: a setting is no address of this machine, or the address is neither given nor known.
        UnreachableAddress: a loopback address is given, and a NATS server is on another machine.
    """
    present = interfaces()
    if not (settings.address or local):
        raise _invalid("address", "", "the connection to NATS shows no address of this machine; set UNICRON_ADDRESS")
    remote = _remote(settings, server, present)
    if local and remote and ipaddress.ip_address(local).is_loopback:
        local = route(remote) or local
    ip = _own("address", settings.address or local, present)
    store_host = settings.store_host or ip
    found = NodeAddress(
        ip, _interface(ip, present), store_host, _own("store_host", store_host, present), network_stack()
    )
    if remote:
        for setting, given in found.by_setting.items():
            if ipaddress.ip_address(given).is_loopback:
                raise UnreachableAddress.of(
                    setting,
                    given,
                    "a loopback address beside remote peers",
                    f"{given} is a loopback address and NATS is at {remote}, on another machine: set "
                    f"UNICRON_{setting.upper()} to an address that the other nodes reach, or leave it out",
                )
    return found


def interfaces() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface, IPv4 first."""
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        ips = [a for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        found[name] = [plain(a.address) for a in sorted(ips, key=lambda a: a.family is not socket.AF_INET)]
    return found


def route(ip: str) -> str:
    """Return the address of this machine from which the kernel would send to ``ip``; empty if there is no way."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, _DISCARD_PORT))  # a datagram socket chooses the address, and sends nothing
        except OSError:
            return ""
        return plain(str(probe.getsockname()[0]))


def socket_environment(interface: str, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that have gloo and NCCL use an interface, except those that ``given`` has.

    Args:
        interface: name of the interface.
        given: the environment that the operator has set; default: this process's.
    """
    environment = os.environ if given is None else given
    # "=": this very name; NCCL takes other names as prefixes. A label such as eth0:1 is an address of eth0; NCCL would
    # take what follows the colon for a port.
    variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface.partition(':')[0]}"}
    return {name: value for name, value in variables.items() if name not in environment}


def plain(address: str) -> str:
    """Return an IP address without its zone (``%eth0``)."""
    return address.partition("%")[0]


def _remote(settings: Settings, server: str, present: Interfaces) -> str:
    """Return the IP address of a NATS server on another machine; empty if all are on this one, or unknown.

    Args:
        settings: ``nats_url``.
        server: IP address of the server that the agent is connected to; empty if unknown.
        present: the addresses of this machine.
    """
    known = [server] if server else []
    if len(settings.nats_servers) > 1:
        for url in settings.nats_servers:
            with contextlib.suppress(InvalidInput):  # a server whose name is not known at this moment
                known += _resolve("nats_url", urlsplit(url).hostname or "")
    return next((ip for ip in known if not _is_own(ip, present)), "")


def _own(setting: str, value: str, present: Interfaces) -> str:
    """Return the IP address of this machine that a setting's value (address, host name or interface) stands for.

    A name with several addresses, as ``/etc/hosts`` may give the host's own name, stands for one that is not loopback.
    """
    candidates = list(present[value]) if value in present else _resolve(setting, value)
    # A link-local address has a meaning together with an interface only.
    own = [ip for ip in candidates if _is_own(ip, present) and not ipaddress.ip_address(ip).is_link_local]
    if not own:
        known = ", ".join(f"{ip} ({name})" for name, ips in present.items() for ip in ips)
        raise _invalid(setting, value, f"no address of this machine; its addresses are {known}")
    return min(own, key=lambda ip: ipaddress.ip_address(ip).is_loopback)


def _resolve(setting: str, value: str) -> list[str]:
    try:
        found = socket.getaddrinfo(value, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as err:
        raise _invalid(setting, value, f"neither an interface nor a host that can be resolved: {err}") from err
    return [plain(str(address[0])) for *_, address in found]


def _is_own(ip: str, present: Interfaces) -> bool:
    return ipaddress.ip_address(ip).is_loopback or any(ip in ips for ips in present.values())


def _interface(ip: str, present: Interfaces) -> str:
    """Return the interface that has the address. All of 127.0.0.0/8 is on the interface with a loopback address."""
    exact = [name for name, ips in present.items() if ip in ips]
    loopback = [name for name, ips in present.items() if any(ipaddress.ip_address(i).is_loopback for i in ips)]
    return next(iter([*exact, *loopback]), "lo")


def _invalid(setting: str, value: str, problem: str) -> InvalidInput:
    return InvalidInput.of(setting, value, problem, f"UNICRON_{setting.upper()}: {problem} (given: {value!r})")
