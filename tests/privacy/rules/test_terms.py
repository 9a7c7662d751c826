"""Norms, sums and gradients of each form of term agree."""

from __future__ import annotations

import pytest
import torch

from plait.privacy.rules.terms import Dense, Outer, ghost_pays, joined, wide


def outer(positions, seed=0, inputs=3, outputs=4):
    random = torch.Generator().manual_seed(seed)
    sizes = {"dtype": torch.float64, "generator": random}
    return Outer(torch.randn(5, positions, inputs, **sizes), torch.randn(5, positions, outputs, **sizes))


@pytest.mark.parametrize("positions", [1, 2, 100])
@pytest.mark.parametrize("sizes", [(3, 4), (9, 2)])
def test_outer_products(positions, sizes):
    term, weights = outer(positions, 0, *sizes), torch.rand(5, dtype=torch.float64)
    expected = torch.einsum("mti,mto->moi", term.inputs, term.outputs)
    squares, before = term.squares(), term.weighted(weights)
    torch.testing.assert_close(squares, expected.square().sum((1, 2)))
    torch.testing.assert_close(before, torch.tensordot(weights, expected, 1))
    torch.testing.assert_close(term.dense(), expected)
    torch.testing.assert_close(term.weighted(weights), before)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4, 1e6])
def test_norms_without_gradients_are_never_too_small(offset):
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 8, 64, generator=random) + offset
    outputs = torch.randn(16, 8, 64, generator=random)
    outputs -= outputs.mean(1, keepdim=True)  # what is large in the inputs is not in the gradient
    term = Outer(inputs, outputs)
    assert term.path == "ghost"
    true = torch.bmm(outputs.double().transpose(1, 2), inputs.double()).square().sum((1, 2))
    ratio = term.squares() / true
    assert float(ratio.min()) >= 1 - 1e-6
    if offset <= 1e2:
        assert float(ratio.max()) <= 1 + 3e-2


def test_norms_are_larger_where_products_are_rougher():
    term = outer(4)
    term = Outer(term.inputs.float(), term.outputs.float())
    exact = term.squares()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert bool((term.squares() > exact).all())
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_position_needs_no_dimension():
    long = outer(1)
    short, weights = Outer(long.inputs.squeeze(1), long.outputs.squeeze(1)), torch.rand(5, dtype=torch.float64)
    assert short.path == "ghost"
    torch.testing.assert_close(short.squares(), long.squares())
    torch.testing.assert_close(short.weighted(weights), long.weighted(weights))
    torch.testing.assert_close(joined([short, long]).dense(), 2 * long.dense())


def test_terms_that_are_joined_are_those_of_the_sum():
    both = outer(2), outer(3, 1)
    expected = both[0].dense() + both[1].dense()
    together = joined(list(both))
    assert isinstance(together, Outer)
    torch.testing.assert_close(together.dense(), expected)
    mixed = joined([outer(2), Dense(outer(3, 1).dense())])
    torch.testing.assert_close(mixed.squares(), expected.square().sum((1, 2)))
    assert joined([both[0]]) is both[0]


def test_what_pays():
    assert ghost_pays(32, 784, 256)
    assert not ghost_pays(196, 64, 16)
    assert not ghost_pays(4096, 512, 512)
    assert ghost_pays(25, 256, 32, unfolding=20)
    assert not ghost_pays(25, 256, 32, unfolding=60)


def test_half_precision_is_widened():
    assert wide(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32
    kept = torch.ones(2, dtype=torch.float64)
    assert wide(kept) is kept
