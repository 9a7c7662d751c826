"""What compile() does, and what it leaves as it was."""

from __future__ import annotations

import functools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.data.parts import PartSource
from plait.efl import MODE
from plait.engine.build import current_model
from plait.engine.strategy import Local
from plait.errors import FunctionError, TaskError
from plait.rng import rng_state
from plait.train import SessionRunArgs, SessionRunHook

SETTER = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1))
X = torch.arange(8.0).reshape(4, 2)


def net_loss(model, sample):
    return model.net(sample.x).mean()


def built(loss_fn=net_loss, eval_fn=net_loss, *, data=None, net=None, **config):
    model = efl.Model()
    model.net = net or nn.Linear(2, 1)
    model.input_fn(lambda model, mode: plait.data.TensorSource({"x": X}, 2) if data is None else data())
    model.loss_fn(loss_fn).eval_fn(eval_fn).optimizer_fn(SETTER)
    return model.compile(session_config=config or None)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one | other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_random_states_are_left_as_they_were():
    def draw(model, sample):
        torch.rand(3)
        np.random.rand(3)  # noqa: NPY002 - the global state is meant
        random.random()
        return net_loss(model, sample)

    before = rng_state()
    net = nn.Linear(2, 1)
    after_net = rng_state()
    assert not same(before, after_net)
    built(draw, draw, net=net)
    assert same(rng_state(), after_net)


def test_an_error_in_a_function_leaves_the_random_states_too():
    def fail(model, sample):
        torch.rand(3)
        raise RuntimeError("mine")

    net = nn.Linear(2, 1)
    before = rng_state()
    with pytest.raises(RuntimeError, match="mine"):
        built(fail, net=net)
    assert same(rng_state(), before)


def test_buffers_of_assigned_and_of_scoped_modules_are_left_as_they_were():
    def loss_fn(model, sample):
        norm = plait.layer("norm", nn.BatchNorm1d, 2)
        return model.net(norm(sample.x)).mean()

    model = built(loss_fn, loss_fn, net=nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    values = model.variables()
    for name in ("net/0", "norm"):
        assert values[f"{name}/running_mean"].tolist() == [0, 0]
        assert values[f"{name}/running_var"].tolist() == [1, 1]
        assert values[f"{name}/num_batches_tracked"] == 0
    model.fit(efl.procedure_fn.train(1))
    assert model.variables()["norm/num_batches_tracked"] == 1


def test_nothing_is_learnt():
    net = nn.Linear(2, 1)
    before = [value.clone() for value in net.parameters()]
    model = built(net=net)
    assert all(map(torch.equal, before, net.parameters()))
    assert all(value.grad is None for value in net.parameters())
    assert int(model.global_step) == 0


def test_positions_are_left_at_the_start_and_the_first_batch_comes_again():
    seen = []

    def loss_fn(model, sample):
        seen.append(sample.x[0, 0].item())
        return net_loss(model, sample)

    model = built(loss_fn)
    assert [(stream.epoch, stream.position) for stream in model.streams.values()] == [(0, 0), (0, 0)]
    model.fit(efl.procedure_fn.train())
    assert seen == [0, 0, 4]


def test_an_iterator_that_can_be_read_once_loses_no_batch():
    seen = []

    def loss_fn(model, sample):
        seen.append(sample.x[0, 0].item())
        return net_loss(model, sample)

    model = efl.Model()
    model.net = nn.Linear(2, 1)
    model.input_fn(lambda model, mode: ({"x": X + i} for i in range(3)) if mode is MODE.TRAIN else None)
    model.loss_fn(loss_fn).optimizer_fn(SETTER).compile().fit(efl.procedure_fn.train())
    assert seen == [0, 0, 1, 2]


def test_each_function_runs_exactly_once():
    calls = []

    def named(name, function=net_loss):
        def call(*args):
            calls.append(name)
            return function(*args)

        return call

    model = efl.Model()
    model.net = nn.Linear(2, 1)
    model.input_fn(named("input", lambda model, mode: [{"x": X}]))
    model.loss_fn(named("loss")).eval_fn(named("eval")).optimizer_fn(named("optimizer", SETTER))
    model.compile()
    assert sorted(calls) == ["eval", "input", "input", "loss", "optimizer"]


def test_metrics_are_reset_after_it():
    def count(model, sample):
        model.add_metric("mean", efl.metrics.mean(sample.x))
        return net_loss(model, sample)

    model = built(count, count)
    for mode in MODE:
        assert math.isnan(model.metric_values(mode)["mean"])


def test_functions_run_in_their_scope_and_mode():
    seen = []

    def note(model, sample):
        seen.append((efl.current_task_scope(), model.training_flag, model.net.training, torch.is_grad_enabled()))
        return net_loss(model, sample)

    built(note, note)
    assert seen == [
        (efl.TaskScope(MODE.TRAIN, None), True, True, True),
        (efl.TaskScope(MODE.EVAL, None), False, False, False),
    ]
    assert efl.current_task_scope() == efl.TaskScope()


def test_the_input_fn_is_asked_in_its_scope():
    seen = []

    def input_fn(model, mode):
        seen.append((mode, efl.current_task_scope()))
        return [{"x": X}]

    model = efl.Model()
    model.net = nn.Linear(2, 1)
    model.input_fn(input_fn, task="a").loss_fn(net_loss, task="a").eval_fn(net_loss, task="a")
    model.optimizer_fn(SETTER, task="a").compile()
    assert seen == [(mode, efl.TaskScope(mode, "a")) for mode in (MODE.TRAIN, MODE.EVAL)]


def test_a_task_whose_input_is_none_for_evaluation_has_no_evaluation():
    model = efl.Model()
    model.net = nn.Linear(2, 1)
    model.input_fn(lambda model, mode: [{"x": X}] if mode is MODE.TRAIN else None)
    model.loss_fn(net_loss).eval_fn(net_loss).optimizer_fn(SETTER).compile()
    with pytest.raises(TaskError, match="task None has no eval op"):
        model.eval_op()


def test_a_model_may_only_evaluate():
    model = efl.Model()
    model.input_fn(lambda model, mode: [{"x": X}] * 2)
    model.eval_fn(lambda model, sample: model.add_metric("mean", sample.x.mean())).compile()
    model.fit(efl.procedure_fn.eval())
    assert model.history[0]["metrics"] == {"mean": 3.5}


def test_a_task_may_be_made_of_ops_alone():
    ran = []
    model = efl.Model()
    model.input_fn(lambda model, mode: [{"x": X}] * 2)
    model.add_train_op(lambda: ran.append(1))
    model.compile()
    model.fit(efl.procedure_fn.train(3))
    assert (len(ran), int(model.global_step)) == (3, 3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda model, s: None, "returned NoneType: return the loss, a tensor"),
        (lambda model, s: 3.0, "returned float: return the loss, a tensor"),
        (lambda model, s: model.net(s.x), r"has shape \[2, 1\]: return one number.*mean"),
        (lambda model, s: net_loss(model, s).detach(), "returned depends on no trainable variable.*without detach"),
    ],
)
def test_a_loss_that_cannot_be_one_is_refused(value, words):
    with pytest.raises(FunctionError, match=f"loss.* for TRAIN {words}"):
        built(value)


