from __future__ import annotations

import datetime as dt
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from plait.errors import ConfigError
from plait.federal import certificates


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    certificates.init(tmp_path / "certs")
    return tmp_path / "certs"


def move_clock(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    moved = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=days)
    monkeypatch.setattr(certificates, "_now", lambda: moved)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_init_writes_an_authority_and_two_files_a_party(tmp_path):
    written = certificates.init(tmp_path, ["leader", "follower"])
    names = ["README.txt", "ca.key", "ca.pem", "follower.key", "follower.pem", "leader.key", "leader.pem"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert sorted(path.name for path in written) == names


def test_keys_are_readable_by_their_owner_only(directory):
    for name in ("ca.key", "leader.key", "follower.key"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def test_readme_says_which_file_goes_to_whom(directory):
    text = (directory / "README.txt").read_text()
    assert "leader: ca.pem, leader.pem, leader.key\n" in text
    assert "follower: ca.pem, follower.pem, follower.key\n" in text
    assert "ca.key goes to nobody" in text


def test_a_party_s_certificate_has_its_name_and_serves_both_ends(directory):
    found = certificate(directory / "leader.pem")
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["leader"]
    uses = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    found.verify_directly_issued_by(certificate(directory / "ca.pem"))


def test_a_party_cannot_sign_certificates(directory):
    usage = certificate(directory / "follower.pem").extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature
    assert not usage.key_cert_sign
    authority = certificate(directory / "ca.pem").extensions.get_extension_for_class(x509.BasicConstraints).value
    assert authority.ca
    assert authority.path_length == 0


def test_lifetimes_begin_five_minutes_ago(directory):
    now = dt.datetime.now(dt.timezone.utc)
    for name, days in (("ca", 3650), ("leader", 365)):
        found = certificate(directory / f"{name}.pem")
        assert abs(found.not_valid_before_utc - (now - dt.timedelta(minutes=5))) < dt.timedelta(minutes=1)
        assert abs(found.not_valid_after_utc - (now + dt.timedelta(days=days))) < dt.timedelta(minutes=1)


def test_every_certificate_has_a_serial_number_of_its_own(directory):
    assert len({certificate(directory / f"{name}.pem").serial_number for name in ("ca", "leader", "follower")}) == 3


def test_init_overwrites_only_when_forced(directory):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(ConfigError, match=r"has ca\.pem, ca\.key, leader\.pem, leader\.key"):
        certificates.init(directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    certificates.init(directory, force=True)
    assert (directory / "ca.pem").read_bytes() != before["ca.pem"]
    certificates.load(directory, "leader")


def test_one_existing_key_keeps_all_from_being_written(tmp_path):
    (tmp_path / "follower.key").write_text("mine")
    with pytest.raises(ConfigError, match=r"follower\.key"):
        certificates.init(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["follower.key"]


@pytest.mark.parametrize("parties", [[], ["leader", "leader"], ["ca"], ["../x"], ["Leader"], ["a b"], ["*"], [""]])
def test_names_that_cannot_be(tmp_path, parties):
    with pytest.raises(ConfigError, match="party|parties"):
        certificates.init(tmp_path, parties)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("days", "ca_days"), [(0, 10), (11, 10), (1, 40000)])
def test_lifetimes_that_cannot_be(tmp_path, days, ca_days):
    with pytest.raises(ConfigError, match="write 1 <= days <= ca_days"):
        certificates.init(tmp_path, days=days, ca_days=ca_days)


def test_load_gives_the_files_and_shows_no_key(directory):
    found = certificates.load(directory, "follower")
    assert found.ca == (directory / "ca.pem").read_bytes()
    assert found.certificate == (directory / "follower.pem").read_bytes()
    assert found.key == (directory / "follower.key").read_bytes()
    assert "PRIVATE" not in repr(found)


@pytest.mark.parametrize("name", ["ca.pem", "leader.pem", "leader.key"])
def test_load_names_a_missing_file(directory, name):
    (directory / name).unlink()
    with pytest.raises(ConfigError, match=f"{name} is missing: `plait certs init` makes it"):
        certificates.load(directory, "leader")


@pytest.mark.parametrize(
    ("name", "text"),
    [("ca.pem", "no certificate"), ("leader.pem", "no certificate"), ("leader.key", "no private key")],
)
def test_load_names_a_file_that_holds_something_else(directory, name, text):
    (directory / name).write_text("nothing of the kind")
    with pytest.raises(ConfigError, match=rf"{name} holds {text}"):
        certificates.load(directory, "leader")


def test_load_names_a_file_that_cannot_be_read(directory):
    (directory / "leader.key").unlink()
    (directory / "leader.key").mkdir()
    with pytest.raises(ConfigError, match=r"leader\.key cannot be read: "):
        certificates.load(directory, "leader")


def test_load_does_not_ask_for_passwords(directory):
    key = serialization.load_pem_private_key((directory / "leader.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (directory / "leader.key").write_bytes(locked)
    with pytest.raises(ConfigError, match="locked with a password"):
        certificates.load(directory, "leader")


def test_an_expired_certificate_is_named_with_its_date(directory, monkeypatch):
    end = certificate(directory / "leader.pem").not_valid_after_utc
    move_clock(monkeypatch, 366)
    with pytest.raises(ConfigError, match=rf"CN=leader in .*leader\.pem ended on {end:%Y-%m-%d %H:%M} UTC"):
        certificates.load(directory, "leader")


def test_an_expired_authority_is_named(directory, monkeypatch):
    move_clock(monkeypatch, 3651)
    with pytest.raises(ConfigError, match=r"CN=plait CA [0-9a-f]{8} in .*ca\.pem ended on"):
        certificates.load(directory, "leader")


def test_a_certificate_of_the_future_asks_for_the_clock(directory, monkeypatch):
    move_clock(monkeypatch, -1)
    with pytest.raises(ConfigError, match=r"begins on .* is this machine's clock right\?"):
        certificates.load(directory, "leader")


def test_a_certificate_for_somebody_else(directory):
    for kind in ("pem", "key"):
        (directory / f"leader.{kind}").write_bytes((directory / f"follower.{kind}").read_bytes())
    with pytest.raises(ConfigError, match=r"is a certificate for follower, and this party is 'leader'"):
        certificates.load(directory, "leader")


def test_a_key_of_another_certificate(directory):
    (directory / "leader.key").write_bytes((directory / "follower.key").read_bytes())
    with pytest.raises(ConfigError, match=r"leader\.key is not the key of .*leader\.pem"):
        certificates.load(directory, "leader")


def test_a_certificate_of_another_authority(directory, tmp_path):
    certificates.init(tmp_path / "other")
    (directory / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"leader\.pem was not signed by .*ca\.pem"):
        certificates.load(directory, "leader")


def test_two_authorities_may_be_trusted_at_once(directory, tmp_path):
    certificates.init(tmp_path / "next")
    both = (tmp_path / "next" / "ca.pem").read_bytes() + (directory / "ca.pem").read_bytes()
    (directory / "ca.pem").write_bytes(both)
    assert certificates.load(directory, "leader").ca == both


def test_renew_makes_one_party_s_files_anew(directory, monkeypatch):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    move_clock(monkeypatch, 360)
    certificates.renew(directory, "leader")
    changed = [path.name for path in directory.iterdir() if path.read_bytes() != before[path.name]]
    assert sorted(changed) == ["leader.key", "leader.pem"]
    move_clock(monkeypatch, 720)
    certificates.load(directory, "leader")


def test_renewed_certificates_do_not_outlive_their_authority(tmp_path):
    certificates.init(tmp_path, days=1, ca_days=10)
    certificates.renew(tmp_path, "leader")
    ends = [certificate(tmp_path / f"{name}.pem").not_valid_after_utc for name in ("ca", "leader")]
    assert ends[0] == ends[1]


def test_renew_needs_the_authority_s_own_key(directory):
    (directory / "ca.key").write_bytes((directory / "leader.key").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.key is not the key of .*ca\.pem"):
        certificates.renew(directory, "leader")
    (directory / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key is missing"):
        certificates.renew(directory, "leader")
