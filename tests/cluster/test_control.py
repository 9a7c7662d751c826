from __future__ import annotations

import inspect

import pytest

from plait.cluster.connect import Among
from plait.cluster.control import Control
from plait.cluster.exchange import Mesh
from plait.cluster.ps.coordinator import ServedControl


@pytest.mark.parametrize("kind", [Mesh, ServedControl, Among])
@pytest.mark.parametrize("method", ["gather", "close"])
def test_those_who_are_a_control_take_its_arguments(kind, method):
    wanted = inspect.signature(getattr(Control, method)).parameters
    taken = inspect.signature(getattr(kind, method)).parameters
    assert [name for name in wanted if name in taken] == list(wanted)
