"""One party of a small training of two: `python party.py DIRECTORY`; the environment says which party it is.

Tensors go from the leader to the follower and back, in training and in evaluation, and both have dropout and Adam. In
DIRECTORY, <role>.safetensors (variables and optimizers) and <role>.json (all else) say at the end what came out, to the
last bit; <role>.steps grows by a line at every step.

PLAIT_KILL_AT=`moment:skip` makes the process kill itself at that moment (see `Kill`), after `skip` of them have passed.

`python party.py --serve` has all its imports done, and starts such programs in processes of their own, at once: it
reads lines of {"arguments", "environ", "log"}, answers with their pids, and says "pid code" when one has ended.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import hashlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import plait
from plait import efl
from plait.data import Sample, TensorSource
from plait.federal.channel import Channel
from plait.federal.strategy import Federal
from plait.rng import rng_state
from plait.variables import checkpoint

ROWS, HELD_OUT, BATCH, WIDTH, CLASSES = 320, 96, 32, 8, 3
FIRST_ID, FIRST_LABEL = 5550120000, 9182700000
COLUMNS = {"leader": 4440062.5, "follower": 3330037.5}
"""A column of each party's data, and a part of all that it sends: nothing of these numbers may be seen in a log."""
CANARIES = ("5550120", "9182700", "4440062", "4.4401e", "3330037", "3.3300e")
SAID_SECONDS = 0.3
"""In this time, what was said has reached the other party, which has acted on it."""


class Kill:
    """The moment at which this process ends itself, if it has one.

    open: before it looks for the other party; opened: once they have found each other; build: inside a function that is
    built; built: between compile and fit; agreed: both fit the same; newest: it has heard of the other's checkpoints;
    step, evaluation, update: where they say; named: a checkpoint was named in both, and is written in the other only;
    write: half of it is written; saved: it is written, and the other does not know; last: all is saved and the other
    does not know; done: the other knows, and may have ended; end: fit has returned.
    """

    moment, skip = "", 0

    def set(self, text: str) -> None:
        self.moment, _, skip = text.partition(":")
        self.skip = int(skip or 0)

    def reached(self, moment: str, *, pause: float = 0.0, damage: Callable[[], None] = lambda: None) -> None:
        if moment != self.moment:
            return
        self.skip -= 1
        if self.skip < 0:
            damage()
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Watch the moments that a program does not see by itself."""
        _around(Channel, "open", before=lambda *_: self.reached("open"), after=lambda *_: self.reached("opened"))
        _around(Federal, "newest", after=lambda *_: self.reached("newest"))
        _around(Federal, "begin_fit", after=lambda *_: self.reached("agreed"))
        _around(Federal, "capture", after=lambda *_: self.reached("named", pause=SAID_SECONDS))
        _around(Federal, "saved", before=lambda *_: self.reached("saved", pause=SAID_SECONDS))
        _around(Federal, "finish", before=lambda *_: self.reached("last"))
        _around(Channel, "hear", before=lambda _, topic, *__: topic == "done" and self.reached("done", pause=2.0))
        _around(checkpoint, "sync_file", before=lambda path: self.reached("write", damage=lambda: _tear(path)))
        register_optimizer_step_post_hook(lambda *_: self.reached("update"))


def _around(
    owner: Any,
    name: str,
    before: Callable[..., object] = lambda *_, **__: None,
    after: Callable[..., object] = lambda *_, **__: None,
) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(*args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def _tear(path: Path) -> None:
    """Leave half of a file that was not synced yet, as the loss of power may."""
    if path.is_file():
        os.truncate(path, path.stat().st_size // 2)


KILL = Kill()


def rows(role: str, count: int, seed: int) -> dict[str, torch.Tensor]:
    """A party's columns; both have the ids, and only the leader the labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2 * WIDTH, generator=generator)
    noise = torch.randn(count, CLASSES, generator=generator)
    y = (x[:, :CLASSES] + x[:, WIDTH : WIDTH + CLASSES] + 0.3 * noise).argmax(1)
    secret = torch.full((count, 1), COLUMNS[role])
    part = x[:, :WIDTH] if role == "leader" else x[:, WIDTH:]
    found = {"x": torch.cat([part, secret], 1), "id": torch.arange(count) + FIRST_ID}
    return found | {"y": y + FIRST_LABEL} if role == "leader" else found


def hidden(name: str, x: torch.Tensor, width: int, dropout: float) -> torch.Tensor:
    layer = plait.layer(f"{name}/fc", nn.Linear, x.shape[1] - 1, width)
    found = layer(x[:, :-1]).relu()
    return plait.layer(f"{name}/drop", nn.Dropout, dropout)(found)


def with_secret(role: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, torch.full((len(tensor), 1), COLUMNS[role])], 1)


def leader(model: Any, sample: Sample, *, train: bool, dropout: float, one_way: bool = False) -> torch.Tensor:
    """The logits: what the leader sends comes back with the follower's part in it."""
    own = hidden("leader", sample.x, 12, dropout)
    if not one_way:
        model.send("hint", with_secret("leader", own[:, :4]), require_grad=train)
    joined = torch.cat([own, model.recv("hidden", require_grad=train)[:, :-1]], 1)
    found: torch.Tensor = plait.layer("top", nn.Linear, 28, CLASSES)(joined)
    return found


def follower(model: Any, sample: Sample, *, train: bool, dropout: float, one_way: bool = False) -> torch.Tensor:
    hint = [] if one_way else [model.recv("hint", require_grad=train)[:, :-1]]
    own = hidden("follower", torch.cat([*hint, sample.x], 1), 16, dropout)
    sent: torch.Tensor = model.send("hidden", with_secret("follower", own), require_grad=train)
    return sent


