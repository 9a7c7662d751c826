"""Split equals unsplit: two parties train to the weights of the one-process model, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from plait import efl

from .pair import (
    ADAM,
    LEFT,
    RIGHT,
    SGD,
    WHOLE,
    Y,
    assert_same,
    both,
    communicators,
    dense,
    follower,
    follower_eval,
    follower_loss,
    head,
    leader,
    leader_eval,
    leader_loss,
    whole,
    whole_eval,
    whole_loss,
)

STEPS = 200
PASSES = 20
OPTIMIZERS = {"SGD": SGD, "Adam": ADAM}


def by_leader():
    """Labels at the leader; the follower returns what it sent."""
    return leader_loss, follower_loss, whole_loss


def by_leader_with_none():
    def follower_without_loss(model, sample):
        follower_loss(model, sample)

    return leader_loss, follower_without_loss, whole_loss


def by_follower():
    """Labels at the follower; the leader has no loss."""

    def lead(model, sample):
        model.send("hidden", dense("left", 4, 5, sample.x).relu(), require_grad=True)

    def follow(model, sample):
        hidden = model.recv("hidden", require_grad=True)
        return head(hidden, dense("right", 4, 5, sample.x).relu(), sample.y)

    return lead, follow, whole_loss


def losses_at_both():
    """The follower trains a head of its own beside what the leader does with its hidden layer."""

    def own(hidden, y):
        return nn.functional.cross_entropy(dense("aside", 5, 3, hidden), y)

    def follow(model, sample):
        hidden = model.send("hidden", dense("right", 4, 5, sample.x).relu(), require_grad=True)
        return own(hidden, sample.y)

    def unsplit(model, sample):
        right = dense("right", 4, 5, sample.x2).relu()
        return head(dense("left", 4, 5, sample.x).relu(), right, sample.y) + own(right, sample.y)

    return leader_loss, follow, unsplit


def several_both_ways():
    """Two tensors to the leader, one to the follower; a loss at each."""

    def lead(model, sample):
        left = dense("left", 4, 5, sample.x).relu()
        model.send("left", left, require_grad=True)
        one, two = model.recv("one", require_grad=True), model.recv("two", require_grad=True)
        return head(left, one * two, sample.y)

    def follow(model, sample):
        model.send("one", dense("one", 4, 5, sample.x), require_grad=True)
        model.send("two", dense("two", 4, 5, sample.x).sigmoid(), require_grad=True)
        left = model.recv("left", require_grad=True)
        return dense("check", 5, 1, left).square().mean()

    def unsplit(model, sample):
        left = dense("left", 4, 5, sample.x).relu()
        product = dense("one", 4, 5, sample.x2) * dense("two", 4, 5, sample.x2).sigmoid()
        return head(left, product, sample.y) + dense("check", 5, 1, left).square().mean()

    return lead, follow, unsplit


def chain():
    """From the leader through the follower back to the leader."""

    def lead(model, sample):
        left = dense("left", 4, 5, sample.x).relu()
        model.send("left", left, require_grad=True)
        return head(left, model.recv("back", require_grad=True), sample.y)

    def follow(model, sample):
        left = model.recv("left", require_grad=True)
        return model.send("back", dense("middle", 9, 5, torch.cat([sample.x, left], 1)).tanh(), require_grad=True)

    def unsplit(model, sample):
        left = dense("left", 4, 5, sample.x).relu()
        return head(left, dense("middle", 9, 5, torch.cat([sample.x2, left], 1)).tanh(), sample.y)

    return lead, follow, unsplit


def long_chain():
    """Four times across, begun by the follower."""

    def lead(model, sample):
        one = model.recv("one", require_grad=True)
        two = model.send("two", dense("left", 9, 5, torch.cat([sample.x, one], 1)).tanh(), require_grad=True)
        three = model.recv("three", require_grad=True)
        return head(two, three, sample.y)

    def follow(model, sample):
        one = model.send("one", dense("right", 4, 5, sample.x).relu(), require_grad=True)
        two = model.recv("two", require_grad=True)
        model.send("three", dense("middle", 10, 5, torch.cat([one, two], 1)).tanh(), require_grad=True)

    def unsplit(model, sample):
        one = dense("right", 4, 5, sample.x2).relu()
        two = dense("left", 9, 5, torch.cat([sample.x, one], 1)).tanh()
        return head(two, dense("middle", 10, 5, torch.cat([one, two], 1)).tanh(), sample.y)

    return lead, follow, unsplit


def buckets():
    """Whole numbers, without gradient, that the leader embeds; and a weight for the loss as one number."""

    def bucketed(x):
        return (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

    def embedded(bucket):
        return dense("embedding", 4, 5, nn.functional.one_hot(bucket, 4).float())

    def lead(model, sample):
        bucket = model.recv("bucket", dtype=torch.int64)
        weight = model.recv("weight")
        hidden = model.recv("hidden", require_grad=True)
        return weight * head(embedded(bucket), hidden, sample.y)

    def follow(model, sample):
        model.send("bucket", bucketed(sample.x))
        model.send("weight", sample.x.abs().mean())
        return follower_loss(model, sample)

    def unsplit(model, sample):
        hidden = dense("right", 4, 5, sample.x2).relu()
        return sample.x2.abs().mean() * head(embedded(bucketed(sample.x2)), hidden, sample.y)

    return lead, follow, unsplit


def unused():
    """The leader's loss does not depend on one of the tensors: its gradient is zero, and comes."""

    def lead(model, sample):
        model.recv("spare", require_grad=True)
        return leader_loss(model, sample)

    def follow(model, sample):
        model.send("spare", dense("spare", 4, 2, sample.x), require_grad=True)
        return follower_loss(model, sample)

    def unsplit(model, sample):
        dense("spare", 4, 2, sample.x2)
        return whole_loss(model, sample)

    return lead, follow, unsplit


