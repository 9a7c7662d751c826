"""Tensors that travel inside a step: forward, backward, and what no loss depends on."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

from plait import efl
from plait.data import Sample
from plait.errors import FederalError, FunctionError
from plait.federal.exchange import Exchange

from .channels import pair, together
from .pair import assert_same, both, dense, follower, head, leader, whole

CPU = torch.device("cpu")
TRAIN, EVAL = efl.TaskScope(efl.MODE.TRAIN), efl.TaskScope(efl.MODE.EVAL)
ROWS = 4


class Side:
    """One party: its exchange, and its function around it."""

    def __init__(self, exchange, function):
        self.exchange, self.scope = exchange, TRAIN
        self._loss = exchange.around_loss(lambda model, sample: function(self), lambda: self.scope)
        self._eval = exchange.around_eval(lambda model, sample: function(self), lambda: self.scope)
        self.rows = ROWS

    def send(self, name, tensor, gradient=True):
        return self.exchange.send(name, tensor, gradient, None, None)

    def recv(self, name, gradient=True, dtype=torch.float32):
        return self.exchange.recv(name, dtype, gradient, None, None, None, CPU)

    def step(self, turn, *, scope=TRAIN, backward=True):
        self.exchange.turn, self.scope = turn, scope
        function = self._loss if scope is TRAIN else self._eval
        found = function(None, Sample.of({"x": torch.zeros(self.rows, 1)}))
        if backward and scope is TRAIN:
            found.backward()
        return found

    def build(self, *scopes):
        for scope in scopes:
            self.step(0, scope=scope, backward=False)
        self.exchange.built()


@contextlib.contextmanager
def sides(lead, follow, *, scopes=(TRAIN,), precision=None):
    with pair() as (one, other, _):
        made = [
            Side(Exchange(role, peer, precision), function)
            for role, peer, function in [("leader", "follower", lead), ("follower", "leader", follow)]
        ]
        for side, channel in zip(made, (one, other), strict=True):
            side.exchange.use(channel)
        together(lambda: made[0].build(*scopes), lambda: made[1].build(*scopes))
        yield made


def steps(made, turn=1, **settings):
    return together(lambda: made[0].step(turn, **settings), lambda: made[1].step(turn, **settings))


def parameter(*values):
    return nn.Parameter(torch.tensor(values))


def test_a_gradient_goes_back_and_the_loss_stays_as_it_is():
    weight, scale = parameter(2.0, 3.0), parameter(5.0)

    def lead(side):
        return (side.recv("a") * scale).sum()

    def follow(side):
        return side.send("a", weight.expand(side.rows, 2) * 1.0)

    with sides(lead, follow) as made:
        loss, root = steps(made)
        assert loss.item() == ROWS * 25.0
        assert root.item() == 0.0
        assert weight.grad.tolist() == [20.0, 20.0]
        assert scale.grad.tolist() == [ROWS * 5.0]
        made[0].rows = made[1].rows = 2
        weight.grad = None
        assert steps(made, 2)[0].item() == 2 * 25.0
        assert weight.grad.tolist() == [10.0, 10.0]


def test_what_was_received_last_and_the_last_gradient_are_kept():
    weight = parameter(2.0)
    with sides(lambda side: side.recv("a").sum() * 3, lambda side: side.send("a", weight.expand(side.rows, 1))) as made:
        steps(made)
        assert made[0].exchange.latest["TRAIN:", "recv", "a"].tolist() == [[2.0]] * ROWS
        assert made[1].exchange.latest["TRAIN:", "grad", "a"].tolist() == [[3.0]] * ROWS


def test_a_loss_of_ones_own_is_added():
    weight = parameter(2.0)

    def follow(side):
        sent = side.send("a", weight.expand(side.rows, 1))
        return sent.sum() * 10

    with sides(lambda side: side.recv("a").sum(), follow) as made:
        _, loss = steps(made)
        assert loss.item() == ROWS * 20.0
        assert weight.grad.tolist() == [ROWS * 11.0]
        assert made[1].exchange.lossless == set()


def test_who_has_no_loss_is_known():
    weight = parameter(2.0)

    def follow(side):
        side.send("a", weight.expand(side.rows, 1))

    with sides(lambda side: side.recv("a").sum(), follow) as made:
        assert made[1].exchange.lossless == {"TRAIN:"}
        assert made[0].exchange.lossless == set()


def test_what_no_loss_depends_on_has_a_gradient_of_zero():
    weight, spare = parameter(2.0), parameter(1.0)

    def lead(side):
        side.recv("spare")
        return side.recv("a").sum()

    def follow(side):
        side.send("spare", spare.expand(side.rows, 1))
        side.send("a", weight.expand(side.rows, 1))

    with sides(lead, follow) as made:
        steps(made)
        assert spare.grad.tolist() == [0.0]
        assert weight.grad.tolist() == [ROWS]
        assert made[1].exchange.latest["TRAIN:", "grad", "spare"] is None


def test_a_chain_in_which_a_loss_does_not_depend_on_what_came_back_in_some_steps():
    """Each waits for the other's gradient; who has none to give says so before he waits."""
    weight, own = parameter(2.0), parameter(1.0)
    used = [True]

    def lead(side):
        left = side.send("left", own.expand(side.rows, 1))
        back = side.recv("back")
        return (left * 2 + back).sum() if used[-1] else left.sum()

    def follow(side):
        left = side.recv("left")
        side.send("back", left * weight)

    with sides(lead, follow) as made:
        steps(made, 1)
        assert own.grad.tolist() == [ROWS * 4.0]
        assert weight.grad.tolist() == [ROWS * 1.0]
        used.append(False)
        own.grad = weight.grad = None
        steps(made, 2)
        assert own.grad.tolist() == [ROWS * 1.0]
        assert weight.grad.tolist() == [0.0]


