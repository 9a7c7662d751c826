"""What `plait serve` adds to a model: pictures a second beside bare onnxruntime, requests a second beside a bare route.

resnet_v1_18 at 224: one-picture requests of many clients, against onnxruntime in this process with the same threads
and batch. lenet: requests a second, beside a route of the same web server that gives back what it gets; then the
times of answers at half that load, each counted from the moment at which the request was due. Then malformed requests,
and new versions while clients ask. All in turns, several times; the table has medians, the file the least and greatest
as well. `cpu` is the processor time of the server's process for a request, which others on the machine change less.
Clients and servers share the machine. Under three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from plait import nets
from plait.export import export

__all__ = ["echo", "main", "measure"]

RESULTS = Path(__file__).parent / "results" / "serve.json"
SHAPES = {"resnet_v1_18": (3, 224, 224), "lenet": (1, 28, 28)}

BATCH = 16
"""As `plait serve` has it if nothing is said."""


class Logits(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = nets.build(name)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)[0]


# ---- servers


def echo(port: int) -> None:
    """The bare route: read the body, give it back."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def give_back(request: Request) -> Response:
        return Response((await request.body())[:400], media_type="application/octet-stream")

    app = Starlette(routes=[Route("/v2/models/{name}/infer", give_back, methods=["POST"])])
    uvicorn.run(app, port=port, http="httptools", ws="none", lifespan="off", access_log=False, log_level="error")


class Server:
    """A server's process, its port, and what it has used."""

    def __init__(self, process: subprocess.Popen, port: int) -> None:
        self.process, self.port = process, port

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def process(*command: str, port: int | None = None) -> Iterator[Server]:
    """A server, once it can be reached."""
    started = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    try:
        while port is None:
            line = started.stderr.readline()
            if not line:
                raise SystemExit("the server did not start")
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            port = int(found[1]) if found else None
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        yield Server(started, port)
    finally:
        started.terminate()
        started.communicate(timeout=60)


def serving(folder: Path, *arguments: object) -> contextlib.AbstractContextManager[Server]:
    return process("-m", "plait", "serve", str(folder), "--port", "0", *map(str, arguments))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


# ---- clients


