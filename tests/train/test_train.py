"""The door `plait.train`: its names, and TensorFlow's arguments and defaults."""

from __future__ import annotations

import inspect

import pytest

import plait
from plait import train
from plait.engine.hooks import SessionRunHook
from plait.engine.session import Session
from plait.errors import NanLossError

NEEDED = inspect.Parameter.empty

# TensorFlow 1's arguments in their order, with their defaults; what plait adds comes after, by name only.
SIGNATURES = {
    "CheckpointSaverHook": {
        "checkpoint_dir": NEEDED,
        "save_secs": None,
        "save_steps": None,
        "saver": None,
        "checkpoint_basename": "model.ckpt",
        "scaffold": None,
        "listeners": None,
        "save_graph_def": True,
    },
    "FeedFnHook": {"feed_fn": NEEDED},
    "FinalOpsHook": {"final_ops": NEEDED, "final_ops_feed_dict": None},
    "GlobalStepWaiterHook": {"wait_until_step": NEEDED},
    "LoggingTensorHook": {
        "tensors": NEEDED,
        "every_n_iter": None,
        "every_n_secs": None,
        "at_end": False,
        "formatter": None,
    },
    "MonitoredSession": {"session_creator": None, "hooks": None, "stop_grace_period_secs": 120},
    "NanTensorHook": {"loss_tensor": NEEDED, "fail_on_nan_loss": True},
    "ProfilerHook": {
        "save_steps": None,
        "save_secs": None,
        "output_dir": "",
        "show_dataflow": True,
        "show_memory": False,
    },
    "SecondOrStepTimer": {"every_secs": None, "every_steps": None},
    "StepCounterHook": {"every_n_steps": 100, "every_n_secs": None, "output_dir": None, "summary_writer": None},
    "StopAtStepHook": {"num_steps": None, "last_step": None},
    "SummarySaverHook": {
        "save_steps": None,
        "save_secs": None,
        "output_dir": None,
        "summary_writer": None,
        "scaffold": None,
        "summary_op": None,
    },
}

# In TensorFlow's order, so that arguments may go by position.
SESSION = {
    "master": "",
    "is_chief": True,
    "checkpoint_dir": None,
    "scaffold": None,
    "hooks": None,
    "chief_only_hooks": None,
    "save_checkpoint_secs": 600,
    "save_summaries_steps": 100,
    "save_summaries_secs": None,
    "config": None,
    "stop_grace_period_secs": 120,
    "log_step_count_steps": 100,
    "max_wait_secs": 7200,
    "save_checkpoint_steps": None,
    "summary_dir": None,
}

# The least that each hook must be given.
ARGUMENTS = {
    "CheckpointSaverHook": {"checkpoint_dir": "unused", "save_steps": 1},
    "FeedFnHook": {"feed_fn": dict},
    "FinalOpsHook": {"final_ops": None},
    "GlobalStepWaiterHook": {"wait_until_step": 0},
    "LoggingTensorHook": {"tensors": {}, "at_end": True},
    "NanTensorHook": {"loss_tensor": plait.op(lambda: 0.0)},
    "ProfilerHook": {"save_steps": 1},
    "StepCounterHook": {},
    "StopAtStepHook": {"num_steps": 1},
    "SummarySaverHook": {"save_steps": 1, "output_dir": "unused"},
}


def positional(name):
    parameters = inspect.signature(getattr(train, name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def keyword_only(name):
    parameters = inspect.signature(getattr(train, name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_the_names_are_sorted_and_there():
    assert train.__all__ == sorted(train.__all__)
    assert all(hasattr(train, name) for name in train.__all__)


def test_no_public_name_is_left_out():
    public = {name for name, value in vars(train).items() if not name.startswith("_") and inspect.isroutine(value)}
    public |= {name for name, value in vars(train).items() if inspect.isclass(value)} - {"Any"}
    later = {name for names in train._WHERE.values() for name in names}
    assert public | later == set(train.__all__)
    assert public & later == set()


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_tensorflows(name):
    assert positional(name) == SIGNATURES[name]
    assert list(positional(name)) == list(SIGNATURES[name])


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_plait_adds_is_given_by_name_and_may_be_left_out(name):
    assert NEEDED not in keyword_only(name).values()


def test_the_training_session_has_tensorflows_arguments_and_defaults():
    assert positional("MonitoredTrainingSession") == SESSION
    assert keyword_only("MonitoredTrainingSession") == {"model": None, "saver": None}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_ready_hook_is_made_from_little_and_from_everything(name):
    kind = getattr(train, name)
    assert isinstance(kind(**ARGUMENTS[name]), SessionRunHook)
    assert isinstance(kind(**{**SIGNATURES[name], **ARGUMENTS[name]}), SessionRunHook)


def test_the_table_has_every_ready_hook():
    ready = {name for name in train.__all__ if name.endswith("Hook")} - {"SessionRunHook"}
    assert ready == set(ARGUMENTS)


def test_the_error_of_a_loss_that_is_no_number_has_tensorflows_name():
    assert train.NanLossDuringTrainingError is NanLossError


def test_the_global_step_is_made_once_and_belongs_to_plain_sessions():
    step = train.get_or_create_global_step()
    assert train.get_or_create_global_step() is step
    assert Session().global_step is step
