"""Whether both parties' batches are of the same samples: one keyed digest a batch, no ids."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from plait.errors import DataError

__all__ = ["digest", "session_key"]

_BYTES = 16


def session_key(*parts: str) -> bytes:
    """A key that both parties have had a part in, for one session."""
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=32).digest()


def digest(ids: Any, key: bytes) -> str:
    """What stands for these ids in this order: whole numbers, or a list of texts."""
    state = hashlib.blake2b(key=key, digest_size=_BYTES)
    ids = _numbers(ids)
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise DataError(f"sample ids are {ids.dtype}: give whole numbers or texts")
        state.update(ids.detach().cpu().to(torch.int64).contiguous().numpy().astype("<i8").tobytes())
        return state.hexdigest()
    for one in ids:
        data = one if isinstance(one, bytes) else str(one).encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def _numbers(ids: Any) -> Any:
    """Whole numbers as a tensor, however they are held: the other party may hold them in another way."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "biuf":
        return torch.as_tensor(ids)
    if isinstance(ids, (list, tuple)) and all(type(one) is int and -(2**63) <= one < 2**63 for one in ids):
        return torch.tensor(ids, dtype=torch.int64)
    return ids
