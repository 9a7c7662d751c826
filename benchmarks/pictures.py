"""Pictures a second: a DataLoader over Pillow, plait's folder reader, bare JPEG decoding. `python benchmarks/pictures.py`

Every one makes VGG training inputs of the same JPEG files, which the benchmark draws, except the last, which only
decodes: that is the limit. Rounds take turns. One reader is measured in CPU time, two against one in wall-clock time.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from plait import mox
from plait.atomic import write_atomic
from plait.data.datasets import column_source
from plait.data.pictures import encode_jpeg

PICTURES, CLASSES, BATCH, ROUNDS = 384, 4, 32, 7
RESULT = Path(__file__).parent / "results" / "pictures.json"
MEANS = torch.tensor([123.68, 116.78, 103.94])


def draw(folder: Path, quality: int = 85, noise: float = 11) -> list[Path]:
    """Photographs, near enough: clouds of colour, edges and some noise; 500x375."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:375, 0:500].astype(np.float32)
    paths = []
    for number in range(PICTURES):
        image = np.zeros((375, 500, 3), np.float32)
        for _ in range(12):
            fx, fy, phase = rng.normal(0, 0.02), rng.normal(0, 0.02), rng.uniform(0, 6.3)
            image += rng.normal(0, 30, 3).astype(np.float32) * np.sin(fx * x + fy * y + phase)[..., None]
        for _ in range(8):
            top, left = rng.integers(0, 300), rng.integers(0, 400)
            image[top : top + rng.integers(20, 75), left : left + rng.integers(20, 100)] += rng.normal(0, 40, 3)
        image += rng.normal(0, noise, image.shape) + 127
        path = folder / f"class_{number % CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_jpeg(np.clip(image, 0, 255).astype(np.uint8), quality=quality))
        paths.append(path)
    return paths


class PillowPictures(Dataset):
    """What people write: open, short side 256 to 512, cut 224 out, mirror, to a float tensor, minus the means."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.paths[index]).convert("RGB")
        side = random.randint(256, 512)
        scale = side / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
        left, top = random.randint(0, image.width - 224), random.randint(0, image.height - 224)
        image = image.crop((left, top, left + 224, top + 224))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.asarray(image, dtype=np.float32)) - MEANS
        return tensor.permute(2, 0, 1), index % CLASSES


def pillow(paths: list[Path]) -> None:
    for _ in DataLoader(PillowPictures(paths), batch_size=BATCH, shuffle=True):
        pass


def plait_reader(folder: Path, readers: int) -> Callable[[], None]:
    metadata = mox.ImageClassificationRawMetadata(str(folder))
    dataset = mox.ImageClassificationRawDataset(metadata, num_readers=readers)
    image, label = dataset.get(["image", "label"])
    image = mox.get_data_augmentation_fn("vgg_16", mox.ModeKeys.TRAIN, 224, 224)(image)
    source = column_source((image, label)).batched(BATCH)
    passes = itertools.count()

    def one_pass() -> None:
        for _ in source.batches(next(passes), 0):
            pass

    return one_pass


def bare(buffers: list[bytes], threads: int) -> None:
    def part(number: int) -> None:
        for data in buffers[number::threads]:
            simplejpeg.decode_jpeg(data)

    if threads == 1:
        part(0)
        return
    workers = [threading.Thread(target=part, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def rounds(runs: dict[str, Callable[[], None]], clock: Callable[[], float]) -> list[dict[str, float]]:
    """Pictures a second in each round; the runs take turns, so that a slow moment hits all of them."""
    found = []
    for _ in range(ROUNDS + 1):
        one = {}
        for name, run in runs.items():
            begin = clock()
            run()
            one[name] = PICTURES / (clock() - begin)
        found.append(one)
    return found[1:]  # the first round warms up


def ratio(found: list[dict[str, float]], name: str, other: str) -> float:
    """The median of the rounds' own ratios."""
    return statistics.median(one[name] / one[other] for one in found)


def measure(quality: int, noise: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = draw(folder, quality, noise)
        buffers = [path.read_bytes() for path in paths]
        one = rounds(
            {
                "pillow": lambda: pillow(paths),
                "plait": plait_reader(folder, 1),
                "decoding": lambda: bare(buffers, 1),
            },
            time.process_time,
        )
        two = rounds(
            {
                "1 reader": plait_reader(folder, 1),
                "2 readers": plait_reader(folder, 2),
                "1 decoder": lambda: bare(buffers, 1),
                "2 decoders": lambda: bare(buffers, 2),
            },
            time.perf_counter,
        )
    return {
        "kilobytes": statistics.mean(map(len, buffers)) / 1000,
        **{name: statistics.median(found[name] for found in one) for name in one[0]},
        "over_pillow": ratio(one, "plait", "pillow"),
        "of_the_limit": ratio(one, "plait", "decoding"),
        "gain_of_two_readers": ratio(two, "2 readers", "1 reader"),
        "gain_of_two_decoders": ratio(two, "2 decoders", "1 decoder"),
    }


def main() -> None:
    torch.set_num_threads(1)
    title = f"VGG training inputs of {PICTURES} JPEGs of 500x375, pictures a second of CPU time"
    table = Table(
        "kB", "Pillow", "plait", "decoding only", "over Pillow", "of decoding", "2 readers, 2 decoders", title=title
    )
    results = []
    # from small files, where all that is not decoding weighs most, to those of ImageNet's mean size
    for quality, noise in ((85, 9), (85, 11), (92, 13), (94, 15)):
        found = measure(quality, noise)
        results.append(found)
        table.add_row(
            f"{found['kilobytes']:.0f}",
            *(f"{found[name]:.0f}" for name in ("pillow", "plait", "decoding")),
            *(f"{found[name]:.2f}" for name in ("over_pillow", "of_the_limit")),
            f"{found['gain_of_two_readers']:.2f}, {found['gain_of_two_decoders']:.2f}",
        )
    Console(width=110).print(table)
    facts = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "cores": os.cpu_count()}
    write_atomic(RESULT, json.dumps({**facts, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
