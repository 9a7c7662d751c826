"""The update, compared bit for bit with one written by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from plait import efl
from plait.engine.settings import GradientConfig
from plait.engine.strategy import Local
from plait.engine.update import LeftError, clear_step
from plait.errors import ConfigError, TaskError

from .pair import together, workers

SGD = functools.partial(torch.optim.SGD, lr=0.1)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
BATCHES = [torch.linspace(-1, 1, 8).reshape(4, 2) + step for step in range(5)]


def nets():
    torch.manual_seed(2)
    return nn.Linear(2, 3), nn.Linear(3, 1)


def one_loss(first, second, x):
    return second(first(x).tanh()).square().mean()


def two_losses(first, second, x):
    hidden = first(x).tanh()
    return [hidden.square().mean(), second(hidden).square().mean()]


def compiled(strategy, losses=one_loss, optimizers=None, batches=BATCHES, gradient=None):
    """A model of the two nets; `optimizers` are (factory, names of the nets)."""
    model = efl.Model()
    model.first, model.second = nets()
    model.input_fn(lambda model, mode: [(x,) for x in batches])
    model.loss_fn(lambda model, sample: losses(model.first, model.second, sample[0]))

    def assign(model, task):
        return {
            factory(params := [p for name in names for p in getattr(model, name).parameters()]): (params, None)
            for factory, names in optimizers or ALL
        }

    return model.optimizer_fn(assign).compile(gradient=gradient, strategy=strategy)


def trained(losses, optimizers, strategy=None, gradient=None):
    model = compiled(strategy, losses, optimizers, gradient=gradient)
    model.fit(efl.procedure_fn.train())
    return model


def by_hand(finish=lambda parameters: None, scale=1.0):
    first, second = nets()
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = MOMENTUM(parameters)
    for x in BATCHES:
        optimizer.zero_grad()
        (one_loss(first, second, x) * scale).backward()
        for parameter in parameters:
            parameter.grad /= scale
        finish(parameters)
        optimizer.step()
    return parameters


def equal(model, parameters):
    found = [*model.first.parameters(), *model.second.parameters()]
    return all(torch.equal(a, b) for a, b in zip(found, parameters, strict=True))


ALL = [(MOMENTUM, ("first", "second"))]


class TestOneLoss:
    def test_plain(self):
        assert equal(trained(one_loss, ALL), by_hand())

    @pytest.mark.parametrize("scale", [0.5, 8.0, 65536.0])
    def test_a_scale_that_is_a_power_of_two(self, scale):
        model = trained(one_loss, ALL, gradient=GradientConfig(loss_scale=scale))
        assert equal(model, by_hand(scale=scale))
        assert equal(model, by_hand())

    def test_another_scale(self):
        assert equal(trained(one_loss, ALL, gradient=GradientConfig(loss_scale=3.0)), by_hand(scale=3.0))

    @pytest.mark.parametrize("scale", [1.0, 16.0])
    @pytest.mark.parametrize(
        ("kind", "clip"),
        [
            ("norm", functools.partial(nn.utils.clip_grad_norm_, max_norm=0.1)),
            ("value", functools.partial(nn.utils.clip_grad_value_, clip_value=0.1)),
        ],
    )
    def test_clipped(self, kind, clip, scale):
        gradient = GradientConfig(clip=0.1, clip_type=kind, loss_scale=scale)
        model = trained(one_loss, ALL, gradient=gradient)
        assert equal(model, by_hand(clip, scale))
        assert not equal(model, by_hand())

    def test_the_norm_is_that_of_all_optimizers_together(self):
        halves = [(MOMENTUM, ("first",)), (MOMENTUM, ("second",))]
        clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.1)
        assert equal(trained(one_loss, halves, gradient=GradientConfig(clip=0.1)), by_hand(clip))

    def test_a_variable_that_the_loss_does_not_reach_stays(self):
        def only_first(first, second, x):
            return first(x).square().mean()

        model = trained(only_first, ALL, gradient=GradientConfig(clip=0.1, loss_scale=4.0))
        assert all(torch.equal(a, b) for a, b in zip(model.second.parameters(), nets()[1].parameters(), strict=True))

    @pytest.mark.parametrize("gradient", [None, GradientConfig(loss_scale=64.0)])
    def test_the_loss_that_is_shown_is_not_scaled(self, gradient):
        model = trained(one_loss, [(functools.partial(torch.optim.SGD, lr=0.0), ("first", "second"))], None, gradient)
        expected = one_loss(*nets(), BATCHES[-1]).detach()
        assert model.metric_values(efl.MODE.TRAIN)["loss"] == pytest.approx(float(expected))

    def test_workers_reduce_before_the_scale_is_taken_out(self):
        class Doubling(Local):
            worker_num, in_step = 2, True

            def reduce_gradients(self, variables):
                for variable in variables:
                    variable.grad *= 2

        def double(parameters):
            for parameter in parameters:
                parameter.grad *= 2

        model = trained(one_loss, ALL, Doubling(), GradientConfig(loss_scale=4.0))
        assert equal(model, by_hand(double))


class TestSeveralLosses:
    def by_hand(self, finish=lambda parameters: None, scale=1.0):
        first, second = nets()
        optimizers = [SGD(first.parameters()), ADAM(second.parameters())]
        for x in BATCHES:
            losses = two_losses(first, second, x)
            halves = [list(first.parameters()), list(second.parameters())]
            gradients = [
                torch.autograd.grad(loss * scale, half, retain_graph=True)
                for loss, half in zip(losses, halves, strict=True)
            ]
            for optimizer, half, values in zip(optimizers, halves, gradients, strict=True):
                for parameter, value in zip(half, values, strict=True):
                    parameter.grad = value / scale
                finish(half)
                optimizer.step()
        return [*first.parameters(), *second.parameters()]

    SPLIT = [(SGD, ("first",)), (ADAM, ("second",))]

    def test_each_moves_its_own_from_the_same_forward_pass(self):
        assert equal(trained(two_losses, self.SPLIT), self.by_hand())

    def test_each_is_scaled_and_clipped_by_itself(self):
        clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05)
        gradient = GradientConfig(clip=0.05, loss_scale=32.0)
        model = trained(two_losses, self.SPLIT, gradient=gradient)
        assert equal(model, self.by_hand(clip, 32.0))
        assert not equal(model, self.by_hand())

    def test_their_sum_is_shown(self):
        still = functools.partial(torch.optim.SGD, lr=0.0)
        model = trained(two_losses, [(still, ("first",)), (still, ("second",))])
        expected = sum(two_losses(*nets(), BATCHES[-1])).detach()
        assert model.metric_values(efl.MODE.TRAIN)["loss"] == pytest.approx(float(expected))
        assert model.global_step.value == 5

    def test_a_loss_that_does_not_reach_its_variables_leaves_them(self):
        model = trained(two_losses, [(SGD, ("second",)), (SGD, ("first",))])
        assert all(torch.equal(a, b) for a, b in zip(model.second.parameters(), nets()[1].parameters(), strict=True))
        assert not torch.equal(model.first.weight, nets()[0].weight)

    def test_as_many_optimizers_as_losses(self):
        with pytest.raises(TaskError, match="2 losses and 1 optimizers: give one for each"):
            trained(two_losses, ALL)


class TestGradientMerge:
    """Variables move every so many steps, by the mean of the gradients until then."""

    def by_hand(self, merge, scale=1.0, batches=BATCHES, finish=lambda parameters: None):
        first, second = nets()
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = MOMENTUM(parameters)
        for number, x in enumerate(batches):
            if number % merge == 0:
                optimizer.zero_grad()
            (one_loss(first, second, x) * scale).backward()
            if number % merge == merge - 1:
                for parameter in parameters:
                    parameter.grad /= merge
                    parameter.grad /= scale
                finish(parameters)
                optimizer.step()
        return parameters

    @pytest.mark.parametrize("merge", [2, 3, 5, 7])
    def test_bit_for_bit(self, merge):
        model = trained(one_loss, ALL, Local(merge))
        assert equal(model, self.by_hand(merge))
        assert model.global_step.value == 5

    def test_the_mean_is_scaled_back_and_clipped(self):
        clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.1)
        model = trained(one_loss, ALL, Local(2), GradientConfig(clip=0.1, loss_scale=8.0))
        assert equal(model, self.by_hand(2, 8.0, finish=clip))

    def test_it_equals_larger_batches(self):
        model = trained(one_loss, ALL, Local(2))
        joined = self.by_hand(1, batches=[torch.cat(BATCHES[:2]), torch.cat(BATCHES[2:4])])
        assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), joined, strict=True))

    def test_the_loss_of_every_step_is_shown(self):
        still = functools.partial(torch.optim.SGD, lr=0.0)
        model = trained(one_loss, [(still, ("first", "second"))], Local(3))
        expected = one_loss(*nets(), BATCHES[-1]).detach()
        assert model.metric_values(efl.MODE.TRAIN)["loss"] == pytest.approx(float(expected))

    def test_not_with_several_losses(self):
        with pytest.raises(
            ConfigError, match=r"gradient_merge with several losses \(task None\): leave it out, or add"
        ):
            trained(two_losses, TestSeveralLosses.SPLIT, Local(2))


class TestTwoWorkers:
    MANY = [torch.linspace(-1, 1, 8).reshape(4, 2) + step for step in range(9)]

    def by_hand(self, batches, merge=1):
        first, second = nets()
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = MOMENTUM(parameters)
        for number in range(len(batches) // (2 * merge)):
            sums = []
            for worker in (0, 1):
                optimizer.zero_grad()
                for x in batches[2 * merge * number + worker : 2 * merge * (number + 1) : 2]:
                    one_loss(first, second, x).backward()
                sums.append([parameter.grad / merge for parameter in parameters])
            for parameter, *both in zip(parameters, *sums, strict=True):
                parameter.grad = (both[0] + both[1]) / 2
            optimizer.step()
        return parameters

    @pytest.mark.parametrize("merge", [1, 2])
    def test_both_have_the_mean_of_all_gradients_bit_for_bit(self, merge):
        models = [compiled(worker, batches=self.MANY) for worker in workers(2, merge)]
        together(models, lambda model: model.fit(efl.procedure_fn.train()))
        expected = self.by_hand(self.MANY, merge)
        assert all(equal(model, expected) for model in models)
        assert [model.global_step.value for model in models] == [4, 4]

    def test_merging_workers_talk_only_when_variables_move(self):
        pair = workers(2, 4)
        together([compiled(worker, batches=self.MANY) for worker in pair], lambda m: m.fit(efl.procedure_fn.train(4)))
        assert sum("gradients" in kind for kind in pair[0].meeting.kinds) == 1

    def test_each_loss_is_reduced_by_itself(self):
        pair = workers()
        models = [compiled(worker, two_losses, TestSeveralLosses.SPLIT, self.MANY) for worker in pair]
        together(models, lambda model: model.fit(efl.procedure_fn.train(2)))
        assert torch.equal(models[0].second.weight, models[1].second.weight)
        kinds = [kind for kind in pair[0].meeting.kinds if "gradients" in kind]
        assert kinds == ["3 gradients"] * 4, "two variables and the flags, for each loss of each step"


@pytest.mark.parametrize(("stop", "why"), [(True, "it was told to stop"), (False, "its data ended")])
def test_a_worker_that_was_left_is_told_why(stop, why):
    error = LeftError(stop=stop)
    assert (str(error), error.stop) == (f"another worker has left the loop: {why}", stop)


@pytest.mark.parametrize("count", [1, 2])
def test_old_gradients_are_dropped(count):
    variables = [torch.ones(1, requires_grad=True) for _ in range(count)]
    for variable in variables:
        variable.grad = torch.ones(1)
    clear_step([SGD([variable]) for variable in variables])()
    assert all(variable.grad is None for variable in variables)


# A loss scale that follows overflows


def half(precision="fp16", gradient=None, strategy=None, losses=one_loss, optimizers=None):
    model = efl.Model()
    model.first, model.second = nets()
    model.input_fn(lambda model, mode: [(x,) for x in BATCHES])
    model.loss_fn(lambda model, sample: losses(model.first, model.second, sample[0]))

    def assign(model, task):
        return {
            factory(params := [p for name in names for p in getattr(model, name).parameters()]): (params, None)
            for factory, names in optimizers or [(SGD, ("first", "second"))]
        }

    model.optimizer_fn(assign)
    config = {"device": "cpu", "precision": precision}
    return model.compile(session_config=config, gradient=gradient, strategy=strategy)


@pytest.mark.parametrize("gradient", [None, GradientConfig(clip=0.1)])
@pytest.mark.parametrize("losses", [one_loss, two_losses])
def test_half_precision_is_near_to_full(gradient, losses):
    optimizers = None if losses is one_loss else [(SGD, ("first",)), (SGD, ("second",))]
    found = [half(precision, gradient, losses=losses, optimizers=optimizers) for precision in ("fp16", "fp32")]
    found[0].scaler.load_state_dict({**found[0].scaler.state_dict(), "scale": 256.0})  # these small nets overflow soon
    for model in found:
        model.fit(efl.procedure_fn.train())
    assert found[1].scaler is None
    for scaled, plain in zip(*(model.parameters() for model in found), strict=True):
        torch.testing.assert_close(scaled, plain, rtol=0.02, atol=5e-3)


def test_a_step_that_overflows_moves_nothing_and_lowers_the_scale():
    model = half()
    model.scaler.load_state_dict({**model.scaler.state_dict(), "scale": 1e30})
    before = [value.clone() for value in model.parameters()]
    model.fit(efl.procedure_fn.train(max_step=1))
    assert all(torch.equal(value, old) for value, old in zip(model.parameters(), before, strict=True))
    assert model.scaler.get_scale() == pytest.approx(5e29)
    assert model.global_step.value == 1


def test_the_scale_is_in_the_checkpoint(tmp_path):
    model = half()
    model.scaler.load_state_dict({**model.scaler.state_dict(), "scale": 4096.0})
    model.fit(efl.procedure_fn.train(max_step=2), checkpoint_dir=tmp_path)
    other = half()
    other.fit(efl.procedure_fn.train(max_step=2), checkpoint_dir=tmp_path)
    assert other.scaler.get_scale() == 4096.0


def test_a_scale_that_is_given_stays():
    assert half(gradient=GradientConfig(loss_scale=128.0)).scaler is None
