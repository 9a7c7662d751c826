"""A training that is killed and started again: `python resume_program.py VARIANT CHECKPOINT_DIR OUT.json`.

CHECKPOINT_DIR may be `-`: then nothing is saved. PLAIT_KILL_AT=`moment:step:skip` makes the process kill itself when
it reaches that moment at or after global step `step`, after having let `skip` such moments pass. OUT.json says, to the
last bit, what came out: variables, optimizers, metrics, history, the order of the data, random states.
"""

from __future__ import annotations

import functools
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
from torch.utils.data import DataLoader, Dataset

import plait
from plait import efl
from plait.data import Sample, TensorSource
from plait.engine.hooks import SessionRunArgs, SessionRunHook
from plait.engine.manager import StageManager
from plait.engine.model import Model
from plait.engine.stage import LoopStage, Stage
from plait.engine.task import MODE, TaskScope
from plait.errors import OutOfRangeError
from plait.rng import rng_state
from plait.variables import checkpoint

__all__ = ["MOMENTS", "VARIANTS"]

MOMENTS = ("step", "update", "evaluation", "write", "prune", "pass", "stage")
"""Where a process may kill itself: see `Kill`."""
ROWS, WIDTH, CLASSES = 320, 16, 4


class Kill:
    """The moment at which this process ends itself, if it has one."""

    def __init__(self, text: str) -> None:
        moment, step, skip = text.split(":") if text else ("", "0", "0")
        self.moment, self.step, self.skip = moment, int(step), int(skip)
        self.model: Model | None = None

    def reached(self, moment: str, damage: Callable[[], None] = lambda: None) -> None:
        if moment != self.moment or self.model is None or self.model.global_step.value < self.step:
            return
        self.skip -= 1
        if self.skip < 0:
            damage()
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self, model: Model) -> None:
        """Watch the moments that user functions do not see. Nothing is touched in a process that is to live."""
        self.model = model
        if self.moment == "update":  # after the step of one optimizer, before that of the next
            register_optimizer_step_post_hook(lambda *_: self.reached("update"))
        elif self.moment == "write":
            _before(checkpoint, "sync_file", lambda path: self.reached("write", lambda: _tear(path)))
        elif self.moment == "prune":
            _before(checkpoint.shutil, "rmtree", lambda path, **_: self._in_prune(Path(path)))
        elif self.moment == "pass":
            _after(plait.data.Stream, "_end_pass", lambda: self.reached("pass"))
        elif self.moment == "stage":  # it is done, but no checkpoint says so
            _after(StageManager, "stage", lambda: self.reached("stage"))

    def _in_prune(self, path: Path) -> None:
        if path.exists():
            self.reached("prune", lambda: (path / "manifest.json").unlink(missing_ok=True))


