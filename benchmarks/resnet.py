"""A ResNet-50 of plait's and the same one written out in plain PyTorch, forward on the CPU. `python benchmarks/resnet.py`"""

from __future__ import annotations

import datetime
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from plait import nets
from plait.atomic import write_atomic

BATCH, ROUNDS = 4, 15
RESULT = Path(__file__).parent / "results" / "resnet.json"


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 4
        self.main = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if inputs != outputs
            else nn.MaxPool2d(1, stride)
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.short(x) + self.main(x))


def plain() -> nn.Module:
    """ResNet-50 with strides in the last units of blocks 1 to 3."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
    channels = 64
    for block, (units, outputs) in enumerate(zip((3, 4, 6, 3), (256, 512, 1024, 2048), strict=True)):
        for unit in range(units):
            layers.append(Bottleneck(channels, outputs, 2 if unit == units - 1 and block < 3 else 1))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def measure(training: bool, last: bool) -> dict[str, float]:
    images = torch.randn(BATCH, 3, 224, 224)
    images = images.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    own, other = nets.build("resnet_v1_50").train(training), plain().train(training)
    runs = {"plait": lambda: own(images)[0], "plain PyTorch": lambda: other(images)}
    found: dict[str, list[float]] = {name: [] for name in runs}
    with torch.set_grad_enabled(training):
        for _ in range(ROUNDS + 1):
            for name, run in runs.items():
                begin = time.process_time()
                logits = run()
                if training:
                    logits.sum().backward()
                found[name].append(time.process_time() - begin)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(
        "mode", "memory", "plait, ms", "plain, ms", "ratio", title=f"ResNet-50, batch {BATCH} of 224x224, 1 thread"
    )
    rows = []
    for training in (False, True):
        for last in (False, True):
            found = measure(training, last)
            ours, theirs = found["plait"] * 1000, found["plain PyTorch"] * 1000
            mode = "forward and backward" if training else "forward"
            row = {"mode": mode, "memory": "NHWC" if last else "NCHW", "plait_ms": ours, "plain_ms": theirs}
            rows.append({**row, "ratio": ours / theirs})
            table.add_row(mode, row["memory"], f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.3f}")
    Console(width=100).print(table)
    result = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "rows": rows}
    write_atomic(RESULT, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
