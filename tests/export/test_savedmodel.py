"""Without TensorFlow, the format "tf" says what it needs, and what it could not carry."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from plait.errors import ConfigError
from plait.export import export
from plait.export.formats import FORMATS, check_formats
from plait.export.program import in_evaluation, trace
from plait.export.savedmodel import check


@pytest.fixture
def no_tensorflow(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorflow" else found(name))


class Untouched(nn.Module):
    def forward(self, x):
        pytest.fail("work was done")


def test_the_extra_is_named_before_any_work(tmp_path, no_tensorflow):
    words = r"format 'tf' needs tensorflow, which is not installed: pip install 'plait\[tf\]'"
    with pytest.raises(ConfigError, match=words):
        export(Untouched(), {"x": torch.ones(1)}, tmp_path / "exports", formats=("tf",))
    with pytest.raises(ConfigError, match=words):
        check_formats(["torch", "tf"])
    assert list(tmp_path.iterdir()) == []


def program_of(module, **inputs):
    with in_evaluation(module):
        return trace(module, inputs)


def test_what_is_known_is_checked_without_tensorflow():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    check(program_of(nn.Sequential(*layers, nn.Dropout(), nn.Softmax(1)), input=torch.ones(2, 3, 8, 8)))


class Hidden(nn.Module):
    def forward(self, _x):
        return _x + 1


def test_a_name_that_tensorflow_does_not_take():
    with pytest.raises(ConfigError, match=r"no inputs with a name like '_x': write one that starts with a letter"):
        check(program_of(Hidden(), _x=torch.ones(2)))


def test_the_format():
    assert set(FORMATS) == {"torch", "onnx", "tf"}
    assert FORMATS["tf"].extra == "tf"
    FORMATS["torch"].check(None)  # it carries everything: there is nothing to look at
