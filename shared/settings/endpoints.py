"""Addresses in settings: of NATS servers, and where a process listens."""

from __future__ import annotations

from urllib.parse import urlsplit

from shared.errors import InvalidInput

LOOPBACK = "127.0.0.1"
"""The host on which a process listens if only a port is given."""

DEFAULT_SERVER = f"http://{LOOPBACK}:8642"
"""Address of the gateway where none is set: on this machine, at a port that no common service uses."""


def check_servers(text: str) -> str:
    """Return the URLs of NATS servers in a text, separated by commas.

    Raises:
        InvalidInput: one is no such URL, or only some have TLS: a client verifies all of them or none.
    """
    servers = [server.strip() for server in text.split(",")]
    if wrong := [server for server in servers if not _is_nats_url(server)]:
        raise InvalidInput(f"{wrong[0]!r} is not nats://HOST:PORT or tls://HOST:PORT; several are separated by commas")
    if len({urlsplit(server).scheme for server in servers}) > 1:
        raise InvalidInput("some servers are nats:// and others are tls://; all have to be of one kind")
    return ",".join(servers)


def _is_nats_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("nats", "tls") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number
        return False


def listening(text: str) -> tuple[str, int] | None:
    """Return host and port of ``HOST:PORT`` or ``PORT``, the latter on loopback; None: the text is empty.

    Raises:
        InvalidInput: the text is neither.
    """
    if not text:
        return None
    if text.isascii() and text.isdigit():
        text = f"{LOOPBACK}:{text}"
    try:
        url = urlsplit(f"//{text}")
        if url.hostname and url.port is not None and url.netloc == text and url.username is None:
            return url.hostname, url.port
    except ValueError:  # a port that is no number, or brackets that do not match
        pass
    raise InvalidInput(f"{text!r} is neither HOST:PORT nor PORT, a number from 0 to 65535")
