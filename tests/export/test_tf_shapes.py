"""Sums and means know where the channels stand, and the table has all that slices, joins and multiplies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from plait.export.tf_shapes import reduced
from plait.export.tf_values import OPS, Last


def tensor(count):
    return SimpleNamespace(shape=SimpleNamespace(rank=count))


def called(x, dim, keepdim):
    """Over which axes, and whether the result has its channels last."""
    found = reduced(lambda given, axes, keep: (given, axes, keep), x, dim, keepdim)
    last = isinstance(found, Last)
    given, axes, keep = found.tensor if last else found
    assert keep is keepdim
    return given, axes, last


def test_dimensions_of_pictures_with_their_channels_last():
    picture = Last(tensor(4))
    picture._plain = tensor(4)
    assert called(picture, [2, 3], True) == (picture.tensor, [1, 2], True)
    assert called(picture, [1], True) == (picture.tensor, [3], True)
    assert called(picture, [-1, -2], False) == (picture.tensor, [2, 1], False)
    assert called(picture, None, False) == (picture.tensor, [0, 3, 1, 2], False)
    assert called(picture, [1], False) == (picture.plain, [1], False)


def test_dimensions_as_torch_has_them():
    plain = tensor(3)
    assert called(plain, -1, False) == (plain, [2], False)
    assert called(plain, None, True) == (plain, [0, 1, 2], False)


@pytest.mark.parametrize(
    "name", ["cat.default", "slice.Tensor", "mean.dim", "constant_pad_nd.default", "_softmax.default"]
)
def test_these_leave_the_channels_where_they_are(name):
    assert OPS[f"aten.{name}"].layout == "any"
