"""Labels in returned gradients: what attacks find, what defences leave of it, and what they cost."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait.errors import ConfigError, DataError
from plait.privacy.labels import direction_attack, marvell, max_norm, norm_attack


def made_rows(count=4000, size=8, share=0.1, seed=0):
    """Rows as a binary loss gives them: one direction, its sign by the label, long where the label is rare."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) < share).float()
    direction = functional.normalize(torch.randn(size, generator=generator), dim=0)
    length = torch.where(labels == 1, -0.9, 0.1) * (0.5 + torch.rand(count, generator=generator))
    return length[:, None] * direction + 0.01 * torch.randn(count, size, generator=generator), labels


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def test_both_attacks_find_labels_in_plain_rows():
    rows, labels = made_rows()
    assert norm_attack(rows, labels) > 0.99
    assert direction_attack(rows, labels) > 0.99


def test_an_attack_is_as_good_whichever_way_round():
    rows, labels = made_rows()
    assert norm_attack(rows, 1 - labels) == norm_attack(rows, labels)


def test_the_norm_attack_is_an_auc_with_ties():
    rows = torch.tensor([[1.0], [-1.0], [2.0], [3.0]])
    assert norm_attack(rows, torch.tensor([0, 1, 0, 1])) == pytest.approx(2.5 / 4)


def test_attacks_without_both_classes_are_chance():
    rows = torch.randn(4, 2, generator=source())
    assert norm_attack(rows, torch.ones(4)) == 0.5
    assert direction_attack(rows, torch.zeros(4)) == 0.5


def test_max_norm_hides_norms_and_keeps_the_mean():
    rows, labels = made_rows()
    hidden = max_norm(rows, source())
    assert norm_attack(hidden, labels) < 0.6
    draws = torch.stack([max_norm(rows[:50], source(seed)) for seed in range(4000)])
    largest = rows[:50].norm(dim=1).max()
    assert torch.allclose(draws.mean(0), rows[:50], atol=float(5 * largest / 4000**0.5))
    assert torch.allclose(draws.square().sum(2).mean(0).sqrt(), largest.expand(50), rtol=0.1)


def test_max_norm_lies_along_the_rows():
    rows, _ = made_rows(count=64)
    cosine = functional.cosine_similarity(max_norm(rows, source()), rows)
    assert torch.allclose(cosine.abs(), torch.ones(64), atol=1e-5)


def test_max_norm_leaves_rows_of_zeros():
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert torch.equal(max_norm(rows, source()), rows)
    assert torch.equal(max_norm(torch.zeros(3, 2), source()), torch.zeros(3, 2))
    assert max_norm(torch.zeros(0, 2), source()).shape == (0, 2)


def test_marvell_hides_norms_and_directions():
    rows, labels = made_rows()
    hidden = marvell(rows, labels, 0.04, source())
    assert norm_attack(hidden, labels) < 0.6
    assert direction_attack(hidden, labels) < 0.6


def test_marvell_keeps_the_mean():
    rows, labels = made_rows(count=64)
    draws = torch.stack([marvell(rows, labels, 0.1, source(seed)) for seed in range(500)])
    deviation = (draws - rows).std()
    assert float((draws.mean(0) - rows).abs().max()) < 5 * float(deviation) / 500**0.5 * 2


@pytest.mark.parametrize("budget", [0.1, 1.0])
def test_marvell_spends_its_budget(budget):
    """Noised rows of two Gaussian classes are as far apart as was allowed, and not much nearer."""
    generator, size = source(1), 4
    labels = (torch.rand(200_000, generator=generator) < 0.3).double()
    spread = torch.where(labels == 1, 1.0, 0.3)[:, None]
    rows = torch.randn(len(labels), size, generator=generator, dtype=torch.float64) * spread
    rows[:, 0] += 2 * labels
    hidden = marvell(rows, labels, budget, generator)
    parts = [hidden[labels == one] for one in (1, 0)]
    (mean_one, mean_zero), (one, zero) = [part.mean(0) for part in parts], [part.T.cov() for part in parts]
    apart = mean_one - mean_zero
    traces = torch.trace(zero.inverse() @ one) + torch.trace(one.inverse() @ zero)
    found = 0.5 * (traces + apart @ (one.inverse() + zero.inverse()) @ apart) - size
    assert 0.5 * budget < float(found) < 1.1 * budget


