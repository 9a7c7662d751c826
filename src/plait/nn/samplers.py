"""Samplers of candidates: a few classes drawn for a whole batch, and how often each was to be expected.

Draws come from the global random state, which is part of every checkpoint: a run that is resumed draws what it would
have drawn. They are made on the CPU, so that every device sees the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import ConfigError, DataError
from plait.rng import derive_seed
from plait.variables.store import may_look_at

__all__ = [
    "Candidates",
    "Seed",
    "all_candidate_sampler",
    "candidates",
    "check_classes",
    "check_sampler",
    "generator_of",
    "log_uniform_candidate_sampler",
    "uniform_candidate_sampler",
]

MAX_TRIES = 2**31 - 1
"""A sampler that has drawn so often, and still lacks a class that it has not seen, is asked for too many."""
_MAX_CHUNK = 1 << 20

Seed = int | torch.Generator | None
"""None: the global random state. A number: draws of its own, which follow that state. A generator: that one."""


class Candidates(NamedTuple):
    """What a sampler gives, as TensorFlow's samplers do."""

    sampled_candidates: Tensor
    """[num_sampled] int64: the classes that were drawn."""
    true_expected_count: Tensor
    """[batch, num_true]: how often each true class was to be expected among them."""
    sampled_expected_count: Tensor
    """[num_sampled]: the same for those that were drawn."""


def uniform_candidate_sampler(
    true_classes: Tensor,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: Seed = None,
    name: str | None = None,
) -> Candidates:
    """Draw classes from 0 to `range_max` - 1, each as likely as any other.

    Args:
        true_classes: [batch, num_true] whole numbers.
        num_true: how many true classes a row has.
        num_sampled: how many classes to draw.
        unique: whether no class may be drawn twice; one that was is drawn anew, and the expected counts tell of it.
        range_max: how many classes there are.
        seed: None for the global random state; a number for draws of one's own that follow it; or a generator.
        name: has no meaning here.

    """
    del name
    check_sampler(true_classes, num_true, num_sampled, unique, range_max)
    generator = generator_of(seed)

    def draw(count: int) -> Tensor:
        return torch.randint(range_max, (count,), generator=generator)

    def chance(classes: Tensor) -> Tensor:
        return torch.full(classes.shape, 1.0 / range_max, dtype=torch.float64, device=classes.device)

    return candidates(true_classes, num_sampled, unique, draw, chance)


def log_uniform_candidate_sampler(
    true_classes: Tensor,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: Seed = None,
    name: str | None = None,
) -> Candidates:
    """Draw class c with the chance log((c + 2) / (c + 1)) / log(range_max + 1): for classes sorted by frequency.

    The arguments are those of `uniform_candidate_sampler`.
    """
    del name
    check_sampler(true_classes, num_true, num_sampled, unique, range_max)
    generator, log_range = generator_of(seed), math.log1p(range_max)

    def draw(count: int) -> Tensor:
        points = torch.rand(count, generator=generator, dtype=torch.float64)
        # a point that rounds up to the very end of the range belongs to the last class
        return (points * log_range).exp().long().sub(1).clamp(0, range_max - 1)

    def chance(classes: Tensor) -> Tensor:
        return classes.double().add(1).reciprocal().log1p() / log_range  # log((c + 2) / (c + 1)), rounded once

    return candidates(true_classes, num_sampled, unique, draw, chance)


def all_candidate_sampler(
    true_classes: Tensor,
    num_true: int,
    num_sampled: int,
    unique: bool,
    seed: Seed = None,
    name: str | None = None,
) -> Candidates:
    """Give the classes 0 to `num_sampled` - 1, every one of them once: to test a loss, or to do without sampling."""
    del seed, name
    check_sampler(true_classes, num_true, num_sampled, unique, num_sampled)
    device = true_classes.device
    sampled = torch.arange(num_sampled, device=device)
    return Candidates(sampled, torch.ones(true_classes.shape, device=device), torch.ones(num_sampled, device=device))


