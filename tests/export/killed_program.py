"""Forks processes that export, and kills each at a random moment; then looks at what is there."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from plait.export import export, load, versions
from plait.export.formats import FORMATS, Format


def write(program, folder):
    """A format of many files that takes its time."""
    torch.export.save(program.exported, folder / "model.pt2")
    for number in range(20):
        (folder / f"part-{number}").write_bytes(bytes([number]) * 10_000)
        time.sleep(0.001)


def open_run(folder, about, threads):
    return FORMATS["torch"].open_run(folder, about, threads)


FORMATS["slow"] = Format(module=__name__)


def one_export(directory):
    export(nn.Linear(2, 2), {"input": torch.ones(2, 2)}, directory, formats=["slow"], labels=["a", "b"])


def killed(directory, seconds):
    child = os.fork()
    if not child:
        try:
            while True:
                one_export(directory)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the export failed by itself"


def main():
    directory, rounds = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    one_export(directory)  # the first one imports much
    start = time.monotonic()
    one_export(directory)
    seconds = 1.5 * (time.monotonic() - start)
    moments = random.Random(0)
    for _ in range(rounds):
        killed(directory, moments.uniform(0, seconds))
    there = [entry.name for entry in directory.iterdir() if not entry.name.startswith(".")]
    left = [entry for entry in directory.iterdir() if entry.name.startswith(".")]
    assert versions(directory) == sorted(there, key=int) == [str(number) for number in range(1, len(there) + 1)]
    for name in there:
        assert len(load(directory / name, format="slow").about["files"]) == 22
    for folder in left:
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (0, 0))
    one_export(directory)
    assert not [entry for entry in directory.iterdir() if entry.name.startswith(".")]
    print(len(there), len(left))


if __name__ == "__main__":
    main()
