"""What the document of the door `plait.mox` says: names, parameters, defaults. A table, no code.

A name is a dotted path from `plait.mox`. Its parameters are those of the document, in its order, each with its default:
REQUIRED where there is none, SENTINEL where the document shows `<object object>`, UNSAID where an example uses a
parameter and nothing says what happens when it is left out.
"""

from __future__ import annotations

REQUIRED = "a value must be given"
SENTINEL = "an object that nobody can pass by chance"
UNSAID = "the document does not say"

SIGNATURES = {
    # 1. flags
    "get_flag": {"name": REQUIRED},
    "set_flag": {"name": REQUIRED, "value": REQUIRED},
    "ModeKeys": {},
    # 2. the model
    "ModelSpec": {
        "loss": None,
        "var_scopes": None,
        "log_info": None,
        "output_info": None,
        "export_spec": None,
        "hooks": None,
    },
    "ExportSpec": {"inputs_dict": REQUIRED, "outputs_dict": REQUIRED, "version": -1},
    "get_collection": {"key": REQUIRED},
    "var_scope": {"force_dtype": None},
    "AggregativeSessionRunHook": {},
    "AggregativeSessionRunHook.before_run": {"run_context": REQUIRED},
    "AggregativeSessionRunHook.support_aggregation": {},
    "AggregativeSessionRunHook.support_sync_workers": {},
    "AggregativeSessionRunHook.run_inter_mode": {},
    "file.File": {"url": REQUIRED, "mode": UNSAID},
    # 3. optimizers
    "get_optimizer_fn": {"name": REQUIRED, "learning_rate": REQUIRED, "scope": None},
    "learning_rate_scheduler.piecewise_lr": {
        "lr_strategy": REQUIRED,
        "num_samples": REQUIRED,
        "global_batch_size": REQUIRED,
    },
    # 4. running
    "run": {
        "input_fn": None,
        "output_fn": None,
        "model_fn": None,
        "optimizer_fn": None,
        "run_mode": "invalid",
        "inter_mode": None,
        "batch_size": None,
        "auto_batch": True,
        "log_dir": None,
        "max_number_of_steps": 0,
        "checkpoint_path": None,
        "log_every_n_steps": 10,
        "output_every_n_steps": 0,
        "save_summary_steps": 100,
        "save_model_secs": SENTINEL,
        "export_model": False,
        "fetch_strategy_fn": None,
        "save_model_steps": SENTINEL,
    },
    "EarlyStoppingHook": {
        "monitor_info": REQUIRED,
        "monitor": REQUIRED,
        "batch_size": REQUIRED,
        "samples_in_train": REQUIRED,
        "samples_in_eval": REQUIRED,
        "evaluate_every_n_epochs": UNSAID,
        "min_delta": UNSAID,
        "patience": UNSAID,
        "prefix": UNSAID,
    },
}

SAMPLES = {
    "get_flag": ["flag_name"],
    "ModelSpec": ["output_dict", "var_scope"],
    "placeholder": ["dtype", "shape"],
}
"""What the document's prose and samples write by name beside its headings: second spellings, or TensorFlow's own."""

VARIADIC = ["get_optimizer_fn"]
"""What takes `*args, **kwargs` for somebody else."""

ALONE = ["run"]
"""What has the documented parameters and no other."""

CONSTANTS = {
    "ModeKeys.EVAL": "EVAL",
    "ModeKeys.EXPORT": "EXPORT",
    "ModeKeys.PREDICT": "PREDICT",
    "ModeKeys.TRAIN": "TRAIN",
    "ExportKeys.TF_SERVING": UNSAID,
    "GraphKeys.GLOBAL_VARIABLES": UNSAID,
    "GraphKeys.REGULARIZATION_LOSSES": UNSAID,
}

OPTIMIZERS = {
    "adadelta": {},
    "adagrad": {},
    "adam": {},
    "ftrl": {},
    "momentum": {"momentum": 0.9},
    "rmsprop": {},
    "sgd": {},
}
"""With what they cannot do without."""

FLAGS = ["checkpoint_exclude_patterns", "worker_hosts"]
"""Those that the document names; it calls for all flags of MoXing, and lists none."""

MODES_OF_RUN = ["TRAIN", "EVAL", "PREDICT"]

DEVIATIONS: dict[tuple[str, str], str] = {
    ("get_flag", "name"): "may be left out, since the document's own sample writes flag_name= instead",
}
"""Parameters whose default is another one here, and why."""
