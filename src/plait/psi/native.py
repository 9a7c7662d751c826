"""X25519 eight at a time, by Intel's library for processors with AVX-512 IFMA: five times as fast as one by one.

`pip install 'plait[psi]'` brings it (ipp-crypto); without it, or on another processor, `plait.psi.curve` does the same.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np

from plait.psi import curve

__all__ = ["Multiply", "load"]

Multiply = Callable[[bytes, bytes], bytes]
"""(secret, points) to their multiples; ValueError: a point has a low order."""
LANES = 8
PROVED = 64
"""Random points on which the library is compared with `cryptography` before it is used."""

_RUNTIME = ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so")
_LIBRARY = "libcrypto_mb.so.13"
_BASE = (9).to_bytes(curve.POINT_BYTES, "little")

log = logging.getLogger("plait")


@functools.cache
def load() -> Multiply | None:
    """The library's multiplication, once it has shown that it multiplies as it should; None: it cannot be used."""
    try:
        library = _open()
        if not library.mbx_is_crypto_mb_applicable(ctypes.c_uint64(0)):
            return None
        found = _bind(library)
    except (importlib.metadata.PackageNotFoundError, OSError, AttributeError, StopIteration) as error:
        log.debug("Intel's library is not used: %s", error)
        return None
    secret, points = secrets.token_bytes(curve.POINT_BYTES), secrets.token_bytes(PROVED * curve.POINT_BYTES)
    if found(secret, points) != curve.multiply(secret, points):
        log.warning("Intel's cryptographic library gives wrong multiples here, and is not used")
        return None
    return found


def _open() -> ctypes.CDLL:
    """The library as pip has installed it. What it needs is loaded first, since nothing says where that lies."""
    for name in _RUNTIME:
        ctypes.CDLL(str(_file("intel-cmplr-lib-rt", name)), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(_file("ipp-crypto", _LIBRARY)))


def _file(package: str, name: str) -> Path:
    files = importlib.metadata.files(package) or []
    return Path(str(next(file for file in files if file.name == name).locate())).resolve()


def _bind(library: ctypes.CDLL) -> Multiply:
    function = library.mbx_x25519_mb8
    function.restype, function.argtypes = ctypes.c_uint32, [ctypes.c_void_p] * 3

    def multiply(secret: bytes, points: bytes) -> bytes:
        count = len(points) // curve.POINT_BYTES
        given = np.frombuffer(points + _BASE * (-count % LANES), np.uint8)
        made, key = np.zeros_like(given), np.frombuffer(secret, np.uint8)
        places = np.arange(0, len(given), curve.POINT_BYTES, dtype=np.uint64)
        ins, outs = given.ctypes.data + places, made.ctypes.data + places
        keys = np.full(LANES, key.ctypes.data, np.uint64)
        inputs, outputs, scalars, step = ins.ctypes.data, outs.ctypes.data, keys.ctypes.data, LANES * 8
        wrong = 0
        for at in range(0, len(places) * 8, step):  # a place in the lists of places
            wrong |= function(outputs + at, scalars, inputs + at)
        if wrong:
            raise ValueError("a point has a low order")
        data = made[: count * curve.POINT_BYTES].tobytes()
        _prove(secret, points, data)
        return data

    return multiply


def _prove(secret: bytes, points: bytes, made: bytes) -> None:
    """One multiple of each batch is made in the other way, too: a broken processor is not found out later."""
    if not points:
        return
    at = secrets.randbelow(len(points) // curve.POINT_BYTES) * curve.POINT_BYTES
    if curve.multiply(secret, points[at : at + curve.POINT_BYTES]) != made[at : at + curve.POINT_BYTES]:
        raise RuntimeError("the cryptographic library gave a wrong multiple: uninstall ipp-crypto, and start again")
