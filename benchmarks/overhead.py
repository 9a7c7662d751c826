"""What a framework adds to a training step: the same small training, written for each of several frameworks.

The model is tiny on purpose: a step of it is mostly Python, so what a framework adds shows.
The added microseconds carry over to other models; the ratios belong to this one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CASES", "bare_loop", "calls_per_step", "case", "main", "make_batches", "make_net", "measure"]

Batch = tuple[Tensor, Tensor]
Prepared = tuple[Callable[[], object], Callable[[], Tensor]]
Prepare = Callable[[list[Batch]], Prepared]

RESULTS = Path(__file__).parent / "results" / "overhead.json"
PACKAGES = ("pytorch-ignite", "lightning", "accelerate", "plait")
LEARNING_RATE = 0.1
# A multiple of every "each so many steps" below (Trainer logs each 50, plait each 100), so that the difference of
# a long and a short run holds a whole number of them.
SHORT = 100
COUNTED = 200

CASES: dict[str, Prepare] = {}


def case(name: str) -> Callable[[Prepare], Prepare]:
    """Register `prepare(batches) -> (run, final)`. `run()` trains one step for each batch, from the common first
    weights; `final()` gives the last weights. A `prepare` that raises ImportError is shown as not installed."""

    def register(prepare: Prepare) -> Prepare:
        CASES[name] = prepare
        return prepare

    return register


def make_net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_batches(steps: int) -> list[Batch]:
    seed = torch.Generator().manual_seed(1)
    return [(torch.randn(64, 64, generator=seed), torch.randint(10, (64,), generator=seed)) for _ in range(steps)]


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)


def weights(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield


def loop(batches: list[Batch], net: nn.Module, optimizer: Any, backward: Callable[[Tensor], Any]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        backward(loss)
        optimizer.step()


# ---- the cases


@case("bare loop")
def bare_loop(batches: list[Batch]) -> Prepared:
    net = make_net()
    return partial(loop, batches, net, make_optimizer(net), Tensor.backward), partial(weights, net)


@case("plait, no hooks")
def plait_no_hooks(batches: list[Batch]) -> Prepared:
    from plait import Session

    model, net = plait_model(batches)

    def run() -> None:
        with Session() as session:
            op = model.train_op()
            for _ in batches:
                session.run(op)

    return run, partial(weights, net)


@case("plait, default hooks")
def plait_default_hooks(batches: list[Batch]) -> Prepared:
    from plait.efl import procedure_fn

    logging.getLogger("plait").setLevel(logging.WARNING)
    model, net = plait_model(batches)
    procedure = procedure_fn.train(max_step=len(batches))
    return partial(model.fit, procedure, log_step=100), partial(weights, net)


@case("plait, mox.run")
def plait_mox(batches: list[Batch]) -> Prepared:
    import plait
    from plait import mox

    logging.getLogger("plait").setLevel(logging.WARNING)
    made: list[nn.Module] = []

    def model_fn(inputs: Any, mode: str) -> Any:
        x, y = inputs
        net = plait.layer("net", make_net)
        made[:] = [net]
        loss = F.cross_entropy(net(x), y)
        return mox.ModelSpec(loss=loss, log_info={"loss": loss})

    run = partial(
        mox.run,
        input_fn=lambda mode: batches,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("sgd", learning_rate=LEARNING_RATE),
        run_mode=mox.ModeKeys.TRAIN,
        auto_batch=False,
        max_number_of_steps=len(batches),
        log_every_n_steps=100,
    )
    return run, lambda: weights(made[0])


def plait_model(batches: list[Batch]) -> tuple[Any, nn.Module]:
    from plait.efl import Model, optimizer_fn

    net = make_net()
    model = Model()
    model.net = net
    model.input_fn(lambda model, mode: batches)
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample[0]), sample[1]))
    model.optimizer_fn(optimizer_fn.optimizer_setter(partial(torch.optim.SGD, lr=LEARNING_RATE)))
    model.compile()
    return model, net


@case("Ignite Engine")
def ignite_engine(batches: list[Batch]) -> Prepared:
    from ignite.engine import Engine

    net = make_net()
    optimizer = make_optimizer(net)

    def step(_: Engine, batch: Batch) -> Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return partial(Engine(step).run, batches, max_epochs=1), partial(weights, net)


@case("Lightning Fabric")
def lightning_fabric(batches: list[Batch]) -> Prepared:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    inner = make_net()
    net, optimizer = fabric.setup(inner, make_optimizer(inner))
    return partial(loop, batches, net, optimizer, fabric.backward), partial(weights, inner)


@case("Accelerate")
def accelerate(batches: list[Batch]) -> Prepared:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    inner = make_net()
    net, optimizer = accelerator.prepare(inner, make_optimizer(inner))
    return partial(loop, batches, net, optimizer, accelerator.backward), partial(weights, inner)


@case("Lightning Trainer off")
def trainer_off(batches: list[Batch]) -> Prepared:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return trainer(batches, log=False, **dict.fromkeys(off, False))


@case("Lightning Trainer")
def trainer_defaults(batches: list[Batch]) -> Prepared:
    # Its bar draws less than it would on a terminal, because the output is silenced: the figure is a lower bound.
    return trainer(batches, log=True)


def trainer(batches: list[Batch], *, log: bool, **settings: Any) -> Prepared:
    with silence():
        from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def training_step(self, batch: Batch) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if log:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    module = Module()
    module.net = make_net()
    # Not the list itself: the Trainer would take it for a list of loaders.
    source = dict(enumerate(batches)).values()

    def run() -> None:
        with silence(), tempfile.TemporaryDirectory() as folder:
            Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, **settings).fit(module, source)

    return run, partial(weights, module)


# ---- measuring


class Timing(NamedTuple):
    us: float
    bare_us: float
    difference: float


def seconds(prepare: Prepare, batches: list[Batch]) -> tuple[float, Tensor]:
    run, final = prepare(batches)
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        run()
        taken = time.process_time() - start
    finally:
        gc.enable()
    return taken, final()


def us_per_step(prepare: Prepare, batches: list[Batch]) -> tuple[float, Tensor]:
    """Time a long and a short run, and divide the difference by the difference in steps.

    So what a run costs once (a Trainer's set-up, a checkpoint at the end) is not counted, the same way for every
    case and without looking inside it.
    """
    short, _ = seconds(prepare, batches[:SHORT])
    long, last = seconds(prepare, batches)
    return (long - short) / (len(batches) - SHORT) * 1e6, last


def paired(prepare: Prepare, batches: list[Batch]) -> Timing:
    bare_us, expected = us_per_step(bare_loop, batches)
    us, last = us_per_step(prepare, batches)
    # A weight that is not a number must not look equal: `max` may pass over one.
    return Timing(us, bare_us, float((last - expected).abs().nan_to_num(nan=float("inf")).max()))


def count_calls(run: Callable[[], object]) -> int:
    """The Python functions entered in this thread: exact where time is noise."""
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def calls_per_step(prepare: Prepare) -> float:
    """Python calls a step, once-only calls taken off as in `us_per_step`."""
    batches = make_batches(SHORT + COUNTED)
    prepare(batches[:SHORT])[0]()  # imports and caches, as in `measure`
    short = count_calls(prepare(batches[:SHORT])[0])
    return (count_calls(prepare(batches)[0]) - short) / COUNTED


def row(name: str, timings: list[Timing]) -> dict[str, Any]:
    return {
        "case": name,
        "installed": True,
        "us_per_step": round(min(t.us for t in timings), 1),
        "added_us": round(statistics.median(t.us - t.bare_us for t in timings), 1),
        "ratio": round(statistics.median(t.us / t.bare_us for t in timings), 3),
        "python_calls": round(calls_per_step(CASES[name]), 1),
        "weights_difference": max(t.difference for t in timings),
    }


def measure(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Take the cases in turn, in one process, each right after a bare loop: load on the machine then falls on both.

    The bare loop is a case too: what it "adds" to itself is the noise of this run.
    """
    batches = make_batches(steps)
    timings: dict[str, list[Timing]] = {}
    for name, prepare in CASES.items():
        try:
            run, _ = prepare(batches[:SHORT])
        except ImportError:
            continue
        # A first run imports and caches what later ones find done: timed as the short run, it would hide that much.
        run()
        timings[name] = []
    for _ in range(rounds):
        for name, of_case in timings.items():
            of_case.append(paired(CASES[name], batches))
    return [row(name, timings[name]) if name in timings else {"case": name, "installed": False} for name in CASES]


# ---- showing


def report(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    versions = {found.name: found.version for found in importlib.metadata.distributions()}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {package: versions.get(package) for package in PACKAGES},
        "cpus": os.cpu_count(),
        **vars(arguments),
        "rows": rows,
    }


def cells(row: dict[str, Any]) -> list[str]:
    if not row["installed"]:
        return [row["case"], "not installed"]
    difference = row["weights_difference"]
    return [
        row["case"],
        f"{row['us_per_step']:.0f}",
        f"{row['added_us']:+.1f}",
        f"x{row['ratio']:.2f}",
        f"{row['python_calls']:.0f}",
        "equal" if difference == 0 else f"{difference:.1e}",
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="What a framework adds to a step")
    made.add_column("case", no_wrap=True)
    for heading in ("us/step", "added us", "ratio", "calls", "weights"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*cells(row))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.steps <= SHORT or arguments.rounds < 1:
        parser.error(f"got --steps {arguments.steps} --rounds {arguments.rounds}: write more than {SHORT}, at least 1")
    torch.set_num_threads(1)
    rows = measure(arguments.steps, arguments.rounds)
    Console().print(table(rows))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report(rows, arguments), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
