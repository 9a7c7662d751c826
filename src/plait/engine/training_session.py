"""`MonitoredTrainingSession`: a monitored session with the usual hooks; and `Saver`, for training without a Model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from plait.engine.build import current_model
from plait.engine.checkpoints import Checkpoints, ModelState, Restorable
from plait.engine.hooks import SessionRunHook
from plait.engine.monitored import MonitoredSession
from plait.engine.op import GlobalStep, default_global_step
from plait.engine.ready_hooks import CheckpointSaverHook, StepCounterHook, SummarySaverHook
from plait.engine.report import show_log
from plait.engine.session import Session
from plait.engine.settings import SessionConfig
from plait.errors import CheckpointError, ConfigError, MismatchError
from plait.rng import rng_state, set_rng_state
from plait.variables.checkpoint import CheckpointDir

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["MonitoredTrainingSession", "Saver"]


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Saver:
    """What a training without a Model saves: modules, optimizers and whatever else has a `state_dict`, by name."""

    def __init__(self, objects: Mapping[str, Stateful], global_step: GlobalStep | None = None) -> None:
        self._objects = dict(objects)
        self.global_step = global_step or default_global_step()

    def capture(self, directory: str | None = None) -> dict[str, Any]:
        del directory  # all of it is in the tree
        return {
            "variables": {
                f"{name}/{key.replace('.', '/')}": value
                for name, module in self._objects.items()
                if isinstance(module, torch.nn.Module)
                for key, value in module.state_dict().items()
            },
            "objects": {
                name: _plain(thing.state_dict())
                for name, thing in self._objects.items()
                if not isinstance(thing, torch.nn.Module)
            },
            "global_step": self.global_step.value,
            "random": rng_state(),
        }

    def restore(self, tree: Mapping[str, Any], project: str | None = None, directory: str | None = None) -> bool:
        del project, directory  # one script, one project
        try:
            for name, thing in self._objects.items():
                if isinstance(thing, torch.nn.Module):
                    keys = {key: f"{name}/{key.replace('.', '/')}" for key in thing.state_dict()}
                    thing.load_state_dict({key: tree["variables"][path] for key, path in keys.items()})
                else:
                    thing.load_state_dict(_unplain(tree["objects"][name]))
            self.global_step.value = int(tree["global_step"])
            set_rng_state(tree["random"])
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise MismatchError(
                f"the checkpoint belongs to another program: {error}; choose another checkpoint_dir"
            ) from error
        return True

    def check(self) -> None:
        pass


def _plain(value: Any) -> Any:
    """Optimizers number their parameters with ints; JSON's keys are strings."""
    if isinstance(value, Mapping):
        if all(isinstance(key, int) for key in value) and value:
            return {"$int_keys": [[key, _plain(item)] for key, item in value.items()]}
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _unplain(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"$int_keys"}:
            return {key: _unplain(item) for key, item in value["$int_keys"]}
        return {key: _unplain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unplain(item) for item in value]
    return value


def MonitoredTrainingSession(  # noqa: N802 - TensorFlow's name
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    scaffold: None = None,
    hooks: Sequence[SessionRunHook] | None = None,
    chief_only_hooks: Sequence[SessionRunHook] | None = None,
    save_checkpoint_secs: float | None = 600,
    save_summaries_steps: int | None = 100,
    save_summaries_secs: float | None = None,
    config: SessionConfig | None = None,
    stop_grace_period_secs: float = 120,
    log_step_count_steps: int | None = 100,
    max_wait_secs: float = 7200,
    save_checkpoint_steps: int | None = None,
    summary_dir: str | os.PathLike[str] | None = None,
    *,
    model: Model | None = None,
    saver: Restorable | None = None,
) -> MonitoredSession:
    """A session that restores the last checkpoint, saves, counts steps and writes summaries.

    The state is `saver`'s, or that of `model`, by default the Model compiled last. `save_checkpoint_steps` wins over
    `save_checkpoint_secs`.
    """
    del master, max_wait_secs  # there is no remote session to connect to, and none to wait for
    if scaffold is not None:
        raise ConfigError("scaffold= has no meaning here: pass model= or saver= to say what is saved")
    if config is not None:
        config.apply()
    show_log()
    if saver is None:
        model = model or current_model()
        saver = ModelState(model) if model is not None else None
    is_chief = is_chief and (model is None or model.strategy.worker_id == 0)
    if checkpoint_dir is not None and model is not None and model.strategy.worker_id and not model.strategy.in_step:
        checkpoint_dir = Path(checkpoint_dir) / f"worker-{model.strategy.worker_id}"  # each goes its own way
    usual: list[SessionRunHook] = []
    saving: CheckpointSaverHook | None = None
    if log_step_count_steps:
        usual.append(StepCounterHook(every_n_steps=log_step_count_steps))
    where = summary_dir or checkpoint_dir
    if is_chief and where is not None and (save_summaries_steps or save_summaries_secs):
        steps = save_summaries_steps if save_summaries_secs is None else None
        usual.append(SummarySaverHook(save_steps=steps, save_secs=save_summaries_secs, output_dir=where))
    saves = is_chief or (model is not None and model.strategy.worker_num > 1)  # workers in step all take part
    if saves and checkpoint_dir is not None and (save_checkpoint_secs or save_checkpoint_steps):
        secs = save_checkpoint_secs if save_checkpoint_steps is None else None
        saving = CheckpointSaverHook(checkpoint_dir, secs, save_checkpoint_steps, saver)
        usual.append(saving)
    mine = [*(hooks or ()), *((chief_only_hooks or ()) if is_chief else ())]
    create = _creator(model, saver, checkpoint_dir, saving)
    scoped = model.hooks if model is not None else None
    return MonitoredSession(create, [*mine, *usual], stop_grace_period_secs, scoped_hooks=scoped)


def _creator(
    model: Model | None,
    saver: Restorable | None,
    checkpoint_dir: str | os.PathLike[str] | None,
    saving: CheckpointSaverHook | None,
) -> Callable[[], Session]:
    """Make a session from the last checkpoint, at the start and after each recovery."""

    def create() -> Session:
        if checkpoint_dir is not None:
            if saver is None:
                raise CheckpointError("checkpoint_dir is given, but there is nothing to restore: pass model= or saver=")
            if saving is not None:
                saving.wait()  # what is still being written is the last checkpoint
            Checkpoints(saver, CheckpointDir(checkpoint_dir)).restore()
        step = saver.global_step if saver is not None else None
        return Session(model, step, state=saver)

    return create
