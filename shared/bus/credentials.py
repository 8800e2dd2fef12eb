"""Credentials: the file with which a service or an agent proves to NATS who it is.

The key pair is an nkey (Ed25519): the server knows the public key, and the file has the seed of the private one, which
never leaves the machine. The file also says where NATS is and whose certificates it has, so that it is all that a node
needs (``unicron node add``). ``shared.nats.key_directory`` makes such files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import nkeys
from pydantic import Field, ValidationError

from shared.bus.identities import Identity
from shared.errors import InvalidInput, Unavailable
from shared.machine.durable_files import replace_file
from shared.model import Model

MOST_BYTES = 1 << 20
"""The largest file: certificates of many authorities have a tenth of that."""

_SEED_BYTES = 32
"""The length of the seed of an Ed25519 key."""

PUBLIC_KEY = r"^U[A-Z2-7]{55}$"
"""The public key of a user of NATS: a letter for its kind, the key and a checksum in base 32."""


class Credential(Model):
    """What the file has.

    ``seed``: the seed of the private key. ``servers``: URLs of NATS, used where ``UNICRON_NATS_URL`` is not set;
    ``ca``: certificates (PEM) of those who vouch for these servers; empty: the system's.
    """

    identity: Identity
    seed: Annotated[str, Field(pattern=r"^SU[A-Z2-7]{56}$", repr=False)]
    servers: list[str] = Field(default_factory=list)
    ca: str = Field(default="", repr=False)

    @property
    def public_key(self) -> str:
        """The public key, by which the server knows the identity.

        Raises:
            InvalidInput: the checksum of the seed is wrong.
        """
        try:
            key: str = nkeys.from_seed(bytearray(self.seed.encode())).public_key.decode()
        except (nkeys.NkeysError, ValueError) as err:
            raise InvalidInput(f"the seed of {self.identity} is damaged: {err}") from err
        return key


def new_seed() -> str:
    """Return the seed of a new key pair."""
    seed: bytes = nkeys.encode_seed(os.urandom(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)
    return seed.decode()


def read(path: Path) -> Credential:
    """Return the credential in a file.

    Raises:
        InvalidInput: the file cannot be read, or is no credential; the message does not repeat what is in it.
    """
    try:
        return _parse(path.read_bytes(), str(path))
    except OSError as err:
        raise InvalidInput(f"credential {path}: {err.strerror or err}") from err


def read_descriptor(descriptor: int) -> Credential:
    """Return the credential in an open file, which no child of this process gets from now on.

    The file is read from its beginning wherever the descriptor stands, so it can be read again, also by another process
    with the same descriptor.

    Raises:
        InvalidInput: it cannot be read, or is no credential; as ``read``.
    """
    try:
        os.set_inheritable(descriptor, False)
        return _parse(os.pread(descriptor, MOST_BYTES, 0), f"descriptor {descriptor}")
    except OSError as err:
        raise InvalidInput(f"credential in descriptor {descriptor}: {err.strerror or err}") from err


def _parse(data: bytes, source: str) -> Credential:
    try:
        return Credential.model_validate_json(data, extra="ignore")
    except ValidationError as err:
        found = err.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in found["loc"])
        raise InvalidInput(f"{source} is no credential: {field + ': ' if field else ''}{found['msg']}") from err


def write(path: Path, credential: Credential) -> None:
    """Write a credential to a file that its owner alone can read (mode 0600).

    Raises:
        Unavailable: it cannot be written.
    """
    try:
        replace_file(path, credential.model_dump_json(indent=1).encode() + b"\n", mode=0o600)
    except OSError as err:
        raise Unavailable(f"{path}: {err.strerror or err}") from err
