"""Exact resume: a training that was killed again and again ends with the bits of one that never was."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait import efl
from plait.data import TensorSource
from plait.engine import checkpoints as engine_checkpoints
from plait.engine.hooks import SessionRunHook
from plait.engine.task import MODE

PROGRAM = Path(__file__).with_name("resume_program.py")
VARIANTS = ("plain", "dropout", "loader0", "loader2", "cotrain", "stages", "epochs")
EVERYWHERE = ("outside", "step", "update", "write", "prune", "pass")
SYNCS = 6  # a checkpoint syncs its three files, itself and the directory; one more skips into the next checkpoint
DEADLINE = 120.0


class Training:
    """A process of the program, in a session of its own, so that its workers can be ended with it."""

    def __init__(self, variant: str, checkpoints: Path | None, out: Path, kill_at: str = "") -> None:
        command = [sys.executable, str(PROGRAM), variant, str(checkpoints or "-"), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLAIT_KILL_AT": kill_at}
        self.log = out.with_name("log.txt").open("a+b")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def wait_until(self, reached: Callable[[], bool]) -> bool:
        """Wait until `reached()` (True) or the process's end (False)."""
        deadline = time.monotonic() + DEADLINE
        while not reached():
            if self._ended():
                return False
            if time.monotonic() > deadline:
                pytest.fail(f"nothing came for {DEADLINE} s; the program wrote:\n{self.text()}")
            time.sleep(0.005)
        return True

    def _ended(self) -> bool:
        """Not reaped yet: until `end`, its number belongs to it."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.process.pid, options) is not None

    def end(self) -> int:
        """Kill whatever is left of it; returns how the process ended."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(DEADLINE)
        return self.process.returncode

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-4000:]


@contextlib.contextmanager
def training(*args: Any) -> Iterator[Training]:
    started = Training(*args)
    try:
        yield started
    finally:
        started.end()
        started.log.close()


def finish(variant: str, checkpoints: Path | None, out: Path) -> dict[str, Any]:
    with training(variant, checkpoints, out) as run:
        run.wait_until(lambda: False)
        assert run.end() == 0, run.text()
    return json.loads(out.read_text())


def saved_step(checkpoints: Path) -> int:
    """The global step of the newest checkpoint; -1 before the first."""
    found = [re.fullmatch(r"ckpt-(\d+)-\d+", path.name) for path in checkpoints.glob("ckpt-*")]
    return max((int(hit[1]) for hit in found if hit), default=-1)


def kill(variant: str, checkpoints: Path, out: Path, moment: str, step: int, draws: random.Random) -> None:
    """Start the training and see it killed: from inside at a named moment, or from outside at any."""
    outside = moment == "outside"
    skip = draws.randrange(SYNCS) if moment == "write" else 0
    with training(variant, checkpoints, out, "" if outside else f"{moment}:{step}:{skip}") as run:
        if run.wait_until(lambda: outside and saved_step(checkpoints) >= step):
            time.sleep(draws.uniform(0.0, 0.1))
        code = run.end()
        assert code == -signal.SIGKILL, f"not killed in {moment!r} from step {step} on:\n{run.text()}"


def check_resume(variant: str, moments: list[str], folder: Path, seed: int) -> None:
    expected = finish(variant, None, folder / "expected.json")
    draws = random.Random(seed)
    total = expected["global_step"]
    for number, moment in enumerate(moments):
        # A fifth of the training is left for the last: so it cannot end before the kill comes.
        step = number * total * 4 // (5 * len(moments))
        kill(variant, folder / "checkpoints", folder / "out.json", moment, step, draws)
    found = finish(variant, folder / "checkpoints", folder / "out.json")
    for part, value in expected.items():
        assert found[part] == value, f"{part} differs after kills in {moments}"


def kills(variant: str, count: int, draws: random.Random) -> list[str]:
    """Every moment about as often as any other, in a drawn order; an evaluation is the last."""
    moments = EVERYWHERE if variant == "epochs" else (*EVERYWHERE, "stage", "evaluation")
    order = [moments[number % len(moments)] for number in range(count - 1)]
    draws.shuffle(order)
    return [*order, "evaluation"]


