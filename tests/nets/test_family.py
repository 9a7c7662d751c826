from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

from plait.nets import NETS
from plait.nets.family import Create, Shape

FAMILIES = sorted({facts.family for facts in NETS.values()})


def test_a_shape_is_named_and_fixed():
    shape = Shape(channels=3, height=4, width=5, classes=6)
    assert dataclasses.astuple(shape) == (3, 4, 5, 6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.channels = 1
    with pytest.raises(TypeError):
        Shape(3, 4, 5, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_the_contract(family: str):
    create = importlib.import_module(f"plait.nets.{family}").create
    parameters = inspect.signature(create).parameters
    contract = inspect.signature(Create.__call__).parameters
    assert list(parameters)[:3] == list(contract)[1:4] == ["name", "shape", "renorm"]
    for option in list(parameters.values())[2:]:
        assert option.kind is inspect.Parameter.KEYWORD_ONLY, option
        assert option.default is not inspect.Parameter.empty, option
        assert option.annotation is not inspect.Parameter.empty, option
    assert parameters["renorm"].default is False
    assert inspect.signature(create).return_annotation == "Net"
