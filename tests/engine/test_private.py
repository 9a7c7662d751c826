"""Private training through `Model.fit`, against a plain loop over micro-batches that is written out here."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from plait import efl
from plait.data import PoissonSource, TensorSource
from plait.engine.hooks import SessionRunHook
from plait.engine.strategy import Local
from plait.errors import ConfigError, DataError, FunctionError
from plait.privacy.accountant import Event, epsilon, gaussian_epsilon, together
from plait.privacy.optimizers import PrivateFactory, make_private

ROWS, BATCH = 96, 16
X = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (ROWS,), generator=torch.Generator().manual_seed(1))
SGD = functools.partial(torch.optim.SGD, lr=0.5)
CLIP = 0.7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.tower = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.tower(x))


def batches(batch=BATCH):
    return TensorSource({"x": X, "y": Y}, batch, shuffle=True, seed=5, num_epochs=2)


def losses_of(model, sample):
    return F.cross_entropy(model.net(sample["x"]), sample["y"], reduction="none")


def private(factory=SGD, clip=CLIP, noise=0.0, **options):
    return make_private(factory, clip, noise, **options)


def made(opt=None, *, reduce="mean", source=batches, optimizer_fn=None, strategy=None, **settings):
    model = efl.Model()
    model.net = Net()
    model.input_fn(lambda model, mode: source())
    model.loss_fn(losses_of)
    model.optimizer_fn(optimizer_fn or efl.optimizer_fn.optimizer_setter(opt or private()))
    return model.compile(session_config={"device": "cpu"}, opt_config={"REDUCE": reduce}, strategy=strategy, **settings)


def fitted(*args, **kwargs):
    model = made(*args, **kwargs)
    model.fit(efl.procedure_fn.train())
    return model


def clipped_sum(net, losses, microbatches, reduce, limit):
    """One backward pass for each micro-batch."""
    variables = list(net.parameters())
    total = [torch.zeros_like(value) for value in variables]
    for group in losses.view(microbatches, -1):
        found = torch.autograd.grad(reduce(group), variables, retain_graph=True)
        norm = math.sqrt(sum(float(one.square().sum()) for one in found))
        for place, one in zip(total, found, strict=True):
            place.add_(one * min(1.0, limit / norm))
    return variables, total


def reference(microbatches=None, reduce=torch.mean, batch=BATCH, limit=CLIP):
    net = Net()
    optimizer = SGD(net.parameters())
    for epoch in range(2):
        for sample in batches(batch).batches(epoch, 0):
            losses = F.cross_entropy(net(sample["x"]), sample["y"], reduction="none")
            count = microbatches or len(losses)
            variables, total = clipped_sum(net, losses, count, reduce, limit)
            for variable, one in zip(variables, total, strict=True):
                variable.grad = one / count
            optimizer.step()
    return net


def assert_alike(net, expected, tolerance=1e-5):
    for (name, one), other in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=tolerance, rtol=0), name


def strange(losses):
    return losses.square().sum() / 2


@pytest.mark.parametrize("microbatches", [1, 8, None])
@pytest.mark.parametrize(("reduce", "function"), [("mean", torch.mean), ("sum", torch.sum), (strange, strange)])
def test_training_is_that_of_a_loop_over_micro_batches(microbatches, reduce, function):
    model = fitted(private(num_microbatches=microbatches), reduce=reduce)
    assert_alike(model.net, reference(microbatches, function))
    assert model.global_step.value == 12


class Pictures(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(4)
        after = nn.GroupNorm(2, 4) if norm else nn.Identity()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            after,
            nn.ReLU(),
            nn.Conv2d(4, 3, 2),
            nn.Flatten(),
            nn.Linear(12, 3),
        )

    def forward(self, x):
        return self.net(x.repeat(1, 6).view(-1, 1, 6, 6))


class Words(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        torch.manual_seed(4)
        self.table, self.rnn = nn.Embedding(5, 4), nn.LSTM(4, 4, batch_first=True) if rnn else None
        self.head = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        found = self.table((x.abs() * 3).long() % 5)
        if self.rnn is not None:
            found, _ = self.rnn(found)
        return self.head(found.flatten(1))


NETS = {
    "cnn": lambda: Pictures(norm=False),
    "group norm": lambda: Pictures(norm=True),
    "embedding": lambda: Words(rnn=False),
    "lstm": lambda: Words(rnn=True),
}


@pytest.mark.parametrize("microbatches", [1, 8, None])
@pytest.mark.parametrize(("reduce", "function"), [("mean", torch.mean), ("sum", torch.sum), (strange, strange)])
@pytest.mark.parametrize("net", list(NETS))
def test_training_of_any_net_is_that_of_a_loop(net, microbatches, reduce, function, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Net", NETS[net])
    model = fitted(private(num_microbatches=microbatches), reduce=reduce)
    assert_alike(model.net, reference(microbatches, function))


def by_scope(tower, head):
    return efl.optimizer_fn.scope_optimizer({"net/tower": tower, "net/head": head})


def test_each_optimizer_clips_its_own_variables():
    limits = {"tower": 0.1, "head": 0.4}
    model = fitted(optimizer_fn=by_scope(private(clip=0.1), private(clip=0.4)))
    net = Net()
    optimizers = {name: SGD(getattr(net, name).parameters()) for name in limits}
    for epoch in range(2):
        for sample in batches().batches(epoch, 0):
            losses = F.cross_entropy(net(sample["x"]), sample["y"], reduction="none")
            for name, limit in limits.items():
                variables, total = clipped_sum(getattr(net, name), losses, BATCH, torch.mean, limit)
                for variable, one in zip(variables, total, strict=True):
                    variable.grad = one / BATCH
            for optimizer in optimizers.values():
                optimizer.step()
    assert_alike(model.net, net)


def test_two_mechanisms_on_one_batch_are_one_release_with_their_noise_together():
    model = fitted(optimizer_fn=by_scope(private(noise=2.0), private(noise=3.0)))
    one = fitted(private(noise=(1 / 4 + 1 / 9) ** -0.5))
    assert model.privacy.epsilon(exact=True) == pytest.approx(one.privacy.epsilon(exact=True), rel=1e-6)


def two_tasks(first, second, *, seeds=(5, 6), losses=(losses_of, losses_of), **settings):
    model = efl.Model()
    model.net = Net()
    for task, opt, seed, loss in zip("ab", (first, second), seeds, losses, strict=True):
        source = TensorSource({"x": X, "y": Y}, BATCH, shuffle=True, seed=seed, num_epochs=2)
        model.input_fn(lambda model, mode, source=source: source, task=task)
        model.loss_fn(loss, task=task)
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt), task=task)
    return model.compile(session_config={"device": "cpu"}, **settings)


def in_turn(turns, steps):
    def procedure(model):
        for _ in range(turns):
            for task in "ab":
                model.run_stage(task, efl.stage.LoopStage(model.train_op(task), step=steps))

    return procedure


def test_the_releases_of_several_tasks_add_up():
    model = two_tasks(private(noise=1.5), private(noise=2.5))
    model.fit(in_turn(1, 3))
    assert model.private_state.step == 6
    events = [(Event(1.5, BATCH / ROWS), 3), (Event(2.5, BATCH / ROWS), 3)]
    assert model.privacy.epsilon(exact=True) == pytest.approx(epsilon(events, 1e-5))
    assert model.metric_values(task="a")["epsilon"] == model.metric_values(task="b")["epsilon"]


def test_two_tasks_with_the_same_batches_tell_of_the_same_rows():
    model = two_tasks(private(noise=1.5), private(noise=2.5), seeds=(5, 5))
    model.fit(in_turn(3, 1))
    once = Event(together(1.5, 2.5), BATCH / ROWS)
    assert model.privacy.epsilon(exact=True) == pytest.approx(epsilon([(once, 3)], 1e-5))


def test_batches_of_several_tasks_are_not_merged():
    with pytest.raises(ConfigError, match="gradient_merge=2 with a private optimizer and the tasks 'a', 'b'"):
        two_tasks(private(noise=50.0), private(noise=0.3), strategy=Local(gradient_merge=2))


def test_no_other_task_moves_what_a_private_one_does():
    for kinds in ((private(), SGD), (SGD, private())):
        losses = [losses_of if isinstance(kind, PrivateFactory) else scalar for kind in kinds]
        with pytest.raises(ConfigError, match=r"is not private and moves 'net/.*', which the private"):
            two_tasks(*kinds, losses=losses)


def test_another_task_may_have_variables_of_its_own():
    def other(model, sample):
        return model.other(sample["x"]).square().mean()

    model = efl.Model()
    model.net, model.other = Net(), nn.Linear(6, 1)
    for task, opt, loss in (("a", private(noise=1.0), losses_of), ("b", SGD, other)):
        model.input_fn(lambda model, mode: batches(), task=task)
        model.loss_fn(loss, task=task)
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt), task=task)
    model.compile(session_config={"device": "cpu"}).fit(in_turn(2, 2))
    assert model.private_state.step == 4


def test_merged_batches_are_one_logical_batch():
    merged = fitted(strategy=Local(gradient_merge=2))
    assert_alike(merged.net, reference(batch=2 * BATCH))
    assert merged.global_step.value == 12
    assert merged.private_state.step == 6


def share_of_a_row(source, merge, steps):
    """How far one row's loss moves the variables in the step after `steps`, in limits of its sum."""
    far = X.abs().sum(1).argmax()
    found = []
    for factor in (1.0, 0.0):

        def losses(model, sample, factor=factor):
            own = (sample["x"] == X[far]).all(1)
            return losses_of(model, sample) * torch.where(own, factor * 100.0, 0.0)

        model = efl.Model()
        model.net = Net()
        model.input_fn(lambda model, mode: source())
        model.loss_fn(losses)
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(private(functools.partial(torch.optim.SGD, lr=1.0))))
        model.compile(session_config={"device": "cpu"}, strategy=Local(gradient_merge=merge))
        before = torch.cat([one.detach().flatten() for one in model.net.parameters()])
        model.fit(efl.procedure_fn.train(steps))
        found.append(torch.cat([one.detach().flatten() for one in model.net.parameters()]) - before)
    return float((found[0] - found[1]).norm()) / CLIP


