"""`mox.run` over pictures, killed in the middle of a pass and started again: the same weights, bit for bit.

This file is the program, too: `python test_pictures_integration.py DATA LOG_DIR KIND:STEP ...` trains once for each
`KIND:STEP`, in a process that kills itself when it reaches this global step.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import mox
from plait.data.example import make_example
from plait.data.pictures import encode_jpeg, encode_png
from plait.data.tfrecord import TFRecordWriter
from plait.engine.build import current_model
from plait.errors import DataError

KINDS = ("folders", "records", "gzip", "batches")
PICTURES, BATCH, STEPS = 44, 8, 27  # a pass is 5 batches and a half: kills come in the middle of passes and batches
DEADLINE = 120.0


def dataset(kind, data):
    if kind in ("folders", "batches"):
        own = {"batch_size": BATCH, "augmentation_fn": augmentation()} if kind == "batches" else {}
        return mox.ImageClassificationRawDataset(mox.ImageClassificationRawMetadata(data), num_readers=4, seed=3, **own)
    metadata = mox.ImageClassificationTFRecordMetadata(data, f"{kind}-*")
    return mox.ImageClassificationTFRecordDataset(metadata, num_parallel=4, shuffle_buffer_size=16, seed=3)


def augmentation():
    return mox.get_data_augmentation_fn("cifarnet", mox.ModeKeys.TRAIN, 12, 12)


def train(kind, data, log_dir, kill_at=-1, steps=STEPS):
    """The variables at the end; LOG_DIR may be None."""

    def input_fn(mode):
        image, label = dataset(kind, data).get(["image", "label"])
        return (image if kind == "batches" else augmentation()(image)) / 255, label

    def model_fn(inputs, mode):
        images, labels = inputs
        model = current_model()  # there is none while it is built
        if model is not None and model.global_step.value == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = F.cross_entropy(plait.layer("fc", nn.Linear, 12 * 12 * 3, 4)(images.flatten(1)), labels)
        return mox.ModelSpec(loss=loss, log_info={"loss": loss})

    torch.manual_seed(1)
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("momentum", learning_rate=0.1, momentum=0.9),
        run_mode=mox.ModeKeys.TRAIN,
        batch_size=BATCH,
        max_number_of_steps=steps,
        log_dir=log_dir,
        save_model_steps=2,
    )
    return {name: value.detach().clone() for name, value in current_model().variables().items()}


def write_pictures(data):
    """As folders, and as records in three files, plain and compressed."""
    rng = np.random.default_rng(0)
    examples = []
    for number in range(PICTURES):
        pixels = rng.integers(0, 256, [*rng.integers(12, 20, 2), 3], dtype=np.uint8)
        picture = encode_png(pixels) if number % 5 == 0 else encode_jpeg(pixels)
        path = data / f"class_{number % 4}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
        examples.append(make_example({"image/encoded": picture, "image/class/label": number % 4}))
    for kind, compression in (("records", None), ("gzip", "GZIP")):
        for file in range(3):
            with TFRecordWriter(data / f"{kind}-{file}", compression) as writer:
                for example in examples[file::3]:
                    writer.write(example)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    data = tmp_path_factory.mktemp("pictures")
    write_pictures(data)
    return str(data)


def main(data, log_dir, *jobs):
    """Trainings that are killed, one after the other; in children, which need not import everything anew."""
    importlib.import_module("torch._dynamo")  # or the first step of each would
    for job in jobs:
        kind, step = job.split(":")
        pid = os.fork()
        if not pid:
            train(kind, data, str(Path(log_dir, kind)), kill_at=int(step))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL:
            sys.exit(f"{job} was not killed")


def check_resume(kills, data, log_dir):
    """`kills` are the steps at which the training of a kind is killed, started again, killed again, ..."""
    jobs = [f"{kind}:{step}" for kind, steps in kills.items() for step in steps]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, data, str(log_dir), *jobs]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for kind in kills:
        expected, found = train(kind, data, None), train(kind, data, str(log_dir / kind))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), kind


def test_two_kills(data, tmp_path, caplog):
    check_resume({"folders": [3, 16], "records": [9, 22]}, data, tmp_path)
    went_on = [record.getMessage() for record in caplog.records if "going on at global step" in record.getMessage()]
    assert ["global step 14" in went_on[0], "global step 20" in went_on[1]] == [True, True]  # not from the start


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ten_kills(data, tmp_path, seed):
    draws = random.Random(seed)
    check_resume({kind: sorted(draws.choices(range(1, STEPS), k=10)) for kind in KINDS}, data, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_one(kind, data, tmp_path):
    expected = train(kind, data, None)
    train(kind, data, str(tmp_path / "log"), steps=13)
    found = train(kind, data, str(tmp_path / "log"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_other_readers_give_the_same(data, monkeypatch):
    expected = train("folders", data, None)
    plain = mox.ImageClassificationRawDataset
    monkeypatch.setattr(
        mox, "ImageClassificationRawDataset", lambda metadata, **own: plain(metadata, **{**own, "num_readers": 1})
    )
    found = train("folders", data, None)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["folders", "records"])
def test_a_checkpoint_of_other_pictures_is_refused(kind, tmp_path):
    write_pictures(tmp_path / "data")
    train(kind, str(tmp_path / "data"), str(tmp_path / "log"), steps=3)
    (tmp_path / "data" / "class_1" / "1.jpg").unlink()
    (tmp_path / "data" / "records-1").unlink()
    with pytest.raises(DataError, match="is not the one that the checkpoint was made with"):
        train(kind, str(tmp_path / "data"), str(tmp_path / "log"), steps=6)


if __name__ == "__main__":
    main(*sys.argv[1:])
