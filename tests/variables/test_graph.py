"""Leaves are what a backward pass reaches."""

from __future__ import annotations

import torch

from plait.variables.graph import leaves


def test_all_that_a_backward_pass_reaches_and_nothing_else():
    a, b, c, fixed = (torch.ones(2, requires_grad=number < 3) for number in range(4))
    loss = (a * b.detach() + a * fixed).sum() + (b * 2).sum()
    loss.backward(retain_graph=True)
    assert leaves([loss]) == {one for one in (a, b, c) if one.grad is not None} == {a, b}


def test_the_walk_ends_where_it_is_told_to():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    inner = a * 2
    assert leaves([(inner + b).sum()], {inner.grad_fn}) == {b}


def test_a_tensor_that_is_made_of_nothing():
    assert leaves([torch.ones(2), torch.ones(2, requires_grad=True)]) == set()
