"""Batches a second: torch's DataLoader over a TensorDataset, and plait's TensorSource. `python benchmarks/source.py`"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from plait.atomic import write_atomic
from plait.data import Stream, TensorSource
from plait.errors import OutOfRangeError

BATCH, BATCHES, ROUNDS = 64, 1000, 9
RESULT = Path(__file__).parent / "results" / "source.json"


def loader_pass(x: torch.Tensor, y: torch.Tensor) -> int:
    count = 0
    for _ in DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True):
        count += 1
    return count


def tuple_pass(x: torch.Tensor, y: torch.Tensor) -> int:
    return stream_pass(Stream(TensorSource((x, y), BATCH, shuffle=True)))


def dict_pass(x: torch.Tensor, y: torch.Tensor) -> int:
    return stream_pass(Stream(TensorSource({"x": x, "y": y}, BATCH, shuffle=True)))


def stream_pass(stream: Stream) -> int:
    count = 0
    try:
        while True:
            stream.read()
            stream.commit()
            count += 1
    except OutOfRangeError:
        return count


PASSES: dict[str, Callable[[torch.Tensor, torch.Tensor], int]] = {
    "DataLoader(TensorDataset)": loader_pass,
    "Stream(TensorSource), tuples": tuple_pass,
    "Stream(TensorSource), dicts": dict_pass,
}


def measure() -> dict[str, float]:
    """Median batches a second of CPU time; the passes take turns, so that a slow moment hits all of them."""
    x, y = torch.randn(BATCH * BATCHES, 64), torch.randint(10, (BATCH * BATCHES,))
    speeds: dict[str, list[float]] = {name: [] for name in PASSES}
    for _ in range(ROUNDS + 1):
        for name, one_pass in PASSES.items():
            begin = time.process_time()
            count = one_pass(x, y)
            speeds[name].append(count / (time.process_time() - begin))
            assert count == BATCHES
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}  # the first round warms up


def main() -> None:
    torch.set_num_threads(1)
    speeds = measure()
    base = speeds["DataLoader(TensorDataset)"]
    rows = [
        {"what": name, "batches/s": round(speed), "ratio": round(speed / base, 2)} for name, speed in speeds.items()
    ]
    table = Table("what", "batches/s", "ratio", title=f"shuffled, batch {BATCH}, x [64] float32, y int64, one thread")
    for row in rows:
        table.add_row(row["what"], f"{row['batches/s']:,}", f"{row['ratio']:.1f}")
    Console().print(table)
    facts = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "cpu count": os.cpu_count()}
    write_atomic(RESULT, json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
