"""Random states: seeds derived from facts, states of one's own, states saved and restored."""

from __future__ import annotations

import hashlib
import random
import threading
from types import TracebackType
from typing import Any

import numpy as np
import torch

__all__ = ["LOCK", "IsolatedRng", "derive_seed", "isolated_rng", "rng_state", "set_rng_state"]

LOCK = threading.RLock()
"""Held while variables are made, and while states are put back: two models may be built in two threads."""


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits, the same for the same parts on every machine: `derive_seed(seed, "epoch", 3)`."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class IsolatedRng:
    """Random states of one's own in the place of the global ones, for the length of a `with`.

    The global states are put back on exit. Entered again, the own ones go on where they were.
    """

    __slots__ = ("_outside", "_own", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: _Live | None = None
        self._outside: _Live | None = None

    def __enter__(self) -> None:
        self._outside = _Live()
        if self._own is None:
            _seed_all(self._seed)
        else:
            self._own.restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outside is not None  # noqa: S101 - ours: `with` enters before it leaves
        self._own = _Live()
        self._outside.restore()


def isolated_rng(seed: int) -> IsolatedRng:
    """A block with its own random states, seeded with `seed`, that leaves the global ones as they were."""
    return IsolatedRng(seed)


def rng_state() -> dict[str, Any]:
    """The global random states of Python, NumPy and torch (CUDA too, once in use), as JSON values and uint8 tensors."""
    live = _Live()
    version, words, gauss = live.python
    name, keys, position, has_gauss, cached = live.numpy
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), _to_bytes(keys), int(position), int(has_gauss), float(cached)],
        "torch": live.torch,
    }
    if live.cuda is not None:
        state["cuda"] = live.cuda
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` gave. CUDA states are put back on as many devices as there are."""
    version, words, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    with LOCK:
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((name, _from_bytes(keys), position, has_gauss, cached))  # noqa: NPY002 - the global state is meant
        torch.default_generator.set_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(saved, device)


class _Live:
    """The global states as the libraries give them; nothing converted, so that taking one is cheap."""

    __slots__ = ("cuda", "numpy", "python", "torch")

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy: Any = np.random.get_state()  # noqa: NPY002 - the global state is meant
        self.torch = torch.default_generator.get_state()
        self.cuda = torch.cuda.get_rng_state_all() if _cuda_in_use() else None

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - the global state is meant
        torch.default_generator.set_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global state is meant
    # Not `torch.manual_seed`: before CUDA is in use, that one leaves a seed behind for the moment when it will be.
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(seed)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch does not annotate it


def _to_bytes(keys: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(keys).astype("<u4").view(np.uint8).copy())


def _from_bytes(keys: torch.Tensor) -> Any:
    return keys.numpy().copy().view("<u4").astype(np.uint32)