def _before(owner: Any, name: str, call: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, call: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call()
        return result

    setattr(owner, name, wrapped)


def _tear(path: Path) -> None:
    """Leave half of a file that was not synced yet, as the loss of power may."""
    if path.is_file():
        os.truncate(path, path.stat().st_size // 2)


KILL = Kill(os.environ.get("PLAIT_KILL_AT", ""))


class Trace(nn.Module):
    """A rolling hash of the rows of every training step, as a variable: what a loss_fn saw and a checkpoint kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def add(self, ids: torch.Tensor, tag: int = 0) -> None:
        places = torch.arange(1, len(ids) + 1)
        self.value.mul_(1_000_003).add_(((ids + 7) * places * places).sum() + tag)  # wraps around, always alike
        self.steps.add_(1)


class OrderHook(SessionRunHook):
    """A chain of checksums over the rows of every run, as the state of a hook."""

    def __init__(self, model: Model, task: str | None = None) -> None:
        self._model, self._task = model, task
        self.chain, self.runs = "", 0

    def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs(self._model.input(MODE.TRAIN, self._task))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        ids = run_values.results["id"]
        self.chain = hashlib.sha256(self.chain.encode() + ids.numpy().tobytes()).hexdigest()
        self.runs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"chain": self.chain, "runs": self.runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.chain, self.runs = state["chain"], state["runs"]


def rows(count: int = ROWS, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator)
    y = (x[:, :CLASSES] + 0.5 * torch.randn(count, CLASSES, generator=generator)).argmax(1)
    return {"id": torch.arange(count), "x": x, "y": y}


class Augmented(Dataset[dict[str, Any]]):
    """Rows with noise from torch's global generator, as augmentations have it."""

    def __init__(self, data: dict[str, torch.Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["id"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: column[index] for name, column in self.data.items()}
        return {**row, "x": row["x"] + 0.1 * torch.randn(WIDTH)}


def mlp(*, hidden: int = 64, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    middle: list[nn.Module] = [nn.BatchNorm1d(hidden)] if norm else []
    middle += [nn.ReLU(), nn.Dropout(dropout)] if dropout else [nn.ReLU()]
    return nn.Sequential(nn.Linear(WIDTH, hidden), *middle, nn.Linear(hidden, CLASSES))


def classifier(net: nn.Module, train: Callable[[], Any], optimizer: Any) -> Model:
    """A model with one task; `train` makes its input."""
    model = efl.Model()
    model.net, model.trace = net, Trace()

    def input_fn(model: Model, mode: MODE) -> Any:
        return train() if mode is MODE.TRAIN else TensorSource(rows(96, seed=1), 16)

    def loss_fn(model: Model, sample: Sample) -> torch.Tensor:
        logits = model.net(sample.x)
        model.add_metric("accuracy", efl.metrics.accuracy(sample.y, logits))
        model.trace.add(sample.id)
        KILL.reached("step")
        return F.cross_entropy(logits, sample.y)

    def eval_fn(model: Model, sample: Sample) -> None:
        logits = model.net(sample.x)
        model.add_metric("accuracy", efl.metrics.accuracy(sample.y, logits))
        model.add_metric("loss", F.cross_entropy(logits, sample.y))
        KILL.reached("evaluation")

    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(eval_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(optimizer))
    model.add_hooks([OrderHook(model)], MODE.TRAIN)
    return model.compile()


def shuffled(**settings: Any) -> Callable[[], TensorSource]:
    return lambda: TensorSource(rows(), 16, shuffle=True, **settings)


def loader(workers: int) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Augmented(rows()), batch_size=16, shuffle=True, num_workers=workers)


ADAM = functools.partial(torch.optim.Adam, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def plain() -> tuple[Model, Callable[[Model], None]]:
    """Wide, so that writing a checkpoint takes its time."""
    return classifier(mlp(hidden=8192), shuffled(), ADAM), efl.procedure_fn.train_and_eval(max_iter=12)


def dropout() -> tuple[Model, Callable[[Model], None]]:
    model = classifier(mlp(dropout=0.3, norm=True), shuffled(), ADAM)
    return model, efl.procedure_fn.train_and_eval(train_step=13, eval_step=4, max_iter=18)


def loader0() -> tuple[Model, Callable[[Model], None]]:
    return classifier(mlp(dropout=0.2), loader(0), SGD), efl.procedure_fn.train_and_eval(max_iter=12)


def loader2() -> tuple[Model, Callable[[Model], None]]:
    return classifier(mlp(dropout=0.2), loader(2), SGD), efl.procedure_fn.train_and_eval(train_step=17, max_iter=12)


def epochs() -> tuple[Model, Callable[[Model], None]]:
    def procedure(model: Model) -> None:
        efl.procedure_fn.train()(model)
        efl.procedure_fn.eval()(model)

    return classifier(mlp(dropout=0.2), shuffled(num_epochs=12), ADAM), procedure


def stages() -> tuple[Model, Callable[[Model], None]]:
    return classifier(mlp(dropout=0.2), shuffled(), ADAM), staged


def train_step(sess: Any, model: Model) -> None:
    """A step, if need be the first of the next pass."""
    try:
        sess.run(model.train_op())
    except OutOfRangeError:
        sess.run(model.train_op())


class Shrink(Stage):
    """A stage of a user's own: in each of its turns it shrinks the weights by a drawn factor, then trains a step."""

    def __init__(self, model: Model, turns: int) -> None:
        self.model, self.turns, self.turn = model, turns, 0

    def start(self) -> None:
        self.turn = 0

    def run(self) -> int:
        while self.turn < self.turns:
            with torch.no_grad():
                for variable in self.model.trainable_variables().values():
                    variable.mul_(1 - 0.01 * random.random())
            train_step(self.sess, self.model)
            self.turn += 1
            if self.boundary is not None:
                self.boundary()
        return self.turn

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.turn = state["turn"]


def staged(model: Model) -> None:
    """Loops that suspend within a pass, functions whose results later stages use, a stage of its own kind."""
    learn = LoopStage(model.train_op(), step=7, scope=TaskScope(MODE.TRAIN), model=model)
    test = LoopStage(model.eval_op(), scope=TaskScope(MODE.EVAL), model=model)
    shrink = Shrink(model, 5)
    best, scale = 0.0, model.run_stage("draw", lambda sess: {"scale": 0.5 + torch.rand(()).item()})
    for number in range(18):
        model.run_stage("learn", learn)
        if learn.finish:  # a pass is over: some rounds have steps fewer, some have one more stage
            model.run_stage("nudge", nudge, scale["scale"])
        model.run_stage("shrink", shrink)
        model.run_stage("reset", lambda sess: model.reset_metrics(TaskScope(MODE.EVAL)))
        best = max(best, model.run_stage(f"test {number}", test)["accuracy"])
        scale = model.run_stage("next", lambda sess, last: {"scale": last * (0.9 + best / 10)}, scale["scale"])
    model.run_stage("note", lambda sess: model.history.append({"best": best, "lstep": learn.lstep, **scale}))


def nudge(sess: Any, ctx: Any, scale: float) -> str:
    """Trains inside a function: after a kill all of it happens again."""
    model = sess.session.model
    with torch.no_grad():
        model.net[0].bias.add_(0.01 * scale * np.random.standard_normal())  # noqa: NPY002 - the global state is meant
    train_step(sess, model)
    return f"nudged by {scale!r} as worker {ctx.worker_id}"


def cotrain() -> tuple[Model, Callable[[Model], None]]:
    """Two tasks over one tower; a tower's Adam and the heads' SGD are shared between them."""
    model = efl.Model(seed=3)
    model.trace = Trace()
    split = efl.optimizer_fn.scope_optimizer({"tower": ADAM, "heads": SGD})
    for tag, task in enumerate(("click", "buy")):
        model.input_fn(functools.partial(_task_input, tag=tag), task=task)
        model.loss_fn(functools.partial(_task_loss, task=task, tag=tag), task=task)
        model.eval_fn(functools.partial(_task_eval, task=task), task=task)
        model.optimizer_fn(split, task=task)
        model.add_hooks([OrderHook(model, task)], MODE.TRAIN, task)
    ratio = {"click": 2.0, "buy": 1.0}
    return model.compile(), efl.procedure_fn.cotrain(train_step=13, max_iter=20, task_select_ratio=ratio)


def _task_input(model: Model, mode: MODE, tag: int) -> TensorSource:
    if mode is MODE.EVAL:
        return TensorSource(rows(64, seed=10 + tag), 16)
    return TensorSource(rows(ROWS - 64 * tag, seed=tag), 16, shuffle=True, seed=tag)


def _task_logits(x: torch.Tensor, task: str) -> torch.Tensor:
    with plait.variable_scope("tower", reuse=plait.AUTO_REUSE):
        hidden = plait.layer("norm", nn.BatchNorm1d, 64)(plait.layer("fc", nn.Linear, WIDTH, 64)(x))
        hidden = plait.layer("drop", nn.Dropout, 0.2)(hidden.relu()) * plait.get_variable("gain", [64], initializer=1.0)
    with plait.variable_scope("heads"):
        return plait.layer(task, nn.Linear, 64, 1)(hidden).squeeze(1)


def _task_loss(model: Model, sample: Sample, task: str, tag: int) -> torch.Tensor:
    logits, labels = _task_logits(sample.x, task), (sample.y == tag).float()
    model.add_metric("auc", efl.metrics.auc(labels, logits.sigmoid()))
    model.trace.add(sample.id, tag)
    KILL.reached("step")
    return F.binary_cross_entropy_with_logits(logits, labels)


def _task_eval(model: Model, sample: Sample, task: str) -> None:
    chances = _task_logits(sample.x, task).sigmoid()
    model.add_metric("auc", efl.metrics.auc((sample.y == 0).float(), chances))
    model.add_metric("mean", efl.metrics.mean(chances))
    KILL.reached("evaluation")


VARIANTS = {made.__name__: made for made in (plain, dropout, loader0, loader2, cotrain, stages, epochs)}


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()}"
    return repr(value)


def outcome(model: Model) -> dict[str, Any]:
    """Everything that two runs may differ in."""
    names = {variable: name for name, variable in model.variables().items()}
    states = [
        {names[variable]: {key: digest(value) for key, value in state.items()} for variable, state in opt.state.items()}
        for opt in model.optimizers()
    ]
    hooks = [hook for some in model.hooks.values() for hook in some if isinstance(hook, OrderHook)]
    return {
        "variables": {name: digest(variable) for name, variable in model.variables().items()},
        "optimizers": states,
        "metrics": {
            str(s): {n: repr(float(m.result())) for n, m in ms.items()} for s, ms in model.metric_states.items()
        },
        "history": repr(model.history),
        "order": [int(model.trace.value), int(model.trace.steps), *(hook.state_dict() for hook in hooks)],
        "streams": {str(scope): [stream.epoch, stream.position] for scope, stream in model.streams.items()},
        "journal": repr([entry[:2] for entry in model.stage_mgr.done]),
        "global_step": model.global_step.value,
        "random": {name: random_digest(value) for name, value in rng_state().items()},
    }


def random_digest(state: Any) -> str:
    parts = state if isinstance(state, list) else [state]
    return hashlib.sha256(repr([digest(part) for part in parts]).encode()).hexdigest()


def main(variant: str, checkpoint_dir: str, out: str) -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)  # noqa: NPY002 - the global state is meant
    model, procedure = VARIANTS[variant]()
    KILL.arm(model)
    directory = None if checkpoint_dir == "-" else checkpoint_dir
    # Some save by steps, some by the clock: so that evaluations, which count no steps, are saved in their midst, too.
    when = {"save_secs": 0.005} if variant in ("dropout", "loader2", "stages") else {"save_steps": 3}
    model.fit(procedure, log_step=1000, checkpoint_dir=directory, keep=2, **when)
    Path(out).write_text(json.dumps(outcome(model), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
