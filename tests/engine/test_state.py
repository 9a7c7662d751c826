"""A run's state as one tree, and back."""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import plait
from plait import efl, mox
from plait.efl import MODE
from plait.engine.evaluation_hooks import scale_learning_rate
from plait.engine.state import capture, restore
from plait.engine.strategy import Local
from plait.errors import CheckpointError, DataError, MismatchError
from plait.train import SessionRunHook
from plait.variables.tree import join_tree, snapshot, split_tree

from .pair import together, workers

ADAM = functools.partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9))
X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))


class Patience(SessionRunHook):
    """A hook with a state."""

    def __init__(self):
        self.left = 3

    def after_run(self, run_context, run_values):
        self.left -= 1

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def small(*, out=1, name="fc", opt=ADAM, rows=12, extra=(), strategy=None):
    model = efl.Model()
    model.hook = None

    def loss_fn(model, sample):
        model.add_metric("mean", efl.metrics.mean(sample.x))
        used = [plait.layer(layer, nn.Linear, 2, out) for layer in (name, *extra)]
        return sum(layer(torch.dropout(sample.x, 0.3, model.training_flag)).square().mean() for layer in used)

    model.input_fn(lambda model, mode: plait.data.TensorSource({"x": X[:rows]}, 3, shuffle=True, num_epochs=5))
    model.loss_fn(loss_fn).eval_fn(loss_fn).optimizer_fn(efl.optimizer_fn.optimizer_setter(opt))
    model.patience = Patience()
    model.add_hooks([model.patience])
    return model.compile(strategy=strategy)


def taken(model):
    """Through JSON and tensors, as a checkpoint file does it."""
    state, tensors = split_tree(snapshot(capture(model)))
    return join_tree(json.loads(json.dumps(state)), tensors)


def drawn():
    return [random.random(), np.random.random(), torch.rand(2).tolist()]  # noqa: NPY002 - the global state is meant


def weights(model):
    return {name: value.detach().clone() for name, value in model.variables().items()}


def test_a_restored_model_goes_on_bit_for_bit():
    first = small()
    first.fit(efl.procedure_fn.train(7))
    tree = taken(first)
    second = small()
    torch.manual_seed(99)
    random.seed(99)
    restore(second, snapshot(tree))
    draws = drawn()
    restore(second, snapshot(tree))
    assert draws == drawn()
    ended = []
    for model in (first, second):
        restore(model, snapshot(tree))
        model.fit(efl.procedure_fn.train(6))
        ended.append(weights(model))
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])


def test_everything_comes_back():
    first = small()
    first.fit(efl.procedure_fn.train_and_eval(train_step=2, eval_step=2, max_iter=2))
    second = small()
    restore(second, taken(first))
    assert int(second.global_step) == 4
    assert second.history == first.history
    assert second.patience.left == first.patience.left == -1
    for mode in MODE:
        assert second.metric_values(mode) == first.metric_values(mode)
        scope = efl.TaskScope(mode)
        assert second.streams[scope].state_dict() == first.streams[scope].state_dict()
    (ours,), (theirs,) = second.optimizers(), first.optimizers()
    assert ours.param_groups[0]["betas"] == (0.8, 0.9)
    assert ours.param_groups[0]["lr"] == 0.1
    for one, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_a_number_changed_in_the_program_is_warned_about_and_the_checkpoints_is_used(caplog):
    second = small(opt=functools.partial(torch.optim.Adam, lr=0.5, betas=(0.8, 0.9)))
    restore(second, taken(small()))
    assert caplog.messages == ["Adam: lr is 0.5 in the program and 0.1 in the checkpoint, which is used"]
    assert second.optimizers()[0].param_groups[0]["lr"] == 0.1


def test_a_scheduled_rate_is_the_programs_and_not_warned_about(caplog):
    first = small(opt=mox.get_optimizer_fn("sgd", learning_rate=lambda step: 0.1)())
    first.fit(efl.procedure_fn.train(2))
    caplog.clear()
    restore(small(opt=mox.get_optimizer_fn("sgd", learning_rate=lambda step: 0.5)()), taken(first))
    assert caplog.messages == []