def test_three_kills(tmp_path):
    check_resume("cotrain", ["outside", "write", "evaluation"], tmp_path, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_kills(variant, tmp_path):
    check_resume(variant, kills(variant, 20, random.Random(variant)), tmp_path, seed=2)


# In one process: a training saves at each boundary (of training, of evaluation, between stages); from each of these
# checkpoints another one sets out.


class Counter(SessionRunHook):
    """Counts runs, and asks for the end after `stop` of them."""

    def __init__(self, stop=None):
        self.runs, self.stop = 0, stop

    def after_run(self, run_context, run_values):
        self.runs += 1
        if self.stop is not None and self.runs >= self.stop:
            run_context.request_stop()

    def state_dict(self):
        return {"runs": self.runs}

    def load_state_dict(self, state):
        self.runs = state["runs"]


def small_model():
    data = {"x": torch.linspace(-1, 1, 96).reshape(24, 4), "y": torch.arange(24) % 3}
    torch.manual_seed(8)
    model = efl.Model()
    model.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))
    model.input_fn(lambda model, mode: TensorSource(data, 6 if mode is MODE.TRAIN else 12, shuffle=True))
    model.loss_fn(lambda model, s: F.cross_entropy(model.net(s.x), s.y))
    model.eval_fn(lambda model, s: model.add_metric("accuracy", efl.metrics.accuracy(s.y, model.net(s.x))))
    return model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.Adam, lr=0.01)))


def result_of(procedure, directory=None, *, save_secs=600.0, stop=None, everywhere=False):
    """Everything that a training came to."""
    model = small_model().compile()
    counter = Counter(stop)
    if not everywhere:
        model.add_hooks([counter], MODE.TRAIN)
    hooks = [counter] if everywhere else []
    model.fit(procedure, checkpoint_dir=directory, save_secs=save_secs, keep=None, hooks=hooks)
    variables = {name: value.tolist() for name, value in model.variables().items()}
    found = (variables, model.history, model.global_step.value, counter.runs, torch.get_rng_state().tolist())
    return [repr(part) for part in found]  # repr: a nan is equal to a nan


def check_every_boundary(monkeypatch, folder, procedure, **settings):
    expected = result_of(procedure, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(engine_checkpoints, "SECONDS_BETWEEN_STAGES", 0.0)
        assert result_of(procedure, folder / "all", save_secs=1e-9, **settings) == expected
    saved = sorted((folder / "all").glob("ckpt-*"), key=lambda path: path.name.rpartition("-")[2])
    assert len(saved) > 10
    for path in saved:
        shutil.copytree(path, folder / path.name / path.name)
        assert result_of(procedure, folder / path.name, **settings) == expected, f"from {path.name}"


def test_every_boundary(monkeypatch, tmp_path):
    check_every_boundary(monkeypatch, tmp_path, efl.procedure_fn.train_and_eval(train_step=3, max_iter=3))


def test_every_boundary_with_a_hook_of_fit(monkeypatch, tmp_path):
    procedure = efl.procedure_fn.train_and_eval(max_iter=2)
    check_every_boundary(monkeypatch, tmp_path, procedure, everywhere=True)


def test_every_boundary_of_a_training_that_a_hook_stops(monkeypatch, tmp_path):
    check_every_boundary(monkeypatch, tmp_path, efl.procedure_fn.train_and_eval(max_iter=4), stop=6)


def test_every_boundary_after_a_stage_that_freezes(monkeypatch, tmp_path):
    def freeze(sess):
        sess.session.model.net[0].requires_grad_(False)
        sess.session.model.net[1].eval()

    def procedure(model):
        efl.procedure_fn.train()(model)
        model.run_stage("freeze", freeze)
        efl.procedure_fn.train_and_eval(max_iter=1)(model)

    check_every_boundary(monkeypatch, tmp_path, procedure)


def test_every_boundary_of_a_procedure_that_resets_metrics(monkeypatch, tmp_path):
    def procedure(model):
        for _ in range(2):
            efl.procedure_fn.train()(model)
            model.run_stage("reset", lambda sess: sess.run(model.metric_variables_initializer) and None)
            efl.procedure_fn.eval()(model)

    check_every_boundary(monkeypatch, tmp_path, procedure)
