"""Intel's library, where it is installed and the processor can: the same multiples as those of `cryptography`."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from plait.psi import curve, native


@pytest.fixture
def multiply():
    found = native.load()
    if found is None:
        pytest.skip("Intel's library is not installed, or not for this processor")
    return found


@pytest.fixture
def fresh():
    """What was found before is not remembered, nor is what a test finds."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_the_same_multiples(multiply, count):
    secret, points = os.urandom(32), os.urandom(32 * count)
    assert multiply(secret, points) == curve.multiply(secret, points)


def test_a_point_of_low_order_is_refused(multiply):
    with pytest.raises(ValueError):
        multiply(os.urandom(32), bytes(32))


def test_it_need_not_be_there(monkeypatch, fresh):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(native.importlib.metadata, "files", absent)
    assert native.load() is None


def test_it_may_be_there_without_its_library(monkeypatch, fresh):
    monkeypatch.setattr(native.importlib.metadata, "files", lambda name: [])
    assert native.load() is None


class _Library:
    """Multiplies wrongly."""

    def mbx_is_crypto_mb_applicable(self, features):
        return 1

    class mbx_x25519_mb8:  # noqa: N801
        def __new__(cls, *places):
            return 0


def test_one_that_multiplies_wrongly_is_not_used(monkeypatch, fresh, caplog):
    monkeypatch.setattr(native, "_open", _Library)
    monkeypatch.setattr(native, "_prove", lambda *_: None)
    assert native.load() is None
    assert "wrong multiples" in caplog.text


def test_one_that_begins_to_multiply_wrongly_is_found_out():
    point = curve.hash_to_curve(b"a")
    with pytest.raises(RuntimeError, match="wrong multiple"):
        native._prove(bytes([8] * 32), point, point)


def test_a_processor_that_cannot(monkeypatch, fresh):
    monkeypatch.setattr(_Library, "mbx_is_crypto_mb_applicable", lambda self, features: 0)
    monkeypatch.setattr(native, "_open", _Library)
    assert native.load() is None
