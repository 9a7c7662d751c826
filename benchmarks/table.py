"""What one parameter server's tables cost: memory of many rows, lookups and steps a second, saving.

Times are the thread's own CPU time: other load on the machine shows less, though it still takes caches away.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as RichTable
from torch import Tensor

from plait.cluster.ps.index import Index
from plait.cluster.ps.shard import Push, Shard
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, TableSpec
from plait.cluster.ps.table import Table

__all__ = ["main", "measure"]

RESULTS = Path(__file__).parent / "results" / "table.json"
DIM = 16
BATCH = 26 * 512
VOCABULARY = 100_000
ADAGRAD = OptimizerSpec(kind="Adagrad", options={"initial_accumulator_value": 0.1})
NORMAL = {"kind": "normal", "scale": 0.01, "seed": 0}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_us(call: Callable[[], object], rounds: int = 100) -> float:
    call()
    taken = []
    for _ in range(rounds):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return statistics.median(taken) * 1e6


def spec(name: str, rows: int | None) -> TableSpec:
    return TableSpec(name=name, dim=DIM, dtype="float32", rows=rows, optimizer=0, initializer=NORMAL)


def fill(shard: Shard, rows: int) -> dict[str, Any]:
    """Pull and push every id once, and see what the process has grown by."""
    draw = np.random.default_rng(0)
    ids = torch.from_numpy(draw.permutation(rows) * 7_919_113 - 2**40)
    gradient = torch.randn(50_000, DIM)
    before, start = resident(), time.thread_time()
    for part in ids.split(50_000):
        shard.pull(0, part)
        shard.apply([Push([], [], {0: (part, gradient[: len(part)])})], [0.01])
    grown, own = resident() - before, rows * DIM * 4 * 2
    return {
        "what": f"{rows:,} rows of {DIM} with Adagrad, made on first use",
        "bytes_a_row": round(grown / rows, 1),
        "ratio": round(grown / own, 3),
        "seconds": round(time.thread_time() - start, 2),
    }


def lookups(name: str, table: Table, ids: Tensor) -> dict[str, Any]:
    gradients = torch.randn(len(ids), DIM)
    pull = cpu_us(lambda: table.pull(ids))
    push = cpu_us(lambda: table.push(ids, gradients, 0.01))
    return {
        "what": name,
        "pull_us": round(pull, 1),
        "push_us": round(push, 1),
        "rows_a_second": round(len(ids) / (pull + push) * 1e6),
    }


def small(kind: str, rows: int | None) -> dict[str, Any]:
    options = {"initial_accumulator_value": 0.1} if kind == "Adagrad" else {}
    table = Table(spec("small", rows), OptimizerSpec(kind=kind, options=options))
    table.load(torch.arange(VOCABULARY), torch.randn(VOCABULARY, DIM))
    ids = torch.randint(0, VOCABULARY, (BATCH,), generator=torch.Generator().manual_seed(0))
    kept = "fixed" if rows else "any id"
    return lookups(f"{BATCH:,} ids of {VOCABULARY:,}, {kept}, {kind}", table, ids)


def index_alone() -> dict[str, Any]:
    index = Index()
    ids = np.arange(VOCABULARY) * 7919
    index.slots(ids, create=True)
    some = np.random.default_rng(0).choice(ids, 13_000)
    return {"what": "index: 13,000 known ids", "pull_us": round(cpu_us(lambda: index.slots(some, create=False)), 1)}


def saving(shard: Shard) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        before, start = resident(), time.perf_counter()
        shard.snapshot(copy=False)(Path(folder))
        saved = {
            "what": "save, in blocks",
            "seconds": round(time.perf_counter() - start, 2),
            "grown_mb": round((resident() - before) / 2**20),
        }
        start = time.perf_counter()
        shard.load(Path(folder))
        return [saved, {"what": "load", "seconds": round(time.perf_counter() - start, 2)}]


def measure(rows: int) -> list[dict[str, Any]]:
    found = [small(kind, fixed) for kind in ("SGD", "Adagrad", "Adam") for fixed in (VOCABULARY, None)]
    found.append(index_alone())
    shard = Shard(ModelSpec(optimizers=(ADAGRAD,), tables=(spec("large", None),)), 0, 1)
    found.append(fill(shard, rows))
    ids = shard.tables[0].ids()
    some = ids[torch.randint(0, rows, (BATCH,), generator=torch.Generator().manual_seed(0))]
    found.append(lookups(f"{BATCH:,} ids of {rows:,}, any id, Adagrad", shard.tables[0], some))
    return found + saving(shard)


def report(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        **vars(arguments),
        "rows": rows,
    }


def table(rows: list[dict[str, Any]]) -> RichTable:
    made = RichTable(title="A parameter server's tables, one thread")
    made.add_column("what", no_wrap=True)
    headings = ("pull_us", "push_us", "rows_a_second", "bytes_a_row", "ratio", "seconds", "grown_mb")
    for heading in headings:
        made.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        made.add_row(row["what"], *(f"{row[key]:,}" if key in row else "" for key in headings))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table-rows", type=int, default=10_000_000)
    arguments = parser.parse_args()
    if arguments.table_rows < 1:
        parser.error(f"got --table-rows {arguments.table_rows}: write at least 1")
    torch.set_num_threads(1)
    rows = measure(arguments.table_rows)
    Console().print(table(rows))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report(rows, arguments), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
