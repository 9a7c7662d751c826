"""Reptile and MAML against plain PyTorch, their evaluations, exact resume; and that they learn to learn."""

from __future__ import annotations

import copy
import functools
import logging
import runpy
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import efl
from plait.data.episodes import EpisodeSource, tensor_classes
from plait.efl import MODE
from plait.engine import meta
from plait.engine.meta import fomaml, inner_adam, maml, maml_eval, reptile, reptile_eval
from plait.errors import ConfigError, DataError, TaskError
from plait.rng import derive_seed
from plait.train import SessionRunHook, StopAtStepHook

EXAMPLE = Path(__file__).parents[2] / "examples" / "openks" / "reptile.py"
WIDTH, WAYS = 4, 3
INNER = {"inner_iters": 3, "inner_batch": 4}
SGD = functools.partial(torch.optim.SGD, lr=0.05)
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def classes(seed=0, count=8, each=6):
    """Clouds of points, each around a place of its own."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(count, 1, WIDTH, generator=generator)
    points = places + 0.3 * torch.randn(count, each, WIDTH, generator=generator)
    return tensor_classes(points.flatten(0, 1), torch.arange(count).repeat_interleave(each))


def episodes(mode=MODE.TRAIN, **settings):
    usual = {"ways": WAYS, "shots": 3, "queries": 2, "tasks": 2 if mode is MODE.TRAIN else None, "length": 5}
    return EpisodeSource(classes(0 if mode is MODE.TRAIN else 1), **{**usual, **settings})


def network():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, WAYS))


def smooth():
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WAYS))


def make(optimizer, net=network, data=episodes, *, compiled=True, **gradient):
    torch.manual_seed(3)
    model = efl.Model()
    model.net = net()
    model.input_fn(lambda model, mode: data(mode))
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample.x), sample.y))

    def eval_fn(model, sample):
        logits = model.net(sample.x)[-len(sample.query_y) :]
        model.add_metric("accuracy", efl.metrics.accuracy(sample.query_y, logits))

    model.eval_fn(eval_fn).optimizer_fn(efl.optimizer_fn.optimizer_setter(optimizer))
    return model.compile(gradient=plait.engine.settings.GradientConfig(**gradient)) if compiled else model


def weights(net):
    return [value.detach().clone() for value in net.state_dict().values()]


def parameters(net):
    return [value.detach().clone() for value in net.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def read_tasks(batch):
    """The tasks of a batch as (support_x, support_y, query_x, query_y)."""
    names = ("support_x", "support_y", "query_x", "query_y")
    if batch["support_y"].dim() == 1:
        return [[batch[name] for name in names]]
    return [[batch[name][number] for name in names] for number in range(len(batch["support_y"]))]


# A second, plain implementation


def plain_batches(count, generator, size, iters, replacement):
    """Batches as lists of row numbers, put together one row at a time."""
    if replacement:
        return [torch.randperm(count, generator=generator).tolist()[:size] for _ in range(iters)]
    batches, current = [], []
    while True:
        for row in torch.randperm(count, generator=generator).tolist():
            current.append(row)
            if len(current) == size:
                batches.append(current)
                current = []
            if len(batches) == iters:
                return batches


def plain_reptile(net, optimizer, source, steps, replacement=False, start=1.0, final=0.0):
    for step in range(steps):
        batch = list(source.batches(step // source.length, step % source.length))[0]
        before = parameters(net)
        ends = []
        for number, (x, y, _, _) in enumerate(read_tasks(batch)):
            place = (step // source.length, step % source.length)
            generator = torch.Generator().manual_seed(derive_seed(0, "few-shot", "TRAIN", *place, "batches", number))
            for rows in plain_batches(len(y), generator, 4, 3, replacement):
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()
            ends.append(parameters(net))
            with torch.no_grad():
                for value, old in zip(net.parameters(), before, strict=True):
                    value.copy_(old)
        rate = start * (1 - step / steps) + final * (step / steps)
        with torch.no_grad():
            for value, old, *new in zip(net.parameters(), before, *ends, strict=True):
                value.copy_(old + rate / len(new) * sum(end - old for end in new))


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("optimizer", [inner_adam(1e-2), SGD], ids=["adam", "sgd"])
def test_reptile_equals_plain_pytorch_bit_for_bit(optimizer, replacement):
    model = make(optimizer)
    plain = copy.deepcopy(model.net)
    plain_reptile(plain, optimizer(list(plain.parameters())), episodes(), 7, replacement, 0.8, 0.1)
    before = weights(model.net)
    model.fit(reptile(7, **INNER, meta_step=0.8, meta_step_final=0.1, replacement=replacement))
    assert equal(weights(model.net), weights(plain))  # the statistics of batch normalisation too
    assert not equal(weights(model.net), before)
    assert int(model.global_step) == 7


def plain_gradient(net, tasks, inner_lr, inner_steps, second_order):
    """By hand: the two layers of `smooth` written out as functions of their tensors."""

    def logits(values, x):
        return torch.tanh(x @ values[0].T + values[1]) @ values[2].T + values[3]

    first = [value.detach().clone().requires_grad_() for value in net.parameters()]
    total = 0.0
    for x, y, query_x, query_y in tasks:
        values = list(first)
        for _ in range(inner_steps):
            loss = F.cross_entropy(logits(values, x.to(values[0].dtype)), y)
            gradients = torch.autograd.grad(loss, values, create_graph=True)
            if not second_order:
                gradients = [gradient.detach() for gradient in gradients]
            values = [value - inner_lr * gradient for value, gradient in zip(values, gradients, strict=True)]
        total = total + F.cross_entropy(logits(values, query_x.to(values[0].dtype)), query_y) / len(tasks)
    return total.detach(), torch.autograd.grad(total, first)


def tasks_of(batch, dtype):
    return [[part.to(dtype) if part.is_floating_point() else part for part in task] for task in read_tasks(batch)]


@pytest.mark.parametrize(("procedure", "second_order"), [(maml, True), (fomaml, False)])
def test_gradients_equal_those_by_hand(procedure, second_order):
    model = make(SGD, smooth)
    before = parameters(model.net)
    tasks = tasks_of(next(episodes().batches(0, 0)), torch.float64)
    loss, gradients = plain_gradient(copy.deepcopy(model.net).double(), tasks, 0.4, 3, second_order)
    model.fit(procedure(1, inner_lr=0.4, inner_steps=3))
    for value, old, gradient in zip(parameters(model.net), before, gradients, strict=True):
        torch.testing.assert_close((old - value) / 0.05, gradient.float(), atol=3e-6, rtol=3e-5)
    assert model.metric_values(MODE.TRAIN)["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert int(model.global_step) == 1


def test_mamls_gradient_is_that_of_finite_differences():
    model = make(SGD, lambda: smooth().double(), doubled)
    step = meta._loss_after(model, plait.efl.TaskScope(MODE.TRAIN), 0.4, 3, second_order=True)
    task = meta.Task(*tasks_of(next(episodes().batches(0, 0)), torch.float64)[1])
    loss = step(task)
    gradients = torch.autograd.grad(loss, list(model.net.parameters()))
    for value, gradient in zip(model.net.parameters(), gradients, strict=True):
        for place in [0, value.numel() // 2, value.numel() - 1]:
            found = []
            for nudge in (1e-5, -2e-5):
                with torch.no_grad():
                    value.view(-1)[place] += nudge
                found.append(step(task).item())
            with torch.no_grad():
                value.view(-1)[place] += 1e-5
            assert (found[0] - found[1]) / 2e-5 == pytest.approx(gradient.flatten()[place].item(), abs=1e-8, rel=1e-6)


def doubled(mode):
    """The episodes in float64."""
    rows = [
        {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        for batch in episodes(mode).batches(0, 0)
    ]
    return plait.data.SequenceSource(rows)


def test_maml_with_adam_over_several_steps_equals_plain_pytorch():
    model = make(ADAM, smooth)
    plain = copy.deepcopy(model.net)
    optimizer = ADAM(list(plain.parameters()))
    for batch in episodes().batches(0, 0):
        _, gradients = plain_gradient(plain, read_tasks(batch), 0.1, 2, second_order=True)
        for value, gradient in zip(plain.parameters(), gradients, strict=True):
            value.grad = gradient
        optimizer.step()
    model.fit(maml(5, inner_lr=0.1, inner_steps=2))
    for mine, other in zip(parameters(model.net), parameters(plain), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=0)


def test_maml_moves_variables_made_where_they_are_used():
    """Those of plait.layer and plait.get_variable are replaced in the inner steps like those of assigned modules."""

    def scoped(model, sample):
        hidden = plait.layer("hidden", nn.Linear, WIDTH, 5)(sample.x).tanh()
        return F.cross_entropy(hidden @ plait.get_variable("out", [5, WAYS]), sample.y)

    model = efl.Model(seed=4).input_fn(lambda model, mode: episodes(mode)).loss_fn(scoped)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD)).compile()
    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WAYS, bias=False))
    with torch.no_grad():
        for mine, name in zip(net.parameters(), ("hidden/weight", "hidden/bias", "out"), strict=True):
            mine.copy_(model.variables()[name].T if name == "out" else model.variables()[name])
    assigned = make(SGD, lambda: net)
    for one in (model, assigned):
        one.fit(maml(2, inner_lr=0.4, inner_steps=3))
    torch.testing.assert_close(model.variables()["out"].T, net[2].weight, atol=1e-6, rtol=0)
    torch.testing.assert_close(model.variables()["hidden/weight"], net[0].weight, atol=1e-6, rtol=0)


def test_maml_through_batch_normalisation():
    model = make(SGD, lambda: network().double(), doubled)
    tasks = tasks_of(next(episodes().batches(0, 0)), torch.float64)
    first = dict(model.net.named_parameters())
    total = 0.0
    for x, y, query_x, query_y in tasks:
        values = dict(first)
        for _ in range(2):
            logits = torch.func.functional_call(copy.deepcopy(model.net), values, (x,))
            changes = torch.autograd.grad(F.cross_entropy(logits, y), list(values.values()), create_graph=True)
            values = {name: value - 0.4 * change for (name, value), change in zip(values.items(), changes, strict=True)}
        logits = torch.func.functional_call(copy.deepcopy(model.net), values, (query_x,))
        total = total + F.cross_entropy(logits, query_y) / len(tasks)
    gradients = torch.autograd.grad(total, list(first.values()))
    before = parameters(model.net)
    model.fit(maml(1, inner_lr=0.4, inner_steps=2))
    for value, old, gradient in zip(parameters(model.net), before, gradients, strict=True):
        torch.testing.assert_close((old - value) / 0.05, gradient, atol=1e-10, rtol=1e-8)


def test_gradient_settings_hold_for_the_meta_update():
    ends = []
    for gradient in ({}, {"loss_scale": 1024.0}, {"clip": 1e-3}):
        model = make(SGD, smooth, **gradient)
        before = parameters(model.net)
        model.fit(maml(1))
        ends.append([(old - new) / 0.05 for old, new in zip(before, parameters(model.net), strict=True)])
    for plain, scaled in zip(ends[0], ends[1], strict=True):
        torch.testing.assert_close(plain, scaled, atol=1e-5, rtol=1e-4)
    assert torch.cat([change.flatten() for change in ends[2]]).norm() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(("count", "size", "iters"), [(9, 4, 6), (3, 5, 4), (10, 10, 3), (7, 1, 20)])
@pytest.mark.parametrize("replacement", [False, True])
def test_inner_batches(count, size, iters, replacement):
    made = meta._inner_batches(count, torch.Generator().manual_seed(1), size=size, iters=iters, replacement=replacement)
    found = [rows.tolist() for rows in made]
    assert found == plain_batches(count, torch.Generator().manual_seed(1), size, iters, replacement)
    if replacement:
        assert all(len(set(rows)) == len(rows) == min(size, count) for rows in found)
    else:
        joined = sum(found, [])
        whole = [joined[begin : begin + count] for begin in range(0, len(joined) - count + 1, count)]
        assert all(sorted(one) == list(range(count)) for one in whole)  # one pass after the other
        assert all(len(rows) == size for rows in found)


# Evaluation


def plain_eval(net, optimizer, source, tasks, *, transductive, iters=3):
    right = []
    for number, batch in zip(range(tasks), source.batches(0, 0)):
        x, y, query_x, query_y = read_tasks(batch)[0]
        one = copy.deepcopy(net)
        inner = optimizer(list(one.parameters()))
        generator = torch.Generator().manual_seed(derive_seed(0, "few-shot", "EVAL", 0, number, "batches", 0))
        for rows in plain_batches(len(y), generator, 4, iters, False):
            inner.zero_grad()
            F.cross_entropy(one(x[rows]), y[rows]).backward()
            inner.step()
        asked = [query_x] if transductive else [torch.cat([x, query_x[n : n + 1]]) for n in range(len(query_y))]
        logits = torch.cat([one(rows)[-(len(query_y) if transductive else 1) :] for rows in asked])
        right += (logits.argmax(1) == query_y).tolist()
    return sum(right) / len(right)


@pytest.mark.parametrize("transductive", [False, True])
def test_reptile_eval_equals_plain_pytorch(transductive):
    model = make(inner_adam(3e-2))
    expected = plain_eval(copy.deepcopy(model.net), inner_adam(3e-2), episodes(MODE.EVAL), 4, transductive=transductive)
    model.fit(reptile_eval(4, inner_iters=3, inner_batch=4, transductive=transductive))
    assert model.history[0]["metrics"]["accuracy"] == pytest.approx(expected)
    assert 0 < expected < 1


def test_what_eval_fn_sees():
    seen = []
    model = make(SGD, compiled=False)
    model.eval_fns[None] = lambda model, sample: seen.append((list(sample.keys()), len(sample.x), len(sample.query_y)))
    model.compile()
    seen.clear()
    model.fit(reptile_eval(1, **INNER))
    assert seen == [(["x", "query_y"], WAYS * 3 + 1, 1)] * WAYS * 2
    seen.clear()
    model.fit(maml_eval(1, transductive=True), project_name="another")
    assert seen == [(["x", "query_y"], WAYS * 2, WAYS * 2)]


def state_of(model):
    tensors = [value.clone() for value in [*model.parameters(), *model.buffers()]]
    optimizers = copy.deepcopy([optimizer.state_dict() for optimizer in model.optimizers()])
    return tensors, repr(optimizers), repr(model.metric_values(MODE.TRAIN)), int(model.global_step)


@pytest.mark.parametrize("evaluate", [reptile_eval(3, **INNER), maml_eval(3)])
def test_an_evaluation_changes_nothing(evaluate):
    model = make(inner_adam(1e-2))
    noted = []

    def note(sess):
        noted.append(state_of(model))

    def procedure(model):
        reptile(2, **INNER)(model)
        model.run_stage("before", note)
        evaluate(model)
        model.run_stage("after", note)

    model.fit(procedure)
    (tensors, *rest), (tensors_after, *rest_after) = noted
    assert equal(tensors, tensors_after)
    assert rest == rest_after
    assert rest[-1] == 2


def test_training_is_the_same_with_evaluations_in_between():
    def alone(model):
        reptile(2, **INNER, meta_step_final=0.5)(model)
        reptile(2, **INNER, meta_step=0.5)(model)

    def between(model):
        reptile_eval(2, **INNER)(model)
        reptile(2, **INNER, meta_step_final=0.5)(model)
        reptile_eval(2, **INNER)(model)
        reptile(2, **INNER, meta_step=0.5)(model)

    def dropping():
        return nn.Sequential(*network(), nn.Dropout(0.1))

    ends = []
    for procedure in (alone, between):
        model = make(inner_adam(1e-2), dropping)
        model.fit(procedure)
        ends.append(weights(model.net))
    assert equal(*ends)


def test_modules_are_in_training_mode_throughout():
    modes = []

    class Watch(nn.Module):
        def forward(self, x):
            modes.append(self.training)
            return x

    model = make(SGD, lambda: nn.Sequential(*network(), Watch()))
    modes.clear()

    def procedure(model):
        reptile(1, **INNER)(model)
        reptile_eval(1, **INNER)(model)

    model.fit(procedure)
    assert len(modes) == 2 * 3 + 3 + WAYS * 2
    assert all(modes)


def test_hooks_and_added_ops_run_once_a_meta_step():
    runs = []

    class Note(SessionRunHook):
        def after_run(self, run_context, run_values):
            runs.append(int(model.global_step))

    model = make(SGD)
    model.add_train_op(lambda: runs.append("op"))
    model.add_hooks([Note()], MODE.TRAIN)
    model.fit(reptile(3, **INNER))
    assert runs == ["op", 1, "op", 2, "op", 3]


def test_a_hook_may_stop_it(caplog):
    model = make(SGD)
    model.fit(maml(50), hooks=[StopAtStepHook(last_step=3)])
    assert int(model.global_step) == 3
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_passes_follow_each_other_until_max_step_or_the_last(caplog):
    model = make(SGD)
    model.fit(reptile(12, **INNER))  # a pass has 5 batches
    assert int(model.global_step) == 12
    short = make(SGD, data=lambda mode: episodes(mode, num_epochs=2))
    short.fit(reptile(12, **INNER))
    assert int(short.global_step) == 10
    assert "reptile ended at step 10 of max_step=12, with the data" in caplog.text


def test_the_log_counts_the_rows_of_the_episodes():
    model = make(SGD)
    seen = []

    class Note(SessionRunHook):
        def after_run(self, run_context, run_values):
            seen.append(model._now.sample.batch_size)  # what the log takes for the rows of a step

    model.add_hooks([Note()], MODE.TRAIN)
    model.fit(reptile(1, **INNER))
    assert seen == [episodes().batch_size] == [2 * WAYS * 5]


def test_a_step_that_fails_leaves_the_weights_where_it_began():
    calls = []

    def loss_fn(model, sample):
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("in the middle of the second step")
        return F.cross_entropy(model.net(sample.x), sample.y)

    model = make(SGD, smooth, compiled=False)
    model.loss_fns[None] = loss_fn
    model.compile()
    calls.clear()
    noted = []

    class Note(SessionRunHook):
        def after_run(self, run_context, run_values):
            noted.append(parameters(model.net))

    model.add_hooks([Note()], MODE.TRAIN)
    with pytest.raises(RuntimeError, match="in the middle"):
        model.fit(reptile(3, **INNER))
    assert len(noted) == 1
    assert equal(parameters(model.net), noted[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_step": 0}, "max_step=0: write a whole number above 0"),
        ({"max_step": 1, "inner_iters": 0}, "inner_iters=0"),
        ({"max_step": 1, "inner_batch": 2.5}, "inner_batch=2.5"),
    ],
)
def test_wrong_settings_of_reptile(settings, words):
    with pytest.raises(ConfigError, match=words):
        reptile(**settings)


@pytest.mark.parametrize("make_one", [maml, fomaml, maml_eval])
@pytest.mark.parametrize(
    ("settings", "words"), [({"inner_lr": 0}, "inner_lr=0"), ({"inner_steps": 0}, "inner_steps=0")]
)
def test_wrong_settings_of_maml(make_one, settings, words):
    with pytest.raises(ConfigError, match=words):
        make_one(1, **settings)


@pytest.mark.parametrize(
    ("procedure", "data", "words"),
    [
        (maml(1), lambda mode: episodes(mode, queries=0), "MAML learns from queries, and the episodes have none"),
        (reptile_eval(1), lambda mode: episodes(mode, tasks=2, queries=0), "a batch has 2 tasks; an evaluation takes"),
        (reptile_eval(1), lambda mode: episodes(mode, queries=0), "no queries to ask about"),
        (
            reptile(1),
            lambda mode: {"x": torch.zeros(6, WIDTH), "y": torch.zeros(6).long(), "query_y": torch.zeros(6).long()},
            "no field 'support_x', there are 'x', 'y', 'query_y'; return a plait.data.episodes.EpisodeSource",
        ),
    ],
)
def test_wrong_episodes(procedure, data, words):
    model = make(SGD, data=data, compiled=False)
    model.eval_fns[None] = lambda model, sample: model.net(sample.x)
    with pytest.raises(DataError, match=words):
        model.fit(procedure)


def test_maml_takes_one_loss():
    model = make(SGD, smooth, compiled=False)
    model.loss_fns[None] = lambda model, sample: [model.net(sample.x).sum(), model.net[0](sample.x).sum()]
    model.opt_fns[None] = efl.optimizer_fn.scope_optimizer({"net/0": SGD, "net/2": functools.partial(SGD)})
    with pytest.raises(TaskError, match="maml.. follows one loss, the loss_fn returns several"):
        model.fit(maml(1))


@pytest.mark.parametrize("evaluate", [reptile_eval(1), maml_eval(1)])
def test_an_evaluation_needs_a_loss_to_learn_by(evaluate):
    model = make(SGD, compiled=False)
    del model.loss_fns[None], model.opt_fns[None]
    with pytest.raises(TaskError, match="task None has no (optimizer|loss)"):
        model.fit(evaluate)


# Exact resume


def meta_reptile(model):
    reptile(4, **INNER, meta_step_final=0.5)(model)
    reptile_eval(2, **INNER)(model)
    reptile(3, **INNER, meta_step=0.5, seed=1)(model)
    reptile_eval(2, **INNER)(model)


def meta_maml(model):
    maml(3, inner_lr=0.1)(model)
    maml_eval(2, inner_lr=0.1)(model)
    fomaml(3, inner_lr=0.1)(model)


def result_of(procedure, optimizer, directory=None, **settings):
    model = make(optimizer, lambda: nn.Sequential(*network(), nn.Dropout(0.1)))
    model.fit(procedure, checkpoint_dir=directory, keep=None, **settings)
    state = [optimizer.state_dict()["state"] for optimizer in model.optimizers()]
    found = (weights(model.net), state, model.history, int(model.global_step), torch.get_rng_state().tolist())
    return [repr(torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, part)) for part in found]


@pytest.mark.parametrize(("procedure", "optimizer"), [(meta_reptile, inner_adam(1e-2)), (meta_maml, ADAM)])
def test_resuming_at_every_boundary_gives_the_same_bits(procedure, optimizer, tmp_path):
    expected = result_of(procedure, optimizer)
    assert result_of(procedure, optimizer, tmp_path / "all", save_secs=1e-9) == expected
    saved = sorted((tmp_path / "all").glob("ckpt-*"))
    assert len(saved) > 8
    for path in saved:
        shutil.copytree(path, tmp_path / path.name / path.name)
        assert result_of(procedure, optimizer, tmp_path / path.name) == expected, f"from {path.name}"


# Learning to learn


def accuracies(train_glyphs, tasks, steps, asked, iters):
    """What is right of glyphs never seen, one drawing of each of five: learnt from scratch, and after Reptile."""
    glyphs = runpy.run_path(str(EXAMPLE))

    def data(mode):
        if mode is MODE.TRAIN:
            return EpisodeSource(glyphs["draw_classes"](train_glyphs, 1), shots=10, queries=0, tasks=tasks)
        return EpisodeSource(glyphs["draw_classes"](glyphs["TEST_GLYPHS"], 2))

    model = make(inner_adam(3e-3), glyphs["network"], data, compiled=False)
    model.loss_fns[None], model.eval_fns[None] = glyphs["loss_fn"], glyphs["eval_fn"]

    def procedure(model):
        ask = reptile_eval(asked, inner_iters=iters)
        ask(model)
        reptile(steps, inner_iters=5)(model)
        ask(model)

    model.fit(procedure)
    return [found["metrics"]["accuracy"] for found in model.history]


def test_reptile_learns_to_learn():
    scratch, learnt = accuracies(train_glyphs=100, tasks=3, steps=50, asked=40, iters=10)
    assert learnt > scratch + 0.1


@pytest.mark.slow
def test_reptile_beats_learning_from_scratch_by_twenty_points():
    scratch, learnt = accuracies(train_glyphs=200, tasks=5, steps=150, asked=100, iters=20)
    assert learnt > scratch + 0.2
    assert learnt > 0.7


def test_reptile_leaves_what_no_loss_reaches_as_it_is_to_the_bit():
    model = efl.Model()
    model.net = nn.Linear(4, 3)
    model.idle = nn.Parameter(torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    before = model.idle.detach().clone()
    images, labels = torch.randn(60, 4), torch.arange(6).repeat(10)
    source = EpisodeSource(tensor_classes(images, labels), ways=3, shots=4, queries=0, tasks=5)
    model.input_fn(lambda model, mode: source if mode is efl.MODE.TRAIN else None)
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample.x), sample.y))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(inner_adam(1e-2)))
    model.compile()
    model.fit(reptile(30, inner_iters=2, inner_batch=4))
    assert model.idle.equal(before)


def test_an_evaluation_leaves_the_optimizers_tensors_in_memory_as_the_variables():
    def pictures():
        return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(4, WAYS))

    model = make(inner_adam(1e-2), pictures, compiled=False)
    model.compile(session_config={"device": "cpu", "channels_last": True})
    model.fit(lambda model: (reptile(2, **INNER)(model), reptile_eval(2, **INNER)(model))[0])
    for optimizer in model.optimizers():
        for variable, state in optimizer.state.items():
            assert state["exp_avg"].stride() == variable.stride()