def test_a_merged_step_that_failed_and_is_made_again_counts_once():
    model, failures = made(strategy=Local(gradient_merge=2)), [1]
    move = next(iter(model.private_tasks.values()))

    def fails(do=move._move):
        if model.global_step.value == 3 and failures.pop():
            failures.append(0)
            raise RuntimeError("once")
        do()

    move._move = fails
    with pytest.raises(RuntimeError, match="once"):
        model.fit(efl.procedure_fn.train())
    before = [one.detach().clone() for one in model.net.parameters()]
    assert model.global_step.value == 3
    model.fit(efl.procedure_fn.train(1))
    net = Net()
    for one, value in zip(net.parameters(), before, strict=True):
        one.data.copy_(value)
    sample = list(batches().batches(0, 0))[3]
    losses = F.cross_entropy(net(sample["x"]), sample["y"], reduction="none")
    variables, total = clipped_sum(net, losses, BATCH, torch.mean, CLIP)
    for variable, one in zip(variables, total, strict=True):
        variable.grad = one / BATCH
    SGD(net.parameters()).step()
    assert_alike(model.net, net)


@pytest.mark.parametrize("merge", [1, 2, 6])
def test_a_row_counts_once_in_a_logical_batch(merge):
    assert share_of_a_row(batches, merge, 6) * merge * BATCH == pytest.approx(1.0, rel=1e-3)


