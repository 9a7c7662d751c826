"""Serve both parties' parts, each in a process of its own, and ask the leader's server for the images held out.

python examples/federal/serving/ask.py EXPORTS CERTS

A request has the left halves, which the leader's clients know, and the images' numbers. The leader's server asks the
follower's for what it makes of the right halves, over mutual TLS; those stay with the follower.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import common

from plait import demo

ROWS = 60


@contextlib.contextmanager
def serving(*arguments):
    """`plait serve`, once it says where it is: an address."""
    command = [sys.executable, "-m", "plait", "serve", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = None
        while address is None:
            line = process.stderr.readline()
            if not line:
                raise SystemExit(f"{' '.join(command)} has ended")
            address = re.search(r"(?:http://|listens at )([0-9.]+:[0-9]+)", line)
        yield address[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def ask(url, numbers, halves):
    """The digits that the model sees."""
    inputs = [
        {"name": "half", "datatype": "FP32", "shape": list(halves.shape), "data": halves.flatten().tolist()},
        {"name": "id", "datatype": "INT64", "shape": [len(numbers)], "data": numbers},
    ]
    with urlopen(f"{url}/v2/models/leader/infer", json.dumps({"inputs": inputs}).encode()) as answer:
        found = json.load(answer)["outputs"][0]
    rows = [found["data"][start : start + 10] for start in range(0, len(found["data"]), 10)]
    return [row.index(max(row)) for row in rows]


def main(exports, certs):
    digits, halves = demo.load()[1].tolist(), common.halves("left")
    held_out = range(common.TRAINING_IMAGES, len(digits))
    right = 0
    follower = ["--party", "follower", "--listen", "127.0.0.1:0", "--rows", exports / "rows.safetensors"]
    with serving(exports / "follower", "--certs", certs, *follower) as peer:
        leader = ["--party", "leader", "--peer", peer, "--port", 0]
        with serving(exports / "leader", "--certs", certs, *leader) as address:
            for start in range(held_out.start, held_out.stop, ROWS):
                numbers = list(range(start, min(start + ROWS, held_out.stop)))
                found = ask(f"http://{address}", numbers, halves[numbers])
                right += sum(found[place] == digits[number] for place, number in enumerate(numbers))
            with urlopen(f"http://{address}/v2/models/leader/about") as about:
                trained = json.load(about)["metrics"]["accuracy"]
    print(f"{len(held_out)} images asked for: accuracy {right / len(held_out):.4f}, in training it was {trained:.4f}")


if __name__ == "__main__":
    main(common.EXPORTS, Path(sys.argv[2]))
