"""Requests and bytes that may be under way."""

from __future__ import annotations

import pytest

from plait.errors import UnavailableError
from plait.serve.gate import Gate


def test_so_many_requests_and_no_more():
    gate = Gate(2, 100)
    with gate.inside(1), gate.inside(1):
        assert gate.under_way == 2
        with pytest.raises(UnavailableError), gate.inside(1):
            pass
    assert gate.under_way == 0


def test_so_many_bytes_and_no_more():
    gate = Gate(10, 100)
    with gate.inside(60):
        with pytest.raises(UnavailableError), gate.inside(41):
            pass
        with gate.inside(40):
            pass
    with gate.inside(100):
        pass


def test_a_failure_leaves_room():
    gate = Gate(1, 100)
    with pytest.raises(KeyError), gate.inside(100):
        raise KeyError
    with gate.inside(100):
        pass
