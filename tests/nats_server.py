"""The embedded nats-server with one more identity, ``test``, which may do everything: it stands in for any other."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from shared.bus import credentials
from shared.bus.connection import Bus
from shared.bus.credentials import Credential
from shared.nats.key_directory import KeyDirectory
from shared.nats.nats_server import NatsServer
from shared.nats.rights import Rights, authorization, rights
from tests.condition import until

TEST = "test"
"""The identity of tests."""


def rights_of(identity: str) -> Rights | None:
    """Return the rights of an identity; None, which are all, of the tests'."""
    return None if identity == TEST else rights(identity)


class OpenServer(NatsServer):
    """A server whose key directory has the tests' identity."""

    def __init__(
        self, directory: Path, *, port: int = 0, keys: KeyDirectory | None = None, tls: Sequence[str] = ()
    ) -> None:
        own = keys or KeyDirectory(directory.resolve() / "keys", rights_of)
        super().__init__(directory, port=port, keys=own, tls=tls)
        self.keys.make(more=[TEST])

    @property
    def credential_file(self) -> Path:
        """The file of the tests' credential."""
        return self.keys.credential_file(TEST)

    @property
    def credential(self) -> Credential:
        """The tests' credential."""
        return credentials.read(self.credential_file)

    def refuse(self) -> None:
        """Have the running server refuse the tests' identity."""
        known = {identity: key for identity, key in self.keys.identities().keys.items() if identity != TEST}
        self._authorize(known)

    def accept(self) -> None:
        """Have the running server accept the tests' identity again."""
        self._authorize(self.keys.identities().keys)

    def _authorize(self, known: dict[str, str]) -> None:
        (self.keys.path / "authorization.conf").write_text(authorization(known, rights_of))
        self.reload()


class SharedServer(OpenServer):
    """The server of all tests of a process that do nothing to the server itself: each finds it as if it were new."""

    async def clear(self) -> None:
        """Wait until the clients of the test before have gone; delete the streams that the test has left.

        Raises:
            AssertionError: a client stays, which the error names: a process that the test has left behind.
        """
        await until(lambda: not self._clients(), "the clients of the test before have gone", seen=self._clients)
        bus = await Bus.connect(self.url, credential=self.credential, name="clear")
        for stream in await bus.jetstream.streams_info():
            await bus.jetstream.delete_stream(str(stream.config.name))
        await bus.close()

    def _write_config(self) -> Path:
        path = super()._write_config()
        with path.open("a") as config:
            config.write("http: 127.0.0.1:-1\n")
        return path

    def _clients(self) -> list[str]:
        """Return the names of the connected clients."""
        (monitoring,) = json.loads((self.directory / f"nats-server_{self.pid}.ports").read_text())["monitoring"]
        with urllib.request.urlopen(f"{monitoring}/connz", timeout=40) as answer:
            return [client.get("name", "") for client in json.load(answer)["connections"]]
