"""Everything that is promised of a GPU, checked and timed in one run: `python benchmarks/gpu.py`, from source.

Ways to train the same network take turns in one process: each is a thread that stops in its input when its block of
steps is done. `--only resnet mlp equal private pictures saving` chooses parts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import functools
import json
import logging
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "privacy_peers")]

from plait import Session, efl, mox, nets, train  # noqa: E402
from plait.data import TensorSource, as_source, feeding  # noqa: E402
from plait.engine.build import current_model  # noqa: E402
from plait.mox.flags import reset_flags  # noqa: E402
from plait.privacy.optimizers import make_private  # noqa: E402

RESULT = HERE / "results" / "gpu.json"
CUDA = torch.device("cuda")
BATCH, CLASSES = 256, 1000
WAIT_SECONDS = 400
NAME = "resnet_v1_50"


# ---- Taking turns


class Way:
    """A training in a thread, which goes on for a block of steps when it is asked to."""

    def __init__(self, name: str, run: Callable[[Iterator[Any]], None], batch: Any) -> None:
        self.name = name
        self._batch = batch
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._left = 0
        self._over = False
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[Iterator[Any]], None]) -> None:
        try:
            torch.cuda.set_device(0)
            run(self.batches())
        except BaseException:
            self.error = traceback.format_exc()
        self._done.release()

    def batches(self) -> Iterator[Any]:
        while True:
            if self._left == 0:
                torch.cuda.synchronize()
                self._end = time.perf_counter()
                self._done.release()
                self._go.acquire()
                if self._over:
                    return
                torch.cuda.synchronize()
                self._begin = time.perf_counter()
            self._left -= 1
            yield self._batch

    def ready(self) -> None:
        self._wait()

    def block(self, steps: int) -> float:
        """Seconds of a step."""
        self._left = steps
        self._go.release()
        self._wait()
        return (self._end - self._begin) / steps

    def _wait(self) -> None:
        if not self._done.acquire(timeout=WAIT_SECONDS):
            raise SystemExit(f"{self.name}: no answer within {WAIT_SECONDS} s")
        if self.error is not None:
            raise SystemExit(f"{self.name}: {self.error}")

    def close(self) -> None:
        self._over = True
        self._go.release()
        self._thread.join(60)


def take_turns(ways: list[Way], steps: int, rounds: int, warm: int = 8) -> dict[str, list[float]]:
    for way in ways:
        way.ready()
        way.block(warm)
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            way.block(2)
            found[way.name].append(way.block(steps))
    return found


def ratios(found: dict[str, list[float]], own: str, other: str) -> dict[str, float]:
    """How many times as fast `own` is: the median of the rounds, the least and the greatest."""
    each = [theirs / ours for ours, theirs in zip(found[own], found[other], strict=True)]
    return {"median": round(statistics.median(each), 4), "least": round(min(each), 4), "most": round(max(each), 4)}


def quartiles(own: list[float], other: list[float]) -> list[float]:
    """Of the rounds' ratios, which are many and noisy."""
    each = [ours / theirs for ours, theirs in zip(own, other, strict=True)]
    return [round(value, 4) for value in statistics.quantiles(each, n=4)]


# ---- ResNet-50


SETTINGS = {
    "fp32": {"precision": "fp32", "last": False, "compile": False},
    "bf16 channels-last": {"precision": "bf16", "last": True, "compile": False},
    "bf16 compiled": {"precision": "bf16", "last": True, "compile": True},
}


