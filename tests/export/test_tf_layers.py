"""Where windows lie, how much they divide by and from where a resized picture comes: as in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from plait.export.tf_layers import pads, shares, spans, taps


@pytest.mark.parametrize("ceil_mode", [True, False])
@pytest.mark.parametrize("count_padding", [True, False])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"), [(10, 3, 2, 1), (7, 2, 2, 0), (9, 5, 4, 2), (5, 3, 3, 1), (6, 1, 4, 0)]
)
def test_windows_of_average_pools(size, kernel, stride, padding, ceil_mode, count_padding):
    x = torch.arange(1.0, size + 1)
    expected = functional.avg_pool1d(x[None], kernel, stride, padding, ceil_mode, count_padding)[0]
    settings = (size, len(expected), kernel, stride, padding)
    whole = np.pad(x.numpy(), pads(*settings))
    sums = [whole[place * stride : place * stride + kernel].sum() for place in range(len(expected))]
    np.testing.assert_allclose(sums / shares(*settings, count_padding), expected, rtol=1e-6)


def test_dilated_windows_end_at_the_padding():
    assert pads(9, 4, 3, 2, 1, 2) == (1, 1)
    assert pads(10, 3, 2, 4, 0) == (0, 0)


@pytest.mark.parametrize(("size", "result"), [(9, 3), (9, 4), (7, 7), (3, 5), (8, 1)])
def test_windows_of_adaptive_pools(size, result):
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    expected = functional.adaptive_avg_pool1d(x[None, None], result)[0, 0]
    found = [x[start:end].mean() for start, end in spans(size, result)]
    torch.testing.assert_close(torch.stack(found), expected)


def test_a_matrix_as_places_and_factors():
    matrix = np.array([[0.0, 2.0, 1.0], [0.5, 0.0, 0.0]])
    x = np.array([10.0, 20.0, 30.0])
    found = taps(matrix)
    assert len(found) == 2
    np.testing.assert_array_equal(sum(x[places] * factors for places, factors in found), matrix @ x)
    assert matrix[0, 1] == 2.0, "it was changed"
