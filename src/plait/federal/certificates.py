"""Certificates: a small authority, a key and a certificate for each party, and their checks when a party starts."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from plait.atomic import atomic_path, write_atomic
from plait.errors import ConfigError

__all__ = ["Credentials", "init", "load", "renew"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_EARLIER = dt.timedelta(minutes=5)  # another machine's clock may be behind ours
_README = """\
Certificates of a federation, made by `plait certs init`.

{parties}
ca.key goes to nobody. Keep it where the next certificates will be made, or delete it: whoever has it can pass for
any party. A party's key goes to that party alone, over a way that nobody else reads.

Each party puts its three files into one directory, and names it: `plait party --certs DIR`, or PLAIT_CERTS.
The certificates end on {end:%Y-%m-%d}.
"""


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What a party shows and what it trusts, as PEM."""

    ca: bytes = dataclasses.field(repr=False)
    certificate: bytes = dataclasses.field(repr=False)
    key: bytes = dataclasses.field(repr=False)


def init(
    directory: str | os.PathLike[str],
    parties: Sequence[str] = ("leader", "follower"),
    *,
    days: int = 365,
    ca_days: int = 3650,
    force: bool = False,
) -> list[Path]:
    """Make a certificate authority, and a key and a certificate for each party, in DIRECTORY.

    README.txt, beside them, says which file goes to whom.
    Files that exist are kept, and nothing is written, unless `force` is given.

    Returns:
        the files written.

    """
    root = Path(directory)
    _check_parties(parties)
    _check_days(days, ca_days)
    names = ["ca.pem", "ca.key", *(f"{party}.{kind}" for party in parties for kind in ("pem", "key"))]
    there = [name for name in names if (root / name).exists()]
    if there and not force:
        raise ConfigError(
            f"{root} has {', '.join(there)} already: name another directory, or overwrite them with force "
            "(every party needs its new files then)"
        )
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _make_authority(ca_key, ca_days)
    _write_key(root / "ca.key", ca_key)
    write_atomic(root / "ca.pem", ca.public_bytes(serialization.Encoding.PEM))
    for party in parties:
        _write_party(root, party, ca, ca_key, days)
    readme = root / "README.txt"
    write_atomic(readme, _readme(parties, days))
    return [*(root / name for name in names), readme]


def renew(directory: str | os.PathLike[str], party: str, *, days: int = 365) -> list[Path]:
    """Make a new key and certificate for PARTY with the authority in DIRECTORY; the other parties keep theirs."""
    root = Path(directory)
    _check_parties([party])
    _check_days(days, days)
    ca = _certificates(root / "ca.pem")[0]
    ca_key = _private_key(root / "ca.key")
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != ca.public_key():
        raise ConfigError(
            f"{root / 'ca.key'} is not the key of {root / 'ca.pem'}: use the pair of one `plait certs init`"
        )
    _write_party(root, party, ca, ca_key, days)
    return [root / f"{party}.pem", root / f"{party}.key"]


def load(directory: str | os.PathLike[str], role: str) -> Credentials:
    """The files of party `role` in `directory`, checked before anybody is met with them."""
    root = Path(directory)
    authority, own, key = root / "ca.pem", root / f"{role}.pem", root / f"{role}.key"
    trusted, chain, private = _certificates(authority), _certificates(own), _private_key(key)
    for path, found in ((authority, trusted), (own, chain)):
        for certificate in found:
            _check_dates(path, certificate)
    names = _names(chain[0])
    if role not in names:
        raise ConfigError(
            f"{own} is a certificate for {', '.join(names) or 'nobody'}, and this party is {role!r}: "
            f"make one with `plait certs init --party {role} DIR`"
        )
    if private.public_key() != chain[0].public_key():
        raise ConfigError(
            f"{key} is not the key of {own}: put the two files of one `plait certs init` beside each other"
        )
    if not any(_issued(chain[-1], ca) for ca in trusted):
        raise ConfigError(f"{own} was not signed by {authority}: use the files of one `plait certs init`")
    return Credentials(_read(authority), _read(own), _read(key))


def _check_parties(parties: Sequence[str]) -> None:
    for party in parties:
        if not _NAME.fullmatch(party) or party == "ca":
            raise ConfigError(f"party={party!r}: write a name of small letters, digits and '-', such as leader")
    if not parties or len(set(parties)) < len(parties):
        raise ConfigError(f"parties={list(parties)!r}: name each party once, such as --party leader --party follower")


def _check_days(days: int, ca_days: int) -> None:
    if not 1 <= days <= ca_days <= 36500:
        raise ConfigError(f"days={days!r} and ca_days={ca_days!r}: write 1 <= days <= ca_days <= 36500")


def _readme(parties: Iterable[str], days: int) -> str:
    lines = "".join(f"{party}: ca.pem, {party}.pem, {party}.key\n" for party in parties)
    return _README.format(parties=lines, end=_now() + dt.timedelta(days=days))


def _make_authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    # a name of its own: two authorities of one name would be told apart by their signatures only
    name = _name(f"plait CA {secrets.token_hex(4)}")
    usage = {"key_cert_sign": True, "crl_sign": True}
    return (
        _builder(name, name, key.public_key(), _now() + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(**usage), critical=True)
        .sign(key, hashes.SHA256())
    )


def _write_party(root: Path, party: str, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    end = min(_now() + dt.timedelta(days=days), ca.not_valid_after_utc)
    certificate = (
        _builder(_name(party), ca.subject, key.public_key(), end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(party)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write_key(root / f"{party}.key", key)
    write_atomic(root / f"{party}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _EARLIER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(**allowed: bool) -> x509.KeyUsage:
    nothing = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(**(nothing | allowed))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with atomic_path(path) as temporary:
        temporary.chmod(0o600)  # before the key is in it
        temporary.write_bytes(data)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: `plait certs init` makes it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _certificates(path: Path) -> list[x509.Certificate]:
    data = _read(path)
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise ConfigError(f"{path} holds no certificate in PEM: `plait certs init` makes one") from None


def _private_key(path: Path) -> CertificateIssuerPrivateKeyTypes:
    data = _read(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except TypeError:
        raise ConfigError(
            f"{path} is locked with a password: write it without one, readable by its owner only"
        ) from None
    except ValueError:
        raise ConfigError(f"{path} holds no private key in PEM: `plait certs init` makes one") from None
    return key  # type: ignore[return-value]  # a key that signs no certificates fits none, and is refused by `load`


def _check_dates(path: Path, certificate: x509.Certificate) -> None:
    begin, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, _now()
    who = f"the certificate of {certificate.subject.rfc4514_string()} in {path}"
    if now > end:
        raise ConfigError(f"{who} ended on {end:%Y-%m-%d %H:%M} UTC: make a new one with `plait certs init`")
    if now < begin:
        raise ConfigError(f"{who} begins on {begin:%Y-%m-%d %H:%M} UTC: is this machine's clock right?")


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return list(names.get_values_for_type(x509.DNSName))


def _issued(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _now() -> dt.datetime:
    return dt.datetime.now(dt.timezone.utc)
