"""What privacy adds to a training step: plait and Opacus, each beside plain steps, every sample its own micro-batch.

One thread, batch 256. All ways are in one process: blocks of steps take turns, and each is compared with the plain
steps of its round. How fast a process is depends on where its memory happens to lie, so several are started.
`python benchmarks/privacy.py`; the environment with Opacus is made once and kept (`--peers DIR`). `--gpu` measures
peak memory on a CUDA device instead, of plait only.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "privacy_peers"
RESULT = HERE / "results" / "privacy.json"
sys.path[:0] = [str(SCRIPTS), str(HERE.parent / "src")]

import nets  # noqa: E402

ENVIRONMENTS = Path(tempfile.gettempdir()) / "plait-privacy-peers"
OPACUS = "opacus==1.6.0"
ANSWER_SECONDS = 300
INSTALL_SECONDS = 1800
MOST = {"mlp": 1.45, "cnn": 1.65}
"""Times of a plain step that a private one may take."""
MOST_MEMORY = 1.5
BLOCK_SECONDS = 0.4


class Served:
    """A process that makes blocks of steps when it is asked to."""

    def __init__(self, python: str | Path, script: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(HERE.parent / "src")
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [str(python), str(SCRIPTS / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            text=True,
        )
        self.ways: list[str] = self._answer()["ready"]

    def ask(self, **what: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        watch = threading.Timer(ANSWER_SECONDS, self.process.kill)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        if not line:
            self.errors.seek(0)
            raise SystemExit(f"no answer: {self.errors.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(15)
        self.process.kill()
        self.process.wait()
        self.errors.close()


def measure(launches: int, rounds: int, environments: Path) -> dict[str, Any]:
    python = environments / "opacus" / "bin" / "python"
    problem = install(python)
    found: dict[str, Any] = {"skipped": problem and f"Opacus: skipped, it cannot be installed ({problem})"}
    command = (sys.executable, "plait_steps.py") if problem else (python, "opacus_steps.py")
    seen: dict[str, dict[str, list[dict[str, float]]]] = {net: {} for net in nets.NETS}
    differences: dict[str, dict[str, float]] = {}
    for _ in range(launches):
        with contextlib.closing(Served(*command)) as served:
            for net in nets.NETS:
                differences[net] = differences.get(net) or updates(net, served)
                measure_net(net, served, rounds, seen[net])
    for net in nets.NETS:
        found[net] = [row(way, seen[net], differences[net]) for way in seen[net]]
    if not problem:
        asked = [str(python), str(SCRIPTS / "epsilons.py")]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True)
        found["opacus_prv_epsilons"] = json.loads(done.stdout)
    return found


def measure_net(net: str, served: Served, rounds: int, seen: dict[str, list[dict[str, float]]]) -> None:
    steps = {}
    for way in served.ways:  # the first blocks warm up, and say how many steps make a block
        served.ask(net=net, way=way, steps=1)
        steps[way] = max(2, round(BLOCK_SECONDS / served.ask(net=net, way=way, steps=2)["wall"]))
    for number in range(rounds):
        for way in served.ways if number % 2 == 0 else served.ways[::-1]:
            seen.setdefault(way, []).append(served.ask(net=net, way=way, steps=steps[way]))


def row(way: str, seen: dict[str, list[dict[str, float]]], differences: dict[str, float]) -> dict[str, Any]:
    def ratio(kind: str, base: str) -> float:
        return round(median(one[kind] / other[kind] for one, other in zip(seen[way], seen[base], strict=True)), 3)

    return {
        "way": way,
        "cpu_ms": round(1e3 * median(one["cpu"] for one in seen[way]), 3),
        "wall_ms": round(1e3 * median(one["wall"] for one in seen[way]), 3),
        "of_plait": ratio("cpu", "plait"),
        "of_torch": ratio("cpu", "torch"),
        "wall_of_plait": ratio("wall", "plait"),
        "private_of_it": ratio_of(seen["plait private"], seen[way]),
        "difference": differences.get(way),
    }


def ratio_of(own: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    return round(median(one["cpu"] / peer["cpu"] for one, peer in zip(own, other, strict=True)), 3)


def updates(net: str, served: Served) -> dict[str, float]:
    """How far the weights after a step without noise are from those of the clipped gradients, one by one."""
    expected = clipped_update(net)
    found = {}
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        for way in served.ways:
            if way not in ("torch", "plait"):
                path = f"{folder}/update.pt"
                served.ask(net=net, way=way, update=path)
                found[way] = float((torch.load(path) - expected).abs().max())
    return found


def clipped_update(name: str) -> torch.Tensor:
    net = nets.make_net(name)
    x, y = nets.make_batches(name)[0]
    total = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for loss in torch.nn.functional.cross_entropy(net(x), y, reduction="none"):
        gradients = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for one, gradient in zip(total, gradients, strict=True):
            one += gradient * min(1.0, nets.CLIP / float(norm))
    with torch.no_grad():
        for parameter, one in zip(net.parameters(), total, strict=True):
            parameter -= nets.RATE * one / nets.BATCH
    return nets.weights(net)


def median(values: Iterator[float]) -> float:
    return statistics.median(list(values))


def install(python: Path) -> str:
    """Make Opacus' environment unless it is there; what went wrong. Alone it would ask for another torch."""
    root = python.parent.parent
    if (root / "installed").exists():
        return ""
    shutil.rmtree(root, ignore_errors=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    version = torch.__version__.split("+")[0]
    for command in (
        [sys.executable, "-m", "venv", str(root)],
        [*pip, f"torch=={version}", "numpy", "scipy", "opt_einsum", "pyzmq", "cryptography", "safetensors"],
        [*pip, "--no-deps", OPACUS],
    ):
        print(" ".join(command), file=sys.stderr)
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"not within {INSTALL_SECONDS} s"
        except subprocess.CalledProcessError as error:
            return (error.stderr.strip().splitlines() or ["no reason given"])[-1]
    (root / "installed").touch()
    return ""


# ---- on a GPU


def measure_memory(rounds: int) -> dict[str, Any]:
    """Peak memory, and the time of a step, of plain and private training on a CUDA device."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for net in nets.NETS:
        plain, private = (one_memory(net, private, rounds) for private in (False, True))
        found[net] = {
            "plain_bytes": plain["bytes"],
            "private_bytes": private["bytes"],
            "memory_ratio": round(private["bytes"] / plain["bytes"], 3),
            "plain_ms": plain["ms"],
            "private_ms": private["ms"],
            "time_ratio": round(private["ms"] / plain["ms"], 3),
        }
    return found


def one_memory(net: str, private: bool, rounds: int) -> dict[str, Any]:
    import gc

    import plait_steps

    gc.collect()
    torch.cuda.empty_cache()
    make = plait_steps.private if private else plait_steps.plain
    before = torch.cuda.memory_allocated()
    _, step = make(nets.make_net(net), nets.make_batches(net, 2, "cuda"), nets.NOISE, "cuda")
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 20)
    return {"bytes": torch.cuda.max_memory_allocated() - before, "ms": round(1e3 * statistics.median(times), 3)}


# ---- showing


def show(found: dict[str, Any]) -> None:
    for net, title in nets.NETS.items():
        print(f"\n{title}, batch {nets.BATCH}, one thread")
        print(f"{'way':<18} {'CPU ms':>9} {'wall ms':>9} {'of torch':>9} {'of plait':>9} {'difference':>11}")
        for one in found[net]:
            difference = "" if one["difference"] is None else f"{one['difference']:.1e}"
            print(
                f"{one['way']:<18} {one['cpu_ms']:>9.3f} {one['wall_ms']:>9.3f} {one['of_torch']:>9.3f} "
                f"{one['of_plait']:>9.3f} {difference:>11}"
            )
    print()
    if found["skipped"]:
        print(found["skipped"])
    for line in verdicts(found):
        print(line)


def verdicts(found: dict[str, Any]) -> Iterator[str]:
    for net, title in nets.NETS.items():
        rows = {one["way"]: one for one in found[net]}
        yield verdict(f"{title}: a private step, of plait's plain one", rows["plait private"]["of_plait"], MOST[net])
        peers = {way: one["private_of_it"] for way, one in rows.items() if way.startswith("Opacus")}
        if peers:
            best = max(peers, key=peers.__getitem__)
            yield verdict(f"{title}: a private step, of one of {best}, the fastest", peers[best], 1.0)
        worst = max(one["difference"] or 0.0 for one in found[net])
        yield verdict(f"{title}: weights after a step without noise, greatest difference", worst, 1e-5)


def verdict(what: str, got: float, most: float) -> str:
    return f"{what}: {got:g}, at most {most:g}: {'reached' if got <= most else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peers", type=Path, default=ENVIRONMENTS, metavar="DIR", help="where Opacus is, or will be")
    parser.add_argument("--gpu", action="store_true", help="peak memory on a CUDA device")
    arguments = parser.parse_args()
    key = "gpu" if arguments.gpu else "steps"
    if arguments.gpu:
        found = measure_memory(arguments.rounds)
        for net, title in nets.NETS.items():
            print(f"{title}: {found[net]}")
            print(verdict(f"{title}: peak memory of private, of plain", found[net]["memory_ratio"], MOST_MEMORY))
    else:
        found = measure(arguments.launches, arguments.rounds, arguments.peers.resolve())
        show(found)
    head = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "launches": arguments.launches,
        "rounds": arguments.rounds,
    }
    write(key, {**head, **found})


def write(key: str, found: dict[str, Any]) -> None:
    """Keep the other part's figures."""
    from plait.atomic import write_atomic

    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    write_atomic(RESULT, json.dumps({**kept, key: found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
