"""Captured steps on a GPU, beside the same steps as always."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait import efl, mox, train
from plait.data import TensorSource
from plait.engine import capture as capturing
from plait.engine.build import current_model
from plait.engine.settings import GradientConfig
from plait.engine.strategy import Local
from plait.mox.flags import reset_flags

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS, SIZE = 320, 32
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.fixture(autouse=True)
def repeatable():
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 16, generator=generator), torch.randint(4, (rows,), generator=generator)


def net(dropout=0.3):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4)
    )


def plain_loss(model, sample):
    logits = model.net(sample.x)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.y, logits))
    loss = F.cross_entropy(logits, sample.y)
    model.add_metric("shown", loss * 2)
    return loss


class Losses(train.SessionRunHook):
    def __init__(self, model):
        self.model = model
        self.seen = []

    def before_run(self, run_context):
        return train.SessionRunArgs(fetches=self.model.loss())

    def after_run(self, run_context, run_values):
        self.seen.append(run_values.results)


def trained(capture, *, factory=SGD, steps=40, loss_fn=plain_loss, rows=ROWS, merge=1, gradient=None, after=None):
    """Losses, weights and metrics after some steps, and how many graphs there are."""
    x, y = data(rows)
    model = efl.Model()
    model.net = net()
    model.input_fn(lambda model, mode: efl.Sample(TensorSource({"x": x, "y": y}, SIZE, num_epochs=100)))
    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(factory))
    config = {"device": "cuda", "capture": capture}
    model.compile(session_config=config, gradient=gradient, strategy=Local(gradient_merge=merge))
    torch.manual_seed(7)
    hook = Losses(model)
    model.fit(efl.procedure_fn.train(max_step=steps), hooks=[hook])
    if after is not None:
        after(model)
        model.fit(efl.procedure_fn.train(max_step=steps), hooks=[hook])
    found = torch.stack(hook.seen).cpu()
    weights = {name: value.detach().cpu() for name, value in model.variables().items()}
    core = model.train_op().captured
    graphs = len(core._graphs) if core is not None else 0
    return found, weights, model.metric_values(), graphs


def assert_alike(one, other, rtol=1e-5):
    torch.testing.assert_close(one[0], other[0], rtol=rtol, atol=1e-6)
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=rtol * 10, atol=1e-5)
    for name, value in one[2].items():
        assert value == pytest.approx(other[2][name], rel=1e-4), name


FACTORIES = {
    "sgd": SGD,
    "torch adam": functools.partial(torch.optim.Adam, lr=0.01),
    "torch adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adam": mox.get_optimizer_fn("adam", learning_rate=0.01)(),
    "momentum": mox.get_optimizer_fn("momentum", learning_rate=0.05, momentum=0.9)(),
    "rmsprop": mox.get_optimizer_fn("rmsprop", learning_rate=0.01, momentum=0.5)(),
    "ftrl": mox.get_optimizer_fn("ftrl", learning_rate=0.1)(),
    "lars": mox.get_optimizer_wrapper_fn("lars", mox.get_optimizer_fn("momentum", learning_rate=1.0, momentum=0.9)())(),
    "schedule": mox.get_optimizer_fn("momentum", lambda step: 0.1 / (1 + step), momentum=0.9)(),
}


@pytest.mark.parametrize("name", list(FACTORIES))
def test_captured_equals_uncaptured(name):
    captured, eager = (trained(capture, factory=FACTORIES[name]) for capture in (True, False))
    assert captured[3] == 1
    assert len(captured[0].unique()) > 30
    assert_alike(captured, eager, rtol=1e-4)


def test_gradients_are_clipped():
    gradient = GradientConfig(clip=0.05)
    assert_alike(trained(True, gradient=gradient), trained(False, gradient=gradient))


def test_gradients_are_merged():
    captured, eager = (trained(capture, merge=3, steps=60) for capture in (True, False))
    assert captured[3] == 3
    assert_alike(captured, eager)


def test_short_batches_have_a_graph_of_their_own():
    captured, eager = (trained(capture, rows=ROWS + 8, steps=90) for capture in (True, False))
    assert captured[3] == 2
    assert_alike(captured, eager)


def test_merged_gradients_and_short_batches():
    captured, eager = (trained(capture, rows=ROWS + 8, merge=2, steps=150) for capture in (True, False))
    assert_alike(captured, eager)


def test_a_rate_that_somebody_sets_is_seen():
    def lower(model):
        for optimizer in model.optimizers():
            for group in optimizer.param_groups:
                group["lr"] = 0.001

    assert_alike(trained(True, after=lower), trained(False, after=lower))


def test_other_settings_make_another_graph():
    def other(model):
        for optimizer in model.optimizers():
            for group in optimizer.param_groups:
                group["momentum"] = 0.5

    assert_alike(trained(True, after=other), trained(False, after=other))


def test_frozen_variables_stay():
    def freeze(model):
        model.net[0].weight.requires_grad_(False)

    assert_alike(trained(True, after=freeze), trained(False, after=freeze))


def looks_at_a_value(model, sample):
    loss = plain_loss(model, sample)
    return loss * (2 if loss.item() > 1e9 else 1)


def looks_at_the_step(model, sample):
    return plain_loss(model, sample) * (1 + 0 * int(model.global_step))


def keeps_rows(model, sample):
    logits = model.net(sample.x)
    model.add_metric("auc", efl.metrics.auc(sample.y > 1, logits[:, 0].sigmoid(), exact=True))
    return F.cross_entropy(logits, sample.y)


def test_losses_that_somebody_holds_are_no_hindrance():
    held = []

    def holds(model, sample):
        held.append(plain_loss(model, sample))
        return held[-1]

    captured = trained(True, loss_fn=holds)
    assert captured[3] == 1
    assert_alike(captured, trained(False))


def test_optimizers_are_fused_unless_gradients_are_sparse():
    def groups(net, inputs):
        model = efl.Model()
        model.net = net
        model.input_fn(lambda model, mode: [{"x": inputs}] * 3)
        model.loss_fn(lambda model, sample: model.net(sample.x).square().mean())
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
        model.compile(session_config={"device": "cuda"})
        model.fit(efl.procedure_fn.train())
        return [group["fused"] for optimizer in model.optimizers() for group in optimizer.param_groups]

    assert groups(nn.Linear(4, 2), torch.ones(3, 4)) == [True]
    assert groups(nn.Embedding(4, 2, sparse=True), torch.tensor([1, 2])) == [None]


@pytest.mark.parametrize("compiled", [False, True])
def test_pictures_through_mox(compiled, caplog):
    torch.set_float32_matmul_precision("high")  # the compiler would have us warned, and warnings are errors here
    images = torch.randint(0, 255, (160, 28, 28, 1), dtype=torch.uint8)
    labels = torch.randint(10, (160,))

    def model_fn(inputs, mode, **_):
        logits, _ = mox.get_model_fn("lenet" if compiled else "resnet_v1_20", mode, 10)(inputs[0])
        loss = F.cross_entropy(logits, inputs[1])
        return mox.ModelSpec(loss=loss, log_info={"loss": loss})

    mox.set_flag("capture_steps", True)
    mox.set_flag("compile_modules", compiled)
    try:
        mox.run(
            input_fn=lambda mode: TensorSource((images, labels), SIZE, num_epochs=4),
            model_fn=model_fn,
            optimizer_fn=mox.get_optimizer_fn("momentum", learning_rate=0.01, momentum=0.9),
            run_mode=mox.ModeKeys.TRAIN,
            batch_size=SIZE,
            max_number_of_steps=12,
        )
        graphs = current_model().train_op().captured._graphs
    finally:
        reset_flags()
        torch.set_float32_matmul_precision("highest")
    assert "is not captured" not in caplog.text
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [(looks_at_a_value, "captur"), (looks_at_the_step, "global step"), (keeps_rows, "keeps every row")],
)
def test_what_cannot_be_captured_runs_as_always(loss_fn, said, caplog):
    with caplog.at_level(logging.WARNING, logger="plait"):
        captured = trained(True, loss_fn=loss_fn)
    assert captured[3] == 0
    lines = [record.getMessage() for record in caplog.records if "is not captured" in record.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]
    assert_alike(captured, trained(False, loss_fn=loss_fn))


def test_an_optimizer_that_counts_in_python_runs_as_always(caplog):
    factory = functools.partial(torch.optim.Adagrad, lr=0.1)
    with caplog.at_level(logging.WARNING, logger="plait"):
        captured = trained(True, factory=factory)
    assert "Adagrad" in caplog.text
    assert_alike(captured, trained(False, factory=factory))


def test_the_number_of_graphs_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(capturing, "MAX_SHAPES", 1)
    with caplog.at_level(logging.WARNING, logger="plait"):
        captured = trained(True, rows=ROWS + 8, steps=90)
    assert captured[3] == 1
    assert caplog.text.count("is not captured") == 1
    assert_alike(captured, trained(False, rows=ROWS + 8, steps=90))


def test_resumed_equals_uninterrupted(tmp_path):
    def run(steps, folder):
        x, y = data()
        model = efl.Model()
        model.net = net()
        model.input_fn(lambda model, mode: efl.Sample(TensorSource({"x": x, "y": y}, SIZE, num_epochs=100)))
        model.loss_fn(plain_loss)
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(FACTORIES["adam"]))
        model.compile(session_config={"device": "cuda", "capture": True})
        torch.manual_seed(7)
        model.fit(efl.procedure_fn.train(max_step=steps), checkpoint_dir=folder, save_steps=15)
        return {name: value.detach().cpu() for name, value in model.variables().items()}

    whole = run(40, tmp_path / "whole")
    run(20, tmp_path / "parts")
    resumed = run(40, tmp_path / "parts")
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5)


def two_losses(capture):
    x, _ = data()
    model = efl.Model()
    torch.manual_seed(0)
    model.one, model.two = nn.Linear(16, 16), nn.Linear(16, 1)
    model.input_fn(lambda model, mode: efl.Sample(TensorSource({"x": x}, SIZE, num_epochs=100)))

    def loss_fn(model, sample):
        made = model.two(model.one(sample.x)).squeeze(1)
        real = model.two(sample.x).squeeze(1)
        ones, zeros = torch.ones_like(made), torch.zeros_like(made)
        cross = F.binary_cross_entropy_with_logits
        return [cross(made, ones), cross(real, ones) + cross(made, zeros)]

    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.scope_optimizer({"one": SGD, "two": functools.partial(SGD)}))
    model.compile(session_config={"device": "cuda", "capture": capture})
    model.fit(efl.procedure_fn.train(max_step=40))
    return {name: value.detach().cpu() for name, value in model.variables().items()}


def test_two_losses_with_two_optimizers():
    captured, eager = two_losses(True), two_losses(False)
    for name, value in captured.items():
        torch.testing.assert_close(value, eager[name], rtol=1e-4, atol=1e-5)


def test_half_precision_with_a_scale_that_follows_overflows():
    x, y = data()
    model = efl.Model()
    model.net = net()
    model.input_fn(lambda model, mode: efl.Sample(TensorSource({"x": x, "y": y}, SIZE, num_epochs=100)))
    model.loss_fn(plain_loss)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD))
    model.compile(session_config={"device": "cuda", "precision": "fp16"})
    first = []
    model.fit(efl.procedure_fn.train(max_step=1))
    first = model.metric_values()["loss"]
    model.fit(efl.procedure_fn.train(max_step=100))
    assert model.metric_values()["loss"] < first
    assert model.scaler.get_scale() > 0


def test_batches_are_read_ahead_and_whole():
    class Items(list):
        pass

    items = Items((torch.full((8, 4), float(number)), torch.full((8,), number)) for number in range(50))
    model = efl.Model()
    model.net = nn.Linear(4, 1)
    model.input_fn(lambda model, mode: items)
    seen = []

    def loss_fn(model, sample):
        seen.append((sample[0].mean(), sample[1].float().mean()))
        return model.net(sample[0]).mean()

    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD))
    model.compile(session_config={"device": "cuda"})
    seen.clear()
    model.fit(efl.procedure_fn.train())
    assert [float(one) for one, _ in seen] == list(range(50))
    assert [float(two) for _, two in seen] == list(range(50))
    assert model.streams[next(iter(model.streams))].idle >= 0