def test_a_placeholder_that_nothing_feeds_is_found_at_once():
    def loss_fn(model, sample):
        return net_loss(model, sample) * plait.placeholder()

    with pytest.raises(TaskError, match=r"makes 1 placeholder\(s\) that nothing feeds: add a hook"):
        built(loss_fn)


def test_a_hook_made_in_a_function_feeds_its_placeholder():
    class Feed(SessionRunHook):
        def __init__(self, place):
            self.place = place

        def before_run(self, run_context):
            return SessionRunArgs(feed_dict={self.place: 3.0})

        def rebind(self, fresh):
            pass

    seen = []

    def loss_fn(model, sample):
        place = plait.placeholder(shape=[])
        model.add_hooks([Feed(place)])
        seen.append(place.item())
        return net_loss(model, sample) * place

    built(loss_fn).fit(efl.procedure_fn.train())
    assert seen == [0, 3, 3]


def test_bf16_computes_in_bfloat16_and_keeps_variables_in_float32():
    seen = []

    def loss_fn(model, sample):
        out = model.net(sample.x)
        seen.append(out.dtype)
        return out.float().mean()

    model = built(loss_fn, precision="bf16")
    assert seen == [torch.bfloat16]
    assert model.net.weight.dtype == torch.float32


def test_the_model_compiled_last_is_the_current_one():
    assert current_model() is None
    first, second = built(), built()
    assert current_model() is second
    assert current_model() is not first


class TestStrategy:
    class Two(Local):
        worker_id, worker_num = 1, 2

        def __init__(self):
            super().__init__()
            self.seen = []

        def begin(self, model):
            self.seen.append(("begin", bool(model.calls), bool(model.assignments)))

        def transform(self, model):
            self.seen.append(("transform", bool(model.calls), bool(model.assignments)))

        def prepare(self, model):
            self.seen.append(("prepare", model.compiled, bool(model.assignments)))

        def part(self, source, *, training):
            self.seen.append(("part", training))
            return PartSource(source, 1, 2, together=training)

    def compiled(self, data):
        strategy = self.Two()
        model = efl.Model().input_fn(lambda model, mode: data).optimizer_fn(SETTER)
        model.net = nn.Linear(2, 1)
        return model.loss_fn(net_loss).eval_fn(net_loss).compile(strategy=strategy), strategy

    def test_it_is_asked_before_the_build_between_variables_and_optimizers_and_at_the_end(self):
        _, strategy = self.compiled(plait.data.TensorSource({"x": X}, 1))
        assert [one for one in strategy.seen if one[0] != "part"] == [
            ("begin", False, False),
            ("transform", True, False),
            ("prepare", True, True),
        ]

    def test_each_worker_reads_its_part(self):
        model, strategy = self.compiled(plait.data.TensorSource({"x": X}, 1))
        assert [one for one in strategy.seen if one[0] == "part"] == [("part", True), ("part", False)]
        assert torch.equal(model.streams[efl.TaskScope(MODE.TRAIN)].read().x, X[1:2])


class EmptyFirst(plait.data.TensorSource):
    """Batches that are drawn may have no rows."""

    def batches(self, epoch, start):
        yield {"x": torch.zeros(0, 2)}
        yield from super().batches(epoch, start)


def test_where_the_first_batch_is_empty_the_next_has_its_groups_of_columns():
    model = efl.Model()
    data = plait.data.Sample(
        EmptyFirst({"x": torch.ones(8, 2)}, 4), columns={"wide": ["x", lambda fields: fields["x"]]}
    )
    model.input_fn(lambda model, mode: data)
    model.loss_fn(lambda model, sample: plait.layer("fc", torch.nn.Linear, 4, 1)(sample.wide).mean())
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
    model.compile(session_config={"device": "cpu"})
    assert "fc/weight" in model.variables()
