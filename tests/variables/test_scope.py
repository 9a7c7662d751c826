from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import plait
from plait import GraphKeys, efl, mox
from plait.errors import VariableError

SGD = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.fixture
def model():
    """A model in whose scope variables can be made."""
    made = efl.Model()
    with made.scope():
        yield made


def trained(loss_fn, steps=2, **assigned):
    model = efl.Model()
    for name, module in assigned.items():
        setattr(model, name, module)
    model.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}] * steps)
    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD))
    model.compile().fit(efl.procedure_fn.train())
    return model


def test_scopes_nest_and_end(model):
    with plait.variable_scope("tower"):
        with plait.variable_scope("deep/er"):
            plait.get_variable("w", [1])
        plait.get_variable("w", [1])
    plait.get_variable("w", [1])
    assert list(model.variables()) == ["w", "tower/w", "tower/deep/er/w"]


def test_a_scope_taken_up_again_is_where_it_was(model):
    with plait.variable_scope("a"), plait.variable_scope("b") as inner:
        plait.get_variable("w", [1])
    with plait.variable_scope("elsewhere"), plait.variable_scope(inner):
        plait.get_variable("v", [1])
    assert inner.name == "a/b"
    assert set(model.variables()) == {"a/b/w", "a/b/v"}


def test_a_scope_ends_with_an_error_too(model):
    with pytest.raises(RuntimeError), plait.variable_scope("a"):
        raise RuntimeError
    plait.get_variable("w", [1])
    assert list(model.variables()) == ["w"]


@pytest.mark.parametrize("reuse", [True, plait.AUTO_REUSE])
def test_inner_scopes_inherit_reuse(model, reuse):
    with plait.variable_scope("a"), plait.variable_scope("b"):
        kept = plait.get_variable("w", [1])
    with plait.variable_scope("a", reuse=reuse), plait.variable_scope("b") as inner:
        assert inner.reuse == reuse
        assert plait.get_variable("w", [1]) is kept


def test_reuse_false_inside_a_reused_scope_reuses_still(model):
    with plait.variable_scope("a"):
        kept = plait.get_variable("w", [1])
    with plait.variable_scope("a", reuse=True), plait.variable_scope("", reuse=False) as inner:
        assert inner.reuse is True
    with plait.variable_scope("a", reuse=True):
        assert plait.get_variable("w") is kept


def test_without_reuse_the_second_is_an_error(model):
    with plait.variable_scope("a"):
        plait.get_variable("w", [1])
    with plait.variable_scope("a"), pytest.raises(VariableError, match="'a/w' is made twice"):
        plait.get_variable("w", [1])


def test_reuse_variables_shares_from_there_on(model):
    with plait.variable_scope("a") as scope:
        kept = plait.layer("fc", nn.Linear, 2, 2)
        scope.reuse_variables()
        assert plait.layer("fc", nn.Linear, 2, 2) is kept


def test_auto_reuse_creates_and_then_shares(model):
    with plait.variable_scope("a", reuse=plait.AUTO_REUSE):
        assert plait.get_variable("w", [1]) is plait.get_variable("w", [1])


@pytest.mark.parametrize("make", [lambda: plait.get_variable("w", [1]), lambda: plait.layer("fc", nn.Linear, 1, 1)])
def test_without_a_model_it_says_where_to_call_it(make):
    with pytest.raises(VariableError, match=r"no model is at hand.*loss_fn.*model.scope\(\)"):
        make()


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [(2.5, [2.5, 2.5]), (torch.tensor([1.0, 2.0]), [1.0, 2.0]), (nn.init.ones_, [1.0, 1.0]), (None, [0.0, 0.0])],
)
def test_initializers(model, initializer, expected):
    assert plait.get_variable("w", [2], initializer=initializer).tolist() == expected


def test_without_an_initializer_a_matrix_is_random_within_glorots_bound(model):
    values = plait.get_variable("w", [30, 20])
    assert values.abs().max() <= (6 / 50) ** 0.5
    assert values.std() > 0.1