def test_a_row_that_would_count_twice_in_a_logical_batch_is_refused():
    whole = functools.partial(TensorSource, {"x": X, "y": Y}, ROWS, num_epochs=8)
    strategy = Local(gradient_merge=4)
    refused(ConfigError, "gradient_merge=4 and 1 batches in a pass", source=whole, strategy=strategy)
    refused(ConfigError, "gradient_merge=4 and 6 batches in a pass", strategy=strategy)
    refused(ConfigError, "gradient_merge=4 with a ConstantSource", source=lambda: {"x": X, "y": Y}, strategy=strategy)
    listed = {"source": lambda: list(batches().batches(0, 0)), "opt": private(samples=ROWS)}
    refused(ConfigError, "gradient_merge=3 with a SequenceSource", strategy=Local(gradient_merge=3), **listed)


def test_a_merge_that_goes_over_the_end_of_a_pass_is_refused_where_it_happens(tmp_path):
    def make():
        return made(private(noise=1.0), strategy=Local(gradient_merge=2))

    make().fit(efl.procedure_fn.train(3), project_name="a", checkpoint_dir=tmp_path)
    again = make()
    with pytest.raises(DataError, match="ended in the middle of a logical batch"):
        again.fit(efl.procedure_fn.train(), project_name="b", checkpoint_dir=tmp_path)
    # two releases of the first run; one of a single batch, and three of the next five, the last of which was not made
    assert [sum(run.counts.values()) for run in again.privacy._runs()] == [2, 4]
    assert again.private_state.step == 1 + 1 + 2


