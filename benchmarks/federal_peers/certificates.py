"""Throw-away certificates for mutual TLS: a CA, and a key and a certificate for each party."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def certificate(subject: str, key, signer: str, signer_key, *, ca: bool = False) -> bytes:
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.DNSName(subject), x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(signer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer_key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def make(directory: Path) -> None:
    """ca.pem, and <role>.pem and <role>.key for both roles."""
    keys = {role: ec.generate_private_key(ec.SECP256R1()) for role in ("ca", "leader", "follower")}
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    for role, key in keys.items():
        (directory / f"{role}.pem").write_bytes(certificate(role, key, "ca", keys["ca"], ca=role == "ca"))
        if role != "ca":
            (directory / f"{role}.key").write_bytes(key.private_bytes(*form))


def read(directory: Path, role: str) -> tuple[bytes, bytes, bytes]:
    """The CA's certificate, this party's key, and its certificate."""
    return tuple((directory / part).read_bytes() for part in ("ca.pem", f"{role}.key", f"{role}.pem"))
