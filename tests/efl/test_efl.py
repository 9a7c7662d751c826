"""The door as its documents describe it: what users write, and what comes of it."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl, train
from plait.errors import FunctionError, StageError, TaskError

SGD = functools.partial(torch.optim.SGD, lr=0.1)
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


def make_model(*, tasks=(None,), source=None, seed=0):
    """A model whose tasks learn the sum of three features."""

    def input_fn(model, mode):
        features = {"x": X, "y": X.sum(1, keepdim=True)}
        return efl.Sample(features) if source is None else source(features)

    def output(task, sample):
        with plait.variable_scope(task or "net"):
            return plait.layer("dense", nn.Linear, 3, 1)(sample.x)

    def loss_fn(task, model, sample):
        return functional.mse_loss(output(task, sample), sample.y)

    def eval_fn(task, model, sample):
        model.add_metric("rmse", efl.metrics.root_mean_squared_error(sample.y, output(task, sample)))

    model = efl.Model(seed=seed)
    for task in tasks:
        model.input_fn(input_fn, task)
        model.loss_fn(functools.partial(loss_fn, task), task)
        model.eval_fn(functools.partial(eval_fn, task), task)
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer({task or "net": SGD}), task)
    return model.compile()


def batches_of_8(features):
    return plait.data.TensorSource(features, 8)


def run_stages(procedure, model=None, **settings):
    """What `procedure` returns, run inside a fit."""
    model = model or make_model()
    results = []
    model.fit(lambda model: results.append(procedure(model)), **settings)
    return results[0]


def test_train_lowers_the_loss():
    model = make_model()
    model.fit(efl.procedure_fn.train(max_step=1))
    first = model.metric_values()["loss"]
    model.fit(efl.procedure_fn.train(max_step=50), project_name="more")
    assert model.metric_values()["loss"] < first / 10
    assert int(model.global_step) == 51


def test_train_without_a_limit_ends_with_the_data():
    model = make_model(source=batches_of_8)
    model.fit(efl.procedure_fn.train())
    assert int(model.global_step) == 3


def test_eval_runs_no_training_step():
    model = make_model(source=batches_of_8)
    before = {name: value.detach().clone() for name, value in model.variables().items()}
    model.fit(efl.procedure_fn.eval())
    assert int(model.global_step) == 0
    assert all(torch.equal(before[name], value) for name, value in model.variables().items())
    assert list(model.history[0]["metrics"]) == ["rmse"]


def test_train_and_eval_alternate():
    model = make_model(source=batches_of_8)
    model.fit(efl.procedure_fn.train_and_eval(train_step=2, eval_step=1, max_iter=3))
    assert [entry["global_step"] for entry in model.history] == [2, 3, 5]  # a pass has 3 batches


def test_cotrain_draws_tasks_by_ratio_and_evaluates_each():
    model = make_model(tasks=("click", "buy"))
    counts = dict.fromkeys(["click", "buy"], 0)
    for task in counts:
        model.add_train_op(functools.partial(counts.__setitem__, task, 1), task)
    ratio = {"click": 0.5, "buy": 0.5}
    model.fit(efl.procedure_fn.cotrain(train_step=20, eval_step=1, max_iter=1, task_select_ratio=ratio))
    assert counts == {"click": 1, "buy": 1}
    assert int(model.global_step) == 20
    assert [entry["task"] for entry in model.history] == ["click", "buy"]


def test_extra_data_is_kept_with_the_model():
    model = efl.Model()
    model.add_extra_data("key", [1])
    assert model.get_extra_data("key") == [1]
    assert model.get_extra_data("other") is None
    with pytest.raises(TaskError, match="'key' already: choose another key"):
        model.add_extra_data("key", 2)


def test_opt_to_vars_tells_variables_and_scope_of_each_optimizer():
    model = make_model(tasks=("click", "buy"))
    [(optimizer, (variables, scope))] = model.opt_to_vars("buy").items()
    assert isinstance(optimizer, torch.optim.SGD)
    assert scope == "buy"
    assert [list(variable.shape) for variable in variables] == [[1, 3], [1]]


def test_metrics_are_ops_by_name():
    model = make_model()
    found = model.metrics(efl.MODE.EVAL)
    assert list(found) == ["rmse"]
    with plait.Session(model) as session:
        assert float(session.run(found["rmse"])) > 0


def test_a_task_scope_as_a_statement_stays_and_as_a_block_ends():
    efl.task_scope(efl.MODE.EVAL, "click")
    assert efl.current_task_scope() == (efl.MODE.EVAL, "click")
    with efl.task_scope(efl.MODE.TRAIN, "buy") as scope:
        assert efl.current_task_scope() == scope == (efl.MODE.TRAIN, "buy")
    assert efl.current_task_scope() == (efl.MODE.EVAL, "click")


def test_a_task_scope_names_the_task_of_calls_that_do_not():
    model = make_model(tasks=("click", "buy"))
    with efl.task_scope(task="buy"):
        assert model.loss() is model.losses["buy"]
    with pytest.raises(TaskError, match="the model has several tasks, 'click', 'buy': say which, .*task='click'"):
        model.loss()


# Stages, as the notes on XDL have them


def test_a_function_stage_gets_the_session_and_the_context():
    def my_stage(sess, ctx):
        assert isinstance(sess, train.MonitoredSession)
        return [ctx.worker_id, ctx.worker_num, ctx.is_chief()]

    assert run_stages(lambda model: model.run_stage("mine", my_stage)) == [0, 1, True]


def test_a_function_stage_may_take_the_session_alone():
    assert run_stages(lambda model: model.run_stage("mine", lambda sess: int(sess.global_step))) == 0


def test_a_stage_class_takes_arguments_and_has_the_session():
    class Steps(efl.Stage):
        def run(self, model, count, *, by=1):
            for _ in range(count * by):
                self.sess.run(model.train_op())
            return int(model.global_step)

    assert run_stages(lambda model: model.run_stage("mine", Steps(), model, 2, by=3)) == 6


def test_a_stage_without_run_says_what_to_write():
    class Empty(efl.Stage):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty has no run\(\): write one"):
        Empty()()


def test_the_context_finds_variables_and_combines_results():
    def my_stage(sess, ctx):
        with ctx.scope(), plait.variable_scope("net", reuse=True):
            shape = list(plait.layer("dense", nn.Linear, 3, 1).weight.shape)
        combined = [getattr(ctx, how)(3.0) for how in ("sum", "mean", "min", "max")]
        return [shape, combined, ctx.concat([1, 2])]

    shape, combined, joined = run_stages(lambda model: model.run_stage("mine", my_stage))
    assert shape == [1, 3]
    assert combined == [3.0] * 4
    assert list(joined) == [1, 2]


def test_the_context_reads_the_configuration(tmp_path):
    file = tmp_path / "plait.json"
    file.write_text(json.dumps({"model": {"width": 5}}))

    def my_stage(sess, ctx):
        return [ctx.get("model", "width"), ctx.get("model.width"), ctx.get("no", default=7)]

    assert run_stages(lambda model: model.run_stage("mine", my_stage), config=file) == [5, 5, 7]


def test_a_loop_stage_suspends_and_goes_on_until_it_finishes():
    def procedure(model):
        loop = efl.stage.LoopStage(model.train_op(), step=2)
        finished = []
        for number in range(2):
            model.run_stage(f"loop {number}", loop)
            finished.append(loop.finish)
        return finished, loop.lstep

    assert run_stages(procedure, make_model(source=batches_of_8)) == ([False, True], 3)


def test_a_model_bank_loads_what_its_config_names(tmp_path):
    first, second = make_model(tasks=("a", "b"), seed=1), make_model(tasks=("a", "b"), seed=2)
    first.fit(efl.procedure_fn.cotrain(train_step=1, max_iter=1, eval_step=1), checkpoint_dir=tmp_path)
    config = {"first": {"load": ["*"], "exclude": ["b/*"], "path": str(tmp_path)}}
    run_stages(lambda model: model.run_stage("bank", efl.stage.ModelBank(True, config)), second)
    same = {name: torch.equal(value, second.variables()[name]) for name, value in first.variables().items()}
    assert {name for name, equal in same.items() if equal} == {"a/dense/weight", "a/dense/bias"}


def test_a_stage_runs_once_and_its_result_is_kept(tmp_path):
    calls = []

    def my_stage(sess, ctx):
        calls.append(1)
        return {"found": 5}

    def procedure(model):
        return model.run_stage("mine", my_stage)

    for _ in range(2):
        assert run_stages(procedure, checkpoint_dir=tmp_path) == {"found": 5}
    assert len(calls) == 1


@pytest.mark.parametrize("thing", [5, None, "train"])
def test_a_stage_that_is_neither_function_nor_stage_is_refused(thing):
    with pytest.raises(StageError, match=f"stage 'mine' is a {type(thing).__name__}: give a function or an efl.Stage"):
        run_stages(lambda model: model.run_stage("mine", thing))


def test_run_stage_outside_a_procedure_says_where_it_belongs():
    with pytest.raises(TaskError, match=r"run_stage\(\) belongs inside a procedure: model.fit"):
        make_model().run_stage("mine", print)


def test_hooks_must_be_hooks():
    with pytest.raises(FunctionError, match="add_hooks got a int: derive it from plait.train.SessionRunHook"):
        efl.Model().add_hooks([5])


@pytest.mark.parametrize("given", [plait.SessionConfig(device="cpu"), {"device": "cpu"}])
def test_compile_takes_a_session_config_or_a_dict(given):
    model = efl.Model()
    model.net = nn.Linear(3, 1)
    model.input_fn(lambda model, mode: efl.Sample({"x": X})).loss_fn(lambda model, sample: model.net(sample.x).mean())
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD)).compile(session_config=given)
    assert model.config == plait.SessionConfig(device="cpu")


def test_a_loss_that_is_not_a_number_ends_training():
    model = make_model(source=lambda features: efl.Sample({**features, "y": features["y"] * torch.nan}))
    with pytest.raises(train.NanLossDuringTrainingError, match="the loss of TRAIN is nan, noticed at global step"):
        model.fit(efl.procedure_fn.train(max_step=5), log_step=1)


def test_looking_at_the_loss_before_training_is_no_nan():
    def look(sess, ctx, model):
        return float(sess.run(model.loss()))

    assert run_stages(lambda model: model.run_stage("look", look, model), log_step=1) > 0