def test_that_chain_is_the_unsplit_model():
    calls = {"lead": 0, "whole": 0}

    def uses(who):
        calls[who] += 1
        return calls[who] % 3 != 2

    def lead(model, sample):
        left = model.send("left", dense("left", 4, 5, sample.x).relu(), require_grad=True)
        back = model.recv("back", require_grad=True)
        return head(left, back if uses("lead") else left, sample.y)

    def follow(model, sample):
        left = model.recv("left", require_grad=True)
        model.send("back", dense("middle", 9, 5, torch.cat([sample.x, left], 1)).tanh(), require_grad=True)

    def unsplit(model, sample):
        left = dense("left", 4, 5, sample.x).relu()
        back = dense("middle", 9, 5, torch.cat([sample.x2, left], 1)).tanh()
        return head(left, back if uses("whole") else left, sample.y)

    procedure = efl.procedure_fn.train(10)
    parts = both(leader(procedure, lead), follower(procedure, follow))
    assert_same(whole(procedure, unsplit), *parts)


def test_evaluations_ask_for_no_gradients():
    weight = parameter(2.0)

    def lead(side):
        found = side.recv("a").sum()
        assert found.requires_grad is (side.scope is TRAIN)
        return found

    with sides(lead, lambda side: side.send("a", weight.expand(side.rows, 1)), scopes=(TRAIN, EVAL)) as made:
        found, _ = steps(made, scope=EVAL)
        assert found.item() == ROWS * 2.0
        assert weight.grad is None


def test_whole_numbers_and_single_numbers_travel():
    weight = parameter(2.0)

    def lead(side):
        bucket, scale = side.recv("bucket", False, torch.int64), side.recv("scale", False)
        assert bucket.dtype is torch.int64
        return (side.recv("a") * bucket * scale).sum()

    def follow(side):
        side.send("bucket", torch.arange(side.rows)[:, None], False)
        side.send("scale", torch.tensor(10.0), False)
        side.send("a", weight.expand(side.rows, 1))

    with sides(lead, follow) as made:
        steps(made)
        assert weight.grad.tolist() == [(0 + 1 + 2 + 3) * 10.0]


