"""Whether both parties' batches are of the same samples: one keyed digest a batch, no ids."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from plait.errors import DataError

__all__ = ["digest", "session_key"]

_BYTES = 16


def session_key(*parts: str) -> bytes:
    """A key that both parties have had a part in, for one session."""
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=32).digest()


def digest(ids: Any, key: bytes) -> str:
    """What stands for these ids in this order: whole numbers as a tensor or array, or a list of texts."""
    state = hashlib.blake2b(key=key, digest_size=_BYTES)
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise DataError(f"sample ids are {ids.dtype}: give whole numbers or texts")
        state.update(ids.detach().cpu().to(torch.int64).contiguous().numpy().tobytes())
        return state.hexdigest()
    for one in ids:
        data = one if isinstance(one, bytes) else str(one).encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
