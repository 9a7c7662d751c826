"""TensorFlow's 64-bit fingerprint of strings (FarmHash's `Fingerprint64`), for many strings at once.

Strings are taken by their lengths: 0, 1 to 3, 4 to 7, 8 to 16, 17 to 32, 33 to 64, and longer ones in blocks of 64
bytes. Every number is an unsigned one of 64 bits that wraps around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["CROSS_KEY", "fingerprint64", "fingerprint_cat64"]

U64: TypeAlias = NDArray[np.uint64]
_Bytes: TypeAlias = NDArray[np.uint8]
_Places: TypeAlias = NDArray[np.int64]
_Pair: TypeAlias = tuple[U64, U64]

CROSS_KEY = 0xDECAFCAFFE
"""What TensorFlow begins the hash of a cross with."""

_K0 = np.uint64(0xC3A5C85C97CB3127)
_K1 = np.uint64(0xB492B66FBE98F273)
_K2 = np.uint64(0x9AE16A3B2F90404F)
_CAT = np.uint64(0xC6A4A7935BD1E995)
_SEED = 81
_BLOCK = 64
_WORD = 8
_ROWS = 1 << 14
"""Strings that are worked on at once: what they take stays in the cache."""


def fingerprint64(data: _Bytes, offsets: _Places) -> U64:
    """The fingerprints of the strings `data[offsets[i]:offsets[i + 1]]`."""
    found = np.empty(len(offsets) - 1, np.uint64)
    padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])  # a word may be read at the last byte
    with np.errstate(over="ignore"):
        for first in range(0, len(found), _ROWS):
            some = offsets[first : first + _ROWS + 1]
            _fill(found[first : first + _ROWS], _Fetch(padded), some[:-1], np.diff(some))
    return found


def fingerprint_cat64(first: U64, second: U64) -> U64:
    """One fingerprint of two, in this order."""
    with np.errstate(over="ignore"):
        mixed = (first ^ _CAT) ^ (_shift_mix(second * _CAT) * _CAT)
        return _shift_mix(_shift_mix(mixed * _CAT) * _CAT)


class _Fetch:
    """Words of 8 and 4 bytes and single bytes, wherever they begin."""

    def __init__(self, padded: _Bytes) -> None:
        count = max(len(padded) - _WORD + 1, 0)
        self._words = np.ndarray((count,), "<u8", buffer=padded, strides=(1,))
        self._halves = np.ndarray((count,), "<u4", buffer=padded, strides=(1,))
        self._bytes = padded

    def word(self, places: _Places) -> U64:
        found: U64 = self._words[places].astype(np.uint64, copy=False)
        return found

    def half(self, places: _Places) -> U64:
        found: U64 = self._halves[places].astype(np.uint64)
        return found

    def byte(self, places: _Places) -> U64:
        return self._bytes[places].astype(np.uint64)


_Hash: TypeAlias = Callable[[_Fetch, _Places, _Places], U64]


def _fill(found: U64, fetch: _Fetch, starts: _Places, lengths: _Places) -> None:
    kinds = np.searchsorted(_UP_TO, lengths)
    present = np.flatnonzero(np.bincount(kinds, minlength=len(_HASHES)))
    for kind in present:
        hashed = _HASHES[kind]
        if len(present) == 1:
            found[:] = hashed(fetch, starts, lengths)
            return
        here = np.flatnonzero(kinds == kind)
        found[here] = hashed(fetch, starts[here], lengths[here])


def _rotate(value: U64, by: int) -> U64:
    turned: U64 = (value >> np.uint64(by)) | (value << np.uint64(64 - by))
    return turned


def _shift_mix(value: U64) -> U64:
    mixed: U64 = value ^ (value >> np.uint64(47))
    return mixed


def _mix(first: U64, second: U64, factor: Any) -> U64:
    """Two words to one."""
    inner = _shift_mix((first ^ second) * factor)
    mixed: U64 = _shift_mix((second ^ inner) * factor) * factor
    return mixed


def _factor(lengths: _Places) -> U64:
    factor: U64 = _K2 + lengths.astype(np.uint64) * np.uint64(2)
    return factor


def _hash_0(fetch: _Fetch, starts: _Places, lengths: _Places) -> U64:
    del fetch, lengths
    return np.full(len(starts), _K2)


def _hash_1_to_3(fetch: _Fetch, starts: _Places, lengths: _Places) -> U64:
    first, middle, last = (fetch.byte(starts + place) for place in (0, lengths >> 1, lengths - 1))
    low = first + (middle << np.uint64(8))
    high = lengths.astype(np.uint64) + (last << np.uint64(2))
    mixed: U64 = _shift_mix(low * _K2 ^ high * _K0) * _K2
    return mixed


def _hash_4_to_7(fetch: _Fetch, starts: _Places, lengths: _Places) -> U64:
    low = lengths.astype(np.uint64) + (fetch.half(starts) << np.uint64(3))
    return _mix(low, fetch.half(starts + lengths - 4), _factor(lengths))


def _hash_8_to_16(fetch: _Fetch, starts: _Places, lengths: _Places) -> U64:
    factor = _factor(lengths)
    first, last = fetch.word(starts) + _K2, fetch.word(starts + lengths - 8)
    return _mix(_rotate(last, 37) * factor + first, (_rotate(first, 25) + last) * factor, factor)


def _hash_17_to_32(fetch: _Fetch, starts: _Places, lengths: _Places) -> U64:
    factor, ends = _factor(lengths), starts + lengths
    a, b = fetch.word(starts) * _K1, fetch.word(starts + 8)
    c, d = fetch.word(ends - 8) * factor, fetch.word(ends - 16) * _K2
    return _mix(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, factor)


def _hash_33_to_64(fetch: _Fetch, starts: _Places, lengths: _Places) -> U64:
    factor, ends = _factor(lengths), starts + lengths
    a, b = fetch.word(starts) * _K2, fetch.word(starts + 8)
    c, d = fetch.word(ends - 8) * factor, fetch.word(ends - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _mix(y, a + _rotate(b + _K2, 18) + c, factor)
    e, f = fetch.word(starts + 16) * factor, fetch.word(starts + 24)
    g, h = (y + fetch.word(ends - 32)) * factor, (z + fetch.word(ends - 24)) * factor
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, factor)


class _State:
    """What is carried from block to block."""

    def __init__(self, first: U64) -> None:
        count = len(first)
        y = np.full(count, _SEED, np.uint64) * _K1 + np.uint64(113)
        self.x = np.full(count, _SEED, np.uint64) * _K2 + first
        self.y = y
        self.z = _shift_mix(y * _K2 + np.uint64(113)) * _K2
        self.v: _Pair = (np.zeros(count, np.uint64), np.zeros(count, np.uint64))
        self.w: _Pair = (np.zeros(count, np.uint64), np.zeros(count, np.uint64))

    def taken(self, here: _Places) -> _State:
        """Of some of the strings."""
        some = _State.__new__(_State)
        some.x, some.y, some.z = self.x[here], self.y[here], self.z[here]
        some.v, some.w = (self.v[0][here], self.v[1][here]), (self.w[0][here], self.w[1][here])
        return some

    def put(self, here: _Places, some: _State) -> None:
        self.x[here], self.y[here], self.z[here] = some.x, some.y, some.z
        for mine, theirs in zip((*self.v, *self.w), (*some.v, *some.w), strict=True):
            mine[here] = theirs

    def mix(self, fetch: _Fetch, at: _Places, factor: Any, often: int) -> None:
        """Take in the block of 64 bytes at `at`; the last one, `often` 9, weighs two of the words more."""
        times = np.uint64(often)
        (v0, v1), (w0, w1) = self.v, self.w
        x = _rotate(self.x + self.y + v0 + fetch.word(at + 8), 37) * factor ^ w1 * times
        y = _rotate(self.y + v1 + fetch.word(at + 48), 42) * factor + v0 * times + fetch.word(at + 40)
        z = _rotate(self.z + w0, 33) * factor
        self.v = _weak(fetch, at, v1 * factor, x + w0)
        self.w = _weak(fetch, at + 32, z + w1, y + fetch.word(at + 16))
        self.x, self.y, self.z = z, y, x


def _weak(fetch: _Fetch, at: _Places, a: U64, b: U64) -> _Pair:
    """Four words taken into two."""
    first, second, third, fourth = (fetch.word(at + place) for place in (0, 8, 16, 24))
    a = a + first
    b = _rotate(b + a + fourth, 21)
    total = a + second + third
    return total + fourth, b + _rotate(total, 44) + a


def _hash_long(fetch: _Fetch, starts: _Places, lengths: _Places) -> U64:
    blocks, rest = (lengths - 1) // _BLOCK, ((lengths - 1) % _BLOCK).astype(np.uint64)
    state = _State(fetch.word(starts))
    for number in range(int(blocks.max())):
        here = np.flatnonzero(blocks > number)
        some = state.taken(here)
        some.mix(fetch, starts[here] + number * _BLOCK, _K1, 1)
        state.put(here, some)
    factor = _K1 + ((state.z & np.uint64(0xFF)) << np.uint64(1))
    w0 = state.w[0] + rest
    v0 = state.v[0] + w0
    state.v, state.w = (v0, state.v[1]), (w0 + v0, state.w[1])
    state.mix(fetch, starts + lengths - _BLOCK, factor, 9)
    return _mix(
        _mix(state.v[0], state.w[0], factor) + _shift_mix(state.y) * _K0 + state.z,
        _mix(state.v[1], state.w[1], factor) + state.x,
        factor,
    )


_UP_TO = np.array([0, 3, 7, 16, 32, 64])
_HASHES: list[_Hash] = [
    _hash_0, _hash_1_to_3, _hash_4_to_7, _hash_8_to_16, _hash_17_to_32, _hash_33_to_64, _hash_long,
]  # fmt: skip
"""One more than `_UP_TO` has: for what is longer."""
