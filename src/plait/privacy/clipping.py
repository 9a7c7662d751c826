"""From squared norms to weights: how much of each micro-batch's gradient goes into the sum."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, isfinite, sqrt

import torch
from torch import Tensor

from plait.errors import ConfigError, DataError

__all__ = ["Adaptive", "flat", "per_layer"]


class Adaptive:
    """A limit that follows a quantile of the norms (Andrew et al. 2021), for clipping with `flat`.

    After a step, each micro-batch votes whether its gradient was below the limit, and the limit moves by the votes'
    noised share. The votes cost privacy, too: `noise_multiplier` is raised for the gradients so that both together
    cost what was asked for. `microbatches` is the number expected in a step, over all workers.
    """

    def __init__(
        self, limit: float, noise_multiplier: float, microbatches: float, *, quantile: float = 0.5, rate: float = 0.2
    ) -> None:
        if not (limit > 0 and microbatches > 0 and 0 < quantile < 1 and rate > 0):
            raise ConfigError(
                f"adaptive clipping: limit is {limit}, microbatches {microbatches}, quantile {quantile}, rate {rate}; "
                "write numbers above 0, and a quantile below 1, such as 0.5"
            )
        self.limit, self.microbatches, self.quantile, self.rate = float(limit), microbatches, quantile, rate
        self.vote_noise = max(microbatches / 20, noise_multiplier) if noise_multiplier else 0.0
        """The standard deviation of the noise on the votes' sum, which one micro-batch moves by a half."""
        self.noise_multiplier = _raised(noise_multiplier, self.vote_noise)

    @staticmethod
    def votes(cut: Tensor) -> Tensor:
        """The sum of the votes: a half for each gradient below the limit, minus a half for each that was cut."""
        return 0.5 * cut.numel() - cut.sum()

    def update(self, votes: float | Tensor, normal: float) -> None:
        """Move the limit by the votes of all workers; `normal` is a draw of the standard normal distribution."""
        below = (float(votes) + self.vote_noise * normal) / self.microbatches + 0.5
        self.limit *= exp(-self.rate * (min(max(below, 0.0), 1.0) - self.quantile))

    def state_dict(self) -> dict[str, float]:
        return {"limit": self.limit}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.limit = float(state["limit"])


def _raised(noise_multiplier: float, vote_noise: float) -> float:
    """The multiplier that, with the votes' own of twice their noise, makes the one asked for."""
    return (noise_multiplier**-2 - (2 * vote_noise) ** -2) ** -0.5 if noise_multiplier else 0.0


def flat(squares: Mapping[str, Tensor], limit: float | Tensor) -> tuple[Tensor, Tensor]:
    """Weights [m] that bound the norm over all layers by `limit`, and which micro-batches they cut."""
    norms = _norms(squares)
    return _weights(norms, limit), norms > limit


def per_layer(squares: Mapping[str, Tensor], limit: float | Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Weights [m] of each layer, bounded by `limit / sqrt(layers)`: all together are bounded by `limit`."""
    if not squares:
        return {}, torch.zeros(0, dtype=torch.bool)
    share = limit / sqrt(len(squares))
    norms = torch.stack(list(squares.values())).sqrt_()
    _check_finite(norms)
    return dict(zip(squares, _weights(norms, share), strict=True)), (norms > share).any(0)


def _norms(squares: Mapping[str, Tensor]) -> Tensor:
    parts = list(squares.values())
    if not parts:
        return torch.zeros(0)
    norms = torch.stack(parts).sum(0).sqrt_()
    _check_finite(norms)
    return norms


def _check_finite(norms: Tensor) -> None:
    """A gradient without a norm cannot be clipped, and would show in the sum; to wait for a GPU would cost too much."""
    if norms.device.type == "cpu" and not isfinite(float(norms.sum())):
        wrong = int(norms.view(-1, norms.shape[-1]).isfinite().all(0).logical_not_().nonzero()[0])
        raise DataError(
            f"the gradient of micro-batch {wrong} is not finite, so it cannot be clipped: look for bad input, such as "
            "infinities and numbers above 1e15, or lower the learning rate"
        )


def _weights(norms: Tensor, limit: float | Tensor) -> Tensor:
    return (limit / norms).clamp_(max=1)