def test_what_rounding_loses_of_gradients_comes_later():
    weight, factor = parameter(1.0), [1.0]

    def lead(side):
        found = side.recv("a")
        return (found * torch.tensor([100.0, factor[-1]])).sum()

    with sides(lead, lambda side: side.send("a", weight.expand(side.rows, 2)), precision="int8") as made:
        got = []
        for turn in range(1, 5):
            factor.append(0.3)
            steps(made, turn)
            got.append(made[1].exchange.latest["TRAIN:", "grad", "a"][0, 1].item())
        assert len(set(got)) > 1  # a step of int8 is 100 / 127: none of the gradients can be sent as it is
        assert sum(got) == pytest.approx(4 * 0.3, abs=0.4)


def test_a_tensor_of_another_turn_is_not_taken():
    weight = parameter(2.0)

    def follow(side):
        return side.send("a", weight.expand(side.rows, 1) * side.exchange.turn)

    with sides(lambda side: side.recv("a").sum(), follow) as made:
        made[1].step(7, backward=False)
        made[1].step(8, backward=False)
        assert made[0].step(8).item() == ROWS * 2.0 * 8


def test_a_gradient_of_another_shape_is_refused():
    weight = parameter(2.0)
    with sides(lambda side: side.recv("a").sum(), lambda side: side.send("a", weight.expand(side.rows, 1))) as made:
        made[0].exchange.channel.send(1, 1, torch.zeros(ROWS + 1, 1), gradient=True)
        with pytest.raises(FederalError, match=r"came with shape \[5, 1\] from the leader; what was sent has \[4, 1\]"):
            made[1].step(1)


def test_a_tensor_without_elements_is_refused():
    weight = parameter(2.0)
    with sides(lambda side: side.recv("a").sum(), lambda side: side.send("a", weight.expand(side.rows, 1))) as made:
        made[1].exchange.channel.send(1, 1, None)
        with pytest.raises(FederalError):
            made[0].step(1)


def test_outside_of_a_step():
    exchange = Exchange("leader", "follower", None)
    with pytest.raises(FunctionError, match=r"recv\(\) was called outside"):
        exchange.recv("a", torch.float32, False, None, None, None, CPU)
    with pytest.raises(FederalError, match=r"there is no connection before compile\(\)"):
        _ = exchange.channel


def test_a_second_backward_pass_is_refused():
    weight = parameter(2.0)

    def lead(side):
        return side.recv("a").square().sum()

    with sides(lead, lambda side: side.send("a", weight.expand(side.rows, 1))) as made:
        made[1].step(1, backward=False)
        loss = made[0].step(1, backward=False)
        loss.backward(retain_graph=True)
        with pytest.raises(FederalError, match="a second backward pass through the same step"):
            loss.backward()


def test_a_step_that_is_over_is_freed_at_once():
    """Its activations with it: nothing waits for the collector of cycles."""
    weight, own = parameter(2.0), parameter(1.0)

    def lead(side):
        left = side.send("left", own.expand(side.rows, 1))
        return (side.recv("back") + left).sum()

    def follow(side):
        side.send("back", side.recv("left") * weight)

    with sides(lead, follow) as made:
        steps(made, 1)
        gc.collect()
        gc.disable()
        try:
            before = _steps_alive()
            for turn in range(2, 12):
                steps(made, turn)
            assert _steps_alive() == before
        finally:
            gc.enable()


def test_a_model_that_is_over_is_freed():
    gc.collect()
    before = _steps_alive()
    both(leader(efl.procedure_fn.train(3)), follower(efl.procedure_fn.train(3)))
    gc.collect()
    assert _steps_alive() == before


def _steps_alive():
    return sum(type(thing).__name__ == "_Step" for thing in gc.get_objects())
