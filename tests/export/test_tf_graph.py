"""What of a graph is needed, and what of it has no words in TensorFlow, is known without TensorFlow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.errors import ConfigError
from plait.export.program import in_evaluation, trace
from plait.export.tf_graph import check


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.function(self, x)


def checked(function):
    module = Of(function)
    with in_evaluation(module):
        check(trace(module, {"x": torch.ones(2, 3)}).core)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda _, x: torch.special.modified_bessel_i1(x), r"operator aten\.special_modified_bessel_i1\.default"),
        (lambda _, x: torch.fft.rfft(x).abs(), r"operator aten\._fft_r2c\.default"),
        (lambda self, x: x + self.count.add_(1), "buffer that changes whenever it runs, such as 'module.count'"),
    ],
)
def test_what_cannot_be_written_is_named(function, words):
    with pytest.raises(ConfigError, match=rf"format 'tf' has no {words}.*'torch' carries every operator"):
        checked(function)


def test_what_nobody_reads_does_not_matter():
    def function(_, x):
        torch.special.modified_bessel_i1(x)
        return x.sort(1)[0] * x.shape[0]

    checked(function)
