"""plait against a bare PyTorch loop, written out here: the same losses and the same variables, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import efl
from plait.data import TensorSource
from plait.engine.hooks import SessionRunArgs, SessionRunHook
from plait.engine.stage import CotrainStage
from plait.engine.task import MODE
from plait.rng import rng_state

ROWS, BATCH = 72, 16  # the last batch of a pass is a short one
X = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (ROWS,), generator=torch.Generator().manual_seed(1))
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class Net(nn.Module):
    def __init__(self, *, norm=False, dropout=0.0):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(dropout)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.tower(x))


class Losses(SessionRunHook):
    """Every step's loss, as it was fetched."""

    def __init__(self, model, task=None):
        self.op = model.loss(task)
        self.found = []

    def before_run(self, run_context):
        return SessionRunArgs(self.op)

    def after_run(self, run_context, run_values):
        self.found.append(run_values.results)


def make(optimizer_fn, *, evaluates=False, **net):
    model = efl.Model()
    torch.manual_seed(3)
    model.net = Net(**net)
    model.input_fn(lambda model, mode: TensorSource({"x": X, "y": Y}, BATCH))
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample.x), sample.y))
    model.optimizer_fn(optimizer_fn)
    if evaluates:
        model.eval_fn(lambda model, s: model.add_metric("loss", F.cross_entropy(model.net(s.x), s.y)))
    return model.compile()


def bare(optimizers, *, passes=3, seed=11, **net):
    """The loop that everybody writes."""
    torch.manual_seed(3)
    model = Net(**net)
    made = optimizers(model)
    losses = []
    torch.manual_seed(seed)
    for _ in range(passes):
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            for optimizer in made:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for optimizer in made:
                optimizer.step()
            losses.append(loss.detach())
    return model, losses


def fit(model, *, passes=3, seed=11, procedure=None, **settings):
    losses = Losses(model)
    model.add_hooks([losses], MODE.TRAIN)
    torch.manual_seed(seed)
    model.fit(procedure or all_passes(passes), **settings)
    return losses.found


def all_passes(passes):
    def procedure(model):
        for _ in range(passes):
            efl.procedure_fn.train()(model)

    return procedure


def assert_equal(net, expected, losses, expected_losses):
    assert len(losses) == len(expected_losses)
    for step, (loss, other) in enumerate(zip(losses, expected_losses, strict=True)):
        assert torch.equal(loss, other), f"step {step}"
    state, other = net.state_dict(), expected.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("factory", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("net", [{}, {"dropout": 0.3}, {"norm": True}, {"norm": True, "dropout": 0.3}], ids=str)
def test_one_optimizer(factory, net):
    expected, expected_losses = bare(lambda model: [factory(model.parameters())], **net)
    model = make(efl.optimizer_fn.optimizer_setter(factory), **net)
    assert_equal(model.net, expected, fit(model), expected_losses)


def test_a_ready_optimizer():
    expected, expected_losses = bare(lambda model: [ADAM(model.parameters())])
    model = efl.Model()
    torch.manual_seed(3)
    model.net = Net()
    model.input_fn(lambda model, mode: TensorSource((X, Y), BATCH))
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample[0]), sample[1]))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(ADAM(model.net.parameters())))
    assert_equal(model.net, expected, fit(model.compile()), expected_losses)


def test_two_scopes():
    expected, expected_losses = bare(
        lambda model: [ADAM(model.tower.parameters()), SGD(model.head.parameters())], dropout=0.2
    )
    model = make(efl.optimizer_fn.scope_optimizer({"net/tower": ADAM, "net/head": SGD}), dropout=0.2)
    assert_equal(model.net, expected, fit(model), expected_losses)


def test_evaluation_changes_nothing():
    expected, expected_losses = bare(lambda model: [ADAM(model.parameters())], norm=True, dropout=0.3)
    model = make(efl.optimizer_fn.optimizer_setter(ADAM), evaluates=True, norm=True, dropout=0.3)
    losses = fit(model, procedure=efl.procedure_fn.train_and_eval(max_iter=3))
    assert len(model.history) == 3
    assert_equal(model.net, expected, losses, expected_losses)


