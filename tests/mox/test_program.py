"""Losses and the optimizers that move variables by them: one, or several with scopes."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import mox
from plait.errors import ConfigError, FunctionError, PlaitError, TaskError, VariableError

SPEC = importlib.util.spec_from_file_location("mox_runs", Path(__file__).with_name("runs.py"))
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)

SGD = runs.SGD
by_hand, lines, model_fn, run, same, weights = (
    runs.by_hand,
    runs.lines,
    runs.model_fn,
    runs.run,
    runs.same,
    runs.weights,
)


class TestOptimizers:
    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            (None, ConfigError, "optimizer_fn is NoneType: give a function that returns an optimizer"),
            (0.1, ConfigError, "optimizer_fn is float: give a function"),
            (torch.optim.SGD([torch.zeros(1)], lr=0.1), ConfigError, "optimizer_fn is SGD: give a function"),
            (functools.partial(torch.optim.SGD, lr=0.1), ConfigError, r"needs arguments: .*mox.get_optimizer_fn"),
            (lambda: 3, TaskError, "an optimizer was expected, got int"),
            ([SGD, SGD], ConfigError, "1 losses, but 2 optimizers: give one for each loss, or one for all"),
        ],
    )
    def test_wrong_ones(self, given, error, words):
        with pytest.raises(error, match=words):
            run(optimizer_fn=given)

    def test_a_function_may_return_any_factory(self):
        model = run(optimizer_fn=lambda: functools.partial(torch.optim.SGD, lr=0.1), max_number_of_steps=13)
        assert same(weights(model), by_hand(13))

    def test_a_list_of_one_for_one_loss(self):
        assert same(weights(run(optimizer_fn=[SGD], max_number_of_steps=6)), by_hand(6))

    def test_a_list_of_one_loss_is_a_loss(self):
        def listed(inputs, mode):
            return mox.ModelSpec(loss=[model_fn(inputs, mode).loss])

        assert same(weights(run(model_fn=listed, max_number_of_steps=6)), by_hand(6))

    def test_a_factory_for_a_scope_moves_only_that(self):
        def two(inputs, mode):
            spec = model_fn(inputs, mode)
            return mox.ModelSpec(loss=spec.loss + plait.layer("other", nn.Linear, 2, 1)(inputs[0]).mean())

        model = run(model_fn=two, optimizer_fn=mox.get_optimizer_fn("sgd", 0.1, scope="fc"), max_number_of_steps=6)
        assert same({name: value for name, value in weights(model).items() if "fc" in name}, by_hand(6))

    def test_a_model_without_variables_cannot_be_trained(self):
        with pytest.raises(PlaitError, match="variable"):
            run(model_fn=lambda inputs, mode: mox.ModelSpec(loss=inputs[0].mean().requires_grad_()))


# A generator and a discriminator, with two losses from one forward pass.

NOISE = 3


def pictures():
    return torch.randn(40, 2, generator=torch.Generator().manual_seed(1))


def noise_of(x):
    return x.repeat(1, NOISE)[:, :NOISE].sin()


def gan_model_fn(inputs, mode, scopes=(("discriminator",), ("generator",))):
    real = inputs[0]

    def generator(x, reuse=None):
        with plait.variable_scope("generator", reuse=reuse):
            return plait.layer("out", nn.Linear, 8, 2)(plait.layer("in", nn.Linear, NOISE, 8)(x).tanh())

    def discriminator(x, reuse=None):
        with plait.variable_scope("discriminator", reuse=reuse):
            return plait.layer("out", nn.Linear, 8, 1)(plait.layer("in", nn.Linear, 2, 8)(x).tanh())

    on_real, on_fake = discriminator(real), discriminator(generator(noise_of(real)), reuse=True)
    d_loss, g_loss = _gan_losses(on_real, on_fake)
    return mox.ModelSpec(
        loss=[d_loss, g_loss],
        var_scopes=None if scopes is None else [list(some) for some in scopes],
        log_info={"D_loss": d_loss, "G_loss": g_loss},
    )


def _gan_losses(on_real, on_fake):
    ones, zeros = torch.ones_like(on_real), torch.zeros_like(on_real)
    judged = F.binary_cross_entropy_with_logits
    return judged(on_real, ones) + judged(on_fake, zeros), judged(on_fake, ones)


def gan_by_hand(start, steps, make_d, make_g):
    """Both losses from the same forward pass; each moves its own half."""
    halves = {
        name: nn.ModuleDict({"in": nn.Linear(width, 8), "out": nn.Linear(8, out)})
        for name, width, out in (("discriminator", 2, 1), ("generator", NOISE, 2))
    }
    for name, half in halves.items():
        half.load_state_dict(
            {key.partition("/")[2].replace("/", "."): v for key, v in start.items() if key.startswith(name)}
        )
    d, g = halves["discriminator"], halves["generator"]
    optimizers = [make_d(list(d.parameters())), make_g(list(g.parameters()))]
    data = pictures()
    for step in range(steps):
        real = data[step % 10 * 4 :][:4]
        judge = lambda x: d["out"](d["in"](x).tanh())
        d_loss, g_loss = _gan_losses(judge(real), judge(g["out"](g["in"](noise_of(real)).tanh())))
        of_d = torch.autograd.grad(d_loss, list(d.parameters()), retain_graph=True)
        of_g = torch.autograd.grad(g_loss, list(g.parameters()))
        for half, gradients in ((d, of_d), (g, of_g)):
            for variable, gradient in zip(half.parameters(), gradients, strict=True):
                variable.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    named = {name: dict(half.named_parameters()) for name, half in halves.items()}
    return {f"{name}/{k.replace('.', '/')}": v.detach() for name, some in named.items() for k, v in some.items()}


def gan(optimizer_fn, steps=50, **settings):
    made = functools.partial(gan_model_fn, **settings)
    return run(data=list(pictures()), model_fn=made, optimizer_fn=optimizer_fn, max_number_of_steps=steps)


ADAM = mox.get_optimizer_fn("adam", learning_rate=0.01)


class TestTwoLosses:
    @pytest.fixture
    def start(self):
        return weights(gan(mox.get_optimizer_fn("sgd", 0.0), steps=1))

    def test_an_optimizer_for_each_loss_equals_a_hand_written_loop_bit_for_bit(self, start):
        model = gan([ADAM, SGD])
        assert same(weights(model), gan_by_hand(start, 50, ADAM(), SGD()))
        assert not same(weights(model), start)

    def test_one_optimizer_for_both_equals_a_hand_written_loop_bit_for_bit(self, start):
        model = gan(ADAM)
        assert len(model.optimizers()) == 2
        assert same(weights(model), gan_by_hand(start, 50, ADAM(), ADAM()))

    def test_a_resumed_one_ends_with_the_same_bits(self, tmp_path):
        whole = weights(gan([ADAM, SGD], 20))
        for steps in (7, 20):
            model = run(
                data=list(pictures()),
                model_fn=gan_model_fn,
                optimizer_fn=[ADAM, SGD],
                max_number_of_steps=steps,
                log_dir=str(tmp_path),
            )
        assert same(weights(model), whole)

    def test_both_losses_are_logged_and_their_sum_is_watched(self, caplog):
        model = gan([ADAM, SGD], steps=1)
        assert [field.split(":")[0] for field in lines(caplog)[0].split("\t")][2:] == ["D_loss", "G_loss"]
        values = model.metric_values(plait.efl.MODE.TRAIN)
        assert float(model.loss_metrics[None].result()) == pytest.approx(sum(values.values()))

    def test_without_scopes_each_loss_moves_everything(self, start):
        moved = weights(gan([mox.get_optimizer_fn("sgd", 0.0), SGD], steps=1, scopes=None))
        assert not any(torch.equal(moved[name], start[name]) for name in start)

    def test_a_scope_of_both_losses_is_moved_by_both(self, start):
        """By each with its own gradient, one after the other, all from the same forward pass."""
        both = gan([SGD, SGD], steps=1, scopes=(("discriminator",), ("discriminator", "generator")))
        only = {
            which: weights(gan([SGD, SGD], steps=1, scopes=scopes))
            for which, scopes in {
                0: (("discriminator",), ("generator",)),
                1: (("generator",), ("discriminator",)),
            }.items()
        }
        for name, value in weights(both).items():
            if name.startswith("discriminator"):
                moves = (only[0][name] - start[name]) + (only[1][name] - start[name])
                torch.testing.assert_close(value - start[name], moves)

    def test_a_scope_without_variables_is_named(self):
        with pytest.raises(
            VariableError, match="no trainable variable is in scope 'judge': the model has discriminator, generator"
        ):
            gan(ADAM, scopes=(("judge",), ("generator",)))

    def test_as_many_scopes_as_losses(self):
        with pytest.raises(FunctionError, match="2 losses, but var_scopes has 1: write a list for each loss"):
            gan(ADAM, scopes=(("generator",),))

    def test_as_many_optimizers_as_losses(self):
        with pytest.raises(ConfigError, match="2 losses, but 3 optimizers: give one for each loss, or one for all"):
            gan([ADAM] * 3)

    @pytest.mark.parametrize("scopes", [["generator"], "generator", ["generator/in", "generator/out"]])
    def test_a_single_loss_moves_only_its_scopes(self, start, scopes):
        def single(inputs, mode):
            spec = gan_model_fn(inputs, mode)
            return mox.ModelSpec(loss=spec.loss[1], var_scopes=scopes)

        moved = weights(run(data=list(pictures()), model_fn=single, max_number_of_steps=3))
        assert {name.partition("/")[0] for name in start if not torch.equal(moved[name], start[name])} == {"generator"}