@pytest.mark.parametrize("hide", [max_norm, functools.partial(marvell, labels=torch.arange(1001) % 20 == 0)])
def test_one_row_changes_what_becomes_of_all(hide):
    """Clipping and noise of 1 for each row afterwards would promise 1 in these units, and do not keep it."""

    def power(first):
        rows = torch.randn(1001, 2, generator=source()) * 1e-3
        rows[0] = torch.tensor(first)
        hidden = hide(rows, generator=source(1))
        clipped = hidden / hidden.norm(dim=1, keepdim=True).clamp(min=1)
        return float((clipped + torch.randn(clipped.shape, generator=source(2)))[1:].square().sum())

    deviation = (2 * 2 * 1000) ** 0.5
    assert (power([50.0, 0.0]) - power([0.0, 0.0])) / deviation > 5


def test_marvell_with_one_class_is_max_norm():
    rows, _ = made_rows(count=32)
    assert torch.equal(marvell(rows, torch.zeros(32), 0.1, source()), max_norm(rows, source()))


def test_rows_may_have_any_shape_and_dtype():
    rows, labels = made_rows(count=32)
    cubes = rows.double().reshape(32, 2, 4)
    for hidden in (max_norm(cubes, source()), marvell(cubes, labels, 0.1, source())):
        assert hidden.shape == cubes.shape
        assert hidden.dtype == torch.float64


def test_what_cannot_be_hidden_is_refused():
    rows, labels = made_rows(count=8)
    with pytest.raises(ConfigError, match="budget=0"):
        marvell(rows, labels, 0)
    with pytest.raises(DataError, match="7 labels for 8 rows"):
        marvell(rows, labels[:7])
    with pytest.raises(DataError, match="0 or 1"):
        norm_attack(rows, torch.arange(8))
    with pytest.raises(DataError, match="torch.int64 of shape"):
        max_norm(torch.arange(3))


def rare_task(count, generator):
    """A table whose rare class depends on two parties' columns."""
    x = torch.randn(count, 12, generator=generator)
    score = x[:, :6].sum(1) + x[:, 6:].sum(1) + 1.5 * torch.randn(count, generator=generator)
    return x, (score > 5).float()


def auc_and_attack(protect, seed):
    """Train a model that is cut in the middle: its AUC on other rows, and what norms tell on the way."""
    generator = source(seed)
    x, y = rare_task(6000, generator)
    test_x, test_y = rare_task(4000, generator)
    torch.manual_seed(seed)
    bottom, own = (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
    top = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    adam = torch.optim.Adam([*bottom.parameters(), *own.parameters(), *top.parameters()], lr=3e-3)
    attacks = []
    for step in range(120):
        rows = slice(step * 500 % 6000, step * 500 % 6000 + 500)
        sent = bottom(x[rows, 6:])
        received = sent.detach().requires_grad_()
        logit = top(torch.cat([own(x[rows, :6]), received], 1)).squeeze(1)
        adam.zero_grad()
        functional.binary_cross_entropy_with_logits(logit, y[rows]).backward()
        returned = protect(received.grad, y[rows], generator)
        attacks.append(norm_attack(returned, y[rows]))
        sent.backward(returned)
        adam.step()
    with torch.no_grad():
        scores = top(torch.cat([own(test_x[:, :6]), bottom(test_x[:, 6:])], 1))
    return norm_attack(scores.sigmoid(), test_y), sum(attacks) / len(attacks)


DEFENCES = {
    "max_norm": lambda rows, labels, generator: max_norm(rows, generator),
    "marvell": lambda rows, labels, generator: marvell(rows, labels, 0.4, generator),
}


@pytest.mark.parametrize("defence", DEFENCES)
def test_the_attack_falls_to_near_chance_at_little_cost(defence):
    plain = [auc_and_attack(lambda rows, labels, generator: rows, seed) for seed in range(2)]
    hidden = [auc_and_attack(DEFENCES[defence], seed) for seed in range(2)]
    mean = torch.tensor([plain, hidden]).mean(1)
    assert mean[0, 1] > 0.9
    assert mean[1, 1] < 0.6
    assert mean[0, 0] - mean[1, 0] < 0.015
