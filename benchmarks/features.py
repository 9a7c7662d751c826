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
BAG, SEPARATE, HASHES = 1.2, 3, 20
"""The bars: times one EmbeddingBag, how much faster than 26 Embeddings, million strings a minute."""


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


def forwards(buckets: int) -> dict[str, tuple[nn.Module, Callable[[], torch.Tensor]]]:
    """26 columns of ids, looked up in four ways: each a module, and what calls it."""
    generator = torch.Generator().manual_seed(0)
    ids = {f"c{number:02}": torch.randint(0, buckets, (BATCH,), generator=generator) for number in range(COLUMNS)}
    dense = DenseFeatures([embedding_column(categorical_column_with_identity(key, buckets), DIM) for key in ids])
    bag = nn.EmbeddingBag(buckets * COLUMNS, DIM, mode="sum")
    tables = nn.ModuleList(nn.Embedding(buckets, DIM) for _ in ids)
    starts = torch.arange(COLUMNS) * buckets
    places = torch.arange(BATCH * COLUMNS)

    def joined() -> torch.Tensor:
        return (torch.stack(list(ids.values()), 1) + starts).view(-1)

    before = joined()
    return {
        "DenseFeatures": (dense, lambda: dense(ids)),
        "one EmbeddingBag": (bag, lambda: bag(joined(), places).view(BATCH, -1)),
        "one EmbeddingBag, ids joined before": (bag, lambda: bag(before, places).view(BATCH, -1)),
        "26 Embeddings": (
            tables,
            lambda: torch.cat([table(one) for table, one in zip(tables, ids.values(), strict=True)], 1),
        ),
    }


def lookups(buckets: int, rounds: int, *, backward: bool) -> list[dict[str, Any]]:
    """What each way takes, alone or with its backward pass, and how many times as long as DenseFeatures that is."""
    gradient = torch.randn(BATCH, COLUMNS * DIM, generator=torch.Generator().manual_seed(1))

    def step(module: nn.Module, forward: Callable[[], torch.Tensor]) -> Callable[[], object]:
        if not backward:
            return forward
        variables = list(module.parameters())

        def both() -> None:
            clear(variables)
            forward().backward(gradient)

        return both

    found = turns({name: step(*way) for name, way in forwards(buckets).items()}, rounds)
    own = found["DenseFeatures"]
    return [
        {
            "what": f"{name}, {buckets:,} buckets",
            "way": name,
            "passes": "forward+backward" if backward else "forward",
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
    found = [
        row
        for backward in (True, False)
        for buckets in (100, 1_000, 10_000)
        for row in lookups(buckets, rounds, backward=backward)
    ]
    return [*found, *hashing()]


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Each bar beside what was measured; of times, by the least, which other programs disturb the least."""
    lines = []
    for row in rows:
        if "million_a_minute" in row:
            rate = row["million_a_minute"]
            lines.append(f"{_word(rate >= HASHES)}: {row['what']}: {rate} million a minute, at least {HASHES}")
        elif row["way"] == "one EmbeddingBag":
            share = round(1 / row["times_by_least"], 2)
            lines.append(
                f"{_word(share <= BAG)}: {row['passes']}: DenseFeatures takes {share} times {row['what']}, at most {BAG}"
            )
        elif row["way"] == "26 Embeddings":
            times = row["times_by_least"]
            lines.append(
                f"{_word(times >= SEPARATE)}: {row['passes']}: {row['what']} take {times} times DenseFeatures, at least "
                f"{SEPARATE}"
            )
    return lines


def _word(good: bool) -> str:
    return "reached" if good else "missed"


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title=f"{COLUMNS} columns of width {DIM}, batch {BATCH}; one thread")
    made.add_column("what", no_wrap=True)
    headings = ("passes", "least_us", "median_us", "times_the_columns", "times_by_least", "million_a_minute")
    for heading in headings:
        made.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        shown = {key: value if isinstance(value, str) else f"{value:,}" for key, value in row.items()}
        made.add_row(row["what"], *(shown.get(key, "") for key in headings))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"got --rounds {arguments.rounds}: write at least 1")
    torch.set_num_threads(1)
    rows = measure(arguments.rounds)
    console = Console(width=160)
    console.print(table(rows))
    for line in verdicts(rows):
        console.print(line, highlight=False)
    RESULTS.parent.mkdir(exist_ok=True)
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        **vars(arguments),
        "rows": rows,
        "verdicts": verdicts(rows),
    }
    RESULTS.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