class Logits(nn.Module):
    """The network of plait as anybody's: pictures in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nets.build(NAME, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net.forward(images)[0]


def ready_net(setting: dict[str, Any]) -> nn.Module:
    net = Logits().cuda().train()
    return net.to(memory_format=torch.channels_last) if setting["last"] else net


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)


def by_hand(batches: Iterator[Any], setting: dict[str, Any]) -> None:
    net = ready_net(setting)
    optimizer = sgd(net)
    called = torch.compile(net) if setting["compile"] else net
    half = setting["precision"] == "bf16"
    for images, labels in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = F.cross_entropy(called(images), labels)
        loss.backward()
        optimizer.step()


def by_plait(batches: Iterator[Any], setting: dict[str, Any], **more: Any) -> None:
    def model_fn(inputs: Any, mode: str, **_: Any) -> Any:
        images, labels = inputs
        network = mox.get_model_fn(NAME, mode, CLASSES, data_format="NHWC", preprocess_fn=None)
        logits, _ = network(images.permute(0, 2, 3, 1))
        loss = F.cross_entropy(logits, labels)
        return mox.ModelSpec(loss=loss, log_info={"loss": loss})

    reset_flags()
    mox.set_flag("precision", setting["precision"])
    mox.set_flag("compile_modules", setting["compile"])
    mox.run(
        input_fn=lambda mode: batches,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("momentum", learning_rate=0.01, momentum=0.9),
        run_mode=mox.ModeKeys.TRAIN,
        auto_batch=False,
        **more,
    )


def by_lightning(batches: Iterator[Any], setting: dict[str, Any]) -> None:
    try:
        import lightning as L
    except ImportError:
        import pytorch_lightning as L
    net = ready_net(setting)
    if setting["compile"]:
        net = torch.compile(net)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            images, labels = batch
            return F.cross_entropy(self.net(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.net)

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return batches

    trainer = L.Trainer(
        max_epochs=1,
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed" if setting["precision"] == "bf16" else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        benchmark=True,
    )
    trainer.fit(Module(), Loader())


def by_accelerate(batches: Iterator[Any], setting: dict[str, Any]) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="bf16" if setting["precision"] == "bf16" else "no")
    net = ready_net(setting)
    net, optimizer = accelerator.prepare(net, sgd(net))
    called = torch.compile(net) if setting["compile"] else net
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(called(images), labels)
        accelerator.backward(loss)
        optimizer.step()


WAYS = {"by hand": by_hand, "plait": by_plait, "Lightning": by_lightning, "Accelerate": by_accelerate}


def pictures_on_device(last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(BATCH, 3, 224, 224, device=CUDA)
    if last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.randint(CLASSES, (BATCH,), device=CUDA)


def measure_resnet(rounds: int) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    found: dict[str, Any] = {}
    for title, setting in SETTINGS.items():
        begun = time.perf_counter()
        batch = pictures_on_device(setting["last"])
        ways = []
        try:
            for name, run in WAYS.items():
                ways.append(Way(name, functools.partial(run, setting=setting), batch))
                ways[-1].ready()  # one after the other: flags are the process's
                ways[-1]._done.release()
            times = take_turns(ways, 10 if title == "fp32" else 25, rounds)
        finally:
            for way in ways:
                way.close()
        gc_all()
        found[title] = {
            "pictures_a_second": {name: round(BATCH / statistics.median(each)) for name, each in times.items()},
            "plait_of": {name: ratios(times, "plait", name) for name in times if name != "plait"},
            "seconds": round(time.perf_counter() - begun, 1),
        }
        print(f"ResNet-50, {title}: {json.dumps(found[title])}", flush=True)
    return found


# ---- A small network


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))


class Clock(train.SessionRunHook):
    """From the first step of a fit to its end; nothing is done in between."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        torch.cuda.synchronize()
        self.begin_at = time.perf_counter()

    def end(self, session: Any) -> None:
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.begin_at


def small_model(capture: bool, source: Any) -> efl.Model:
    model = efl.Model()
    model.net = mlp()
    model.input_fn(lambda model, mode: efl.Sample(source))
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample.x), sample.y))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
    model.compile(session_config={"device": "cuda", "capture": capture})
    return model


