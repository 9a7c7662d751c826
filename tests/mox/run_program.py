"""A `mox.run` that is killed and started again: `python run_program.py LOG_DIR OUT.json`.

LOG_DIR may be `-`: then nothing is saved. PLAIT_KILL_AT=`moment:step:skip` makes the process kill itself when it
reaches that moment at or after global step `step`, after having let `skip` such moments pass. OUT.json says, to the
last bit, what came out.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

import plait
from plait import mox
from plait.engine.build import current_model
from plait.engine.model import Model
from plait.rng import rng_state
from plait.variables import checkpoint

__all__ = ["MOMENTS"]

MOMENTS = ("step", "update", "evaluation", "write")
"""Where a process may kill itself: in a model_fn of either mode, after the update, in the write of a checkpoint."""
ROWS, BATCH, WIDTH, CLASSES = 320, 16, 8, 4


class Kill:
    """The moment at which this process ends itself, if it has one."""

    def __init__(self, text: str) -> None:
        moment, step, skip = text.split(":") if text else ("", "0", "0")
        self.moment, self.step, self.skip = moment, int(step), int(skip)

    def reached(self, moment: str, damage: Callable[[], None] = lambda: None) -> None:
        model = current_model()
        if moment != self.moment or model is None or model.global_step.value < self.step:
            return
        self.skip -= 1
        if self.skip < 0:
            damage()
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Watch the moments that user functions do not see; nothing is touched in a process that is to live."""
        if self.moment == "update":
            register_optimizer_step_post_hook(lambda *_: self.reached("update"))
        elif self.moment == "write":
            original = checkpoint.sync_file

            def torn(path: Any) -> None:
                self.reached("write", lambda: _tear(Path(path)))
                original(path)

            checkpoint.sync_file = torn


def _tear(path: Path) -> None:
    """Leave half of a file that was not synced yet, as the loss of power may."""
    if path.is_file():
        os.truncate(path, path.stat().st_size // 2)


KILL = Kill(os.environ.get("PLAIT_KILL_AT", ""))


class Noisy(Dataset[Any]):
    """Rows with noise from torch's global generator, as augmentations have it."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = (self.x[:, :CLASSES] + torch.randn(count, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.y[index]


class Chain(mox.AggregativeSessionRunHook):
    """A chain of checksums over what every step of a mode logged, as the state of a hook."""

    def __init__(self, numbers: Mapping[str, torch.Tensor]) -> None:
        self.numbers, self.chain, self.steps = dict(numbers), "", 0

    def after_run(self, run_context: Any, run_values: Any) -> None:
        text = self.chain + "".join(digest(value) for value in self.numbers.values())
        self.chain, self.steps = hashlib.sha256(text.encode()).hexdigest(), self.steps + 1

    def support_aggregation(self) -> bool:
        return False

    def support_sync_workers(self) -> bool:
        return False

    def run_inter_mode(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"chain": self.chain, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.chain, self.steps = state["chain"], state["steps"]


def input_fn(mode: str) -> Noisy:
    return Noisy(ROWS, seed=0) if mode == mox.ModeKeys.TRAIN else Noisy(100, seed=1)


def model_fn(inputs: list[torch.Tensor], mode: str, **kwargs: Any) -> mox.ModelSpec:
    x, y = inputs
    hidden = plait.layer("norm", nn.BatchNorm1d, 64)(plait.layer("in", nn.Linear, WIDTH, 64)(x)).relu()
    logits = plait.layer("out", nn.Linear, 64, CLASSES)(plait.layer("drop", nn.Dropout, 0.3)(hidden))
    loss, accuracy = F.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()
    KILL.reached("step" if mode == mox.ModeKeys.TRAIN else "evaluation")
    log_info = {"loss": loss, "accuracy": accuracy}
    stop = mox.EarlyStoppingHook(
        monitor_info=log_info,
        monitor="accuracy",
        batch_size=BATCH,
        samples_in_train=ROWS,
        samples_in_eval=100,
        min_delta=0.01,
        patience=20,
    )
    return mox.ModelSpec(loss=loss, log_info=log_info, hooks=[Chain(log_info), stop])


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()}"
    return repr(value)


def outcome(model: Model) -> dict[str, Any]:
    """Everything that two runs may differ in."""
    names = {variable: name for name, variable in model.variables().items()}
    (optimizer,) = model.optimizers()
    return {
        "variables": {name: digest(variable) for name, variable in model.variables().items()},
        "optimizer": {
            names[variable]: {key: digest(value) for key, value in state.items()}
            for variable, state in optimizer.state.items()
        },
        "rate": repr(optimizer.param_groups[0]["lr"]),
        "log_info": {
            str(scope): {name: repr(float(metric.result())) for name, metric in metrics.items()}
            for scope, metrics in model.metric_states.items()
        },
        "hooks": {str(scope): [repr(hook.state_dict()) for hook in hooks] for scope, hooks in model.hooks.items()},
        "streams": {str(scope): [stream.epoch, stream.position] for scope, stream in model.streams.items()},
        "global_step": model.global_step.value,
        "random": hashlib.sha256(repr(sorted(rng_state().items(), key=lambda item: item[0])).encode()).hexdigest(),
    }


def main(log_dir: str, out: str) -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)  # noqa: NPY002 - the global state is meant
    torch.set_printoptions(threshold=sys.maxsize)  # for the digest of the random states
    KILL.arm()
    schedule = mox.learning_rate_scheduler.piecewise_lr("5:0.01->0.1,15:0.1,40:0.1=>0.01,50:0.01", ROWS, BATCH)
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("momentum", learning_rate=schedule, momentum=0.9),
        run_mode=mox.ModeKeys.TRAIN,
        inter_mode=mox.ModeKeys.EVAL,
        batch_size=BATCH,
        max_number_of_steps=5000,
        log_dir=None if log_dir == "-" else log_dir,
        save_model_steps=3,
    )
    model = current_model()
    assert model is not None
    Path(out).write_text(json.dumps(outcome(model), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
