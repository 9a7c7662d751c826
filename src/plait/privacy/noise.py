"""Gaussian noise for gradients: a stream that can be resumed, and one that never repeats."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import ConfigError

__all__ = ["Noise", "SecureNoise"]

_KEY_BYTES = 32
_SUMMED = 4
"""Secure draws are sums of so many."""


class _Buffer:
    """One flat tensor for all gradients of a kind, so that they are drawn in one call, and views of it to add."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        first, sizes = gradients[0], [gradient.numel() for gradient in gradients]
        dtype = first.dtype if first.dtype is torch.float64 else torch.float32
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=first.device)
        self.views = [
            part.view(gradient.shape) for part, gradient in zip(torch.split(self.flat, sizes), gradients, strict=True)
        ]
        self.normals = _Normals(self.flat.numpy()) if first.device.type == "cpu" else None


class _Adding:
    """Adds draws to lists of gradients; on the CPU, buffers are kept for lists that come again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], _Buffer] = {}

    def add_drawn(self, gradients: Sequence[Tensor], fill: Callable[[_Buffer, int], None]) -> None:
        for number, alike in enumerate(_by_kind(gradients)):
            key = tuple((one.shape, one.dtype, one.device) for one in alike)
            buffer = self._buffers.get(key)
            if buffer is None:
                buffer = _Buffer(alike)
                if buffer.normals is not None:  # a GPU's memory is short, and taken again in no time
                    self._buffers[key] = buffer
            fill(buffer, number)
            torch._foreach_add_(alike, buffer.views)


def _by_kind(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """In groups of one dtype and device, in an order that depends on the list alone."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    return list(groups.values())


class Noise(_Adding):
    """What is drawn is a pure function of (key, step, part): only the key needs to be saved.

    The key comes from the operating system unless a seed is given, which is for tests and comparisons: who knows the
    seed can take the noise away again.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.seed = seed
        self.key = os.urandom(_KEY_BYTES) if seed is None else _digest(b"seed", str(seed).encode())
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], deviation: float, step: int, part: int = 0) -> None:
        """Add to every element a draw of that standard deviation; another `part` is another worker or optimizer."""
        if deviation > 0:
            self.add_drawn(gradients, lambda buffer, number: self._fill(buffer, deviation, (step, part, number)))

    def _fill(self, buffer: _Buffer, deviation: float, place: tuple[int, ...]) -> None:
        key, device = self._key_of(place), buffer.flat.device
        if buffer.normals is not None:
            buffer.normals.fill(deviation, key)
            return
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        buffer.flat.normal_(0.0, deviation, generator=generator.manual_seed(int.from_bytes(key[:8], "big") >> 1))

    def draw(self, deviation: float, step: int, part: int = 0) -> float:
        """One draw alone, for what is counted beside the gradients; none of those that `add` takes."""
        return _one_normal(deviation, self._key_of((step, part, -1)))

    def _key_of(self, place: tuple[int, ...]) -> bytes:
        return _digest(self.key, ",".join(map(str, place)).encode())

    def change_key(self, reason: str) -> None:
        """Another stream from here on: a step number may come again with other data, and must not with this noise."""
        self.key = os.urandom(_KEY_BYTES) if self.seed is None else _digest(self.key, reason.encode())

    def state_dict(self) -> dict[str, Any]:
        return {"key": self.key.hex()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "key" not in state:
            raise ConfigError("the checkpoint has secure noise, which has no key: write secure_noise=True, as before")
        self.key = bytes.fromhex(state["key"])


class SecureNoise(_Adding):
    """Draws from a stream cipher with a new key of the operating system's at every call: nothing to know or resume.

    Each is a sum of several draws. A single one is made of few numbers that can be floats, and tells by its last bits
    which gradients it may have been added to (Holohan and Braghin, 2021).
    """

    seed: int | None = None

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], deviation: float, step: int, part: int = 0) -> None:
        del step, part  # nothing comes again
        if deviation > 0:
            self.add_drawn(gradients, lambda buffer, _: _fill_securely(buffer.flat, deviation))

    def draw(self, deviation: float, step: int, part: int = 0) -> float:
        del step, part
        return _one_normal(deviation, os.urandom(_KEY_BYTES))

    def change_key(self, reason: str) -> None:
        """It has none."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """It has none."""


def _fill_securely(flat: Tensor, deviation: float) -> None:
    draws, total = np.empty(flat.numel()), np.zeros(flat.numel())
    normals = _Normals(draws)
    for _ in range(_SUMMED):
        normals.fill(deviation / math.sqrt(_SUMMED), os.urandom(_KEY_BYTES))
        total += draws
    flat.copy_(torch.from_numpy(total))


def _one_normal(deviation: float, key: bytes) -> float:
    found = np.empty(1)
    _Normals(found).fill(deviation, key)
    return float(found[0])


class _Normals:
    """Draws in one piece of memory, again and again: what was used before is warm.

    Of two uniform numbers, Box and Muller make a radius and an angle, and so two draws. The numbers are the bits of a
    stream cipher, which processors have a circuit for: it is faster than torch's generator, and nobody can guess on.
    """

    def __init__(self, out: NDArray[Any]) -> None:
        self._out, self._half = out, -(-len(out) // 2)
        self._zeros = bytes(2 * self._half * out.itemsize)
        self._bytes = bytearray(len(self._zeros) + 15)  # the cipher wants room for another block
        self._kind = np.int32 if out.dtype == np.float32 else np.int64
        self._bits = np.frombuffer(self._bytes, dtype=self._kind, count=2 * self._half)
        self._radius, self._angle = np.empty((2, self._half), dtype=out.dtype)

    def fill(self, deviation: float, key: bytes) -> None:
        """A function of the key, which is to be used once."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # noqa: PLC0415 - when it is used

        Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update_into(self._zeros, self._bytes)
        out, half, bits, radius, angle = self._out, self._half, self._bits, self._radius, self._angle
        size = float(2 ** (8 * out.itemsize - 1))
        radius[:] = np.bitwise_and(bits[:half], np.iinfo(self._kind).max, out=bits[:half])
        radius += 0.5  # none is 0, which has no logarithm
        radius *= 1.0 / size
        np.log(radius, out=radius)
        radius *= -2.0 * deviation**2
        np.sqrt(radius, out=radius)
        angle[:] = bits[half:]
        angle *= math.pi / size
        np.cos(angle, out=out[:half])
        out[:half] *= radius
        rest = len(out) - half
        np.sin(angle[:rest], out=out[half:])
        out[half:] *= radius[:rest]


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=_KEY_BYTES).digest()