def test_merged_batches_get_noise_once():
    noisy, quiet = (fitted(private(noise=noise, seed=4), strategy=Local(gradient_merge=3)) for noise in (1.0, 0.0))
    whole = fitted(private(noise=1.0, seed=4), source=lambda: batches(3 * BATCH))
    assert_alike(noisy.net, whole.net)
    assert not torch.allclose(noisy.net.head.weight, quiet.net.head.weight)
    assert noisy.privacy.epsilon(exact=True) == whole.privacy.epsilon(exact=True)


@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_the_noise_has_the_deviation_that_was_asked_for(clipping):
    """At a learning rate of 1, a step of zeros is the noise alone."""
    torch.manual_seed(0)
    model = efl.Model()
    model.net = nn.Linear(300, 300)
    start = model.net.weight.detach().clone()
    x = torch.zeros(8, 300)
    model.input_fn(lambda model, mode: TensorSource({"x": x}, 8, num_epochs=1))
    model.loss_fn(lambda model, sample: model.net(sample["x"]).sum(1) * 0)
    opt = make_private(functools.partial(torch.optim.SGD, lr=1.0), 0.5, 3.0, clipping=clipping)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt))
    model.compile(session_config={"device": "cpu"})
    model.fit(efl.procedure_fn.train())
    assert (model.net.weight - start).std().item() == pytest.approx(0.5 * 3.0 / 8, rel=0.01)


def test_a_limit_for_each_layer_bounds_each_layer():
    model, net = fitted(private(clipping="per-layer")), Net()
    layers = [net.tower[0], net.tower[2], net.head]
    optimizer, cut = SGD(net.parameters()), 0
    for epoch in range(2):
        for sample in batches().batches(epoch, 0):
            losses = F.cross_entropy(net(sample["x"]), sample["y"], reduction="none")
            for layer in layers:
                limit = CLIP / math.sqrt(len(layers))
                variables, total = clipped_sum(layer, losses, BATCH, torch.mean, limit)
                _, whole = clipped_sum(layer, losses, BATCH, torch.mean, math.inf)
                cut += not torch.allclose(total[0], whole[0])
                for variable, one in zip(variables, total, strict=True):
                    variable.grad = one / BATCH
            optimizer.step()
    assert_alike(model.net, net)
    assert cut > 12
    assert not torch.allclose(model.net.head.weight, reference(limit=CLIP).head.weight, atol=1e-4)


# ---- what is refused


def scalar(model, sample):
    return losses_of(model, sample).mean()


def refused(error, match, opt=None, loss=losses_of, **settings):
    model = efl.Model()
    model.net = Net()
    source = settings.pop("source", batches)
    model.input_fn(lambda model, mode: source())
    model.loss_fn(loss)
    optimizer_fn = settings.pop("optimizer_fn", None)
    model.optimizer_fn(optimizer_fn or efl.optimizer_fn.optimizer_setter(opt or private(noise=1.0)))
    with pytest.raises(error, match=match):
        model.compile(session_config={"device": "cpu"}, **settings)


