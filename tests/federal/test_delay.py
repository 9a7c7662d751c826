"""A follower whose variables move one step late: always by one, which is what a loop by hand gives, bit for bit."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from plait import efl, train
from plait.data import TensorSource
from plait.engine.stage import train_loop
from plait.errors import FunctionError
from plait.federal.delay import keeping_variables

from .pair import LEFT, RIGHT, WHOLE, Dense, both, communicators, dense, follower, leader, leader_loss, refused

TRAIN = efl.procedure_fn.train
FACTORIES = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


def deep_loss(model, sample):
    """Two layers: going back needs the variables of the second as they were."""
    hidden = dense("low", 4, 6, sample.x).tanh()
    model.send("hidden", dense("high", 6, 5, hidden).relu(), require_grad=True)


def late(steps, optimizer="sgd", **settings):
    """Both parties' variables after so many steps."""
    fit = settings.pop("fit", [{}, {}])
    assigned = efl.optimizer_fn.optimizer_setter(FACTORIES[optimizer])
    given = {"optimizer": assigned, "num_epochs": 100, **settings}
    found = both(
        leader(TRAIN(steps), fit=fit[0], **given),
        follower(TRAIN(steps), deep_loss, fit=fit[1], **given),
        communicators(staleness=1),
    )
    return {**found[0].variables, **found[1].variables}


def by_hand(steps, optimizer, drains=()):
    """The same in one process; `drains`: after these steps nothing is left to come, as at checkpoints."""
    make = FACTORIES[optimizer]
    left, top = Dense("left", 4, 5), Dense("top", 10, 3)
    right = nn.ModuleList([Dense("low", 4, 6), Dense("high", 6, 5)])
    ours, theirs = make([*left.parameters(), *top.parameters()]), make(list(right.parameters()))
    source, pending, step = TensorSource(WHOLE, 32, shuffle=True, seed=1), [], 0

    def move():
        for copied, hidden, gradient in pending:
            hidden.backward(gradient)
            for parameter, old in zip(right.parameters(), copied.parameters(), strict=True):
                parameter.grad = old.grad
            theirs.step()
        pending.clear()

    for epoch in range(100):
        for batch in source.batches(epoch, 0):
            copied = copy.deepcopy(right)
            hidden = copied[1](copied[0](batch["x2"]).tanh()).relu()
            received = hidden.detach().requires_grad_()
            ours.zero_grad()
            joined = torch.cat([left(batch["x"]).relu(), received], 1)
            nn.functional.cross_entropy(top(joined), batch["y"]).backward()
            ours.step()
            move()
            pending.append((copied, hidden, received.grad))
            step += 1
            if step in drains or step == steps:
                move()
            if step == steps:
                named = {"left": left, "top": top, "low": right[0], "high": right[1]}
                return {f"net/{m}/{n}": p.detach() for m, one in named.items() for n, p in one.named_parameters()}
    raise AssertionError("too few rows")


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("optimizer", FACTORIES)
def test_it_is_what_a_loop_by_hand_gives(optimizer):
    assert_equal(late(60, optimizer), by_hand(60, optimizer))


def test_a_step_late_is_not_in_time():
    assert not torch.equal(late(20)["net/low/weight"], by_hand(20, "sgd", drains=range(20))["net/low/weight"])


class Nothing(train.SessionRunHook):
    """It may stop, for all that the parties know."""

    def after_run(self, run_context, run_values):
        pass


def test_whether_steps_are_told_ahead_changes_nothing():
    assert_equal(late(60, fit=[{"hooks": [Nothing()]}, {}]), by_hand(60, "sgd"))


def test_checkpoints_are_part_of_the_schedule(tmp_path):
    fit = [{"checkpoint_dir": tmp_path / role, "save_steps": 10} for role in ("leader", "follower")]
    assert_equal(late(25, fit=fit), by_hand(25, "sgd", drains=(10, 20)))


def test_resumed_equals_uninterrupted(tmp_path):
    fits = [
        [{"checkpoint_dir": tmp_path / run / role, "save_steps": 10} for role in ("leader", "follower")]
        for run in ("one", "two")
    ]
    late(20, fit=fits[0])
    assert_equal(late(45, fit=fits[0]), late(45, fit=fits[1]))


def test_ids_are_compared_though_steps_are_told_ahead():
    other = {**RIGHT, "id": RIGHT["id"] + 1}
    settings = {"num_epochs": 9, "model": {"sample_id": "id"}}
    found = refused(
        leader(TRAIN(50), fields=LEFT, **settings),
        follower(TRAIN(50), deep_loss, fields=other, **settings),
        communicators(staleness=1),
    )
    assert any("is of other samples than the leader's" in str(error) for error in found)


def test_a_leader_that_waits_for_gradients_is_refused():
    def leads(model, sample):
        model.send("back", dense("back", 4, 5, sample.x), require_grad=True)
        return leader_loss(model, sample)

    def follows(model, sample):
        model.send("hidden", dense("right", 4, 5, sample.x) + model.recv("back", require_grad=True), require_grad=True)

    found = refused(leader(TRAIN(5), leads), follower(TRAIN(5), follows), communicators(staleness=1))
    assert all("staleness=1, and the leader sends 'back'" in str(error) for error in found)


def test_a_pass_goes_back_with_the_variables_that_it_had():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    wanted = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    with keeping_variables():
        out = net(x).sum()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    found = torch.autograd.grad(out, list(net.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_what_autograd_would_refuse_is_refused():
    layer = nn.Linear(3, 4)
    with keeping_variables():
        hidden = layer(torch.randn(5, 3)).sigmoid()
        hidden.mul_(2.0)
        out = hidden.sum()
    with pytest.raises(FunctionError, match="was changed in place"):
        out.backward()


def test_steps_that_one_party_makes_alone_do_not_move_the_schedule(tmp_path):
    """Both save by steps that both make."""

    def procedure(model):
        model.run_stage("train", train_loop(model, "both", step=5, across_passes=True))
        if "alone" in model.tasks():
            model.run_stage("alone", train_loop(model, "alone", step=5, across_passes=True))
        model.run_stage("again", train_loop(model, "both", step=20, across_passes=True))

    def alone(model, sample):
        return dense("own", 4, 3, sample.x).square().mean()

    fit = [{"checkpoint_dir": tmp_path / role, "save_steps": 10} for role in ("leader", "follower")]
    found = both(
        leader(procedure, {"both": leader_loss, "alone": alone}, tasks=("both", "alone"), fit=fit[0], num_epochs=9),
        follower(procedure, deep_loss, tasks=("both",), fit=fit[1], num_epochs=9),
        communicators(staleness=1),
    )
    assert [one.step for one in found] == [30, 25]
