"""What a format needs is known before any work."""

from __future__ import annotations

import importlib.util

import pytest

from plait.errors import ConfigError
from plait.export.formats import FORMATS, check_formats, check_installed


def test_each_once():
    assert check_formats(["onnx", "torch", "onnx"]) == ["onnx", "torch"]


@pytest.mark.parametrize(
    ("formats", "words"), [("torch", "write a list"), ([], "write a list"), (["coreml"], "there is no format 'coreml'")]
)
def test_formats_that_cannot_be(formats, words):
    with pytest.raises(ConfigError, match=words):
        check_formats(formats)


def test_a_package_that_is_missing(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name))
    with pytest.raises(ConfigError, match=r"needs onnxscript, which is not installed: pip install 'plait\[export\]'"):
        check_formats(["torch", "onnx"])
    assert check_formats(["torch"]) == ["torch"]
    check_installed("onnx", FORMATS["onnx"].runs_with)
