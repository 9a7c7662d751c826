"""A secret as the product of two: what a party chooses to be multiplied meets a number that is used once.

Libraries have had mistakes that show only at special values on the way; who may choose points could choose them so that
a wrong multiple tells something of the secret. Multiplied by a random number first, and then by what is missing, it
tells of that number alone.
"""

from __future__ import annotations

import secrets

__all__ = ["ORDER", "clamped", "split"]

ORDER = 2**252 + 27742317777372353535851937790883648493
"""Of the curve's large subgroup, a prime; all points of the curve are in it once they are multiplied by 8."""

_BYTES = 32


def clamped(secret: bytes) -> int:
    """The number that X25519 multiplies by: from 2^254 to 2^255, a multiple of 8."""
    return int.from_bytes(secret, "little") % 2**254 // 8 * 8 + 2**254


def split(secret: bytes) -> tuple[bytes, bytes]:
    """Two secrets, the first of them random: to multiply a point of the curve by both is to multiply it by `secret`."""
    while True:
        first = secrets.token_bytes(_BYTES)
        rest = clamped(secret) * pow(clamped(first), -1, ORDER) % ORDER
        rest += -rest * pow(ORDER, -1, 8) % 8 * ORDER  # the same modulo the order, and a multiple of 8
        if 2**254 <= rest < 2**255:  # as for every other one
            return first, rest.to_bytes(_BYTES, "little")