def measure_mlp(rounds: int, steps: int = 2000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64 * steps, 64, generator=generator)
    y = torch.randint(10, (64 * steps,), generator=generator)
    eager = measure_eager(x[:64].cuda(), y[:64].cuda(), 2000 * rounds)
    on_device = [(a.cuda(), b.cuda()) for a, b in zip(x.split(64), y.split(64), strict=True)]
    replay, inputs, labels = graphed(mlp().cuda())

    def bare_graph() -> None:
        for images, targets in on_device:
            inputs.copy_(images)
            labels.copy_(targets)
            replay()

    models = {
        "plait captured": small_model(True, TensorSource({"x": x, "y": y}, 64)),
        "plait captured, rows on the card": small_model(True, TensorSource({"x": x.cuda(), "y": y.cuda()}, 64)),
    }

    def fitted(name: str) -> float:
        clock = Clock()
        models[name].fit(efl.procedure_fn.train(), hooks=[clock])
        return clock.seconds / steps

    bare_graph()
    for name in models:
        fitted(name)
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        times.setdefault("bare graph", []).append(timed(bare_graph) / steps)
        for name in models:
            times.setdefault(name, []).append(fitted(name))
    slow = statistics.median(eager["by hand"])
    found = {
        "ms_a_step": {name: round(1e3 * statistics.median(each), 4) for name, each in {**eager, **times}.items()},
        "uncaptured_of_bare": round(sum(eager["plait"]) / sum(eager["by hand"]), 4),
        "uncaptured_of_fused_by_hand": round(sum(eager["plait"]) / sum(eager["by hand, fused"]), 4),
        "by_hand_of_by_hand": round(sum(eager["by hand again"]) / sum(eager["by hand"]), 4),
        "uncaptured_of_bare_by_rounds": quartiles(eager["plait"], eager["by hand"]),
        "times_faster_than_eager": round(slow / statistics.median(times["plait captured"]), 2),
    }
    print(f"MLP 64-64-10, batch 64: {json.dumps(found)}", flush=True)
    return found


class TakingTurns(train.SessionRunHook):
    """After a few steps of plait as many by hand, twice: the machine's pace, which changes, is the same for all."""

    def __init__(self, batch: Any, warm: int, few: int = 10) -> None:
        self.times: dict[str, list[float]] = {"plait": []}
        self._warm, self._few, self._steps = warm, few, 0
        self._batches = [batch] * few
        self._others = {}
        for name, fused in (("by hand", None), ("by hand again", None), ("by hand, fused", True)):
            net = mlp().to(batch["x"].device)
            self._others[name] = (net, torch.optim.SGD(net.parameters(), lr=0.1, fused=fused))

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._last = time.perf_counter()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._steps += 1
        if self._steps % self._few:
            return
        ended = time.perf_counter()
        self._note("plait", ended - self._last)
        for name, (net, optimizer) in self._others.items():
            eager_steps(net, optimizer, self._batches)
            now = time.perf_counter()
            self._note(name, now - ended)
            ended = now
        self._last = time.perf_counter()

    def _note(self, name: str, seconds: float) -> None:
        if self._steps > self._warm:
            self.times.setdefault(name, []).append(seconds / self._few)


def measure_eager(x: torch.Tensor, y: torch.Tensor, steps: int) -> dict[str, list[float]]:
    """What launching a step takes; the card, which needs a tenth of that, never has more than a few of them to do."""
    turns = TakingTurns({"x": x, "y": y}, warm=300)
    small_model(False, [{"x": x, "y": y}] * (steps + 300)).fit(efl.procedure_fn.train(), hooks=[turns])
    return turns.times