def test_the_same_numbers_are_not_warned_about(caplog):
    restore(small(), taken(small()))
    assert caplog.messages == []


def test_another_set_of_variables_is_a_mismatch():
    first, second = small(), small()
    tree = taken(first)
    tree["optimizers"][0]["variables"] = ["fc/weight"]
    words = (
        r"optimizer 0: its variables is \['fc/weight'\] in the checkpoint, \['fc/weight', 'fc/bias'\] in the program"
    )
    with pytest.raises(MismatchError, match=words):
        restore(second, tree)


def test_a_changed_learning_rate_comes_back():
    first = small()
    first.optimizers()[0].param_groups[0]["lr"] = 0.025
    second = small()
    restore(second, taken(first))
    assert second.optimizers()[0].param_groups[0]["lr"] == 0.025


def test_without_positions_only_what_was_learnt_comes_back():
    first = small()
    first.fit(efl.procedure_fn.train_and_eval(train_step=3, max_iter=1))
    second = small()
    random_before = torch.get_rng_state()
    restore(second, taken(first), positions=False)
    assert torch.equal(second.variables()["fc/weight"], first.variables()["fc/weight"])
    assert int(second.global_step) == 3
    assert second.optimizers()[0].state
    assert second.streams[efl.TaskScope(MODE.TRAIN)].position == 0
    assert (second.history, second.patience.left) == ([], 3)
    assert torch.equal(torch.get_rng_state(), random_before)


def test_the_tree_holds_the_live_tensors():
    model = small()
    assert capture(model)["variables"]["fc/weight"] is model.variables()["fc/weight"]


def test_optimizer_state_goes_by_the_names_of_variables():
    model = small()
    model.fit(efl.procedure_fn.train(1))
    (saved,) = capture(model)["optimizers"]
    assert saved["kind"] == "Adam"
    assert saved["variables"] == ["fc/weight", "fc/bias"]
    assert set(saved["state"]) == {"fc/weight", "fc/bias"}


SGD = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (functools.partial(small, out=3), r"fc/weight: \[1, 2\] in the checkpoint, \[3, 2\] in the model"),
        (functools.partial(small, name="tower"), r"tower/weight: in the model only"),
        (functools.partial(small, name="tower"), r"fc/weight: in the checkpoint only"),
        (functools.partial(small, name="tower"), r"choose another checkpoint_dir .*, or load what fits .*ModelBank"),
        (functools.partial(small, opt=SGD), "optimizer 0: its kind is Adam in the checkpoint, SGD in the program"),
        (functools.partial(small, extra=[f"l{i}" for i in range(9)]), "and 10 more"),
    ],
)
def test_another_model_is_a_mismatch_that_shows_the_difference(other, words):
    first, second = small(), other()
    before = weights(second)
    with pytest.raises(MismatchError, match=words):
        restore(second, taken(first))
    assert all(torch.equal(before[name], value) for name, value in second.variables().items())


def test_another_number_of_optimizers_is_a_mismatch():
    first, second = small(), small()
    tree = taken(first)
    tree["optimizers"] = []
    with pytest.raises(MismatchError, match="the checkpoint has 0 optimizers, the model has 1"):
        restore(second, tree)


def test_other_data_is_an_error_that_shows_the_difference():
    with pytest.raises(DataError, match=r"input 'TRAIN' is not the one(.|\n)*rows +12 +9"):
        restore(small(rows=9), taken(small()))


@pytest.mark.parametrize("part", ["variables", "optimizers", "global_step", "streams", "random", "history"])
def test_a_tree_without_a_part_is_a_checkpoint_error(part):
    tree = taken(small())
    del tree[part]
    with pytest.raises(CheckpointError, match=f"lacks a part of the state: KeyError\\('{part}'\\)"):
        restore(small(), tree)


def test_another_format_is_named():
    with pytest.raises(CheckpointError, match="the checkpoint has format 99, this plait reads"):
        restore(small(), {**taken(small()), "format": 99})


