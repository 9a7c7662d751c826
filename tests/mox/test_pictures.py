from __future__ import annotations

import numpy as np
import pytest
import torch

from plait import mox, nets
from plait.data.augmentation import augment
from plait.data.datasets import Dataset, column_source
from plait.errors import ConfigError


def picture(number=0):
    return torch.from_numpy(np.random.default_rng(number).integers(0, 256, (60, 50, 3), dtype=np.uint8))


def dataset(**settings):
    return Dataset("drawn", 8, {"image": picture}, **settings)


@pytest.mark.parametrize("name", nets.NETS)
def test_every_network_has_the_recipe_that_its_normalisation_goes_with(name):
    assert getattr(mox.PreprocessingKeys, name.upper()) == f"{nets.info(name).preprocessing}_preprocessing"


def test_a_tensor_gives_a_tensor_and_an_array_an_array():
    augmentation_fn = mox.get_data_augmentation_fn("lenet", mox.ModeKeys.TRAIN, 28, 28)
    assert augmentation_fn(picture()).shape == (28, 28, 3)
    assert isinstance(augmentation_fn(picture()), torch.Tensor)
    assert isinstance(augmentation_fn(picture().numpy()), np.ndarray)


def test_a_value_draws_from_the_global_generator():
    augmentation_fn = mox.get_data_augmentation_fn("vgg_16", "TRAIN", 224, 224)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(augmentation_fn(picture()))
    assert found[0].equal(found[1])
    assert not found[0].equal(augmentation_fn(picture()))


def test_a_column_draws_from_each_sample_s_own():
    (image,) = dataset().get(["image"])
    image = mox.get_data_augmentation_fn("cifarnet", "TRAIN", 32, 32)(image)
    once, again = (list(column_source(image).batched(4).batches(0, 0)) for _ in range(2))
    assert all(a[0].equal(b[0]) for a, b in zip(once, again, strict=True))
    assert once[0][0].shape == (4, 32, 32, 3)
    other_pass = list(column_source(image).batched(4).batches(1, 0))
    assert not once[0][0].equal(other_pass[0][0])


def test_evaluation_draws_nothing():
    fn = mox.get_data_augmentation_fn("inception_v3", "EVAL", 40, 40)
    expected = augment("inception_preprocessing", False, 40, 40)(picture().numpy(), np.random.default_rng())
    assert torch.from_numpy(expected).equal(fn(picture()))


def test_the_size_is_the_network_s_own_if_none_is_given():
    assert mox.get_data_augmentation_fn("cifarnet", "EVAL")(picture()).shape == (32, 32, 3)
    assert mox.get_data_augmentation_fn("cifarnet", "EVAL", output_height=20)(picture()).shape == (20, 20, 3)


def test_families_and_options():
    assert mox.get_data_augmentation_fn("vgg", "EVAL", 64, 64, resize_side_min=64)(picture()).shape == (64, 64, 3)
    with pytest.raises(ConfigError, match="fast_mode"):
        mox.get_data_augmentation_fn("inception", "TRAIN", 64, 64, slow=True)


@pytest.mark.parametrize(("name", "mode", "said"), [("vgg_17", "TRAIN", "vgg_16"), ("vgg_16", "train", "ModeKeys")])
def test_errors_say_what_to_write(name, mode, said):
    with pytest.raises(ConfigError, match=said):
        mox.get_data_augmentation_fn(name, mode)