def request_of(name: str) -> bytes:
    """A whole request, with one picture as bytes, that asks for bytes."""
    data = np.random.default_rng(0).normal(size=(1, *SHAPES[name])).astype("f4").tobytes()
    entry = {"name": "images", "datatype": "FP32", "shape": [1, *SHAPES[name]]}
    entry["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    return _request(name, head + data, f"Inference-Header-Content-Length: {len(head)}")


def _request(name: str, body: bytes, *lines: str) -> bytes:
    first = [f"POST /v2/models/{name}/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join([*first, "", ""]).encode() + body


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(int(re.search(rb"\r\ncontent-length: (\d+)", head)[1]))
    return int(head[9:12]), body


async def flat_out(
    server: Server, request: bytes, clients: int, seconds: float, seen: Callable[[int, bytes], object] | None = None
) -> dict[str, float]:
    """Requests a second of clients that each ask again as soon as they have an answer, and the server's time for one."""
    count = 0

    async def client() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while time.perf_counter() < until:
            status, body = await exchange(reader, writer, request)
            if seen is not None:
                seen(status, body)
            elif status != 200:
                raise SystemExit(f"{status}: {body!r}")
            count += start <= time.perf_counter() < until
        writer.close()

    async def clock() -> float:
        await asyncio.sleep(start - time.perf_counter())
        before = server.cpu()
        await asyncio.sleep(until - time.perf_counter())
        return server.cpu() - before

    start = time.perf_counter() + seconds / 5
    until = start + seconds
    used, *_ = await asyncio.gather(clock(), *(client() for _ in range(clients)))
    return {"a_second": count / seconds, "cpu_us": used / max(1, count) * 1e6}


async def at_rate(server: Server, request: bytes, rate: float, clients: int, seconds: float) -> dict[str, float]:
    """Milliseconds from when a request was due until its answer, for requests at a steady rate."""
    start = time.perf_counter() + 0.1
    due = iter(start + n / rate for n in range(int(rate * seconds)))
    taken: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for moment in due:
            if (wait := moment - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            status, _ = await exchange(reader, writer, request)
            if status != 200:
                raise SystemExit(f"{status} at half of the load")
            taken.append(time.perf_counter() - moment)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    steps = statistics.quantiles(taken, n=100)
    return {"a_second": rate, "p50_ms": steps[49] * 1e3, "p99_ms": steps[98] * 1e3}


def malformed(name: str, draw: np.random.Generator) -> bytes:
    """A good request, spoilt in one of several ways."""
    data = np.zeros((1, *SHAPES[name]), "f4").tobytes()
    entry: dict[str, Any] = {"name": "images", "datatype": "FP32", "shape": [1, *SHAPES[name]]}
    entry["parameters"] = {"binary_data_size": len(data)}
    kind = int(draw.integers(6))
    if kind == 0:  # bytes that are missing
        data = data[: int(draw.integers(len(data)))]
    if kind == 1:
        entry["shape"] = [int(size) for size in draw.integers(0, 2**30, 4)]
    if kind == 2:
        entry[str(draw.choice(["name", "datatype"]))] = "x" * int(draw.integers(1, 1000))
    head = bytearray(json.dumps({"inputs": [entry]}).encode())
    if kind == 3:
        head[int(draw.integers(len(head)))] = 0  # no JSON has this byte
    length = int(draw.integers(len(head))) if kind == 4 else len(head)
    body = bytes(head) + data
    if kind == 5:
        body = draw.bytes(int(draw.integers(1, 2000)))
    return _request(name, body, f"Inference-Header-Content-Length: {length}")


async def send_malformed(server: Server, name: str, count: int, draw: np.random.Generator) -> collections.Counter[int]:
    found: collections.Counter[int] = collections.Counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(count):
        status, _ = await exchange(reader, writer, malformed(name, draw))
        found[status] += 1
    writer.close()
    return found


# ---- what is measured


Figures = dict[str, dict[str, Any]]


def repeated(call: Callable[[], object], seconds: float) -> float:
    """Calls a second."""
    call()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - start)


def bare(folder: Path, name: str, batch: int, threads: int, seconds: float) -> dict[str, float]:
    """onnxruntime in this process, without anything of plait, by whole batches."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    model = onnxruntime.InferenceSession(folder / name / "1" / "model.onnx", settings, ["CPUExecutionProvider"])
    images = np.random.default_rng(0).normal(size=(batch, *SHAPES[name])).astype("f4")
    before = time.process_time()
    found = repeated(lambda: model.run(None, {"images": images}), seconds) * batch
    return {"a_second": found, "cpu_us": (time.process_time() - before) / (found * seconds) * 1e6}


def pictures(folder: Path, options: argparse.Namespace) -> Figures:
    batch, threads, request = options.batch, options.threads, request_of("resnet_v1_18")
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    with serving(folder / "resnet_v1_18", "--batch", batch, "--threads", threads) as server:
        for _ in range(options.rounds):
            alone = bare(folder, "resnet_v1_18", batch, threads, options.seconds)
            served = asyncio.run(flat_out(server, request, 2 * batch, options.seconds))
            rounds.append((alone, {**served, "ratio": served["a_second"] / alone["a_second"]}))
    return {
        f"resnet_v1_18: onnxruntime, batch {batch}, {threads} threads": merged([one for one, _ in rounds]),
        "resnet_v1_18: plait serve, one picture a request": merged([other for _, other in rounds]),
    }


def requests(folder: Path, options: argparse.Namespace) -> Figures:
    request, clients, seconds = request_of("lenet"), options.clients, options.seconds
    found: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    with (
        process(__file__, "--echo", str(port := free_port()), port=port) as plain,
        serving(folder / "lenet", "--threads", 1) as server,
    ):
        for _ in range(options.rounds):
            alone = bare(folder, "lenet", BATCH, 1, seconds / 2)
            echoed = asyncio.run(flat_out(plain, request, clients, seconds))
            served = asyncio.run(flat_out(server, request, clients, seconds))
            half = asyncio.run(at_rate(server, request, served["a_second"] / 2, clients, seconds))
            found[f"lenet: onnxruntime, batch {BATCH}, 1 thread"].append(alone)
            found[f"lenet: a bare route, {clients} clients"].append(echoed)
            ratio = served["a_second"] / echoed["a_second"]
            found[f"lenet: plait serve, {clients} clients"].append({**served, "ratio": ratio})
            found["lenet: plait serve, at half that load"].append(half)
    return {name: merged(rounds) for name, rounds in found.items()}


def mistakes(folder: Path, options: argparse.Namespace) -> Figures:
    """Malformed requests: how many had an answer of 4xx, and how the server's memory grew after the first fifth."""
    draw = np.random.default_rng(0)
    with serving(folder / "lenet", "--threads", 1) as server:
        asyncio.run(send_malformed(server, "lenet", options.malformed // 5, draw))
        before = server.resident()
        start = time.perf_counter()
        found = asyncio.run(send_malformed(server, "lenet", options.malformed, draw))
        seconds, grown = time.perf_counter() - start, server.resident() - before
    refused = sum(count for status, count in found.items() if 400 <= status < 500)
    figures = {
        "a_second": options.malformed / seconds,
        "sent": options.malformed,
        "4xx": refused,
        "grown_mb": grown / 2**20,
    }
    return {"lenet: malformed requests": figures}


def swaps(folder: Path, options: argparse.Namespace) -> Figures:
    """New versions while clients ask: answers by status, and versions that answered."""
    directory = folder / "swapped" / "lenet"
    shutil.copytree(folder / "lenet" / "1", directory / "1")
    statuses: collections.Counter[int] = collections.Counter()
    versions: set[bytes] = set()

    def seen(status: int, body: bytes) -> None:
        statuses[status] += 1
        versions.update(re.findall(rb'"model_version":"(\d+)"', body[:200]))

    def publish(last: int) -> None:
        for number in range(2, last + 1):
            time.sleep(options.seconds / last)
            shutil.copytree(folder / "lenet" / "1", directory / f".{number}.partial")
            (directory / f".{number}.partial").rename(directory / str(number))

    with serving(directory, "--threads", 1, "--poll", 0.05) as server:
        publisher = threading.Thread(target=publish, args=(5,))
        publisher.start()
        request = request_of("lenet")
        found = asyncio.run(flat_out(server, request, options.clients, 1.5 * options.seconds, seen))
        publisher.join()
    lost = sum(count for status, count in statuses.items() if status != 200)
    figures = {**found, "asked": statuses.total(), "lost": lost, "versions": len(versions)}
    return {"lenet: plait serve, 4 new versions meanwhile": figures}


def merged(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure, and the least and the greatest."""
    found: dict[str, Any] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    found["spread"] = {key: [min(one[key] for one in rounds), max(one[key] for one in rounds)] for key in rounds[0]}
    return found


PARTS = {"pictures": pictures, "requests": requests, "mistakes": mistakes, "swaps": swaps}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for net, shape in SHAPES.items():
            torch.manual_seed(0)
            export(Logits(net), {"images": torch.randn(2, *shape)}, folder / net, formats=["onnx"])
        for part in options.parts:
            rows += [{"part": part, "what": what, **row} for what, row in PARTS[part](folder, options).items()]
    return [rounded(row) for row in rows]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="plait serve")
    made.add_column("what", no_wrap=True)
    headings = ("a_second", "cpu_us", "ratio", "p50_ms", "p99_ms")
    for heading in headings:
        made.add_column(heading.replace("_", " "), justify="right")
    made.add_column("besides")
    known = {*headings, "part", "what", "spread"}
    for row in rows:
        others = ", ".join(f"{key} {value:,g}" for key, value in row.items() if key not in known)
        made.add_row(row["what"], *(_cell(row, key) for key in headings), others)
    return made


def _cell(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    places = 2 if key == "ratio" or row[key] < 100 else 0
    least, greatest = row.get("spread", {}).get(key, (row[key], row[key]))
    shown = f"{row[key]:,.{places}f}"
    return shown if least == greatest else f"{shown} ({least:,.{places}f}-{greatest:,.{places}f})"


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What was measured now, and what the file has of other parts."""
    settings = {key: value for key, value in vars(options).items() if key not in ("echo", "parts")}
    head = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **settings,
    }
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["parts"] if RESULTS.exists() else {}
    measured = {part: {**head, "rows": [row for row in rows if row["part"] == part]} for part in options.parts}
    return {"parts": {part: {**before, **measured}[part] for part in PARTS if part in {**before, **measured}}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; otherwise all")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.parts = options.parts or list(PARTS)
    if options.echo:
        echo(options.echo)
        return
    rows = measure(options)
    Console(width=160).print(table(rows))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report(rows, options), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