def test_a_loss_of_one_number_is_refused_with_a_hint():
    refused(FunctionError, "reduction='none'", loss=scalar)


def test_losses_of_rows_need_a_private_optimizer():
    refused(FunctionError, "return one number", opt=SGD)


def test_all_optimizers_of_a_task_are_private_or_none():
    refused(ConfigError, "SGD that is not", optimizer_fn=by_scope(private(), SGD))


def test_micro_batches_are_of_equal_size():
    refused(DataError, "16 rows, which 5 micro-batches", opt=private(num_microbatches=5))


def test_a_short_batch_at_the_end_is_refused_where_it_does_not_fit():
    model = made(private(num_microbatches=8), source=lambda: TensorSource({"x": X[:90], "y": Y[:90]}, BATCH))
    with pytest.raises(DataError, match="10 rows, which 8"):
        model.fit(efl.procedure_fn.train())


def test_gradient_clipping_of_another_kind_is_refused():
    from plait.engine.settings import GradientConfig  # noqa: PLC0415

    refused(ConfigError, "leave it out", gradient=GradientConfig(clip=1.0))


def test_one_promise_has_one_delta():
    refused(ConfigError, "delta", optimizer_fn=by_scope(private(delta=1e-5), private(delta=1e-6)))


def test_an_input_that_does_not_tell_its_rows_is_refused():
    refused(ConfigError, "samples=", source=lambda: list(batches().batches(0, 0)))


def test_the_user_may_tell_the_rows():
    listed = fitted(private(noise=1.0, samples=ROWS), source=lambda: list(batches().batches(0, 0)))
    told = fitted(private(noise=1.0), source=lambda: TensorSource({"x": X, "y": Y}, BATCH, num_epochs=1))
    assert listed.privacy.epsilon(exact=True) == told.privacy.epsilon(exact=True)


def test_batch_norm_is_refused():
    model = efl.Model()
    model.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model.input_fn(lambda model, mode: batches())
    model.loss_fn(losses_of)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(private()))
    with pytest.raises(ConfigError, match="GroupNorm"):
        model.compile(session_config={"device": "cpu"}).fit(efl.procedure_fn.train())


# ---- inputs that are not what they say


class Endless:
    def __init__(self, *sizes):
        self.sizes = sizes

    def __iter__(self):
        for size in itertools.chain(self.sizes, itertools.repeat(self.sizes[-1])):
            yield {"x": X[:size], "y": Y[:size]}


def released_by(source, steps, noise=1.0):
    model = made(private(noise=noise, samples=ROWS), source=lambda: source)
    model.fit(efl.procedure_fn.train(steps))
    return model.privacy


def test_an_input_that_may_give_a_row_in_every_batch_is_counted_so():
    assert released_by(Endless(ROWS), 20).epsilon(exact=True) == pytest.approx(gaussian_epsilon(20, 1e-5))
    assert released_by(Endless(BATCH), 20).peer_epsilon() == pytest.approx(gaussian_epsilon(20, 1e-5))
    assert released_by({"x": X, "y": Y}, 20).epsilon(exact=True) == pytest.approx(gaussian_epsilon(20, 1e-5))
    assert released_by(batches(), 12).peer_epsilon() == pytest.approx(gaussian_epsilon(2, 1e-5))


def test_a_batch_that_is_larger_than_the_first_has_a_larger_share_of_the_rows():
    assert released_by(Endless(2, ROWS), 21).epsilon(exact=True) == pytest.approx(gaussian_epsilon(21, 1e-5))
    found = released_by(Endless(2, 4, 2, 8, 4), 5)._counts()
    assert found == {Event(1.0, share / ROWS): count for share, count in ((2, 1), (4, 2), (8, 2))}