def test_a_rate_that_a_hook_lowered_is_no_change_of_the_program(caplog):
    lowered, again = small(), small()
    scale_learning_rate(lowered.optimizers()[0], 0.5)
    tree = snapshot(capture(lowered))
    with caplog.at_level("WARNING", logger="plait"):
        restore(again, tree)
    assert again.optimizers()[0].param_groups[0]["lr"] == lowered.optimizers()[0].param_groups[0]["lr"]
    assert not caplog.records


class TestMergedGradients:
    """A checkpoint between two moves of the variables."""

    def test_they_come_back(self):
        first, second = small(strategy=Local(4)), small(strategy=Local(4))
        first.fit(efl.procedure_fn.train(6))
        tree = taken(first)
        for model in (first, second):
            restore(model, snapshot(tree))
            model.fit(efl.procedure_fn.train(3))
        assert all(torch.equal(first.variables()[name], value) for name, value in second.variables().items())

    def test_none_are_kept_after_a_move(self):
        model = small(strategy=Local(2))
        model.fit(efl.procedure_fn.train(2))
        assert capture(model)["merged"] == {}
        restore(model, taken(model))
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_rows_come_back_as_rows(self):
        model = efl.Model()
        model.table = nn.Embedding(4, 2, sparse=True)
        model.input_fn(lambda model, mode: [{"x": torch.tensor([1, 3, 1])}] * 2)
        model.loss_fn(lambda model, sample: model.table(sample.x).square().sum())
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD)).compile(strategy=Local(8))
        model.fit(efl.procedure_fn.train())
        before = model.table.weight.grad
        restore(model, taken(model))
        after = model.table.weight.grad
        assert after.is_sparse
        assert torch.equal(after._indices(), before._indices())
        assert torch.equal(after.to_dense(), before.to_dense())

    def test_another_project_starts_without_them(self):
        first, second = small(strategy=Local(4)), small(strategy=Local(4))
        first.fit(efl.procedure_fn.train(6))
        restore(second, taken(first), positions=False)
        assert all(parameter.grad is None for parameter in second.parameters())


class Noting(Local):
    """The second of two workers, with what a checkpoint asks of it."""

    worker_id, worker_num, in_step = 1, 2, True

    def __init__(self):
        super().__init__()
        self.chiefs = None
        self.taken = []

    def gather(self, value):
        return snapshot([value if self.chiefs is None else self.chiefs, value])

    def capture(self, model, directory):
        return {"directory": directory}

    def restore(self, model, state, directory):
        self.taken.append((model, state, directory))