def check_sampler(true_classes: Tensor, num_true: int, num_sampled: int, unique: bool, range_max: int) -> None:
    """Raise if a sampler cannot be asked for this."""
    for what, value in (("num_true", num_true), ("num_sampled", num_sampled), ("range_max", range_max)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{what}={value!r}: write a whole number from 1 on")
    if unique and num_sampled > range_max:
        raise ConfigError(
            f"num_sampled={num_sampled} of range_max={range_max} classes with unique=True: there are not so many; "
            "lower num_sampled, or write unique=False"
        )
    if not isinstance(true_classes, Tensor) or true_classes.is_floating_point():
        kind = true_classes.dtype if isinstance(true_classes, Tensor) else type(true_classes).__name__
        raise DataError(f"true_classes are {kind}: give a tensor of whole numbers, such as labels.long()")
    if true_classes.dim() != 2 or true_classes.shape[1] != num_true:
        raise DataError(
            f"true_classes have shape {list(true_classes.shape)}: give [batch, num_true] with num_true={num_true}, "
            "such as labels.unsqueeze(1)"
        )
    check_classes("true_classes", true_classes, range_max)


def check_classes(what: str, classes: Tensor, range_max: int) -> None:
    """Raise if there is no such class."""
    if not classes.numel() or not may_look_at(classes):
        return
    low, high = (int(end) for end in classes.aminmax())
    if low < 0 or high >= range_max:
        raise DataError(f"{what} have class {low if low < 0 else high}: classes go from 0 to {range_max - 1}")


def generator_of(seed: Seed) -> torch.Generator | None:
    """The generator that draws; None is torch's global one.

    A number alone would draw the same at every step: it is mixed with a draw from the global state.
    """
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed={seed!r}: write a whole number, a torch.Generator, or None")
    step = int(torch.randint(2**62, ()))
    return torch.Generator().manual_seed(derive_seed(seed, step))


def candidates(
    true_classes: Tensor,
    num_sampled: int,
    unique: bool,
    draw: Callable[[int], Tensor],
    chance: Callable[[Tensor], Tensor],
) -> Candidates:
    """Draw, and work out the expected counts from each class's chance in one draw."""
    sampled, tries = _distinct(draw, num_sampled) if unique else (draw(num_sampled), num_sampled)
    sampled = sampled.to(true_classes.device)
    return Candidates(sampled, *(_expected(chance(classes), num_sampled, tries) for classes in (true_classes, sampled)))


def _expected(chances: Tensor, num_sampled: int, tries: int) -> Tensor:
    """Without a draw that had to be repeated, so many times the chance; else the chance to be among that many tries."""
    if tries == num_sampled:
        return (chances * num_sampled).float()
    return -torch.expm1(tries * torch.log1p(-chances)).float()


def _distinct(draw: Callable[[int], Tensor], wanted: int) -> tuple[Tensor, int]:
    """Draw until `wanted` different classes were seen: these in the order of their draws, and how many draws it took.

    Drawn in pieces that grow; what was drawn beyond the last class is as if it had not been.
    """
    found = torch.empty(0, dtype=torch.int64)
    tries, chunk = 0, wanted
    while tries < MAX_TRIES:
        drawn = draw(chunk).cpu()
        both = torch.cat([found, drawn])
        _, inverse = torch.unique(both, return_inverse=True)
        first = torch.full((int(inverse.max()) + 1,), len(both)).scatter_reduce(
            0, inverse, torch.arange(len(both)), "amin"
        )
        places = first.sort().values
        if len(places) >= wanted:
            return both[places[:wanted]], tries + int(places[wanted - 1]) - len(found) + 1
        found = both[places]
        tries += chunk
        chunk = min(2 * chunk, _MAX_CHUNK)
    raise ConfigError(
        f"num_sampled={wanted} different classes were not found in {tries} draws: lower num_sampled, or write "
        "unique=False"
    )
