from __future__ import annotations

import hashlib
from importlib import resources

import numpy as np
import pytest
import torch

from plait import demo, efl
from plait.demo import digits

MODES = (efl.MODE.TRAIN, efl.MODE.EVAL)
COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_data_is_what_digits_md_says():
    file = resources.files("plait.demo").joinpath("digits.npz")
    assert len(file.read_bytes()) < 100_000
    with resources.as_file(file) as path, np.load(path, allow_pickle=False) as arrays:
        assert sorted(arrays) == ["images", "labels"]
        images, labels = arrays["images"], arrays["labels"]
    assert (images.shape, images.dtype, images.min(), images.max()) == ((1797, 8, 8), np.uint8, 0, 16)
    assert np.bincount(labels).tolist() == COUNTS
    # scikit-learn's first image, a nought
    assert images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_training_and_held_out_images_are_all_of_them_and_always_the_same():
    images, labels = demo.load()
    assert (images.shape, labels.shape) == ((1797, 1, 8, 8), (1797,))
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels.bincount().tolist() == COUNTS
    train, test = (digits.source(mode, "digit") for mode in MODES)
    assert (train.rows, test.rows) == (1437, 360)
    assert (train.shuffle, test.shuffle) == (True, False)
    assert (train.count(0), test.count(0)) == (45, 1)
    assert torch.equal(torch.cat([train.tensors[1], test.tensors[1]]), labels)
    assert hashlib.sha256(labels.numpy().tobytes()).hexdigest().startswith("0a708bf25364e1b5")


def test_a_party_gets_the_fields_that_it_asks_for_and_no_others():
    assert digits.source(efl.MODE.TRAIN, "right").names == ["id", "right"]
    assert digits.source(efl.MODE.EVAL, "left", "digit").names == ["id", "left", "digit"]
    with pytest.raises(KeyError, match="middle"):
        digits.source(efl.MODE.TRAIN, "middle")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_both_halves_of_a_batch_are_of_the_same_images(mode):
    images, labels = demo.load()
    ours, theirs = digits.source(mode, "left", "digit"), digits.source(mode, "right")
    for epoch in (0, 1):
        for left, right in zip(ours.batches(epoch, 0), theirs.batches(epoch, 0), strict=True):
            assert torch.equal(left["id"], right["id"])
            assert torch.equal(torch.cat([left["left"], right["right"]], dim=3), images[left["id"]])
            assert torch.equal(left["digit"], labels[left["id"]])