def test_rows_that_are_drawn_with_replacement_are_refused():
    rows = [{"x": one, "y": other} for one, other in zip(X, Y, strict=True)]
    sampler = WeightedRandomSampler(torch.ones(ROWS), ROWS, replacement=True)
    refused(ConfigError, "write replacement=False", source=lambda: DataLoader(rows, BATCH, sampler=sampler))


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e25])
def test_a_row_that_is_not_finite_moves_nothing(bad):
    x = X.clone()
    x[90] = bad
    model = made(private(noise=1.0), source=lambda: TensorSource({"x": x, "y": Y}, BATCH, num_epochs=1))
    kept = []

    class Keep(SessionRunHook):
        def before_run(self, run_context):
            kept.append(model.net.head.weight.detach().clone())

    with pytest.raises(DataError, match="is not finite"):
        model.fit(efl.procedure_fn.train(), hooks=[Keep()])
    assert model.global_step.value == 5
    assert torch.equal(model.net.head.weight, kept[-1])
    assert model.net.head.weight.isfinite().all()


# ---- variables that rest


class Does(SessionRunHook):
    def __init__(self, at, what):
        self.at, self.what = at, what

    def before_run(self, run_context):
        if run_context.session.global_step.value == self.at:
            self.what()


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("layers", [["tower.0"], ["tower"], ["head"]])
def test_what_is_frozen_after_the_build_does_not_move_and_may_move_again(at, layers):
    model = made(private(noise=1.0))
    resting = [one for name in layers for one in model.net.get_submodule(name).parameters()]
    others = [one for one in model.net.parameters() if all(one is not other for other in resting)]
    seen = {}

    def note(name, trainable):
        seen[name] = [one.detach().clone() for one in (*resting, *others)]
        for one in resting:
            one.requires_grad_(trainable)

    hooks = [Does(at, lambda: note("frozen", False)), Does(at + 3, lambda: note("thawed", True))]
    model.fit(efl.procedure_fn.train(8), hooks=hooks)
    note("end", True)
    count = len(resting)
    assert all(map(torch.equal, seen["frozen"][:count], seen["thawed"][:count]))
    assert not any(map(torch.equal, seen["frozen"][count:], seen["thawed"][count:]))
    assert not any(map(torch.equal, seen["thawed"], seen["end"]))


def test_what_was_frozen_at_the_build_and_is_not_any_more_is_refused():
    model = efl.Model()
    model.net = Net()
    model.net.tower.requires_grad_(False)
    model.input_fn(lambda model, mode: batches())
    model.loss_fn(losses_of)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(private(noise=1.0)))
    model.compile(session_config={"device": "cpu"})
    model.fit(efl.procedure_fn.train(2))
    model.net.tower.requires_grad_(True)
    with pytest.raises(ConfigError, match="'net/tower/0/weight' was frozen when the model was compiled"):
        model.fit(efl.procedure_fn.train(2))


# ---- runs that end and go on


class Dies(SessionRunHook):
    """Ends the program before a step, as a kill does."""

    def __init__(self, at):
        self.at = at

    def before_run(self, run_context):
        if run_context.session.global_step.value == self.at:
            raise KeyboardInterrupt


ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("merge", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, merge):
    def make():
        opt = private(ADAM, noise=1.0, seed=None)
        return made(opt, strategy=Local(gradient_merge=merge))

    first = make()
    with pytest.raises(KeyboardInterrupt):
        first.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path / "a", save_steps=3, hooks=[Dies(8)])
    key = next(iter(first.private_state.living.values())).noise.key
    resumed = make()
    resumed.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path / "a", save_steps=3)
    whole = make()
    next(iter(whole.private_state.living.values())).noise.key = key
    whole.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path / "b", save_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(resumed.net.parameters(), whole.net.parameters(), strict=True))
    assert resumed.privacy.epsilon(exact=True) == whole.privacy.epsilon(exact=True)
    assert resumed.private_state.step == whole.private_state.step == 12 // merge


