"""Keys as points of Curve25519, and their multiples: X25519 (RFC 7748) by `cryptography`.

A point is its u-coordinate in 32 bytes. This file imports nothing of plait: it is also the program of the processes
that multiply, and they start at once.
"""

from __future__ import annotations

import hashlib
import importlib
import struct
import sys
from collections.abc import Callable, Iterable
from typing import IO

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

__all__ = [
    "BLIND",
    "COEFFICIENT",
    "LARGEST",
    "LOW_ORDER",
    "MULTIPLY",
    "POINT_BYTES",
    "PRIME",
    "hash_to_curve",
    "is_on_curve",
    "multiply",
    "pack",
    "serve",
    "unpack",
]

PRIME = 2**255 - 19
COEFFICIENT = 486662
"""Of the curve v² = u³ + 486662 u² + u, modulo the prime."""
POINT_BYTES = 32
LARGEST = 2**255 - 2**32
"""Coordinates are below. One in 2^223 is not, so no key ever is; and Intel's library errs within 2^12 of the prime."""
LOW_ORDER = (
    0,
    1,
    PRIME - 1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
"""The u-coordinates of points, of the curve and of its twist, whose order divides 8: X25519 makes 0 of them."""
BLIND, MULTIPLY = b"H", b"M"
"""What a process that multiplies is asked for: the multiples of keys, or of points."""

_DOMAIN = b"plait psi 1\0"
_MASK = (1 << 255) - 1
_ORDER = struct.Struct("<cQ")
_LENGTH = struct.Struct("<I")


def _find_jacobi() -> Callable[[int, int], int]:
    """Whether a number is a square modulo a prime: 1, 0 for 0, or -1. Without gmpy2, it takes fifty times as long."""
    try:
        found: Callable[[int, int], int] = importlib.import_module("gmpy2").jacobi
    except ImportError:
        return lambda value, prime: (pow(value, (prime - 1) // 2, prime) + 1) % prime - 1
    return found


_jacobi = _find_jacobi()


def is_on_curve(u: int) -> bool:
    """Whether there is a point with this coordinate on the curve; otherwise there is one on its twist."""
    return _jacobi(u * (u * (u + COEFFICIENT) + 1) % PRIME, PRIME) == 1


def hash_to_curve(key: bytes) -> bytes:
    """The point of a key: the first on the curve among coordinates that SHA-512 makes of the key and a count.

    Nobody knows its logarithm, and it is on the curve, never on the twist: multiples keep the side they are on, and
    would tell it.
    """
    count = 0
    while True:
        digest = hashlib.sha512(_DOMAIN + count.to_bytes(2, "little") + key).digest()
        for half in (digest[:POINT_BYTES], digest[POINT_BYTES:]):
            u = int.from_bytes(half, "little") & _MASK
            if u < LARGEST and _jacobi(u * (u * (u + COEFFICIENT) + 1) % PRIME, PRIME) == 1 and u not in LOW_ORDER:
                return u.to_bytes(POINT_BYTES, "little")
        count += 1


def multiply(secret: bytes, points: bytes) -> bytes:
    """The multiples of points that stand one after the other. ValueError: one of them has a low order."""
    exchange, load = X25519PrivateKey.from_private_bytes(secret).exchange, X25519PublicKey.from_public_bytes
    return b"".join(
        [exchange(load(points[at : at + POINT_BYTES])) for at in range(0, len(points), POINT_BYTES)],
    )


def pack(keys: Iterable[bytes]) -> bytes:
    """Keys as one piece of bytes, each with its length before it."""
    return b"".join([part for key in keys for part in (_LENGTH.pack(len(key)), key)])


def unpack(data: bytes) -> list[bytes]:
    keys, at = [], 0
    while at < len(data):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(data, at)[0]
        keys.append(data[begin:at])
    return keys


def serve(orders: IO[bytes], answers: IO[bytes]) -> None:
    """Read a secret, then orders, and answer each, until there are no more."""
    secret = orders.read(POINT_BYTES)
    work: dict[bytes, Callable[[bytes], bytes]] = {
        BLIND: lambda data: multiply(secret, b"".join([hash_to_curve(key) for key in unpack(data)])),
        MULTIPLY: lambda data: multiply(secret, data),
    }
    while head := orders.read(_ORDER.size):
        kind, size = _ORDER.unpack(head)
        try:
            answer = work[kind](orders.read(size))
        except ValueError:
            kind, answer = b"E", b""
        answers.write(_ORDER.pack(kind, len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
