"""Losses over sampled classes, against full softmax, against sums written out, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait.cluster.embedding import SparseEmbedding
from plait.errors import ConfigError, DataError
from plait.nn import (
    Candidates,
    all_candidate_sampler,
    compute_accidental_hits,
    fixed_unigram_candidate_sampler,
    log_uniform_candidate_sampler,
    nce_loss,
    sampled_softmax_loss,
    uniform_candidate_sampler,
)

CLASSES, DIM, BATCH = 30, 6, 8


@pytest.fixture
def net():
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (BATCH, 1))
    weights = torch.randn(CLASSES, DIM, dtype=torch.float64, requires_grad=True)
    biases = torch.randn(CLASSES, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(BATCH, DIM, dtype=torch.float64, requires_grad=True)
    return weights, biases, labels, inputs


@pytest.mark.parametrize("sampler", ["all", "uniform"])
def test_with_all_classes_it_is_full_softmax(net, sampler):
    weights, biases, labels, inputs = net
    full = functional.cross_entropy(inputs @ weights.t() + biases, labels.squeeze(1), reduction="none")
    drawn = all_candidate_sampler(labels, 1, CLASSES, True)
    if sampler == "uniform":  # each class once; what it expects is the same of all, and so has no say
        drawn = uniform_candidate_sampler(labels, 1, CLASSES, True, CLASSES)
    sampled = sampled_softmax_loss(weights, biases, labels, inputs, CLASSES, CLASSES, sampled_values=drawn)
    torch.testing.assert_close(sampled, full)
    wanted = torch.autograd.grad(full.sum(), [weights, biases, inputs])
    found = torch.autograd.grad(sampled.sum(), [weights, biases, inputs])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def logits_by_hand(net, drawn, num_true, remove):
    weights, biases, labels, inputs = net
    rows = []
    for row in range(BATCH):
        values = []
        for place, label in enumerate(labels[row]):
            logit = inputs[row] @ weights[label] + biases[label]
            values.append(logit - drawn.true_expected_count[row, place].double().log())
        for place, label in enumerate(drawn.sampled_candidates):
            logit = inputs[row] @ weights[label] + biases[label] - drawn.sampled_expected_count[place].double().log()
            values.append(logit - 1e30 if remove and label in labels[row] else logit)
        rows.append(torch.stack(values))
    targets = torch.zeros(BATCH, num_true + len(drawn.sampled_candidates), dtype=torch.float64)
    targets[:, :num_true] = 1 / num_true
    return torch.stack(rows), targets


@pytest.mark.parametrize("num_true", [1, 3])
@pytest.mark.parametrize("remove", [True, False])
def test_losses_are_what_the_definitions_say(net, num_true, remove):
    labels = torch.stack([torch.randperm(CLASSES)[:num_true] for _ in range(BATCH)])
    net = (*net[:2], labels, net[3])
    drawn = log_uniform_candidate_sampler(labels, num_true, 12, True, CLASSES)
    logits, targets = logits_by_hand(net, drawn, num_true, remove)
    options = {"num_true": num_true, "sampled_values": drawn, "remove_accidental_hits": remove}
    softmax = sampled_softmax_loss(*net, 12, CLASSES, **options)
    torch.testing.assert_close(softmax, -(targets * logits.log_softmax(1)).sum(1))
    nce = nce_loss(*net, 12, CLASSES, **options)
    by_hand = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    torch.testing.assert_close(nce, by_hand)


def test_gradients_are_right(net):
    weights, biases, labels, inputs = net
    drawn = log_uniform_candidate_sampler(labels, 1, 10, True, CLASSES)
    for loss in (sampled_softmax_loss, nce_loss):
        assert torch.autograd.gradcheck(
            lambda w, b, i, loss=loss: loss(w, b, labels, i, 10, CLASSES, sampled_values=drawn),
            (weights, biases, inputs),
        )


def test_a_sparse_table_gets_a_sparse_gradient(net):
    weights, biases, labels, inputs = net
    table, bias = nn.Embedding(CLASSES, DIM, sparse=True).double(), nn.Embedding(CLASSES, 1, sparse=True).double()
    with torch.no_grad():
        table.weight.copy_(weights)
        bias.weight.copy_(biases.unsqueeze(1))
    drawn = uniform_candidate_sampler(labels, 1, 5, True, CLASSES)
    dense = sampled_softmax_loss(weights, biases, labels, inputs, 5, CLASSES, sampled_values=drawn)
    sparse = sampled_softmax_loss(table, bias, labels, inputs, 5, CLASSES, sampled_values=drawn)
    torch.testing.assert_close(sparse, dense)
    (dense + sparse).sum().backward()
    assert table.weight.grad.is_sparse
    touched = set(labels.flatten().tolist()) | set(drawn.sampled_candidates.tolist())
    assert set(table.weight.grad.coalesce().indices()[0].tolist()) == touched
    torch.testing.assert_close(table.weight.grad.to_dense(), weights.grad)
    torch.testing.assert_close(bias.weight.grad.to_dense().squeeze(1), biases.grad)


def test_rows_that_somebody_else_holds_are_looked_up_once(net):
    _, _, labels, inputs = net
    asked = []
    table = SparseEmbedding(DIM, dtype=torch.float64)
    table.register_forward_hook(lambda module, given, found: asked.append(given[0].tolist()))
    loss = sampled_softmax_loss(table, torch.zeros(CLASSES).double(), labels, inputs, 4, CLASSES, seed=1)
    loss.sum().backward()
    assert len(asked) == 1
    assert len(asked[0]) == BATCH + 4


@pytest.mark.parametrize("strategy", ["mod", "div"])
@pytest.mark.parametrize("parts", [1, 4, 7])
def test_a_table_may_lie_in_parts(net, strategy, parts):
    weights, biases, labels, inputs = net
    drawn = uniform_candidate_sampler(labels, 1, 20, True, CLASSES)
    if strategy == "mod":
        pieces = [[table[number::parts] for number in range(parts)] for table in (weights, biases)]
    else:
        pieces = [list(table.tensor_split(parts)) for table in (weights, biases)]
    options = {"sampled_values": drawn, "partition_strategy": strategy}
    split = sampled_softmax_loss(*pieces, labels, inputs, 20, CLASSES, **options)
    torch.testing.assert_close(
        split, sampled_softmax_loss(weights, biases, labels, inputs, 20, CLASSES, sampled_values=drawn)
    )
    torch.testing.assert_close(torch.autograd.grad(split.sum(), weights)[0].shape, weights.shape)


def test_candidates_are_drawn_where_none_are_given(net):
    torch.manual_seed(5)
    first = sampled_softmax_loss(*net, 10, CLASSES)
    torch.manual_seed(5)
    assert torch.equal(first, sampled_softmax_loss(*net, 10, CLASSES))
    assert not torch.equal(first, sampled_softmax_loss(*net, 10, CLASSES))
    assert nce_loss(*net, 10, CLASSES).shape == (BATCH,)


def test_accidental_hits_have_row_place_and_the_least_number():
    hits = compute_accidental_hits(torch.tensor([[5, 2], [9, 3], [7, 7]]), torch.tensor([2, 3, 7, 2]), 2)
    assert hits.indices.tolist() == [0, 0, 1, 2]
    assert hits.ids.tolist() == [0, 3, 1, 2]
    assert hits.weights.tolist() == [torch.finfo(torch.float32).min] * 4


def test_half_precision_stays_finite():
    labels = torch.tensor([[1], [2]])
    drawn = Candidates(torch.tensor([1, 2]), torch.ones(2, 1), torch.ones(2))
    weights, inputs = torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16)
    loss = sampled_softmax_loss(weights, weights[:, 0], labels, inputs, 2, 3, sampled_values=drawn)
    assert loss.tolist() == pytest.approx([math.log(2)] * 2, abs=0.02)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": torch.zeros(BATCH, dtype=torch.int64)}, r"labels.unsqueeze\(1\)"),
        ({"labels": torch.zeros(BATCH, 1)}, "whole numbers"),
        ({"inputs": torch.zeros(3, DIM)}, "8 rows"),
        ({"weights": "x"}, "a tensor, a module"),
        ({"weights": [torch.zeros(CLASSES, DIM).double()], "partition_strategy": "even"}, "'mod' or 'div'"),
    ],
)
def test_what_cannot_work_is_said(net, change, text):
    given = dict(zip(("weights", "biases", "labels", "inputs"), net, strict=True))
    with pytest.raises((ConfigError, DataError), match=text):
        sampled_softmax_loss(**{**given, "num_sampled": 5, "num_classes": CLASSES, **change})


@pytest.mark.parametrize("loss", [sampled_softmax_loss, nce_loss])
def test_an_empty_batch_has_no_losses(loss):
    found = loss(torch.zeros(5, 2), torch.zeros(5), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 2), 2, 5)
    assert found.shape == (0,)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": torch.tensor([[5]])}, "class 5"),
        ({"labels": torch.tensor([[-1]])}, "class -1"),
        ({"inputs": torch.zeros(1, 3)}, r"\[2\] weights, and a row of inputs \[3\]"),
        ({"biases": torch.zeros(3), "labels": torch.tensor([[4]])}, "3 rows, and class 4"),
    ],
)
def test_classes_and_widths_that_are_not_there_are_said(change, text):
    given = {"weights": torch.zeros(5, 2), "biases": torch.zeros(5), "labels": torch.tensor([[1]])}
    with pytest.raises(DataError, match=text):
        sampled_softmax_loss(**{**given, "inputs": torch.zeros(1, 2), "num_sampled": 2, "num_classes": 5, **change})


@pytest.mark.parametrize("loss", [sampled_softmax_loss, nce_loss])
def test_a_label_that_is_never_drawn_is_refused_not_infinite(net, loss):
    weights, biases, labels, inputs = net
    counts = [1.0] * CLASSES
    counts[int(labels[3, 0])] = 0.0
    drawn = fixed_unigram_candidate_sampler(labels, 1, 5, True, CLASSES, unigrams=counts)
    with pytest.raises(DataError, match=rf"class {int(labels[3, 0])} is among the labels, and is never drawn"):
        loss(weights, biases, labels, inputs, 5, CLASSES, sampled_values=drawn)
