"""Every documented name, parameter and default, compared with the table in `tests/mox/conformance.py`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import plait
from plait import mox
from plait.errors import ConfigError

SPEC = importlib.util.spec_from_file_location("mox_conformance", Path(__file__).with_name("conformance.py"))
table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table)

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
EMPTY = inspect.Parameter.empty


def resolve(path):
    return functools.reduce(getattr, path.split("."), mox)


def parameters_of(path):
    """Parameters of a function, method or constructor, without self."""
    function = resolve(path)
    is_method = "." in path and inspect.isclass(resolve(path.rpartition(".")[0])) and inspect.isfunction(function)
    found = list(inspect.signature(function).parameters.values())
    return found[1:] if is_method else found


def agrees(found, documented):
    if documented == table.SENTINEL:
        return type(found) is object
    return found is EMPTY if documented == table.REQUIRED else found == documented


def in_a_model(function):
    """What `function` gives inside a model_fn, where variables and collections are."""
    with plait.Model().scope():
        return function()


@pytest.mark.parametrize("path", table.SIGNATURES)
def test_documented_parameters_come_first_and_in_order(path):
    names = [parameter.name for parameter in parameters_of(path) if parameter.kind in POSITIONAL]
    wanted = list(table.SIGNATURES[path])
    assert names[: len(wanted)] == wanted


@pytest.mark.parametrize("path", table.SIGNATURES)
def test_documented_defaults(path):
    found = {parameter.name: parameter.default for parameter in parameters_of(path)}
    other = [
        name
        for name, default in table.SIGNATURES[path].items()
        if default != table.UNSAID and (path, name) not in table.DEVIATIONS and not agrees(found[name], default)
    ]
    assert other == []


@pytest.mark.parametrize("path", table.SIGNATURES)
def test_parameters_of_our_own_can_be_left_out(path):
    ours = [found for found in parameters_of(path) if found.name not in table.SIGNATURES[path]]
    assert [found.name for found in ours if found.kind not in VARIADIC and found.default is EMPTY] == []


@pytest.mark.parametrize("path", table.ALONE)
def test_there_is_no_other_parameter(path):
    assert [parameter.name for parameter in parameters_of(path)] == list(table.SIGNATURES[path])


@pytest.mark.parametrize("path", table.VARIADIC)
def test_arguments_are_handed_on(path):
    assert [parameter.kind for parameter in parameters_of(path)][-2:] == list(VARIADIC)


@pytest.mark.parametrize("path", table.SAMPLES)
def test_what_the_samples_write_is_accepted_by_name(path):
    found = {parameter.name: parameter for parameter in parameters_of(path)}
    assert [name for name in table.SAMPLES[path] if found[name].default is EMPTY] == []


@pytest.mark.parametrize("path", table.CONSTANTS)
def test_constants(path):
    wanted = table.CONSTANTS[path]
    assert isinstance(resolve(path), str)
    assert wanted in (table.UNSAID, resolve(path))


@pytest.mark.parametrize(("path", "name"), table.DEVIATIONS)
def test_a_deviation_is_one_of_a_documented_parameter_and_is_there(path, name):
    found = {parameter.name: parameter.default for parameter in parameters_of(path)}
    assert not agrees(found[name], table.SIGNATURES[path][name])
    assert table.DEVIATIONS[path, name]


def test_both_sentinels_of_run_are_one():
    found = inspect.signature(mox.run).parameters
    assert found["save_model_secs"].default is found["save_model_steps"].default


@pytest.mark.parametrize("name", table.FLAGS)
def test_documented_flags_by_both_spellings(name):
    assert mox.get_flag(name) == mox.get_flag(flag_name=name) == ""
    assert f"--{name} " in mox.get_help()


def test_the_pages_about_the_door_name_every_flag_and_every_public_name():
    docs = Path(__file__).parents[2] / "docs"
    page = "".join((docs / name).read_text(encoding="utf-8") for name in ("mox.md", "pictures.md"))
    flags = [line.split()[0].removeprefix("--") for line in mox.get_help().splitlines()]
    words = set(re.findall(r"\w+", page))
    assert [name for name in [*flags, *mox.__all__, *mox.file.__all__] if name not in words] == []


def test_get_flag_needs_a_name():
    with pytest.raises(ConfigError, match="there is no flag None: the flags are capture_steps"):
        mox.get_flag()


@pytest.mark.parametrize("name", table.OPTIMIZERS)
def test_documented_optimizers(name):
    factory = mox.get_optimizer_fn(name, learning_rate=0.5, **table.OPTIMIZERS[name])()
    optimizer = factory([torch.zeros(1, requires_grad=True)])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_unknown_optimizer_is_a_value_error_that_names_them_all():
    with pytest.raises(ValueError, match=f"there is no optimizer 'lion': there are {', '.join(table.OPTIMIZERS)}"):
        mox.get_optimizer_fn("lion", 0.1)


@pytest.mark.parametrize("mode", ["invalid", "EXPORT", "train", None])
def test_another_run_mode_is_a_value_error(mode):
    assert mode not in table.MODES_OF_RUN
    with pytest.raises(ValueError, match=r"run_mode=.*: write mox\.ModeKeys\.TRAIN, EVAL or PREDICT"):
        mox.run(input_fn=lambda mode: [], model_fn=lambda inputs, mode: None, run_mode=mode)


def test_variables_are_made_in_the_forced_type_and_handed_out_in_the_one_asked_for():
    def make():
        with mox.var_scope(force_dtype=torch.float32):
            asked = plait.get_variable("a", shape=[], dtype=torch.float16)
        return asked.dtype, mox.get_collection(mox.GraphKeys.GLOBAL_VARIABLES)[0].dtype

    assert in_a_model(make) == (torch.float16, torch.float32)


def test_regularization_losses_are_a_collection():
    def make():
        plait.get_variable("w", initializer=torch.ones(3), regularizer=lambda w: 0.5 * w.square().sum())
        return mox.get_collection(mox.GraphKeys.REGULARIZATION_LOSSES)

    assert [float(loss.detach()) for loss in in_a_model(make)] == [1.5]


def test_the_hook_of_the_document_is_a_session_run_hook():
    assert issubclass(mox.AggregativeSessionRunHook, plait.train.SessionRunHook)
    assert issubclass(mox.EarlyStoppingHook, mox.AggregativeSessionRunHook)


@pytest.mark.parametrize("question", ["support_aggregation", "support_sync_workers", "run_inter_mode"])
def test_a_question_without_an_answer_is_an_error_that_says_what_to_write(question):
    class Silent(mox.AggregativeSessionRunHook):
        pass

    with pytest.raises(NotImplementedError, match=f"Silent does not answer {question}.*return False"):
        getattr(Silent(), question)()


def test_the_networks_are_those_of_the_document():
    there = {name: value for name, value in vars(mox.NetworkKeys).items() if name.isupper()}
    assert there == {name: name.lower() for name in table.NETWORKS}
    assert list(there) == table.NETWORKS


@pytest.mark.parametrize("recipe", table.PREPROCESSING)
def test_every_network_has_the_recipe_of_the_document(recipe):
    found = {name: getattr(mox.PreprocessingKeys, name) for name in table.PREPROCESSING[recipe]}
    assert set(found.values()) == {recipe}
