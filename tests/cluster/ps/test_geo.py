"""Geo mode against a simulation by hand of two workers and a server."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.cluster.ps.geo import Drift

DRAW = torch.Generator().manual_seed(4)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=DRAW)


class Server:
    """What a parameter server does in geo mode: it adds, and gives what it has."""

    def __init__(self, dense, rows):
        self.dense, self.rows = dense.clone(), rows.clone()

    def exchange(self, drift):
        (delta,), pushed = drift.taken()
        self.dense += delta
        ids, deltas = pushed[0]
        self.rows.index_add_(0, ids, deltas)
        drift.given([self.dense.clone()], {0: (ids, self.rows[ids])})
        return ids.tolist()


class ByHand:
    """A worker as the formulas have it: it sends its share of the way gone, and takes what others have moved."""

    def __init__(self, value):
        self.value, self.old = value.clone(), value.clone()

    def exchange(self, server, rows=slice(None)):
        delta = (self.value[rows] - self.old[rows]) / 2
        server[rows] += delta
        self.value[rows] += server[rows] - (self.old[rows] + delta)
        self.old[rows] = server[rows]


@pytest.fixture
def start():
    return numbers(3), numbers(6, 2)


def made(dense, rows, workers=2):
    variable, weight = dense.clone(), nn.Parameter(rows.clone())
    return variable, weight, Drift([variable], [weight], workers)


def touch(weight, drift, ids, step):
    """A backward pass that leaves rows, and an optimizer that moves them."""
    values = torch.ones(len(ids), 2).double()
    weight.grad = torch.sparse_coo_tensor(torch.tensor([ids]), values, weight.shape, check_invariants=True)
    drift.note()
    with torch.no_grad():
        weight[sorted(set(ids))] += step


def test_two_workers_over_many_exchanges(start):
    dense, rows = start
    server = Server(dense, rows)
    workers = [made(dense, rows) for _ in range(2)]
    expected, expected_rows = dense.clone(), rows.clone()
    by_hand = [(ByHand(dense), ByHand(rows)) for _ in range(2)]
    touched = [[0, 3], [3, 5, 3], [1], [0, 5], [2, 3]]
    for turn, ids in enumerate(touched):
        for number in (0, 1):
            step, rows_step = numbers(3), float(numbers(1))
            variable, weight, drift = workers[number]
            variable += step
            touch(weight, drift, ids, rows_step)
            own, own_rows = by_hand[number]
            own.value += step
            own_rows.value[sorted(set(ids))] += rows_step
        for number in (turn % 2, 1 - turn % 2):
            assert server.exchange(workers[number][2]) == sorted(set(ids))
            by_hand[number][0].exchange(expected)
            by_hand[number][1].exchange(expected_rows, sorted(set(ids)))
    torch.testing.assert_close(server.dense, expected)
    torch.testing.assert_close(server.rows, expected_rows)
    for (variable, weight, _), (own, own_rows) in zip(workers, by_hand, strict=True):
        torch.testing.assert_close(variable, own.value)
        torch.testing.assert_close(weight.detach(), own_rows.value)


def test_alone_the_server_has_what_the_worker_has(start):
    dense, rows = start
    server = Server(dense, rows)
    variable, weight, drift = made(dense, rows, workers=1)
    for _ in range(3):
        variable += numbers(3)
        touch(weight, drift, [1, 4], 0.5)
        server.exchange(drift)
    torch.testing.assert_close(server.dense, variable)
    torch.testing.assert_close(server.rows, weight.detach())


def test_who_does_not_move_takes_what_the_others_made(start):
    dense, rows = start
    server = Server(dense, rows)
    variable, weight, drift = made(dense, rows)
    server.dense += 1.0
    assert server.exchange(drift) == []
    torch.testing.assert_close(variable, dense + 1.0)
    assert torch.equal(weight.detach(), rows)


def test_rows_are_sent_once_and_only_those_that_were_touched(start):
    _, weight, drift = made(*start)
    touch(weight, drift, [4, 1], 1.0)
    touch(weight, drift, [1, 1], 1.0)
    _, pushed = drift.taken()
    ids, deltas = pushed[0]
    assert ids.tolist() == [1, 4]
    torch.testing.assert_close(deltas, torch.tensor([[1.0, 1.0], [0.5, 0.5]]).double())
    assert drift.taken()[1][0][0].tolist() == []


def test_an_embedding_without_a_gradient_sends_none(start):
    _, weight, drift = made(*start)
    drift.note()
    weight.grad = torch.ones_like(weight)  # of all rows: not one of a lookup
    drift.note()
    assert drift.taken()[1][0][0].tolist() == []


def test_what_was_moved_is_forgotten_when_the_variables_are_the_servers(start):
    variable, weight, drift = made(*start)
    variable += 1.0
    touch(weight, drift, [2], 1.0)
    drift.begin()
    (delta,), pushed = drift.taken()
    assert delta.tolist() == [0, 0, 0]
    assert pushed[0][0].tolist() == []
