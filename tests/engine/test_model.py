"""Every attribute and method of Model, as a user sees them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.efl import MODE
from plait.errors import ConfigError, FunctionError, TaskError
from plait.train import SessionRunHook

SGD = functools.partial(torch.optim.SGD, lr=0.1)
X = torch.arange(12.0).reshape(6, 2) / 10
SETTER = efl.optimizer_fn.optimizer_setter(SGD)


def loss_of(model, sample):
    return plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()


def small(loss_fn=loss_of, eval_fn=None, *, task=None, tasks=None, rows=6, batch=2, compiled=True, **source):
    """A model with one task (or several), each with three batches of two rows."""
    model = efl.Model()
    for name in tasks or [task]:
        wrapped = _scoped(name, loss_fn) if tasks else loss_fn
        model.input_fn(lambda model, mode: plait.data.TensorSource({"x": X[:rows]}, batch, **source), task=name)
        model.loss_fn(wrapped, task=name).optimizer_fn(SETTER, task=name)
        model.eval_fn(_scoped(name, eval_fn) if tasks and eval_fn else eval_fn or wrapped, task=name)
    return model.compile() if compiled else model


def _scoped(name, function):
    def inside(model, sample):
        with plait.variable_scope(name):
            return function(model, sample)

    return inside


def run(model, fetches):
    with plait.Session(model) as session:
        return session.run(fetches)


class TestFunctions:
    @pytest.mark.parametrize("what", ["input_fn", "loss_fn", "optimizer_fn", "eval_fn"])
    def test_each_returns_the_model_and_is_kept_under_its_task(self, what):
        model, function = efl.Model(), lambda *args: None
        table = {"input_fn": "input_fns", "loss_fn": "loss_fns", "optimizer_fn": "opt_fns", "eval_fn": "eval_fns"}
        assert getattr(model, what)(function, task="click") is model
        assert getattr(model, table[what]) == {"click": function}

    @pytest.mark.parametrize("what", ["input_fn", "loss_fn", "optimizer_fn", "eval_fn"])
    def test_what_cannot_be_called_is_refused(self, what):
        with pytest.raises(FunctionError, match=f"{what} of task 'click' is a int: give a function"):
            getattr(efl.Model(), what)(3, task="click")

    def test_a_task_gets_each_function_once(self):
        with pytest.raises(TaskError, match="task None has an loss_fn already: give another task a name"):
            small(compiled=False).loss_fn(loss_of)

    def test_functions_come_before_compile(self):
        with pytest.raises(TaskError, match=r"loss_fn of task 'late' comes after compile\(\)"):
            small().loss_fn(loss_of, task="late")

    def test_a_model_without_tasks_cannot_be_compiled(self):
        with pytest.raises(TaskError, match="no task: give it an input_fn and a loss_fn"):
            efl.Model().compile()

    def test_compile_returns_the_model_and_happens_once(self):
        model = small(compiled=False)
        assert model.compile() is model
        with pytest.raises(TaskError, match="a model is compiled once"):
            model.compile()

    def test_compile_checks_what_it_is_given(self):
        with pytest.raises(ConfigError, match="session_config has unknown keys gpu: it takes device"):
            small(compiled=False).compile(session_config={"gpu": 1})

    def test_compile_keeps_the_options_of_private_optimizers(self):
        model = small(compiled=False).compile(opt_config={"REDUCE": "sum"})
        assert model.opt_config == {"REDUCE": "sum", "BACKEND_MODE": "noise"}


class TestTables:
    def test_what_compile_fills(self):
        model = small(tasks=["a", "b"])
        assert model.tasks() == ["a", "b"]
        assert set(model.losses) == set(model.train_ops) == set(model.eval_ops) == {"a", "b"}
        assert set(model.inputs) == {efl.TaskScope(mode, task) for mode in MODE for task in "ab"}
        assert set(model.opt_fns) == set(model.input_fns) == set(model.loss_fns) == {"a", "b"}

    def test_the_stage_manager_is_there_while_a_procedure_runs(self):
        model = small()
        assert model.stage_mgr is None
        seen = []
        model.fit(lambda model: seen.append(model.stage_mgr))
        assert isinstance(seen[0], efl.framework.StageManager)

    def test_run_stage_outside_a_procedure_says_where_it_belongs(self):
        with pytest.raises(TaskError, match=r"run_stage\(\) belongs inside a procedure: model.fit"):
            small().run_stage("a", lambda sess: None)


def test_a_binned_auc_of_logits_is_refused_at_the_first_step():
    model = efl.Model()

    def eval_fn(model, sample):
        model.add_metric("auc", efl.metrics.auc(torch.tensor([0, 1]), torch.tensor([-3.0, 3.0])))

    model.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}]).eval_fn(eval_fn)
    with pytest.raises(FunctionError, match="predictions go beyond 0 and 1; give probabilities"):
        model.compile().fit(efl.procedure_fn.eval())


class TestWhichTask:
    def test_none_means_the_only_task_whatever_its_name(self):
        model = small(task="click")
        assert model.loss() is model.loss("click")
        assert model.input(MODE.EVAL) is model.inputs[efl.TaskScope(MODE.EVAL, "click")]

    @pytest.mark.parametrize("ask", ["loss", "train_op", "eval_op", "opt_to_vars", "input", "metrics"])
    def test_an_unknown_task_names_those_there_are(self, ask):
        with pytest.raises(TaskError, match="there is no task 'buy': the model has 'click'"):
            getattr(small(task="click"), ask)(task="buy")

    @pytest.mark.parametrize("ask", ["loss", "train_op", "input", "metrics"])
    def test_a_name_is_unknown_where_the_only_task_has_none(self, ask):
        words = "there is no task 'buy': the model's only task has no name; leave task= out"
        with pytest.raises(TaskError, match=words):
            getattr(small(), ask)(task="buy")

    @pytest.mark.parametrize("ask", ["loss", "train_op", "input", "metrics"])
    def test_none_is_unknown_where_there_are_two_tasks(self, ask):
        with pytest.raises(TaskError, match="the model has several tasks, 'a', 'b': say which, .*task='a'"):
            getattr(small(tasks=["a", "b"]), ask)()

    def test_the_current_scope_decides_where_a_call_does_not_say(self):
        model = small(tasks=["a", "b"])
        with efl.task_scope(MODE.EVAL, "b"):
            assert model.input() is model.inputs[efl.TaskScope(MODE.EVAL, "b")]
            assert model.input(task="a") is model.inputs[efl.TaskScope(MODE.EVAL, "a")]
            assert model.input(MODE.TRAIN) is model.inputs[efl.TaskScope(MODE.TRAIN, "b")]
            assert model.loss() is model.loss("b")

    def test_outside_any_scope_it_is_training(self):
        model = small()
        assert model.input() is model.inputs[efl.TaskScope(MODE.TRAIN, None)]

    @pytest.mark.parametrize("ask", ["loss", "train_op", "eval_op", "opt_to_vars", "input"])
    def test_before_compile_it_says_so(self, ask):
        with pytest.raises(TaskError, match=r"has no .*: call compile\(\) first"):
            getattr(small(compiled=False), ask)()

    def test_a_part_that_a_task_lacks_is_named(self):
        model = efl.Model().input_fn(lambda model, mode: [{"x": X}])
        model.eval_fn(lambda model, sample: None).compile()
        with pytest.raises(TaskError, match="task None has no train op"):
            model.train_op()

    def test_hooks_and_ops_for_an_unknown_task_are_found_at_compile(self):
        model = efl.Model()
        model.add_train_op(lambda: None, task="clik")
        model.input_fn(lambda model, mode: [{"x": X}], task="click").loss_fn(loss_of, task="click")
        model.optimizer_fn(SETTER, task="click")
        with pytest.raises(TaskError, match="there is no task 'clik': the model has 'click'"):
            model.compile()


class TestOps:
    def test_input_as_a_fetch_is_this_steps_batch(self):
        model = small()
        batch = run(model, model.input())
        assert torch.equal(batch.x, X[:2])

    def test_input_feeds_an_op(self):
        model = small()
        assert run(model, plait.op(lambda sample: sample.x.sum(), model.input())) == X[:2].sum()

    def test_loss_is_the_loss_of_this_step_and_moves_nothing(self):
        model = small()
        expected = model.variables()["fc/weight"].detach().clone()
        value = run(model, model.loss())
        fc = model._store.root.fc
        assert value == fc(X[:2]).mean()
        assert not value.requires_grad
        assert torch.equal(fc.weight, expected)
        assert int(model.global_step) == 0

    def test_train_op_makes_one_step(self):
        model = small()
        weight = model.variables()["fc/weight"]
        before = weight.detach().clone()
        run(model, model.train_op())
        assert torch.allclose(weight, before - 0.1 * X[:2].mean(0))

    def test_a_step_reads_its_batch_once_whatever_is_fetched(self):
        model = small()
        batch, loss, _ = run(model, [model.input(), model.loss(), model.train_op()])
        assert torch.equal(batch.x, X[:2])
        assert model.streams[efl.TaskScope(MODE.TRAIN)].position == 1
        assert torch.isfinite(loss)

    def test_eval_op_gives_what_eval_fn_returns(self):
        model = small(eval_fn=lambda model, sample: sample.x.sum())
        assert run(model, model.eval_op()) == X[:2].sum()

    def test_opt_to_vars(self):
        ((opt, (variables, scope)),) = small().opt_to_vars().items()
        assert isinstance(opt, torch.optim.SGD)
        assert ([list(v.shape) for v in variables], scope) == ([[1, 2], [1]], None)

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("kind", ["callable", "op"])
    def test_add_train_op_runs_once_a_step_after_the_update(self, when, kind):
        seen = []
        model = small(compiled=False)
        note = lambda *_: seen.append(int(model.global_step))
        if when == "after":
            model.compile()
        if kind == "op":
            note = plait.op(note, *([model.input()] if when == "after" else []))
        model.add_train_op(note)
        model.fit(efl.procedure_fn.train())
        assert seen == [1, 2, 3]

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_add_eval_op_runs_at_evaluation_steps_only(self, when):
        seen = []
        model = small(compiled=False)
        if when == "after":
            model.compile()
        model.add_eval_op(lambda: seen.append(model.training_flag))
        model.fit(efl.procedure_fn.train_and_eval(max_iter=1))
        assert seen == [False] * 3

    def test_an_op_added_inside_a_loss_fn_is_added_once(self):
        seen = []

        def loss_fn(model, sample):
            model.add_train_op(lambda: seen.append(int(model.global_step)))
            return loss_of(model, sample)

        model = small(loss_fn, lambda model, sample: None)
        for _ in range(2):
            model.fit(efl.procedure_fn.train())
        assert seen == [1, 2, 3, 4, 5, 6]
        assert len(model.train_ops[None]) == 2

    @pytest.mark.parametrize("wrong", [3, torch.zeros(1), "op"])
    def test_what_is_no_op_is_refused(self, wrong):
        with pytest.raises(plait.errors.FetchError, match=r"an Op was expected, got .*plait.op\(fn, \*inputs\)"):
            small().add_train_op(wrong)


class TestNow:
    def test_global_step_is_an_int_and_an_op(self):
        model = small()
        model.fit(efl.procedure_fn.train(2))
        assert int(model.global_step) == 2
        assert list(range(5))[model.global_step] == 2
        assert run(model, {"step": model.global_step}) == {"step": 2}

    def test_global_step_counts_training_steps_of_all_tasks_and_no_evaluations(self):
        model = small(tasks=["a", "b"])
        model.fit(efl.procedure_fn.train(2, task="a"))
        model.fit(efl.procedure_fn.train(1, task="b"))
        model.fit(efl.procedure_fn.eval(task="b"))
        assert int(model.global_step) == 3

    def test_training_flag_is_a_bool_and_true_inside_training_steps_only(self):
        flags = []

        def loss_fn(model, sample):
            flags.append(("train", model.training_flag))
            return loss_of(model, sample)

        def eval_fn(model, sample):
            flags.append(("eval", model.training_flag))

        model = small(loss_fn, eval_fn, rows=2)
        assert model.training_flag is False
        model.fit(efl.procedure_fn.train_and_eval(max_iter=2))
        assert flags == [("train", True), ("eval", False)] * 3
        assert model.training_flag is False
        model.fit(efl.procedure_fn.train(1))
        assert model.training_flag is False

    def test_modules_train_in_training_and_come_back_from_evaluation_as_they_were(self):
        seen = []

        def note(model, sample):
            seen.append([module.training for module in (model.net, model.net[0], model.net[1])])
            return model.net(sample.x).mean()

        model = small(note, compiled=False)
        model.net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        model.net[1].eval()
        model.compile()
        model.fit(efl.procedure_fn.train_and_eval(train_step=1, eval_step=1, max_iter=2))
        training, evaluation = [True, True, False], [False, False, False]
        assert seen == [training, evaluation] * 3
        assert [module.training for module in model.net] == [True, False]


class TestMetrics:
    def test_a_tensor_is_the_latest_in_training_and_the_mean_by_rows_in_evaluation(self):
        def both(model, sample):
            model.add_metric("first", sample.x[0, 0])
            return loss_of(model, sample)

        model = small(both, rows=5)  # batches of 2, 2 and 1 rows
        model.fit(efl.procedure_fn.train_and_eval(max_iter=1))
        assert model.metric_values()["first"] == pytest.approx(0.8)
        assert model.metric_values(MODE.EVAL)["first"] == pytest.approx((2 * 0.0 + 2 * 0.4 + 0.8) / 5)

    def test_a_measurement_accumulates_in_both(self):
        def both(model, sample):
            model.add_metric("mean", efl.metrics.mean(sample.x))
            return loss_of(model, sample)

        model = small(both)
        model.fit(efl.procedure_fn.train_and_eval(max_iter=1))
        assert model.metric_values()["mean"] == pytest.approx(X.mean().item())
        assert model.metric_values(MODE.EVAL)["mean"] == pytest.approx(X.mean().item())

    @pytest.mark.parametrize("mode", list(MODE))
    def test_an_op_is_the_latest(self, mode):
        model = small()
        model.add_metric("last", plait.op(lambda sample: sample.x.max(), model.input(mode)), mode)
        model.fit(efl.procedure_fn.train_and_eval(max_iter=1))
        assert model.metric_values(mode)["last"] == pytest.approx(1.1)

    def test_a_mode_and_a_task_may_be_named(self):
        def loss_fn(model, sample):
            model.add_metric("here", 1.0)
            model.add_metric("there", 2.0, MODE.EVAL, "b")
            return loss_of(model, sample)

        model = small(loss_fn, lambda model, sample: None, tasks=["a", "b"])
        assert {"here", "loss"} == set(model.metrics(task="a")) == set(model.metrics(MODE.TRAIN, "b"))
        assert set(model.metrics(MODE.EVAL, "b")) == {"there"}

    def test_metrics_are_ops_that_run_the_step(self):
        def loss_fn(model, sample):
            model.add_metric("first", sample.x[0, 0])
            return loss_of(model, sample)

        model = small(loss_fn)
        assert run(model, model.metrics()["first"]) == pytest.approx(0.0)
        values = run(model, {"train": model.train_op(), **model.metrics()})
        assert values["first"] == pytest.approx(0.4)

    @pytest.mark.parametrize("first", ["loss", "train"])
    def test_the_loss_metric_is_that_of_this_step_in_any_order_of_fetches(self, first):
        model = small()
        fetches = {"loss": model.metrics()["loss"], "train": model.train_op(), "value": model.loss()}
        if first == "train":
            fetches = dict(reversed(fetches.items()))
        with plait.Session(model) as session:
            for _ in range(2):
                values = session.run(fetches)
                assert values["loss"] == values["value"]

    def test_the_loss_is_a_metric_unless_the_user_has_one_of_that_name(self):
        def loss_fn(model, sample):
            model.add_metric("loss", torch.tensor(5.0))
            return loss_of(model, sample)

        model = small(loss_fn, lambda model, sample: None)
        model.fit(efl.procedure_fn.train(1))
        assert model.metric_values() == {"loss": 5.0}

    def test_metric_variables_initializer_resets_everything(self):
        model = small()
        model.fit(efl.procedure_fn.train(1))
        assert math.isfinite(model.metric_values()["loss"])
        run(model, model.metric_variables_initializer)
        assert math.isnan(model.metric_values()["loss"])

    def test_what_is_no_metric_is_refused(self):
        with pytest.raises(FunctionError, match=r"metric 'm' is a str: give efl.metrics.mean\(values\)"):
            small().add_metric("m", "0.5")

    def test_a_metric_that_is_new_after_compile_is_refused(self):
        steps = []

        def loss_fn(model, sample):
            steps.append(1)
            if len(steps) > 2:
                model.add_metric("late", 1.0)
            return loss_of(model, sample)

        with pytest.raises(FunctionError, match=r"metric 'late' is new after compile\(\): add the same metrics"):
            small(loss_fn, lambda model, sample: None).fit(efl.procedure_fn.train())


class TestTheRest:
    def test_extra_data(self):
        model = efl.Model()
        model.add_extra_data(("any", 1), [1])
        assert model.get_extra_data(("any", 1)) == [1]
        assert model.extra_data == {("any", 1): [1]}
        assert model.get_extra_data("nothing") is None
        with pytest.raises(TaskError, match="extra data under .*any.* already: choose another key"):
            model.add_extra_data(("any", 1), 2)

    @pytest.mark.parametrize(
        ("mode", "task", "runs"), [(MODE.TRAIN, "a", 2), (MODE.EVAL, "a", 1), (MODE.TRAIN, "b", 0)]
    )
    def test_hooks_see_the_runs_of_their_task_and_mode_only(self, mode, task, runs):
        seen = []

        class Note(SessionRunHook):
            def after_run(self, run_context, run_values):
                seen.append(1)

        model = small(tasks=["a", "b"])
        model.add_hooks([Note()], mode, task)
        model.fit(efl.procedure_fn.train_and_eval(train_step=2, eval_step=1, max_iter=1, task="a"))
        assert len(seen) == runs

    def test_what_is_no_hook_is_refused(self):
        with pytest.raises(FunctionError, match="add_hooks got a int: derive it from plait.train.SessionRunHook"):
            small().add_hooks([3])

    def test_a_model_can_be_a_subclass_and_is_a_module(self):
        class Mine(efl.Model):
            def __init__(self):
                super().__init__()
                self.tower = nn.Linear(2, 1)

        model = Mine()
        assert list(model.variables()) == ["tower/weight", "tower/bias"]
        assert isinstance(model, nn.Module)
