"""Certificates of NATS: an authority of the cluster's own, and the certificate of its servers.

The authority vouches for nobody else, and each credential has its certificate (``shared.nats.key_directory``), so
nothing else has to be distributed. ``unicron keys tls`` makes both.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.errors import Corrupt, InvalidInput

VALID = timedelta(days=3650)
"""The time for which both certificates are valid. A cluster that stops in the middle of a run because one has expired
is worse off than one whose operator replaces them on purpose: revocation is a new authority."""

CLOCK_ERROR = timedelta(days=1)
"""Time before they were made from which certificates are valid: clocks of nodes may be behind."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, PEM."""

    certificate: str
    key: str = field(repr=False)


def new_authority(now: datetime) -> Pair:
    """Return a new authority, made at a time with its zone."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Unicron NATS authority")
    certificate = (
        _builder(name, name, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def issue(authority: Pair, names: Sequence[str], now: datetime) -> Pair:
    """Return a certificate of servers with these names.

    Args:
        authority: signs it.
        names: host names and IP addresses under which clients reach the servers.
        now: the time, with its zone.

    Raises:
        InvalidInput: there is no name, or one is no name of a host.
        Corrupt: the authority's files are damaged.
    """
    if not names:
        raise InvalidInput("a certificate needs at least one name or address under which clients reach NATS")
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
    try:
        issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
        signs = load_pem_private_key(authority.key.encode(), password=None)
    except ValueError as err:
        raise Corrupt(f"the authority of the certificates cannot be read: {err}") from err
    if not isinstance(signs, ec.EllipticCurvePrivateKey):
        raise Corrupt("the key of the authority is of another kind than those that are made here")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name("Unicron NATS"), issuer.subject, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signs.public_key()), critical=False)
        .add_extension(alternatives, critical=False)
        .sign(signs, hashes.SHA256())
    )
    return _pair(certificate, key)


def server_configuration(certificate: Path, key: Path) -> str:
    """Return the part of nats-server's configuration for a certificate.

    ``handshake_first``: TLS begins before the protocol of NATS. The server otherwise offers TLS in a line that is not
    encrypted, and an attacker on the way could remove the offer.
    """
    return (
        "tls {\n"
        f"  cert_file: {json.dumps(str(certificate), ensure_ascii=False)}\n"
        f"  key_file: {json.dumps(str(key), ensure_ascii=False)}\n"
        '  min_version: "1.3"\n'
        "  handshake_first: true\n"
        "}\n"
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        if not name or " " in name or "/" in name or ":" in name:
            raise ValueError("a host name or an IP address is allowed")
        return x509.DNSName(name)
    except ValueError as err:
        raise InvalidInput(f"{name!r} is no name of a server: {err}") from err


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_ERROR)
        .not_valid_after(now + VALID)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(Encoding.PEM).decode(),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    )
