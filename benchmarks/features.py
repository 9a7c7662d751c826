"""What feature columns cost: 26 of them against lookups written by hand, and hashing strings.

Each pair is measured in turns; times are the thread's own CPU time, the quickest and the median of all rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from plait.feature_column import (
    DenseFeatures,
    Strings,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    embedding_column,
)
from plait.feature_column.inputs import Inputs

__all__ = ["main", "measure"]

RESULTS = Path(__file__).parent / "results" / "features.json"
COLUMNS, DIM, BATCH = 26, 16, 512


def turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each, the quickest and the median; they take turns, so that all see the same machine."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 5):
        for name, call in calls.items():
            for _ in range(4):  # the last of four: caches hold what this one needs
                start = time.thread_time()
                call()
                seconds = time.thread_time() - start
            if number >= 5:
                taken[name].append(seconds * 1e6)
    return {name: (min(times), statistics.median(times)) for name, times in taken.items()}


def clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def lookups(buckets: int, rounds: int) -> list[dict[str, Any]]:
    """Forward and backward of 26 columns of ids: plait's, one EmbeddingBag on joined ids, 26 Embeddings."""
    generator = torch.Generator().manual_seed(0)
    ids = {f"c{number:02}": torch.randint(0, buckets, (BATCH,), generator=generator) for number in range(COLUMNS)}
    gradient = torch.randn(BATCH, COLUMNS * DIM, generator=generator)
    columns = [embedding_column(categorical_column_with_identity(key, buckets), DIM) for key in ids]
    dense = DenseFeatures(columns)
    bag = nn.EmbeddingBag(buckets * COLUMNS, DIM, mode="sum")
    tables = nn.ModuleList(nn.Embedding(buckets, DIM) for _ in ids)
    joined = (torch.stack(list(ids.values()), 1) + torch.arange(COLUMNS) * buckets).view(-1)
    places = torch.arange(len(joined))
    variables = {name: list(module.parameters()) for name, module in {"d": dense, "b": bag, "t": tables}.items()}

    def columns_call() -> None:
        clear(variables["d"])
        dense(ids).backward(gradient)

    def bag_call() -> None:
        clear(variables["b"])
        bag(joined, places).view(BATCH, -1).backward(gradient)

    def tables_call() -> None:
        clear(variables["t"])
        torch.cat([table(one) for table, one in zip(tables, ids.values(), strict=True)], 1).backward(gradient)

    found = turns({"DenseFeatures": columns_call, "one EmbeddingBag": bag_call, "26 Embeddings": tables_call}, rounds)
    own = found["DenseFeatures"]
    return [
        {
            "what": f"{name}, {buckets:,} buckets a column",
            "least_us": round(least, 1),
            "median_us": round(median, 1),
            "times_the_columns": round(median / own[1], 2),
            "times_by_least": round(least / own[0], 2),
        }
        for name, (least, median) in found.items()
    ]


def hashing(count: int = 200_000) -> list[dict[str, Any]]:
    """Short strings to buckets, in each form that they may come in."""
    draw = np.random.default_rng(0)
    words = [f"{value:x}" for value in draw.integers(0, 2**44, count)]
    compact = Strings.of(words)
    column = categorical_column_with_hash_bucket("word", 1_000_003)
    forms: dict[str, Any] = {
        "array of str": np.array(words, object),
        "array of bytes": np.array([word.encode() for word in words], object),
        "compact": Strings(compact.data, compact.offsets),
    }
    rows = []
    for form, value in forms.items():
        calls = {form: lambda value=value: column.ids(Inputs({"word": value}))}
        least, median = turns(calls, 3)[form]
        rows.append(
            {
                "what": f"hash {count:,} strings of about 11 bytes, {form}",
                "least_us": round(least, 1),
                "median_us": round(median, 1),
                "million_a_minute": round(count / median * 60),
            }
        )
    return rows


def measure(rounds: int) -> list[dict[str, Any]]:
    return [*(row for buckets in (100, 1_000, 10_000) for row in lookups(buckets, rounds)), *hashing()]


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title=f"{COLUMNS} columns of width {DIM}, batch {BATCH}, forward and backward; one thread")
    made.add_column("what", no_wrap=True)
    headings = ("least_us", "median_us", "times_the_columns", "times_by_least", "million_a_minute")
    for heading in headings:
        made.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        made.add_row(row["what"], *(f"{row[key]:,}" if key in row else "" for key in headings))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"got --rounds {arguments.rounds}: write at least 1")
    torch.set_num_threads(1)
    rows = measure(arguments.rounds)
    Console(width=130).print(table(rows))
    RESULTS.parent.mkdir(exist_ok=True)
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        **vars(arguments),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