SPLITS = [
    by_leader, by_leader_with_none, by_follower, losses_at_both, several_both_ways, chain, long_chain, buckets, unused,
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("split", SPLITS, ids=[split.__name__ for split in SPLITS])
def test_200_steps_of_two_parties_are_those_of_one(split, optimizer):
    lead, follow, unsplit = split()
    procedure, settings = efl.procedure_fn.train(STEPS), {"optimizer": OPTIMIZERS[optimizer], "num_epochs": PASSES}
    parts = both(leader(procedure, lead, **settings), follower(procedure, follow, **settings))
    alone = whole(procedure, unsplit, **settings)
    assert alone.step == STEPS
    assert {part.step for part in parts} == {STEPS}
    assert_same(alone, *parts)


def test_a_small_window_changes_nothing():
    procedure = efl.procedure_fn.train(40)
    settings = {"num_epochs": PASSES}
    parts = both(leader(procedure, **settings), follower(procedure, **settings), communicators(window=100))
    assert_same(whole(procedure, **settings), *parts)


def test_training_and_evaluation_are_those_of_one():
    procedure = efl.procedure_fn.train_and_eval(max_iter=3)
    lead, follow = both(leader(procedure, evaluate=leader_eval), follower(procedure, evaluate=follower_eval))
    alone = whole(procedure, evaluate=whole_eval)
    assert_same(alone, lead, follow)
    assert lead.found == alone.found
    assert [list(found) for found in lead.found] == [["accuracy"]] * 3
    assert follow.found == [{}] * 3


def test_one_optimizer_for_each_scope():
    sgd, adam = functools.partial(torch.optim.SGD, lr=0.1), functools.partial(torch.optim.Adam, lr=0.01)
    lead = efl.optimizer_fn.scope_optimizer({"net/left": sgd, "net/top": adam})
    follow = efl.optimizer_fn.scope_optimizer({"net/right": sgd})
    joined = efl.optimizer_fn.scope_optimizer({"net/left": sgd, "net/top": adam, "net/right": sgd})
    procedure = efl.procedure_fn.train(STEPS)
    parts = both(
        leader(procedure, optimizer=lead, num_epochs=PASSES), follower(procedure, optimizer=follow, num_epochs=PASSES)
    )
    assert_same(whole(procedure, optimizer=joined, num_epochs=PASSES), *parts)


# ---- several tasks


def small(name):
    """Two outputs of one task over the hidden layers of both."""

    def lead(model, sample):
        hidden = model.recv("hidden", require_grad=True)
        return joined(dense("left", 4, 5, sample.x).relu(), hidden, sample.y)

    def unsplit(model, sample):
        return joined(dense("left", 4, 5, sample.x).relu(), dense("right", 4, 5, sample.x2).relu(), sample.y)

    def joined(one, other, y):
        logits = dense(f"top_{name}", 10, 3, torch.cat([one, other], 1))
        return nn.functional.cross_entropy(logits, (y + len(name)) % 3)

    return lead, unsplit


TASKS = ("click", "buy")
RATIO = {"click": 2.0, "buy": 1.0}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_tasks_drawn_by_the_leader(optimizer):
    procedure = efl.procedure_fn.cotrain(train_step=10, max_iter=25, task_select_ratio=RATIO)
    settings = {"tasks": TASKS, "optimizer": OPTIMIZERS[optimizer], "num_epochs": PASSES}
    parts = both(
        leader(procedure, {task: small(task)[0] for task in TASKS}, **settings),
        follower(procedure, follower_loss, **settings),
    )
    alone = whole(procedure, {task: small(task)[1] for task in TASKS}, **settings)
    assert alone.step >= STEPS
    assert {part.step for part in parts} == {alone.step}
    assert_same(alone, *parts)


def test_two_tasks_until_the_data_ends_with_evaluations():
    procedure = efl.procedure_fn.cotrain(max_iter=2, task_select_ratio=RATIO)

    def evaluate(function, task):
        def evaluated(model, sample):
            model.add_metric("loss", function(model, sample))

        return evaluated

    def losses(place):
        return {task: small(task)[place] for task in TASKS}

    def evaluations(place):
        return {task: evaluate(small(task)[place], task) for task in TASKS}

    lead, follow = both(
        leader(procedure, losses(0), evaluations(0), tasks=TASKS),
        follower(procedure, follower_loss, follower_eval, tasks=TASKS),
    )
    alone = whole(procedure, losses(1), evaluations(1), tasks=TASKS)
    assert_same(alone, lead, follow)
    assert lead.found == alone.found
    assert len(alone.found) == 4


def test_a_task_that_is_the_leaders_alone():
    """Only the leader draws it; the follower hears of the steps of the other one."""

    def local(model, sample):
        return dense("left", 4, 5, sample.x).relu().square().mean()

    ratio = {"joint": 1.0, "local": 1.0}
    settings = {"optimizer": ADAM, "num_epochs": PASSES}
    lead, follow = both(
        leader(
            efl.procedure_fn.cotrain(train_step=10, max_iter=10, task_select_ratio=ratio),
            {"joint": leader_loss, "local": local},
            tasks=("joint", "local"),
            **settings,
        ),
        follower(efl.procedure_fn.cotrain(train_step=10, max_iter=10), tasks=("joint",), **settings),
    )
    alone = whole(
        efl.procedure_fn.cotrain(train_step=10, max_iter=10, task_select_ratio=ratio),
        {"joint": whole_loss, "local": local},
        tasks=("joint", "local"),
        **settings,
    )
    assert_same(alone, lead, follow)
    assert lead.step == alone.step
    assert 30 < follow.step < alone.step


# ---- precision on the wire


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01), ("int8", 0.05)])
def test_fewer_bits_train_to_nearly_the_same(precision, tolerance):
    procedure = efl.procedure_fn.train(100)
    parts = both(
        leader(procedure, num_epochs=PASSES),
        follower(procedure, num_epochs=PASSES),
        communicators(wire_dtype=precision),
    )
    alone = whole(procedure, num_epochs=PASSES)
    joined = {name: value for part in parts for name, value in part.variables.items()}
    distance = max(float((joined[name] - alone.variables[name]).abs().max()) for name in joined)
    assert 0 < distance < tolerance


def test_the_data_of_these_tests_has_all_labels_and_a_short_batch():
    assert set(Y.tolist()) == {0, 1, 2}
    assert len(WHOLE["x"]) % 32
    assert len(LEFT["x"]) == len(RIGHT["x"])