def test_evaluation_in_the_midst_of_a_pass_changes_nothing():
    expected, expected_losses = bare(lambda model: [ADAM(model.parameters())], norm=True, dropout=0.3)
    model = make(efl.optimizer_fn.optimizer_setter(ADAM), evaluates=True, norm=True, dropout=0.3)
    # Passes have 5 steps: each takes two iterations, of 3 and of 2 steps.
    losses = fit(model, procedure=efl.procedure_fn.train_and_eval(train_step=3, eval_step=2, max_iter=6))
    assert [entry["global_step"] for entry in model.history] == [3, 5, 8, 10, 13, 15]
    assert_equal(model.net, expected, losses, expected_losses)


def test_checkpoints_change_nothing(tmp_path):
    expected, expected_losses = bare(lambda model: [ADAM(model.parameters())], norm=True, dropout=0.3)
    model = make(efl.optimizer_fn.optimizer_setter(ADAM), norm=True, dropout=0.3)
    assert_equal(model.net, expected, fit(model, checkpoint_dir=tmp_path, save_steps=1), expected_losses)


def test_evaluation_finds_what_a_bare_loop_finds():
    model = make(efl.optimizer_fn.optimizer_setter(ADAM), evaluates=True, norm=True, dropout=0.3)
    fit(model, procedure=efl.procedure_fn.train_and_eval(max_iter=1))
    model.net.eval()
    with torch.no_grad():
        mean = sum(
            F.cross_entropy(model.net(x), y).double() * len(x)
            for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True)
        )
    assert model.history[0]["metrics"]["loss"] == pytest.approx(float(mean) / ROWS, rel=1e-12)


