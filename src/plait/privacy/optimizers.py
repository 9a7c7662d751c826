"""Private optimizers: what is done to gradients before an optimizer of any kind sees them."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from plait.errors import ConfigError
from plait.optim.factories import get_optimizer_fn
from plait.optim.schedules import Schedule
from plait.privacy.noise import Noise, SecureNoise

__all__ = [
    "CLIPPINGS",
    "DPSGD",
    "DPAdagrad",
    "DPAdam",
    "DPFtrl",
    "DPMomentum",
    "DPRMSprop",
    "Private",
    "PrivateFactory",
    "make_private",
    "private_of",
]

CLIPPINGS = ("flat", "per-layer", "adaptive")
"""One limit for all of a micro-batch's gradient; one for each layer; one that follows the norms."""
_PLACE = "privacy"


@dataclass(frozen=True, kw_only=True)
class Private:
    """How the gradients of one optimizer are clipped and noised, and what is promised of it."""

    l2_norm_clip: float
    """The most that the gradient of one micro-batch may count; the first one, if clipping is adaptive."""
    noise_multiplier: float
    """The standard deviation of the noise, in limits."""
    num_microbatches: int | None = None
    """Groups of rows whose gradients are clipped; None: every row is one."""
    clipping: str = "flat"
    secure_noise: bool = False
    """Draws that nobody can repeat, so that a resumed run has others."""
    delta: float = 1e-5
    epsilon_budget: float | None = None
    """Training stops before this epsilon is passed."""
    accountant: str = "pld"
    seed: int | None = None
    """Makes the noise the same in every run. For tests: who knows it can take the noise away."""
    samples: int | None = None
    """Rows of the training data, where the input cannot say."""

    def __post_init__(self) -> None:
        limit, multiplier = self.l2_norm_clip, self.noise_multiplier
        if not _is_number(limit) or not 0 < limit < math.inf:
            raise ConfigError(
                f"l2_norm_clip={limit!r}: write a number above 0, such as 1.0; noise without clipping bounds nothing"
            )
        if not _is_number(multiplier) or not 0 <= multiplier < math.inf:
            raise ConfigError(
                f"noise_multiplier={multiplier!r}: write a number from 0 up, such as 1.0; `plait privacy plan` gives "
                "the one for an epsilon"
            )
        if self.clipping not in CLIPPINGS:
            raise ConfigError(f"clipping={self.clipping!r}: write one of {', '.join(map(repr, CLIPPINGS))}")
        for name in ("num_microbatches", "samples"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: write a whole number from 1 up, or leave it out")
        if self.secure_noise and self.seed is not None:
            raise ConfigError(
                f"secure_noise=True with seed={self.seed}: secure noise has no seed; leave one of them out"
            )

    def make_noise(self) -> Noise | SecureNoise:
        return SecureNoise() if self.secure_noise else Noise(self.seed)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def private_of(optimizer: Optimizer) -> Private | None:
    """How this optimizer's gradients are kept private; it may stand inside others. None: they are not."""
    found: Any = optimizer
    while found is not None:
        private = getattr(found, _PLACE, None)
        if isinstance(private, Private):
            return private
        found = getattr(found, "inner", None)
    return None


@dataclass(frozen=True, eq=False, repr=False)
class PrivateFactory:
    """Makes an optimizer with the inner factory, and has its gradients kept private."""

    inner: Callable[[list[Tensor]], Optimizer]
    private: Private

    @property
    def scope(self) -> str | None:
        """The inner factory's."""
        return getattr(self.inner, "scope", None)

    def __call__(self, params: Iterable[Tensor]) -> Optimizer:
        made = self.inner(list(params))
        if not isinstance(made, Optimizer):
            raise ConfigError(f"make_private: the factory {self.inner!r:.80} returned {type(made).__name__}")
        if private_of(made) is not None:
            raise ConfigError("make_private around a private optimizer: write it once")
        setattr(made, _PLACE, self.private)
        return made

    def __repr__(self) -> str:
        clip, noise = self.private.l2_norm_clip, self.private.noise_multiplier
        return f"private({self.inner!r}, l2_norm_clip={clip}, noise_multiplier={noise})"


def make_private(
    factory: Callable[[list[Tensor]], Optimizer],
    l2_norm_clip: float,
    noise_multiplier: float,
    num_microbatches: int | None = None,
    clipping: str = "flat",
    secure_noise: bool = False,
    *,
    delta: float = 1e-5,
    epsilon_budget: float | None = None,
    accountant: str = "pld",
    seed: int | None = None,
    samples: int | None = None,
) -> PrivateFactory:
    """A factory of private optimizers, around the factory of any optimizer.

    With it, the loss_fn returns one loss for each row. Each of `num_microbatches` groups of rows has its gradient
    clipped to `l2_norm_clip`; the sum gets Gaussian noise of `l2_norm_clip * noise_multiplier`, once, and is divided
    by the number of groups.

    >>> import functools, torch
    >>> make_private(functools.partial(torch.optim.SGD, lr=0.1), l2_norm_clip=1.0, noise_multiplier=1.1).private.delta
    1e-05
    """
    if isinstance(factory, Optimizer) or not callable(factory):
        raise ConfigError(
            f"make_private got a {type(factory).__name__}: give a factory, such as functools.partial(torch.optim.SGD, "
            "lr=0.1) or efl.privacy.DPSGD(...)"
        )
    if isinstance(factory, PrivateFactory):
        raise ConfigError("make_private around a private optimizer: write it once")
    private = Private(
        l2_norm_clip=l2_norm_clip,
        noise_multiplier=noise_multiplier,
        num_microbatches=num_microbatches,
        clipping=clipping,
        secure_noise=secure_noise,
        delta=delta,
        epsilon_budget=epsilon_budget,
        accountant=accountant,
        seed=seed,
        samples=samples,
    )
    return PrivateFactory(factory, private)


Maker = Callable[..., PrivateFactory]
_OURS = tuple(inspect.signature(make_private).parameters)[4:]


def _named(name: str, shown: str) -> Maker:
    def make(
        learning_rate: float | Schedule,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        **options: Any,
    ) -> PrivateFactory:
        ours = {key: options.pop(key) for key in _OURS if key in options}
        inner = get_optimizer_fn(name, learning_rate, options.pop("scope", None), **options)()
        return make_private(inner, l2_norm_clip, noise_multiplier, num_microbatches, **ours)

    make.__name__ = make.__qualname__ = shown
    make.__doc__ = (
        f"The optimizer {name!r} of `mox.get_optimizer_fn`, private. `options` are that optimizer's, its `scope`, and "
        f"{', '.join(_OURS)} of `make_private`."
    )
    return make


DPAdagrad = _named("adagrad", "DPAdagrad")
DPAdam = _named("adam", "DPAdam")
DPFtrl = _named("ftrl", "DPFtrl")
DPMomentum = _named("momentum", "DPMomentum")
DPRMSprop = _named("rmsprop", "DPRMSprop")
DPSGD = _named("sgd", "DPSGD")
