"""What role makers talk through, in both kinds of cluster."""

from __future__ import annotations

import inspect

import pytest

from plait.cluster.connect import _Among
from plait.cluster.control import Control
from plait.cluster.ps.coordinator import ServedControl
from plait.engine.strategy import Local


@pytest.mark.parametrize("kind", [ServedControl, _Among])
@pytest.mark.parametrize("name", ["gather", "close"])
def test_both_kinds_have_every_method_with_its_parameters(kind, name):
    asked = inspect.signature(getattr(Control, name)).parameters
    given = inspect.signature(getattr(kind, name)).parameters
    assert {one: (way.kind, way.default) for one, way in asked.items()}.items() <= {
        one: (way.kind, way.default) for one, way in given.items()
    }.items()


def test_one_process_gathers_from_itself():
    assert _Among(Local()).gather("start", {"a": 1}) == [{"a": 1}]