def make(model: Any, role: str, given: argparse.Namespace) -> Any:
    settings = {"dropout": given.dropout, "one_way": given.one_way}

    def input_fn(_: Any, mode: efl.MODE) -> TensorSource:
        if mode is efl.MODE.EVAL:
            return TensorSource(rows(role, HELD_OUT, 1), BATCH)
        found = rows(role, ROWS, 0)
        if given.wrong_row and role == "follower":
            found["id"][given.wrong_row] += 1000
        return TensorSource(found, BATCH, shuffle=True, seed=2)

    def loss_fn(model: Any, sample: Sample) -> Any:
        KILL.reached("build" if not model.compiled else "step")
        if role == "follower":
            return follower(model, sample, train=True, **settings)
        logits = leader(model, sample, train=True, **settings)
        if given.fail_at and model.global_step.value == given.fail_at:
            raise ArithmeticError(f"a user's error with values in it: {sample.y[:3].tolist()} {sample.id[:3].tolist()}")
        return F.cross_entropy(logits, sample.y - FIRST_LABEL)

    def eval_fn(model: Any, sample: Sample) -> None:
        KILL.reached("build" if not model.compiled else "evaluation")
        if role == "follower":
            follower(model, sample, train=False, **settings)
            return
        logits = leader(model, sample, train=False, **settings)
        model.add_metric("accuracy", efl.metrics.accuracy(sample.y - FIRST_LABEL, logits))

    adam = functools.partial(torch.optim.Adam, lr=0.01)
    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(eval_fn)
    return model.optimizer_fn(efl.optimizer_fn.optimizer_setter(adam))


class Steps(plait.train.SessionRunHook):
    """Writes down every run, and takes its time."""

    def __init__(self, model: Any, file: Path, pause: float) -> None:
        self._model, self._pause = model, pause
        self._file = file.open("a")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        del run_context, run_values
        self._file.write(f"{self._model.global_step.value}\n")
        self._file.flush()
        time.sleep(self._pause)

    def end(self, session: Any) -> None:
        del session
        self._file.close()


def report(model: Any, out: Path) -> None:
    names = {variable: name for name, variable in model.variables().items()}
    tensors = {f"variable {name}": variable.detach().clone() for variable, name in names.items()}
    for number, optimizer in enumerate(model.optimizers()):
        for variable, state in optimizer.state.items():
            tensors |= {f"optimizer {number} {names[variable]} {key}": value for key, value in state.items()}
    facts = {
        "global_step": model.global_step.value,
        "metrics": {
            str(scope): {name: repr(float(metric.result())) for name, metric in states.items()}
            for scope, states in model.metric_states.items()
        },
        "history": repr(model.history),
        "streams": {str(scope): [stream.epoch, stream.position] for scope, stream in model.streams.items()},
        "journal": repr([entry[:2] for entry in model.stage_mgr.done]),
        "random": hashlib.sha256(repr({n: _digest(v) for n, v in rng_state().items()}).encode()).hexdigest(),
    }
    safetensors.torch.save_file(tensors, f"{out}.safetensors")
    Path(f"{out}.json").write_text(json.dumps(facts, indent=1))


def _digest(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.numpy().tobytes()).hexdigest()
    return [_digest(part) for part in value] if isinstance(value, list) else repr(value)


def run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--fits", type=int, default=1, help="procedures, one after the other")
    parser.add_argument("--one-way", action="store_true", help="the leader sends nothing")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--wire-dtype")
    parser.add_argument("--wrong-row", type=int, default=0, help="of the follower's: its id is another")
    parser.add_argument("--fail-at", type=int, default=0, help="the leader's function raises at this step")
    given = parser.parse_args(arguments)
    role = os.environ["PLAIT_PARTY"]
    KILL.set(os.environ.get("PLAIT_KILL_AT", ""))
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("plait").setLevel(logging.DEBUG)
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)  # noqa: NPY002 - the global state is meant
    party = {"staleness": given.staleness, "wire_dtype": given.wire_dtype}
    model = make(efl.FederalModel(sample_id="id", **party), role, given)
    model.compile()
    KILL.reached("built")
    chief = model.strategy.worker_id == 0
    for number in range(given.fits):
        hooks = [Steps(model, given.directory / f"{role}.steps", given.pause)] if chief else []
        procedure = efl.procedure_fn.train_and_eval(max_iter=given.passes)
        checkpoints = given.directory / f"{role}-checkpoints" / str(number)
        model.fit(procedure, log_step=5, checkpoint_dir=checkpoints, save_steps=7, keep=3, hooks=hooks)
    KILL.reached("end")
    if chief:
        report(model, given.directory / role)
    model.close()


def serve() -> None:
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # brings a large part of torch
    buffer, running = b"", set()
    while True:
        if select.select([0], [], [], 0.01)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                running.add(pid := start(json.loads(line)))
                print(pid, flush=True)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                print(pid, os.waitstatus_to_exitcode(status), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def start(order: dict[str, Any]) -> int:
    """A copy of this process that runs the program; its pid."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    os.environ.update(order["environ"])
    code = 1
    try:
        run(order["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # noqa: SLF001 - as the interpreter does at its end
        os._exit(code)
    return 0


if __name__ == "__main__":
    KILL.arm()
    serve() if sys.argv[1:] == ["--serve"] else run(sys.argv[1:])
