"""What `plait serve` adds to a model: pictures a second beside bare onnxruntime, requests a second beside a bare route.

resnet_v1_18 at 224: one-picture requests of many clients, against onnxruntime in this process with the same threads
and batch. lenet: requests a second, beside a route of the same web server that gives back what it gets; then the
times of answers at half that load, each counted from the moment at which the request was due. Clients and server share
the machine. Under two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from plait import nets
from plait.export import export, load

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


@contextlib.contextmanager
def process(*command: str, port: int | None = None) -> Iterator[int]:
    """A server, once it can be reached; its port."""
    started = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    try:
        while port is None:
            line = started.stderr.readline()
            if not line:
                raise SystemExit("the server did not start")
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            port = int(found[1]) if found else None
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        started.terminate()
        started.communicate(timeout=30)


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
    lines = [
        f"POST /v2/models/{name}/infer HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(head) + len(data)}",
        f"Inference-Header-Content-Length: {len(head)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + head + data


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(head.decode())
    await reader.readexactly(int(re.search(rb"\r\ncontent-length: (\d+)", head)[1]))


async def flat_out(port: int, request: bytes, clients: int, seconds: float) -> float:
    """Requests a second of clients that each ask again as soon as they have an answer."""
    count = 0

    async def client() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < until:
            await exchange(reader, writer, request)
            count += start <= time.perf_counter() < until
        writer.close()

    start = time.perf_counter() + seconds / 5
    until = start + seconds
    await asyncio.gather(*(client() for _ in range(clients)))
    return count / seconds


async def at_rate(port: int, request: bytes, rate: float, clients: int, seconds: float) -> list[float]:
    """Seconds from when a request was due until its answer, for requests at a steady rate."""
    start = time.perf_counter() + 0.1
    due = iter(start + n / rate for n in range(int(rate * seconds)))
    taken: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for moment in due:
            if (wait := moment - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            await exchange(reader, writer, request)
            taken.append(time.perf_counter() - moment)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return taken


# ---- what is measured


def repeated(call: Callable[[], object], seconds: float) -> float:
    """Calls a second."""
    call()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - start)


def pictures(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bare, served, bare: what the machine does meanwhile falls on both."""
    images = np.random.default_rng(0).normal(size=(options.batch, *SHAPES["resnet_v1_18"])).astype("f4")

    def bare() -> float:
        model = load(directory / "resnet_v1_18" / "1", format="onnx", threads=options.threads)
        return repeated(lambda: model.run({"images": images}), options.seconds / 2) * options.batch

    before = bare()
    arguments = ["--batch", str(options.batch), "--threads", str(options.threads)]
    with process("-m", "plait", "serve", str(directory / "resnet_v1_18"), "--port", "0", *arguments) as port:
        request = request_of("resnet_v1_18")
        served = asyncio.run(flat_out(port, request, 2 * options.batch, 2 * options.seconds))
    alone = (before + bare()) / 2
    return [
        {"what": f"resnet_v1_18: onnxruntime, batch {options.batch}, {options.threads} threads", "a_second": alone},
        {"what": "resnet_v1_18: plait serve, one picture a request", "a_second": served, "ratio": served / alone},
    ]


def requests(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    request = request_of("lenet")
    model = load(directory / "lenet" / "1", format="onnx", threads=1)
    images = np.random.default_rng(0).normal(size=(BATCH, *SHAPES["lenet"])).astype("f4")
    alone = repeated(lambda: model.run({"images": images}), options.seconds / 4) * BATCH
    with process(__file__, "--echo", str(port := free_port()), port=port):
        plain = asyncio.run(flat_out(port, request, options.clients, options.seconds))
    with process("-m", "plait", "serve", str(directory / "lenet"), "--port", "0", "--threads", "1") as port:
        served = asyncio.run(flat_out(port, request, options.clients, options.seconds))
        taken = asyncio.run(at_rate(port, request, served / 2, options.clients, options.seconds))
    steps = statistics.quantiles(taken, n=100)
    return [
        {"what": f"lenet: onnxruntime, batch {BATCH}, 1 thread", "a_second": alone},
        {"what": f"lenet: a bare route, {options.clients} clients", "a_second": plain},
        {"what": f"lenet: plait serve, {options.clients} clients", "a_second": served, "ratio": served / plain},
        {
            "what": "lenet: at half that load",
            "a_second": served / 2,
            "p50_ms": steps[49] * 1e3,
            "p99_ms": steps[98] * 1e3,
        },
    ]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            torch.manual_seed(0)
            export(Logits(name), {"images": torch.randn(2, *shape)}, Path(folder, name), formats=["onnx"])
        rows = pictures(Path(folder), options) + requests(Path(folder), options)
    return [{key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} for row in rows]


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="plait serve")
    made.add_column("what", no_wrap=True)
    headings = ("a_second", "ratio", "p50_ms", "p99_ms")
    for heading in headings:
        made.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        made.add_row(row["what"], *(f"{row[key]:,.2f}" if key in row else "" for key in headings))
    return made


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    settings = {key: value for key, value in vars(options).items() if key != "echo"}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        **settings,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        echo(options.echo)
        return
    rows = measure(options)
    Console(width=110).print(table(rows))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report(rows, options), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