def test_another_project_has_other_noise_and_counts_on(tmp_path):
    models = [made(private(noise=1.0)) for _ in range(2)]
    for name, model in zip("ab", models, strict=True):
        model.fit(efl.procedure_fn.train(), project_name=name, checkpoint_dir=tmp_path)
    first, second = models
    keys = {next(iter(model.private_state.living.values())).noise.key for model in models}
    assert len(keys) == 2
    assert second.privacy.epsilon(exact=True) > first.privacy.epsilon(exact=True)
    assert second.private_state.step == 24


def test_the_budget_stops_training_and_a_rerun_stops_at_once(tmp_path, caplog):
    def make():
        return made(private(noise=1.0, epsilon_budget=4.0, accountant="rdp"))

    first = make()
    first.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path)
    steps = first.global_step.value
    assert 0 < steps < 12
    assert first.privacy.epsilon(exact=True) <= 4.0
    assert "the privacy budget is spent" in caplog.text
    caplog.clear()
    again = make()
    again.fit(efl.procedure_fn.train(), project_name="another", checkpoint_dir=tmp_path)
    assert again.global_step.value == steps
    assert "the privacy budget is spent" in caplog.text


def test_epsilon_is_in_the_log_line_and_the_end(caplog):
    logging.getLogger("plait").setLevel(logging.INFO)
    model = made(private(noise=1.0, accountant="rdp"))
    model.fit(efl.procedure_fn.train(), log_step=4)
    lines = [message for message in caplog.messages if message.startswith("step: ")]
    shown = [float(line.partition("epsilon: ")[2].split("\t")[0]) for line in lines]
    assert len(shown) == 3
    assert shown == sorted(shown)
    exact = model.privacy.epsilon(exact=True)
    assert exact <= model.metric_values()["epsilon"]
    assert f"privacy: epsilon {exact:.4f} at delta=1e-05" in caplog.messages[-1]
    assert "epsilon" in caplog.messages[-2]  # the table
    assert sum("shuffled or in order" in message for message in caplog.messages) == 1


def test_without_noise_epsilon_is_infinite_and_it_is_said(caplog):
    model = fitted()
    assert model.privacy.epsilon() == math.inf
    assert "noise_multiplier=0" in caplog.text


def test_a_model_without_private_optimizers_has_no_ledger():
    model = efl.Model()
    model.net = Net()
    model.input_fn(lambda model, mode: batches())
    model.loss_fn(scalar)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD))
    model.compile(session_config={"device": "cpu"})
    assert model.privacy is None
    assert "epsilon" not in model.metrics()


def test_the_loss_that_is_fetched_is_the_mean():
    model = made()

    class Fetch(SessionRunHook):
        found = []

        def before_run(self, run_context):
            from plait.engine.hooks import SessionRunArgs  # noqa: PLC0415

            return SessionRunArgs({"loss": model.loss(), "metric": model.metrics()["loss"]})

        def after_run(self, run_context, run_values):
            self.found.append(run_values.results)

    model.fit(efl.procedure_fn.train(max_step=2), hooks=[Fetch()])
    for results in Fetch.found:
        assert results["loss"].dim() == 0
        assert results["loss"] == results["metric"]


def test_micro_batches_of_several_rows_count_as_half_the_noise():
    """A row that comes or goes changes the direction of its whole micro-batch, which is twice the limit away."""
    grouped, single = fitted(private(noise=4.0, num_microbatches=4)), fitted(private(noise=2.0))
    assert grouped.privacy.epsilon(exact=True) == single.privacy.epsilon(exact=True)


def test_a_scaled_loss_gives_the_same():
    from plait.engine.settings import GradientConfig  # noqa: PLC0415

    assert_alike(fitted(gradient=GradientConfig(loss_scale=64.0)).net, reference())


def calls_of(run):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(previous)
    return calls


def test_a_step_takes_few_python_calls_however_many_rows_there_are():
    logging.getLogger("plait").setLevel(logging.WARNING)

    def calls_a_step(batch):
        def run(epochs):
            source = TensorSource({"x": X.repeat(12, 1), "y": Y.repeat(12)}, batch, num_epochs=epochs)
            source.rows = 12 * batch
            model = made(private(noise=1.0, accountant="rdp"), source=lambda: source)
            return calls_of(lambda: model.fit(efl.procedure_fn.train(), log_step=10**6))

        run(1)
        return (run(6) - run(2)) / (4 * 12)

    few, many = calls_a_step(8), calls_a_step(96)
    print(f"calls a step: {few} with 8 rows, {many} with 96")
    assert many < 600
    assert many - few < 30