def eager_steps(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()


def graphed(net: nn.Module) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    inputs, labels = torch.randn(64, 64, device=CUDA), torch.randint(10, (64,), device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager_steps(net, optimizer, [{"x": inputs, "y": labels}] * 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        F.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return graph.replay, inputs, labels


def timed(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


# ---- Captured equals uncaptured


def losses_of(capture: bool, steps: int, rate: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64 * 20, 64, generator=generator)
    y = torch.randint(10, (64 * 20,), generator=generator)
    model = efl.Model()
    model.net = mlp(0.5)
    model.input_fn(lambda model, mode: efl.Sample(TensorSource({"x": x, "y": y}, 64, num_epochs=100)))
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample.x), sample.y))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=rate, momentum=0.9)))
    config = {"device": "cuda", "capture": capture, "deterministic": True}
    model.compile(session_config=config)
    torch.manual_seed(5)
    seen: list[torch.Tensor] = []

    class Keep(train.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return train.SessionRunArgs(fetches=model.loss())

        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(run_values.results)

    model.fit(efl.procedure_fn.train(max_step=steps), hooks=[Keep()])
    return torch.stack(seen).double().cpu()


def measure_equal() -> dict[str, Any]:
    eager, captured = losses_of(False, 200), losses_of(True, 200)
    still = losses_of(True, 60, rate=0.0)
    relative = (captured - eager).abs() / eager.abs()
    torch.use_deterministic_algorithms(False)
    found = {
        "over_20": float(relative[:20].max()),
        "over_200": float(relative.max()),
        "masks_move_on": bool((still[20:40] - still[40:60]).abs().min() > 0),
    }
    print(f"captured beside uncaptured: {json.dumps(found)}", flush=True)
    return found


# ---- Differential privacy


def anchor() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def measure_private(rounds: int) -> dict[str, Any]:
    batches = [(torch.randn(1024, 3, 32, 32, device=CUDA), torch.randint(10, (1024,), device=CUDA)) for _ in range(4)]

    def stepper(private: bool) -> Callable[[], Any]:
        factory = functools.partial(torch.optim.SGD, lr=0.05)
        if private:
            factory = make_private(factory, 1.0, 1.0, samples=60_000)
        model = efl.Model()
        model.net = anchor()
        model.input_fn(lambda model, mode: batches * 20_000)
        reduction = "none" if private else "mean"
        model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample[0]), sample[1], reduction=reduction))
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(factory))
        model.compile(session_config={"device": "cuda"})
        session = Session()
        return functools.partial(session.run, model.train_op())

    found: dict[str, Any] = {}
    times: dict[str, list[float]] = {}
    steps = {"plain": stepper(False), "private": stepper(True)}
    for name, step in steps.items():
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        found[f"{name}_peak_MiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    for _ in range(rounds):
        for name, step in steps.items():
            times.setdefault(name, []).append(timed(lambda step=step: [step() for _ in range(50)]) / 50)
    if os.environ.get("PLAIT_PROFILE"):
        for name, step in steps.items():
            profiled(name, step)
    found["ms"] = {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()}
    found["private_of_plain"] = round(1 / ratios(times, "private", "plain")["median"], 3)
    print(f"private step, CNN 64-128-256, batch 1024: {json.dumps(found)}", flush=True)
    return found


def profiled(name: str, step: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    for key in ("self_device_time_total", "self_cpu_time_total"):
        table = seen.key_averages().table(sort_by=key, row_limit=12, max_name_column_width=60)
        rows = [" ".join(line.split()) for line in table.splitlines() if line.strip() and "---" not in line]
        print(name, key, *rows, sep="\n", flush=True)


def measure_memory() -> dict[str, Any]:
    import privacy

    found = privacy.measure_memory(5)
    print(f"peak memory of private training: {json.dumps(found)}", flush=True)
    return found


# ---- Pictures from disk

READERS = {"threads": None, "processes": mox.ForkedReader}
PASS = 128
"""Steps of a pass over the pictures."""


def make_pictures(folder: Path, count: int) -> None:
    import simplejpeg

    generator = np.random.default_rng(0)
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
    for number in range(count):
        small = generator.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        large = F.interpolate(torch.from_numpy(small).permute(2, 0, 1)[None].float(), (375, 500), mode="bicubic")
        noisy = large[0].permute(1, 2, 0).numpy() + generator.normal(0, 12, (375, 500, 1))
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(noisy.clip(0, 255).astype(np.uint8)), quality=90)
        (folder / str(number % 10) / f"{number}.jpg").write_bytes(data)


def measure_pictures(synthetic: float | None = None, rounds: int = 3) -> dict[str, Any]:
    """`synthetic`: pictures a second where none are read, if that was measured before."""
    folder = Path(tempfile.mkdtemp(prefix="plait-"))
    try:
        begun = time.perf_counter()
        make_pictures(folder, 512)
        size = sum(path.stat().st_size for path in folder.rglob("*.jpg")) / 512
        for path in list(folder.rglob("*.jpg")):  # the same pictures under more names
            for copy in range(1, PASS * BATCH // 512):
                os.link(path, path.with_name(f"{path.stem}-{copy}.jpg"))
        print(f"pictures made in {time.perf_counter() - begun:.0f} s, {size / 1e3:.0f} kB each", flush=True)
        files = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))[:512]]
        alone = {name: reader_alone(folder, kind) for name, kind in READERS.items()}
        decoded = [decoder_alone(files)]
        trained: dict[str, list[tuple[float, float, float]]] = {name: [] for name in READERS}
        for number in range(rounds):
            for name, kind in READERS.items():
                if number and kind is None:
                    continue  # once will do: threads are not what is recommended
                trained[name].append(reader_and_training(folder, kind))
                decoded.append(decoder_alone(files))
        limit = min(statistics.mean(decoded), synthetic or math.inf)
        found = {
            "kilobytes": round(size / 1e3),
            "readers": readers(),
            "decoder_alone": [round(rate) for rate in decoded],
            "synthetic": synthetic,
            "reader_alone": {name: round(rate) for name, rate in alone.items()},
            "trained_in_the_first_pass": {name: [round(one[0]) for one in each] for name, each in trained.items()},
            "trained": {name: [round(one[1]) for one in each] for name, each in trained.items()},
            "trained_of_the_lesser_of_decoder_and_synthetic": {
                name: [round(statistics.mean(one[which] for one in each) / limit, 3) for which in (0, 1)]
                for name, each in trained.items()
            },
            "card_waits": {name: [round(one[2], 3) for one in each] for name, each in trained.items()},
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"pictures from disk: {json.dumps(found)}", flush=True)
    return found


