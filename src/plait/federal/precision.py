"""Fewer bits on the wire: floating-point tensors as fp16, bf16 or int8, and what rounding loses of gradients.

    fp16, bf16   each element rounded to the nearest
    int8         element = byte * scale; scale = the largest magnitude / 127, and no smaller than the smallest normal
                 float32

A tensor that is no wider than that already, or has no fractions, goes as it is.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from plait.errors import CheckpointError, ConfigError, FederalError

__all__ = ["Feedback", "narrow", "narrows", "widen"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FLOAT = struct.Struct("<f")
_STEPS = 127
_FLOAT32 = torch.finfo(torch.float32)


def narrows(wire: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether elements of `wire` may stand for those of `dtype`: it is one of the three, and narrower."""
    return dtype in _FLOATS and wire in _DTYPES.values() and wire.itemsize < dtype.itemsize


def narrow(tensor: Tensor, precision: str | None) -> tuple[Tensor, float]:
    """The tensor as it goes on the wire, and its scale: 0 unless it became int8."""
    if precision is None:
        return tensor, 0.0
    if precision not in _DTYPES:
        raise ConfigError(f"precision {precision!r}: write None, 'fp16', 'bf16' or 'int8'")
    wire = _DTYPES[precision]
    if not narrows(wire, tensor.dtype):
        return tensor, 0.0
    with torch.no_grad():
        largest = _largest(tensor, precision)
        if wire is not torch.int8:
            return tensor.to(wire), 0.0
        (scale,) = _FLOAT.unpack(_FLOAT.pack(max(largest / _STEPS, _FLOAT32.tiny)))
        return (tensor.to(_between(tensor.dtype)) / scale).round_().to(wire), scale


def widen(tensor: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The tensor that `narrow` was given, but for what rounding lost; the same tensor if it lost nothing."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype is torch.int8:
        return tensor.to(_between(dtype)).mul_(scale).to(dtype)
    return tensor.to(dtype)


class Feedback:
    """Error feedback: what rounding lost of a slot's gradient is added to the next gradient of that slot.

    So it is late instead of lost. What is kept is dropped where the next gradient has another shape or dtype.
    """

    def __init__(self, precision: str | None) -> None:
        self.precision = precision
        self._lost: dict[int, Tensor] = {}

    def add(self, slot: int, gradient: Tensor) -> Tensor:
        """What to send, with this precision, in place of `gradient`; call it once for each gradient that is sent."""
        before = self._lost.get(slot)
        if before is not None and before.shape == gradient.shape and before.dtype == gradient.dtype:
            gradient = gradient.detach() + before
        wire, scale = narrow(gradient, self.precision)
        if wire is not gradient:
            # Never changed in place: a state dict that is being written holds the same tensors.
            self._lost[slot] = gradient.detach() - widen(wire, gradient.dtype, scale)
        return gradient

    def state_dict(self) -> dict[str, Tensor]:
        return {str(slot): tensor for slot, tensor in sorted(self._lost.items())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for slot, tensor in state.items():
            if not (slot.isascii() and slot.isdigit() and isinstance(tensor, Tensor) and tensor.dtype in _FLOATS):
                raise CheckpointError(
                    f"what rounding lost of slot {slot!r:.40} cannot be taken from the checkpoint: it is "
                    f"a {getattr(tensor, 'dtype', type(tensor).__name__)}, and has to be a floating-point tensor under "
                    "the number of a slot"
                )
        self._lost = {int(slot): tensor for slot, tensor in state.items()}


def _largest(tensor: Tensor, precision: str) -> float:
    """The largest magnitude; an error if the wire's type has no such number."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    largest = max(-low.item(), high.item())
    limit = _FLOAT32.max * _STEPS if precision == "int8" else torch.finfo(_DTYPES[precision]).max
    # "Not nan" comes by itself: a nan is not smaller than anything.
    if math.isfinite(largest) and largest <= limit:
        return largest
    raise FederalError(
        f"a {tensor.dtype} tensor of shape {list(tensor.shape)} cannot be sent as {precision}: it holds nan, inf, or a "
        f"magnitude past {limit:.3g}; look why, or send it with wire_dtype=None"
        + (" or 'bf16'" if precision == "fp16" else "")
    )


def _between(dtype: torch.dtype) -> torch.dtype:
    """What is computed with: scales are float32, and halves would round twice."""
    return torch.float64 if dtype is torch.float64 else torch.float32
