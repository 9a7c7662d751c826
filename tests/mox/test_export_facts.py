"""What the data tell of classes and pictures goes with an export."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from plait import mox
from plait.data.pictures import encode_jpeg
from plait.data.sources import TensorSource, as_source
from plait.mox.export_facts import labels_of, preprocess_of

LOGITS = {"logits": torch.zeros(2, 3)}


@pytest.fixture
def folder(tmp_path):
    """Pictures of three kinds."""
    for name in ("background", "cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.jpg").write_bytes(encode_jpeg(np.zeros((20, 30, 3), np.uint8)))
    return mox.ImageClassificationRawDataset(mox.ImageClassificationRawMetadata(tmp_path))


@pytest.fixture
def mnist(tmp_path):
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, 2, 28, 28) + bytes(2 * 784))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 2) + bytes([3, 4]))
    return mox.get_dataset("mnist", "train", tmp_path)


class TestLabels:
    def test_of_folders(self, folder):
        assert labels_of(folder, LOGITS) == ["background", "cat", "dog"]
        assert labels_of(as_source(folder.get(["image", "label"])), LOGITS) == ["background", "cat", "dog"]

    def test_a_network_that_knows_no_background(self, folder):
        assert labels_of(folder, {"logits": torch.zeros(2, 2)}) == ["cat", "dog"]
        chosen = {"labels": torch.zeros(2, 1, dtype=torch.int64), "confidences": torch.zeros(2, 1)}
        assert labels_of(folder, chosen) == ["background", "cat", "dog"]

    def test_of_a_known_data_set(self, mnist):
        image, label = mnist.get(["image", "label"])
        assert labels_of(as_source((image, label)), {"logits": torch.zeros(2, 10)})[3] == "three"

    def test_of_other_data(self):
        assert labels_of(TensorSource((torch.ones(4, 2),), batch_size=2), LOGITS) is None
        assert labels_of(as_source([torch.ones(2)]), LOGITS) is None


class TestPreprocess:
    def source(self, dataset, name):
        image, label = dataset.get(["image", "label"])
        augmented = mox.get_data_augmentation_fn(name, mox.ModeKeys.EVAL, 16, 16)(image)
        return as_source((augmented, label - 1))

    def test_the_recipe_of_the_data(self, folder):
        inputs = {"images": torch.zeros(2, 16, 24, 3)}
        expected = {"layout": "NHWC", "size": [16, 24], "recipe": "vgg_preprocessing"}
        assert preprocess_of(self.source(folder, "resnet_v1_50"), inputs) == expected
        assert preprocess_of(self.source(folder, "lenet"), inputs)["recipe"] == "lenet_preprocessing"
        del expected["recipe"]
        assert preprocess_of(as_source(folder.get(["image"])), inputs) == expected

    def test_a_recipe_in_the_data_set_itself(self, tmp_path, folder):
        recipe = mox.get_data_augmentation_fn("inception", mox.ModeKeys.EVAL, 16, 16)
        dataset = mox.ImageClassificationRawDataset(folder.metadata, batch_size=2, augmentation_fn=recipe)
        found = preprocess_of(as_source(dataset.get(["image"])), {"images": torch.zeros(2, 16, 16, 3)})
        assert found["recipe"] == "inception_preprocessing"

    def test_channels_first(self):
        source = TensorSource((torch.ones(4, 2),), batch_size=2)
        assert preprocess_of(source, {"x": torch.zeros(2, 1, 8, 9)}) == {"layout": "NCHW", "size": [8, 9]}

    @pytest.mark.parametrize(
        "inputs", [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 8, 8, 8)}, {"x": torch.zeros(2, 8, 8, 3), "y": 1}]
    )
    def test_what_is_no_picture(self, inputs):
        assert preprocess_of(TensorSource((torch.ones(4, 2),), batch_size=2), inputs) is None