def readers() -> int:
    return os.cpu_count() or 2


def decoder_alone(files: list[bytes], seconds: float = 3.0) -> float:
    """Pictures a second that as many threads as there are readers decode, and do nothing else."""
    from plait.data.pictures import decode

    until = time.perf_counter() + seconds

    def work(count: int) -> int:
        while time.perf_counter() < until:
            decode(files[count % len(files)], "a picture")
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(readers()) as pool:
        return sum(pool.map(work, [0] * readers())) / seconds


def picture_columns(folder: Path, kind: Any) -> tuple[Any, Any]:
    metadata = mox.ImageClassificationRawMetadata(folder)
    data = mox.ImageClassificationRawDataset(metadata, num_readers=readers(), shuffle=True, reader_class=kind)
    image, label = data.get(["image", "label"])
    return mox.get_data_augmentation_fn(NAME, mox.ModeKeys.TRAIN, 224, 224)(image), label


def reader_alone(folder: Path, kind: Any) -> float:
    """Pictures a second that are read, decoded, cropped, scaled and put into batches when nobody trains."""
    batches = as_source(picture_columns(folder, kind)).batched(BATCH).batches(1, 0)  # a pass after the first
    for _ in range(10):
        next(batches)
    begun, steps = time.perf_counter(), PASS - 20
    for _ in range(steps):
        next(batches)
    seconds = time.perf_counter() - begun
    batches.close()
    return steps * BATCH / seconds