class Pair(nn.Module):
    """A tower and a head for each of two tasks."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.heads = nn.ModuleDict({"click": nn.Linear(16, 3), "buy": nn.Linear(16, 3)})

    def loss(self, task, x, y):
        return F.cross_entropy(self.heads[task](self.tower(x)), y)


TASKS = ("click", "buy")
DATA = {"click": (X, Y), "buy": (X.flip(0) * 0.5, Y.flip(0))}


def make_pair():
    model = efl.Model()
    torch.manual_seed(3)
    model.net = Pair()
    split = efl.optimizer_fn.scope_optimizer({"net/tower": ADAM, "net/heads": SGD})
    for task in TASKS:
        model.input_fn(lambda model, mode, task=task: TensorSource(DATA[task], BATCH), task=task)
        model.loss_fn(lambda model, sample, task=task: model.net.loss(task, *sample), task=task)
        model.optimizer_fn(split, task=task)
    return model.compile()


def bare_pair(sequence, seed=11):
    """Each task's batches in order and from the beginning again; both optimizers are shared."""
    torch.manual_seed(3)
    net = Pair()
    optimizers = [ADAM(net.tower.parameters()), SGD(net.heads.parameters())]
    batches = {task: list(zip(*(part.split(BATCH) for part in DATA[task]), strict=True)) for task in TASKS}
    taken, losses = dict.fromkeys(TASKS, 0), []
    torch.manual_seed(seed)
    for task in sequence:
        x, y = batches[task][taken[task] % len(batches[task])]
        taken[task] += 1
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = net.loss(task, x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    return net, losses


def fit_pair(model, procedure, seed=11):
    """The tasks in the order in which their steps came, and the losses."""
    hooks = {task: Losses(model, task) for task in TASKS}
    order, losses = [], []
    for task, hook in hooks.items():
        hook.after_run = lambda _, values, task=task: (order.append(task), losses.append(values.results))
        model.add_hooks([hook], MODE.TRAIN, task)
    torch.manual_seed(seed)
    model.fit(procedure)
    return order, losses


def test_two_tasks_in_turn():
    def procedure(model):
        def in_turn(sess):
            for number in range(8):
                sess.run(model.train_op(TASKS[number % 2]))

        model.run_stage("in turn", in_turn)

    model = make_pair()
    order, losses = fit_pair(model, procedure)
    assert order == ["click", "buy"] * 4
    assert_equal(model.net, *_swap(bare_pair(order), losses))


@pytest.mark.parametrize("step", [None, 4])
def test_cotrain(step):
    model = make_pair()
    ratio = {"click": 1.0, "buy": 2.0}
    order, losses = fit_pair(
        model, efl.procedure_fn.cotrain(train_step=step, max_iter=3, task_select_ratio=ratio, seed=4)
    )
    assert set(order) == set(TASKS)
    assert len(order) == (30 if step is None else 12)
    assert_equal(model.net, *_swap(bare_pair(order), losses))


def test_the_draws_of_cotrain_are_a_function_of_the_seed():
    first, second, other = (CotrainStage(make_pair(), {"click": 1, "buy": 1}, None, seed) for seed in (4, 4, 5))
    sequences = [[stage._draw() for _ in range(50)] for stage in (first, second, other)]
    assert sequences[0] == sequences[1] != sequences[2]


def _swap(expected, losses):
    net, expected_losses = expected
    return net, losses, expected_losses


def flat(state):
    return {
        name: [str(part.tolist() if isinstance(part, torch.Tensor) else part) for part in value]
        if isinstance(value, list)
        else str(value.tolist())
        for name, value in state.items()
    }


def test_the_build_changes_nothing():
    model = efl.Model()
    model.net = Net(norm=True, dropout=0.3)
    model.input_fn(lambda model, mode: TensorSource({"x": X, "y": Y}, BATCH, shuffle=True))
    model.loss_fn(lambda model, s: F.cross_entropy(model.net(s.x), s.y))
    model.eval_fn(lambda model, s: model.add_metric("loss", F.cross_entropy(model.net(s.x), s.y)))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(ADAM))
    random_before = flat(rng_state())
    before = {name: value.clone() for name, value in model.net.state_dict().items()}
    model.compile()
    assert flat(rng_state()) == random_before
    assert all(torch.equal(before[name], value) for name, value in model.net.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all((stream.epoch, stream.position) == (0, 0) for stream in model.streams.values())
    assert all(module.training for module in model.modules())


def test_the_build_changes_no_variable_that_it_makes():
    def loss_fn(model, s):
        count = plait.get_variable("count", [1], torch.int64, 0)
        mean = plait.get_variable("mean", [8], initializer=0.0, trainable=False)
        with torch.no_grad():
            count.add_(1)
            mean.mul_(0.9).add_(s.x.mean(0))
        hidden = plait.layer("norm", nn.BatchNorm1d, 8)(s.x)
        return F.cross_entropy(plait.layer("fc", nn.Linear, 8, 3)(hidden), s.y)

    model = efl.Model()
    model.input_fn(lambda model, mode: TensorSource({"x": X, "y": Y}, BATCH))
    model.loss_fn(loss_fn).optimizer_fn(efl.optimizer_fn.optimizer_setter(ADAM)).compile()
    found = model.variables()
    assert int(found["norm/num_batches_tracked"]) == 0
    assert int(found["count"]) == 0
    assert torch.equal(found["mean"], torch.zeros(8))


def layered(model, x):
    hidden = plait.layer("drop", nn.Dropout, 0.3)(plait.layer("norm", nn.BatchNorm1d, 8)(x))
    return plait.layer("fc", nn.Linear, 8, 3)(hidden)


def test_layers_of_the_build_train_and_evaluate_in_turn():
    model = efl.Model()
    model.input_fn(lambda model, mode: TensorSource({"x": X, "y": Y}, BATCH))
    model.loss_fn(lambda model, s: F.cross_entropy(layered(model, s.x), s.y))
    model.eval_fn(lambda model, s: model.add_metric("loss", F.cross_entropy(layered(model, s.x), s.y)))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(ADAM)).compile()
    torch.manual_seed(3)
    net = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter, name in zip(net.parameters(), ("norm/weight", "norm/bias", "fc/weight", "fc/bias"), strict=True):
            parameter.copy_(model.variables()[name])
    optimizer = ADAM(net.parameters())
    torch.manual_seed(11)
    for _ in range(3):
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    torch.manual_seed(11)
    model.fit(efl.procedure_fn.train_and_eval(train_step=3, max_iter=6))
    found = model.variables()
    assert torch.equal(found["fc/weight"], net[2].weight)
    assert torch.equal(found["norm/running_var"], net[0].running_var)
    assert int(found["norm/num_batches_tracked"]) == 15


def test_the_build_leaves_the_modes_of_modules():
    model = efl.Model()
    model.net = Net(norm=True, dropout=0.3)
    model.net.tower[1].eval()  # a frozen batch norm
    for task in ("trained", "only evaluated"):
        model.input_fn(lambda model, mode: TensorSource({"x": X, "y": Y}, BATCH), task=task)
        model.eval_fn(lambda model, s: model.add_metric("loss", F.cross_entropy(model.net(s.x), s.y)), task=task)
    model.loss_fn(lambda model, s: F.cross_entropy(model.net(s.x), s.y), task="trained")
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(ADAM), task="trained").compile()
    frozen = [module for module in model.modules() if not module.training]
    assert frozen == [model.net.tower[1]]
