"""Every documented name, parameter and default, compared with the table in `tests/conformance.py`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

import plait
from plait import efl, train

SPEC = importlib.util.spec_from_file_location("conformance", Path(__file__).parents[1] / "conformance.py")
table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table)

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
DOCUMENTED = table.EFL | table.TRAIN


def resolve(path):
    return functools.reduce(getattr, path.split("."), plait)


def parameters_of(path):
    """Parameters of a function, method or constructor, without self."""
    function = resolve(path)
    is_method = "." in path and inspect.isclass(resolve(path.rpartition(".")[0])) and inspect.isfunction(function)
    found = list(inspect.signature(function).parameters.values())
    return found[1:] if is_method else found


def tiny_model():
    def input_fn(model, mode):
        return efl.Sample({"x": torch.ones(2, 3)})

    model = efl.Model()
    model.net = torch.nn.Linear(3, 1)
    model.input_fn(input_fn).loss_fn(lambda model, sample: model.net(sample.x).mean())
    return model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_parameters_come_first_and_in_order(path):
    names = [parameter.name for parameter in parameters_of(path) if parameter.kind in POSITIONAL]
    wanted = list(DOCUMENTED[path])
    assert names[: len(wanted)] == wanted


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_defaults(path):
    found = {parameter.name: parameter.default for parameter in parameters_of(path)}
    for name, default in DOCUMENTED[path].items():
        wanted = table.OTHER_DEFAULTS.get((path, name), default)
        if wanted is not table.UNSAID:
            assert found[name] == (inspect.Parameter.empty if wanted is table.REQUIRED else wanted), name


@pytest.mark.parametrize("path", DOCUMENTED)
def test_parameters_of_our_own_can_be_left_out(path):
    documented = {*DOCUMENTED[path], *table.EFL_KEYWORDS.get(path, {})}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters_of(path):
        if parameter.name not in documented and parameter.kind not in variadic:
            assert parameter.default is not inspect.Parameter.empty, parameter.name


@pytest.mark.parametrize("path", table.EFL_KEYWORDS)
def test_documented_keywords_are_accepted_and_optional(path):
    found = {parameter.name: parameter for parameter in parameters_of(path)}
    for name in table.EFL_KEYWORDS[path]:
        assert found[name].default is not inspect.Parameter.empty


@pytest.mark.parametrize("path", table.VARIADIC)
def test_arguments_for_user_functions_are_handed_on(path):
    kinds = {parameter.kind for parameter in parameters_of(path)}
    assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


@pytest.mark.parametrize(("path", "name"), table.OTHER_DEFAULTS)
def test_the_list_of_other_defaults_holds_only_documented_parameters(path, name):
    assert name in DOCUMENTED[path]


def test_the_default_mode_is_train_by_equality_and_by_name():
    default = inspect.signature(efl.Model.add_metric).parameters["mode"].default
    assert default == efl.MODE.TRAIN
    assert default != efl.MODE.EVAL
    assert repr(default) == repr(efl.MODE.TRAIN)


def test_the_two_modes():
    assert list(efl.MODE) == [efl.MODE.TRAIN, efl.MODE.EVAL]


def test_a_task_scope_has_mode_and_task():
    scope = efl.framework.task_scope.TaskScope(efl.MODE.EVAL, "click")
    assert (scope.mode, scope.task) == (efl.MODE.EVAL, "click")
    assert efl.framework.task_scope.TaskScope() == (None, None)


@pytest.mark.parametrize("name", table.MODEL_ATTRIBUTES)
def test_attributes_of_a_model(name):
    assert type(getattr(efl.Model(), name)) is table.MODEL_ATTRIBUTES[name]


@pytest.mark.parametrize("name", table.MODEL_ATTRIBUTES | table.FEDERAL_ATTRIBUTES)
def test_attributes_of_a_federal_model(name):
    model = efl.FederalModel("leader", listen="127.0.0.1:0")
    assert type(getattr(model, name)) is (table.MODEL_ATTRIBUTES | table.FEDERAL_ATTRIBUTES)[name]
    assert model.federal_role in {"leader", "follower"}


def test_a_federal_model_is_a_model_whose_methods_take_the_same():
    """Each method of a Model can be called as documented; those that hand arguments on take any."""
    assert issubclass(efl.FederalModel, efl.Model)
    for path in [path for path in DOCUMENTED if path.startswith("efl.Model.")]:
        method = resolve(path.replace("efl.Model", "efl.FederalModel"))
        names, kinds = zip(*((p.name, p.kind) for p in inspect.signature(method).parameters.values()), strict=True)
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        assert [name for name in DOCUMENTED[path] if name not in names and not takes_any] == [], path


def test_shape_and_mode_of_a_receive_are_keywords():
    """The document has neither; a function's own mode is the default."""
    found = inspect.signature(efl.FederalModel.recv).parameters
    assert {name: (found[name].kind, found[name].default) for name in ("shape", "mode")} == dict.fromkeys(
        ["shape", "mode"], (inspect.Parameter.KEYWORD_ONLY, None)
    )


def test_a_fresh_model_is_at_step_0_and_not_training():
    model = efl.Model()
    assert int(model.global_step) == 0
    assert model.training_flag is False
    assert isinstance(model.global_step, plait.Op)
    assert isinstance(model.metric_variables_initializer, plait.Op)


def test_attributes_of_a_fitted_model_are_filled():
    model = tiny_model().compile()
    model.fit(efl.procedure_fn.train(max_step=2))
    assert list(model.input_fns) == list(model.loss_fns) == list(model.opt_fns) == list(model.losses) == [None]
    assert isinstance(model.losses[None], plait.Op)
    assert isinstance(model.inputs[efl.TaskScope(efl.MODE.TRAIN)], efl.Sample)
    assert [type(op) for op in model.train_ops[None]] == [plait.Op]
    assert isinstance(model.stage_mgr, efl.framework.StageManager)
    assert int(model.global_step) == 2


def test_opt_config_defaults_to_the_documented_one_and_is_not_shared():
    first, second = tiny_model().compile(), tiny_model().compile()
    assert first.opt_config == second.opt_config == table.OPT_CONFIG
    assert first.opt_config is not second.opt_config


def test_registering_compiling_and_fitting_return_what_is_documented():
    model = tiny_model()
    assert model.eval_fn(lambda model, sample: None) is model
    assert model.compile() is model
    assert model.fit(efl.procedure_fn.train(max_step=1)) is None


@pytest.mark.parametrize("stage", [efl.Stage, efl.stage.LoopStage, functools.partial(efl.stage.ModelBank, True)])
def test_every_stage_has_a_session(stage):
    made = stage()
    assert isinstance(made, efl.Stage)
    assert made.sess is None


def test_a_loop_stage_is_not_finished_at_first():
    assert efl.stage.LoopStage().finish is False


def test_a_stage_manager_by_its_documented_positions():
    manager = efl.framework.StageManager("root", "cpu", 0, 1, "project", "manager")
    assert (manager.worker_id, manager.worker_num, manager.project_name, manager.name) == (0, 1, "project", "manager")


def test_the_documented_aliases_are_the_same_things():
    assert efl.procedure_fn.train_and_evaluate is efl.procedure_fn.train_and_eval
    assert efl.optimizer_fn.optimzier_setter is efl.optimizer_fn.optimizer_setter
    assert efl.framework.task_scope.TaskScope is efl.TaskScope
    assert efl.stage.Stage is efl.Stage is train.Stage


def test_a_monitored_training_session_is_a_monitored_session():
    with train.MonitoredTrainingSession(log_step_count_steps=None) as session:
        assert isinstance(session, train.MonitoredSession)