class PassClock(mox.AggregativeSessionRunHook):
    """When steps were done, and how long the card had been idle by then."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.at: dict[int, tuple[float, float]] = dict.fromkeys(steps, (0.0, 0.0))
        self.steps = 0

    def support_aggregation(self) -> bool:
        return True

    def support_sync_workers(self) -> bool:
        return False

    def run_inter_mode(self) -> bool:
        return False

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps += 1
        if self.steps in self.at:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            idle = sum(one.idle for one in current_model().streams.values())
            self.at[self.steps] = time.perf_counter(), idle


def reader_and_training(folder: Path, kind: Any) -> tuple[float, float, float]:
    """Pictures a second in the first pass and in the second, and how much of the second the card was idle."""
    clocks: list[PassClock] = []
    feeding.SAMPLED = 1  # there are few steps here, and they take long
    windows = (30, PASS - 8), (PASS + 12, 2 * PASS - 8)

    def model_fn(inputs: Any, mode: str, **_: Any) -> Any:
        images, labels = inputs
        logits, _ = mox.get_model_fn(NAME, mode, CLASSES)(images)
        loss = F.cross_entropy(logits, labels)
        hook = PassClock([step for window in windows for step in window])
        if not clocks:
            clocks.append(hook)
        return mox.ModelSpec(loss=loss, log_info={"loss": loss}, hooks=[hook])

    reset_flags()
    mox.set_flag("precision", "bf16")
    mox.set_flag("compile_modules", True)
    mox.set_flag("capture_steps", True)  # a step is then one call: it does not wait for readers' turns in Python
    mox.run(
        input_fn=lambda mode: picture_columns(folder, kind),
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("momentum", learning_rate=0.01, momentum=0.9),
        run_mode=mox.ModeKeys.TRAIN,
        batch_size=BATCH,
        max_number_of_steps=2 * PASS,
    )
    at = clocks[0].at
    first, second = (at[end][0] - at[begin][0] for begin, end in windows)
    steps = [end - begin for begin, end in windows]
    begin, end = windows[1]
    return steps[0] * BATCH / first, steps[1] * BATCH / second, (at[end][1] - at[begin][1]) / second


# ---- Saving


def measure_saving(rounds: int, steps: int = 200) -> dict[str, Any]:
    setting = SETTINGS["bf16 compiled"]
    batch = pictures_on_device(True)
    times: dict[str, list[float]] = {"without": [], "every 100 steps": []}
    folders: list[str] = []

    def run(batches: Iterator[Any], saves: bool) -> None:
        folder = tempfile.mkdtemp(prefix="plait-")
        folders.append(folder)
        more = {"log_dir": folder, "save_model_steps": 100, "save_summary_steps": 0} if saves else {}
        by_plait(batches, setting, **more)

    ways = []
    try:
        for name, saves in (("without", False), ("every 100 steps", True)):
            ways.append(Way(name, functools.partial(run, saves=saves), batch))
            ways[-1].ready()
            ways[-1]._done.release()
        times = take_turns(ways, steps, rounds)
    finally:
        for way in ways:
            way.close()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    gc_all()
    found = {
        "pictures_a_second": {name: round(BATCH / statistics.median(each)) for name, each in times.items()},
        "with_of_without": ratios(times, "every 100 steps", "without"),
    }
    print(f"a checkpoint every 100 steps: {json.dumps(found)}", flush=True)
    return found


def gc_all() -> None:
    import gc

    gc.collect()
    torch.cuda.empty_cache()


PARTS = ("equal", "mlp", "private", "memory", "resnet", "pictures", "saving")


def _synthetic(found: dict[str, Any]) -> float | None:
    compiled = found.get("resnet", {}).get("bf16 compiled", {})
    return compiled.get("pictures_a_second", {}).get("plait")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    logging.getLogger("plait").setLevel(logging.WARNING)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "equal": measure_equal,
        "mlp": lambda: measure_mlp(arguments.rounds),
        "private": lambda: measure_private(arguments.rounds),
        "memory": measure_memory,
        "resnet": lambda: measure_resnet(arguments.rounds),
        "saving": lambda: measure_saving(arguments.rounds),
        "pictures": lambda: measure_pictures(_synthetic(found), rounds=arguments.rounds),
    }
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
    }
    for part in arguments.only:
        begun = time.perf_counter()
        try:
            found[part] = runs[part]()
        except (Exception, SystemExit):
            found[part] = {"error": traceback.format_exc()}
            print(found[part]["error"], flush=True)
        print(f"-- {part}: {time.perf_counter() - begun:.0f} s", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