class TestTwoWorkers:
    def test_each_goes_on_with_what_is_its_own(self):
        model = small(strategy=Noting())
        model.batch_norm = nn.BatchNorm1d(2)
        model.fit(efl.procedure_fn.train(3))
        model.batch_norm.running_mean.fill_(1.0)
        chiefs = snapshot(capture(small()))
        model.strategy.chiefs = chiefs
        tree, place = snapshot(capture(model)), model.streams[efl.TaskScope(MODE.TRAIN)].state_dict()
        tree |= {name: chiefs[name] for name in ("metrics", "streams", "hooks", "random")}  # the chief's, for nobody
        tree["variables"]["batch_norm/running_mean"] = torch.full([2], 3.0)
        draws = drawn()
        model.batch_norm.running_mean.fill_(5.0)
        model.patience.left = 99
        model.streams[efl.TaskScope(MODE.TRAIN)].load_state_dict({**place, "position": 0})
        restore(model, tree)
        assert drawn() == draws
        assert model.streams[efl.TaskScope(MODE.TRAIN)].state_dict() == place
        assert model.patience.left == 0
        assert model.batch_norm.running_mean.tolist() == [1, 1]

    def test_variables_are_the_chiefs(self):
        model = small(strategy=Noting())
        tree = snapshot(capture(model))
        tree["variables"]["fc/weight"].fill_(7.0)
        restore(model, tree)
        assert model.variables()["fc/weight"].tolist() == [[7, 7]]

    def test_the_strategy_saves_beside_it_and_takes_that_back(self):
        model = small(strategy=Noting())
        tree = snapshot(capture(model, "where"))
        restore(model, tree, directory="there")
        assert model.strategy.taken == [(model, {"directory": "where"}, "there")]

    @pytest.mark.parametrize(("made_by", "now"), [(None, Noting()), (Noting(), None)])
    def test_another_number_of_workers_cannot_go_on(self, made_by, now):
        was, are = (1 if one is None else 2 for one in (made_by, now))
        words = (
            rf"made by {was} worker\(s\), there are {are} now, who would not know where in the data to go on: start as "
            "many, or choose another project_name, which keeps the weights and starts the stages anew"
        )
        model = small(strategy=now)
        before = weights(model)
        with pytest.raises(MismatchError, match=words):
            restore(model, taken(small(strategy=made_by)))
        assert all(torch.equal(before[name], value) for name, value in model.variables().items())

    def test_another_number_of_workers_may_take_the_weights(self):
        first, second = small(), small(strategy=Noting())
        restore(second, taken(first), positions=False)
        assert torch.equal(second.variables()["fc/weight"], first.variables()["fc/weight"])

    def test_a_checkpoint_of_workers_apart_is_not_one_of_workers_in_step(self):
        tree = taken(small(strategy=Noting()))
        del tree["workers"]
        with pytest.raises(CheckpointError, match=r"lacks a part of the state: KeyError\('workers'\)"):
            restore(small(strategy=Noting()), tree)

    @pytest.mark.parametrize("merge", [1, 4])
    def test_both_go_on_bit_for_bit_also_between_two_moves(self, merge):
        make = lambda: [plain(worker) for worker in workers(2, merge)]
        whole = make()
        together(whole, lambda model: model.fit(efl.procedure_fn.train(9)))
        begun, again = make(), make()
        together(begun, lambda model: model.fit(efl.procedure_fn.train(6)))
        trees = together(begun, lambda model: snapshot(capture(model)))
        for model in again:
            restore(model, snapshot(trees[0]))
        together(again, lambda model: model.fit(efl.procedure_fn.train(3)))
        for model in again:
            assert all(torch.equal(whole[0].variables()[name], value) for name, value in model.variables().items())


def plain(strategy):
    """A model without chance, since the threads of a test share the random states."""
    torch.manual_seed(1)
    model = efl.Model()
    model.net = nn.Linear(2, 1)
    model.input_fn(lambda model, mode: plait.data.TensorSource({"x": X}, 1, shuffle=True, num_epochs=5))
    model.loss_fn(lambda model, sample: model.net(sample.x).square().mean())
    return model.optimizer_fn(efl.optimizer_fn.optimizer_setter(ADAM)).compile(strategy=strategy)


def test_how_an_optimizer_computes_is_the_programs_not_the_checkpoints(caplog):
    fused, plain = (functools.partial(ADAM, fused=how) for how in (True, None))
    before = small(opt=fused)
    before.fit(efl.procedure_fn.train(max_step=3))
    after = small(opt=plain)
    restore(after, capture(before))
    (optimizer,) = after.optimizers()
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert "fused" not in caplog.text
    after.fit(efl.procedure_fn.train(max_step=3))


def test_an_optimizers_state_is_laid_in_memory_as_its_variables_are():
    def made():
        model = efl.Model()
        model.net = nn.Conv2d(3, 4, 3)
        model.input_fn(lambda model, mode: [torch.ones(2, 3, 5, 5)] * 4)
        model.loss_fn(lambda model, sample: model.net(sample[0]).square().mean())
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(ADAM))
        return model.compile(session_config={"device": "cpu", "channels_last": True})

    before = made()
    before.fit(efl.procedure_fn.train(max_step=2))
    contiguous = {name: value.contiguous() for name, value in before.variables().items()}
    tree = capture(before)
    for values in tree["optimizers"][0]["state"].values():
        values.update({name: value.contiguous() for name, value in values.items()})  # as files have them
    after = made()
    restore(after, {**tree, "variables": contiguous})
    (optimizer,) = after.optimizers()
    weight = after.net.weight
    assert not weight.is_contiguous()
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
