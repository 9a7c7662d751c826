"""What the documents of the doors `plait.efl` and `plait.train` say: names, parameters, defaults. A table, no code.

A name is a dotted path from `plait`. Its parameters are those of the document, in its order, each with its default:
REQUIRED where the heading shows none, UNSAID where a table lists a parameter without saying what happens when it is
left out.
"""

from __future__ import annotations

import torch

from plait.efl import MODE, Communicator

REQUIRED = "a value must be given"
UNSAID = "the document does not say"

TASK = {"task": None}
MODE_AND_TASK = {"mode": MODE.TRAIN, "task": None}

EFL = {
    # task scopes
    "efl.framework.task_scope.TaskScope": {"mode": None, "task": None},
    "efl.task_scope": {"mode": None, "task": None},
    "efl.current_task_scope": {},
    # the model
    "efl.Model": {},
    "efl.Model.input": MODE_AND_TASK,
    "efl.Model.metrics": MODE_AND_TASK,
    "efl.Model.add_extra_data": {"key": REQUIRED, "value": REQUIRED},
    "efl.Model.get_extra_data": {"key": REQUIRED},
    "efl.Model.add_train_op": {"train_op": REQUIRED} | TASK,
    "efl.Model.add_eval_op": {"eval_op": REQUIRED} | TASK,
    "efl.Model.loss": TASK,
    "efl.Model.train_op": TASK,
    "efl.Model.eval_op": TASK,
    "efl.Model.opt_to_vars": TASK,
    "efl.Model.add_hooks": {"hooks": REQUIRED} | MODE_AND_TASK,
    "efl.Model.add_metric": {"name": REQUIRED, "metric": REQUIRED} | MODE_AND_TASK,
    "efl.Model.input_fn": {"input_fn": REQUIRED} | TASK,
    "efl.Model.loss_fn": {"loss_fn": REQUIRED} | TASK,
    "efl.Model.optimizer_fn": {"optimizer_fn": REQUIRED} | TASK,
    "efl.Model.eval_fn": {"eval_fn": REQUIRED} | TASK,
    "efl.Model.run_stage": {"name": REQUIRED, "stage_or_func": REQUIRED},
    "efl.Model.fit": {"procedure_fn": REQUIRED, "log_step": 100, "project_name": "default_prj"},
    # a model of two parties; it has all of Model's methods, too
    "efl.FederalModel": {},
    "efl.FederalModel.send": {"name": REQUIRED, "tensor": REQUIRED, "require_grad": False} | MODE_AND_TASK,
    "efl.FederalModel.recv": {"name": REQUIRED, "dtype": torch.float32, "require_grad": False} | TASK,
    # optimizers
    "efl.optimizer_fn.optimizer_setter": {"opt": REQUIRED},
    "efl.optimizer_fn.optimzier_setter": {"opt": REQUIRED},
    "efl.optimizer_fn.scope_optimizer": {"scope_to_opt": REQUIRED},
    # procedures
    "efl.procedure_fn.train": {"max_step": None},
    "efl.procedure_fn.eval": {"max_step": None},
    "efl.procedure_fn.train_and_eval": {
        "train_step": None,
        "eval_step": None,
        "train_interval": None,
        "eval_interval": None,
        "max_iter": UNSAID,
    },
    "efl.procedure_fn.cotrain": {
        "train_step": None,
        "eval_step": None,
        "max_iter": UNSAID,
        "task_select_ratio": UNSAID,
    },
    # stages
    "efl.Stage": {},
    "efl.Stage.run": {},
    "efl.stage.LoopStage": {},
    "efl.stage.LoopStage.run": {"feed_dict": {}},
    "efl.stage.ModelBank": {"is_chief": REQUIRED, "config": None},
    "efl.stage.ModelBank.run": {},
    "efl.framework.StageManager": {
        "root_scope": REQUIRED,
        "device": REQUIRED,
        "worker_id": REQUIRED,
        "worker_num": REQUIRED,
        "project_name": REQUIRED,
        "name": REQUIRED,
    },
    "efl.framework.StageManager.init_arg": {"sess": REQUIRED},
    "efl.framework.StageManager.set_monitored_sess": {"sess": REQUIRED},
    "efl.framework.StageManager.stage": {"name": REQUIRED, "func": REQUIRED, "interval": REQUIRED},
}

EFL_KEYWORDS = {
    "efl.Model.compile": {"session_config": UNSAID, "sync_optimizer_config": UNSAID, "opt_config": UNSAID},
    "efl.Model.fit": {"checkpoint_dir": UNSAID},
}
"""What the document's tables list of a `**kwargs`: it may be keyword-only."""

VARIADIC = [
    "efl.Model.run_stage",
    "efl.Stage.run",
    "efl.framework.StageManager.stage",
]
"""What hands `*args, **kwargs` on to a function of the user's."""

OPT_CONFIG = {"REDUCE": "mean", "BACKEND_MODE": "noise"}
"""The default of compile(opt_config=)."""

MODEL_ATTRIBUTES = {
    "training_flag": bool,
    "input_fns": dict,
    "loss_fns": dict,
    "opt_fns": dict,
    "losses": dict,
    "inputs": dict,
    "train_ops": dict,
    "extra_data": dict,
}
"""With their types; global_step and metric_variables_initializer are Ops, stage_mgr is made by fit."""

FEDERAL_ATTRIBUTES = {
    "recv_grad_ops": dict,
    "require_grad_ops": dict,
    "federal_role": str,
    "communicator": Communicator,
}
"""What FederalModel has beside those."""

TRAIN = {
    "train.MonitoredSession": {},
    "train.MonitoredSession.run": {"fetches": REQUIRED, "feed_dict": None},
    "train.MonitoredSession.should_stop": {},
    "train.MonitoredSession.close": {},
    "train.MonitoredTrainingSession": {},
    "train.SessionRunHook": {},
    "train.SessionRunHook.begin": {},
    "train.SessionRunHook.after_create_session": {"session": REQUIRED, "coord": REQUIRED},
    "train.SessionRunHook.before_run": {"run_context": REQUIRED},
    "train.SessionRunHook.after_run": {"run_context": REQUIRED, "run_values": REQUIRED},
    "train.SessionRunHook.end": {"session": REQUIRED},
    "train.SessionRunArgs": {"fetches": UNSAID, "feed_dict": None, "options": None},
    "train.SessionRunValues": {"results": UNSAID, "options": UNSAID, "run_metadata": UNSAID},
    "train.Stage": {},
    "train.Stage.run": {},
}
"""The notes name these and show the order of the hooks; the parameters are TensorFlow 1's."""

OTHER_DEFAULTS = {
    ("efl.stage.LoopStage.run", "feed_dict"): None,  # stands for {}: a mutable default would be shared by all calls
} | {
    # the model makes its manager itself; who makes one by hand for one worker need not repeat that
    ("efl.framework.StageManager", name): default
    for name, default in {
        "root_scope": "",
        "device": "cpu",
        "worker_id": 0,
        "worker_num": 1,
        "project_name": "default_prj",
        "name": "stage_manager",
    }.items()
}
"""Where ours is another than the document's, and why; every documented call still means the same."""