# ---- rows that are drawn one by one


def drawn(batch=BATCH, **options):
    return PoissonSource({"x": X, "y": Y}, batch, num_epochs=2, seed=2, **options)


def test_drawn_batches_are_divided_by_the_rows_that_were_expected():
    model = fitted(source=drawn)
    net = Net()
    optimizer = SGD(net.parameters())
    sizes = []
    for epoch in range(2):
        for sample in drawn().batches(epoch, 0):
            sizes.append(len(sample["y"]))
            losses = F.cross_entropy(net(sample["x"]), sample["y"], reduction="none")
            variables, total = clipped_sum(net, losses, len(losses), torch.mean, CLIP)
            for variable, one in zip(variables, total, strict=True):
                variable.grad = one / BATCH
            optimizer.step()
    assert len(set(sizes)) > 3
    assert_alike(model.net, net)


def test_a_batch_without_rows_is_noise_alone(caplog):
    calls = []

    def counted(model, sample):
        calls.append(sample.batch_size)
        return losses_of(model, sample)

    source = drawn(1, steps_per_epoch=30)
    sizes = [len(sample["y"]) for epoch in range(2) for sample in source.batches(epoch, 0)]
    assert 0 in sizes
    model = efl.Model()
    model.net = Net()
    model.input_fn(lambda model, mode: source)
    model.loss_fn(counted)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(private(noise=1.0, accountant="rdp")))
    model.compile(session_config={"device": "cpu"})
    calls.clear()
    before = model.net.head.weight.detach().clone()
    model.fit(efl.procedure_fn.train())
    assert calls == [size for size in sizes if size]
    assert model.global_step.value == model.private_state.step == 60
    assert not torch.equal(before, model.net.head.weight)
    assert "not a promise" not in caplog.text


def test_drawn_batches_have_no_other_micro_batches_than_rows():
    refused(ConfigError, "every row is one", opt=private(num_microbatches=4), source=drawn)


def test_the_first_batch_may_be_without_rows():
    source = next(
        one
        for one in (PoissonSource({"x": X, "y": Y}, 1, num_epochs=1, seed=seed) for seed in range(50))
        if len(next(one.batches(0, 0))["y"]) == 0
    )
    assert fitted(private(noise=1.0, accountant="rdp"), source=lambda: source).global_step.value == ROWS


# ---- a limit that follows the norms


def test_an_adaptive_limit_follows_the_norms(tmp_path):
    def make(clip):
        return made(private(noise=0.5, clip=clip, clipping="adaptive", seed=1), source=lambda: batches(32))

    limits = []
    for clip in (100.0, 0.001):
        model = make(clip)
        model.fit(efl.procedure_fn.train())
        limits.append(next(iter(model.private_state.living.values())).limit)
    assert limits[0] < 60.0
    assert limits[1] > 0.0014
    flat = fitted(private(noise=0.5), source=lambda: batches(32))
    assert model.privacy.epsilon(exact=True) == flat.privacy.epsilon(exact=True)


def test_an_adaptive_limit_is_resumed(tmp_path):
    def make():
        return made(private(noise=0.5, clipping="adaptive", seed=1), strategy=Local(gradient_merge=2))

    with pytest.raises(KeyboardInterrupt):
        make().fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path / "a", save_steps=3, hooks=[Dies(8)])
    resumed, whole = make(), make()
    resumed.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path / "a")
    whole.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path / "b")
    limits = [next(iter(model.private_state.living.values())).limit for model in (resumed, whole)]
    assert limits[0] == limits[1] != CLIP
    assert all(torch.equal(a, b) for a, b in zip(resumed.net.parameters(), whole.net.parameters(), strict=True))