def test_an_initializer_that_is_a_tensor_is_copied_and_gives_the_shape(model):
    first = torch.tensor([1, 2, 3])
    made = plait.get_variable("w", dtype=torch.float64, initializer=first)
    assert (made.dtype, list(made.shape)) == (torch.float64, [3])
    first.fill_(0)
    assert made.tolist() == [1, 2, 3]


def test_a_new_variable_needs_a_shape(model):
    with pytest.raises(VariableError, match="'w' is new and has no shape: pass shape="):
        plait.get_variable("w")


def test_another_shape_is_an_error_that_shows_both(model):
    with plait.variable_scope("a", reuse=plait.AUTO_REUSE):
        plait.get_variable("w", [2, 3])
        assert list(plait.get_variable("w").shape) == [2, 3]
        with pytest.raises(VariableError, match=r"'a/w' has shape \[2, 3\], not \[3, 2\]"):
            plait.get_variable("w", [3, 2])


def test_trainable_false_and_whole_numbers_are_saved_but_not_trained(model):
    plait.get_variable("frozen", [2], trainable=False)
    plait.get_variable("count", [2], dtype=torch.int64)
    plait.get_variable("w", [2])
    assert set(model.variables()) == {"frozen", "count", "w"}
    assert set(model.trainable_variables()) == {"w"}


def test_collections_of_variables_can_be_narrowed_to_a_scope(model):
    with plait.variable_scope("a"):
        one = plait.get_variable("w", [1])
        fixed = plait.get_variable("f", [1], trainable=False)
    other = plait.get_variable("w", [1])
    same = lambda got, *wanted: [id(v) for v in got] == [id(v) for v in wanted]
    assert same(plait.get_collection(GraphKeys.TRAINABLE_VARIABLES, "a"), one)
    assert same(plait.get_collection(GraphKeys.GLOBAL_VARIABLES, "a"), one, fixed)
    assert len(plait.get_collection(GraphKeys.TRAINABLE_VARIABLES)) == 2
    assert any(v is other for v in plait.get_collection(GraphKeys.TRAINABLE_VARIABLES))


def test_a_variable_joins_the_collections_that_it_is_given_once(model):
    with plait.variable_scope("a", reuse=plait.AUTO_REUSE):
        made = plait.get_variable("w", [1], collections=["mine"])
        plait.get_variable("w", [1], collections=["mine"])
    assert [id(v) for v in plait.get_collection("mine")] == [id(made)]
    assert plait.get_collection("nobody's") == []


def test_regularizer_losses_are_those_of_this_step_only():
    seen = []

    def loss_fn(model, sample):
        w = plait.get_variable("w", [2], initializer=1.0, regularizer=lambda v: v.square().sum())
        losses = plait.get_collection(GraphKeys.REGULARIZATION_LOSSES)
        seen.append([round(loss.item(), 4) for loss in losses])
        return (w * sample.x).sum() * 0 + sum(losses)

    trained(loss_fn)
    assert seen == [[2.0], [2.0], [1.28]]  # the build, then two steps


def test_what_a_function_collects_is_collected_anew_at_each_step():
    counts = []

    def loss_fn(model, sample):
        plait.add_to_collection("seen", sample.x)
        counts.append(len(plait.get_collection("seen")))
        return plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()

    trained(loss_fn, steps=3)
    assert counts == [1, 1, 1, 1]


def test_assigned_modules_and_scoped_ones_train_together():
    def loss_fn(model, sample):
        return plait.layer("head", nn.Linear, 3, 1)(model.tower(sample.x)).mean()

    before = nn.Linear(2, 3)
    start = before.weight.detach().clone()
    model = trained(loss_fn, tower=before)
    assert set(model.variables()) == {"tower/weight", "tower/bias", "head/weight", "head/bias"}
    assert not torch.equal(before.weight, start)


def test_a_name_in_both_is_an_error_that_names_it():
    def loss_fn(model, sample):
        return plait.layer("tower", nn.Linear, 2, 1)(sample.x).mean() + model.tower(sample.x).mean()

    with pytest.raises(VariableError, match="two variables are called 'tower/weight'.*assigned module and a scope"):
        trained(loss_fn, tower=nn.Linear(2, 1))


