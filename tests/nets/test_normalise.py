from __future__ import annotations

import pytest
import torch

from plait.errors import ConfigError
from plait.nets.normalise import NORMALISATIONS, normalise


def pixels(*values):
    return torch.tensor(values, dtype=torch.uint8).reshape(1, 1, -1, 3)


def test_vgg_takes_the_means_away():
    assert torch.allclose(normalise(pixels(124, 117, 104), "vgg"), torch.tensor([0.32, 0.22, 0.06]), atol=1e-5)


def test_inception_goes_from_minus_one_to_one():
    assert normalise(pixels(0, 255, 0), "inception").flatten().tolist() == [-1, 1, -1]


def test_lenet():
    assert normalise(pixels(0, 128, 255), "lenet").flatten().tolist() == [-1, 0, 0.9921875]


def test_cifarnet_standardises_each_picture():
    images = torch.randint(0, 256, (3, 8, 8, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    ready = normalise(images, "cifarnet")
    assert torch.allclose(ready.mean((1, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(ready.std((1, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_a_picture_of_one_colour_stays_finite():
    assert normalise(torch.full((1, 4, 4, 3), 7, dtype=torch.uint8), "cifarnet").abs().max() == 0


def test_pvanet():
    expected = (torch.tensor([1.0, 0, 0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(normalise(pixels(255, 0, 0), "pvanet").flatten(), expected)


@pytest.mark.parametrize("family", NORMALISATIONS)
def test_grey_pictures_and_given_ones_stay_as_they_are(family):
    images = torch.full((2, 4, 4, 1), 100.0)
    assert normalise(images, family).shape == images.shape
    assert images.eq(100).all()


def test_other_channels_are_refused():
    with pytest.raises(ConfigError, match="5 channels"):
        normalise(torch.zeros(1, 2, 2, 5), "vgg")
