"""`plait serve` as people run it: a process, on a free port."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import torch
from torch import nn

from plait.export import export


class Sums(nn.Module):
    """Pictures [n, 3, 8, 8] to the means of their channels."""

    def forward(self, images):
        return images.mean((2, 3))


def export_sums(directory, **more):
    return export(Sums(), {"images": torch.rand(2, 3, 8, 8)}, directory, labels=["red", "green", "blue"], **more)


@contextlib.contextmanager
def server(directory, *arguments):
    """The process, with its `port`; it is killed in the end if it is still there."""
    command = [sys.executable, "-m", "plait", "serve", str(directory), "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], f"the server has ended: {lines}"
        process.port = int(found[1])
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
