"""Weights from norms, and a limit that follows them."""

from __future__ import annotations

import math

import pytest
import torch

from plait.errors import ConfigError, DataError
from plait.privacy.clipping import Adaptive, flat, per_layer

SQUARES = {"a": torch.tensor([9.0, 0.0, 0.09, 1.0]), "b": torch.tensor([16.0, 0.0, 0.16, 4.0])}


def test_flat_bounds_the_norm_over_all_layers():
    weights, cut = flat(SQUARES, 1.0)
    torch.testing.assert_close(weights, torch.tensor([0.2, 1.0, 1.0, 1 / math.sqrt(5)]))
    assert cut.tolist() == [True, False, False, True]


def test_each_layer_has_its_share():
    weights, cut = per_layer(SQUARES, 2.0)
    torch.testing.assert_close(weights["a"], torch.tensor([math.sqrt(2) / 3, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(weights["b"], torch.tensor([math.sqrt(2) / 4, 1.0, 1.0, math.sqrt(2) / 2]))
    assert cut.tolist() == [True, False, False, True]
    total = sum(weights[name].square() * SQUARES[name] for name in SQUARES)
    assert float(total.max()) <= 4.0 + 1e-5


@pytest.mark.parametrize("clip", [flat, per_layer])
def test_nothing_to_clip(clip):
    weights, cut = clip({}, 1.0)
    assert len(weights) == 0
    assert cut.shape == (0,)


@pytest.mark.parametrize("clip", [flat, per_layer])
@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_refused(clip, wrong):
    with pytest.raises(DataError, match="gradient of micro-batch 2 is not finite"):
        clip({**SQUARES, "b": torch.tensor([1.0, 2.0, wrong, 4.0])}, 1.0)


def test_the_limit_finds_the_quantile():
    random = torch.Generator().manual_seed(0)
    adaptive = Adaptive(100.0, 1.0, 512, quantile=0.7)
    for _ in range(300):
        norms = torch.rand(512, generator=random) * 10
        adaptive.update(adaptive.votes(norms > adaptive.limit), float(torch.randn((), generator=random)))
    assert adaptive.limit == pytest.approx(7.0, rel=0.1)


def test_votes_do_not_tell_how_many_voted():
    assert float(Adaptive.votes(torch.tensor([True, False, True]))) == -0.5
    assert float(Adaptive.votes(torch.zeros(0, dtype=torch.bool))) == 0.0
    assert float(Adaptive.votes(torch.tensor([False]))) == 0.5  # one micro-batch moves the sum by a half


@pytest.mark.parametrize(("noise", "microbatches"), [(1.0, 256), (0.5, 8), (4.0, 1)])
def test_votes_and_gradients_together_cost_what_was_asked_for(noise, microbatches):
    adaptive = Adaptive(1.0, noise, microbatches)
    assert adaptive.noise_multiplier > noise
    together = (adaptive.noise_multiplier**-2 + (2 * adaptive.vote_noise) ** -2) ** -0.5
    assert together == pytest.approx(noise)


def test_without_noise_votes_have_none_either():
    adaptive = Adaptive(1.0, 0.0, 4)
    assert (adaptive.noise_multiplier, adaptive.vote_noise) == (0.0, 0.0)
    adaptive.update(-2.0, 1e9)
    assert adaptive.limit == pytest.approx(math.exp(0.1))


def test_the_limit_is_saved():
    one, other = Adaptive(3.0, 1.0, 4), Adaptive(1.0, 1.0, 4)
    other.load_state_dict(one.state_dict())
    assert other.limit == 3.0


@pytest.mark.parametrize("wrong", [{"limit": 0.0}, {"microbatches": 0}, {"quantile": 1.0}, {"rate": 0.0}])
def test_wrong_numbers_are_refused(wrong):
    given = {"limit": 1.0, "noise_multiplier": 1.0, "microbatches": 4, **wrong}
    with pytest.raises(ConfigError, match="adaptive clipping"):
        Adaptive(**given)
