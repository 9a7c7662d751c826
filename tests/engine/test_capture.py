"""Captured steps without a GPU: a stand-in records what a graph would, so that the steps around it can be seen."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import efl, mox, train
from plait.data import TensorSource
from plait.engine import capture as capturing
from plait.engine.capture import CapturedStep, why_not
from plait.engine.strategy import Local

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ROWS, SIZE = 160, 16


class Replayed:
    """Computes nothing when it records, as a graph; then does the work again for each replay, in the same tensors."""

    made = 0

    def __init__(self, model):
        self.model = model
        Replayed.made += 1

    def warm_up(self, work):
        return work()

    def capture(self, work):
        self.work = work
        before = [value.clone() for value in self.tensors()]
        merged = [(one.grad, one.grad.clone()) for one in self.model.parameters() if one.grad is not None]
        random = torch.get_rng_state()
        try:
            work()
        finally:
            with torch.no_grad():
                for value, old in [*zip(self.tensors(), before, strict=True), *merged]:
                    value.copy_(old)
            torch.set_rng_state(random)
        self.gradients = [one.grad for one in self.model.parameters()]
        self.kept = self.latest()

    def tensors(self):
        states = [metric.sums for metric in self.metrics() if hasattr(metric, "sums")]
        moving = [value for one in self.model.optimizers() for state in one.state.values() for value in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *states, *(v for v in moving if torch.is_tensor(v))]

    def metrics(self):
        return [metric for states in self.model.metric_states.values() for metric in states.values()]

    def latest(self):
        return [(metric, metric.value) for metric in self.metrics() if getattr(metric, "value", None) is not None]

    def replay(self):
        step = self.model.global_step.value
        self.work()
        self.model.global_step.value = step
        with torch.no_grad():
            for variable, kept in zip(self.model.parameters(), self.gradients, strict=True):
                if variable.grad is not kept:
                    variable.grad = kept.copy_(variable.grad)
            for (metric, old), (_, new) in zip(self.kept, self.latest(), strict=True):
                metric.value = old.detach().copy_(new)


def plain_loss(model, sample):
    logits = model.net(sample.x)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.y, logits))
    return F.cross_entropy(logits, sample.y)


def make(loss_fn=plain_loss, *, factory=SGD, rows=ROWS, merge=1):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, 8, generator=generator), torch.randint(4, (rows,), generator=generator)
    model = efl.Model()
    torch.manual_seed(0)
    model.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    model.input_fn(lambda model, mode: efl.Sample(TensorSource({"x": x, "y": y}, SIZE, num_epochs=100)))
    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(factory))
    return model.compile(session_config={"device": "cpu"}, strategy=Local(gradient_merge=merge))


def captured(model):
    """The model with its step in a stand-in for a graph."""
    op = model.train_op()
    (clear,), (loss,) = op.first, op.inputs
    parts = (clear.fn, loss.fn, op.fn)
    op.captured = CapturedStep(model, None, parts, list(model.opt_to_vars()), lambda: Replayed(model))
    return model


def fit(model, steps=30, hooks=()):
    torch.manual_seed(7)
    model.fit(efl.procedure_fn.train(max_step=steps), hooks=hooks)
    return {name: value.detach().clone() for name, value in model.variables().items()}


def assert_same(one, other):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("merge", [1, 3])
@pytest.mark.parametrize("rows", [ROWS, ROWS + 4], ids=["even", "short last batch"])
def test_replayed_steps_are_those_of_always(merge, rows):
    model = captured(make(merge=merge, rows=rows))
    assert_same(fit(model, 60), fit(make(merge=merge, rows=rows), 60))
    assert model.train_op().captured._graphs
    assert model.global_step.value == 60
    assert model.metric_values()["accuracy"] > 0


def test_a_schedule_reaches_the_graph():
    factory = mox.get_optimizer_fn("momentum", lambda step: 0.2 / (1 + step), momentum=0.9)()
    model = captured(make(factory=factory))
    fit(model)
    (rate,) = model.train_op().captured._rates
    assert rate.number == pytest.approx(0.2 / 30)
    assert float(rate.tensor) == pytest.approx(0.2 / 30)
    assert model.optimizers()[0].param_groups[0]["lr"] == pytest.approx(0.2 / 30)  # a number, for everybody else


def test_fetched_values_are_copies():
    model = captured(make())
    seen = []

    class Keep(train.SessionRunHook):
        def before_run(self, run_context):
            return train.SessionRunArgs(fetches=model.loss())

        def after_run(self, run_context, run_values):
            seen.append(run_values.results)

    fit(model, hooks=[Keep()])
    assert len({value.data_ptr() for value in seen}) == len(seen)


def test_other_ops_run_after_the_core_and_others_before():
    model, order = make(), []
    model.add_train_op(plait.op(lambda loss: order.append("after"), model.loss()))
    model.add_train_op(lambda: order.append("any time"))
    fit(captured_first(model), steps=6)
    assert order.count("after") == 6
    assert order.count("any time") == 6


def captured_first(model):
    """The same for a model with Ops of its own after the update."""
    op = model.train_ops[None][0]
    (clear,), (loss,) = op.first, op.inputs
    op.captured = CapturedStep(
        model, None, (clear.fn, loss.fn, op.fn), list(model.opt_to_vars()), lambda: Replayed(model)
    )
    return model


def looks_at_the_step(model, sample):
    return plain_loss(model, sample) * (1 + 0 * int(model.global_step))


def test_a_function_that_looks_at_the_step_runs_as_always(caplog):
    model = captured(make(looks_at_the_step))
    with caplog.at_level(logging.WARNING, logger="plait"):
        weights = fit(model)
    assert caplog.text.count("is not captured") == 1
    assert "global step" in caplog.text
    assert_same(weights, fit(make(looks_at_the_step)))


def keeps_rows(model, sample):
    logits = model.net(sample.x)
    model.add_metric("auc", efl.metrics.auc(sample.y > 1, logits[:, 0].sigmoid(), exact=True))
    return F.cross_entropy(logits, sample.y)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (functools.partial(make, keeps_rows), "'auc'"),
        (functools.partial(make, factory=functools.partial(torch.optim.Adagrad, lr=0.1)), "Adagrad"),
    ],
)
def test_what_cannot_be_recorded_is_said_once(model, said, caplog):
    with caplog.at_level(logging.WARNING, logger="plait"):
        fit(captured(model()))
    assert caplog.text.count("is not captured") == 1
    assert said in caplog.text


def test_reasons():
    model = make()
    call, (optimizer,) = model.loss().fn, model.optimizers()
    sample = model.streams[next(iter(model.streams))].read()
    assert why_not(model, call, sample, [optimizer]) is None
    assert "names" in why_not(model, call, type(sample).of({"x": sample.x, "names": ["a"]}), [optimizer])
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert "hook" in why_not(model, call, sample, [optimizer])
    handle.remove()
    model.scaler = torch.amp.GradScaler("cpu")
    assert "fp16" in why_not(model, call, sample, [optimizer])


def test_more_shapes_than_are_kept_leave_the_others_alone(monkeypatch, caplog):
    monkeypatch.setattr(capturing, "MAX_SHAPES", 1)
    model = captured(make(rows=ROWS + 4))
    with caplog.at_level(logging.WARNING, logger="plait"):
        weights = fit(model, 120)
    assert caplog.text.count("is not captured") == 1
    assert len(model.train_op().captured._graphs) == 1
    assert_same(weights, fit(make(rows=ROWS + 4), 120))


def test_settings_that_change_make_new_graphs():
    model, plain = captured(make()), make()
    fit(model), fit(plain)
    made = Replayed.made
    for one in (model, plain):
        one.optimizers()[0].param_groups[0]["momentum"] = 0.1
    assert_same(fit(model, 60), fit(plain, 60))
    assert Replayed.made > made


def test_hooks_of_the_function_have_this_steps_tensors():
    seen = []

    class Watch(train.SessionRunHook):
        def __init__(self, value):
            self.value = value

        def after_run(self, run_context, run_values):
            seen.append(float(self.value))

    def loss_fn(model, sample):
        loss = plain_loss(model, sample)
        model.add_hooks([Watch(sample.x.sum())])
        return loss

    model = make(loss_fn)
    fit(model, 20)
    expected, seen[:] = list(seen), []
    fit(captured(make(loss_fn)), 3)
    assert seen == pytest.approx(expected[:3])