def test_a_variable_that_is_new_after_compile_is_an_error_that_names_it():
    calls = []

    def loss_fn(model, sample):
        calls.append(1)
        name = "late" if len(calls) == 3 else "fc"
        return plait.layer(name, nn.Linear, 2, 1)(sample.x).mean()

    with pytest.raises(VariableError, match=r"layer 'late' is new after compile\(\).*The model has"):
        trained(loss_fn)


def test_eval_fn_finds_what_loss_fn_made_and_another_task_must_say_reuse():
    def compiled(reuse):
        model = efl.Model()
        for task in ("a", "b"):

            def loss_fn(model, sample):
                with plait.variable_scope("shared", reuse=reuse):
                    return plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()

            model.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}], task=task)
            model.loss_fn(loss_fn, task=task).eval_fn(loss_fn, task=task)
            model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD), task=task)
        return model.compile()

    assert set(compiled(plait.AUTO_REUSE).variables()) == {"shared/fc/weight", "shared/fc/bias"}
    with pytest.raises(VariableError, match="'shared/fc' of task 'a' is made by 'b'"):
        compiled(None)


def test_initial_values_are_those_of_the_name_whatever_the_build_draws():
    def loss_fn(model, sample, draws=0):
        torch.rand(draws)
        return plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()

    def first_values(draws):
        model = efl.Model(seed=3)
        model.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}])
        model.loss_fn(functools.partial(loss_fn, draws=draws))
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD))
        torch.manual_seed(draws)
        return model.compile().variables()["fc/weight"]

    assert torch.equal(first_values(0), first_values(7))


class TestForcedType:
    """`var_scope(force_dtype=...)`: variables are kept in one type and used in another."""

    def test_a_variable_is_kept_in_the_one_and_handed_out_in_the_other(self, model):
        with mox.var_scope(force_dtype=torch.float32):
            used = plait.get_variable("a", shape=[], dtype=torch.float16)
        assert used.dtype == torch.float16
        assert model.variables()["a"].dtype == torch.float32

    def test_a_variable_of_that_type_is_handed_out_itself(self, model):
        with mox.var_scope(torch.float32):
            assert plait.get_variable("a", [2]) is model.variables()["a"]

    def test_it_ends_also_with_an_error(self, model):
        with pytest.raises(RuntimeError), mox.var_scope(force_dtype=torch.float64):
            raise RuntimeError
        assert plait.get_variable("a", [1]).dtype == torch.float32

    @pytest.mark.parametrize("inside", [True, False])
    def test_it_nests_with_scopes_of_names(self, model, inside):
        outer, inner = plait.variable_scope("tower"), mox.var_scope(force_dtype=torch.float64)
        with outer if inside else inner, inner if inside else plait.variable_scope("tower"):
            plait.get_variable("a", [1])
        assert {name: value.dtype for name, value in model.variables().items()} == {"tower/a": torch.float64}

    def test_the_innermost_wins_and_none_is_no_force(self, model):
        with mox.var_scope(force_dtype=torch.float64):
            with mox.var_scope(force_dtype=torch.float16):
                plait.get_variable("a", [1])
            with mox.var_scope():
                plait.get_variable("b", [1])
        assert [value.dtype for value in model.variables().values()] == [torch.float16, torch.float32]

    def test_a_layer_is_kept_in_it(self, model):
        with mox.var_scope(force_dtype=torch.float64):
            made = plait.layer("fc", nn.Linear, 2, 1)
        assert {value.dtype for value in made.parameters()} == {torch.float64}

    def test_training_moves_what_is_kept(self):
        def loss_fn(model, sample):
            with mox.var_scope(force_dtype=torch.float32):
                weight = plait.get_variable("w", [2], torch.float16, initializer=1.0)
            return (sample.x.half() * weight).float().mean()

        variable = trained(loss_fn).variables()["w"]
        assert variable.dtype == torch.float32
        assert torch.allclose(variable, torch.full([2], 0.9))
