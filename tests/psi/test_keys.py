"""What counts as the same key."""

from __future__ import annotations

import pytest

from plait.errors import DataError
from plait.psi.keys import key_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a"], [" a\t"]),
        (["a"], [b"a"]),
        ([17], ["17"]),
        ([-3], ["-3"]),
        (["Jose\u0301"], ["Jos\u00e9"]),
        (["\u00a0x\u3000"], ["x"]),
        (["\ufb01n", 2], ["\ufb01n", "2 "]),
    ],
)
def test_the_same(one, other):
    assert key_of(one, "row 1") == key_of(other, "row 1")


@pytest.mark.parametrize(
    ("one", "other"),
    [(["a"], ["A"]), (["ab", "c"], ["a", "bc"]), (["a", ""], ["a"]), (["", "a"], ["a", ""]), (["1"], ["01"])],
)
def test_not_the_same(one, other):
    assert key_of(one, "row 1") != key_of(other, "row 1")


@pytest.mark.parametrize(
    ("one", "other"), [("STRASSE", "straße"), ("É", "e\u0301"), ("Ann@Example.org", "ann@example.org")]
)
def test_without_case(one, other):
    assert key_of([one], "", ignore_case=True) == key_of([other], "", ignore_case=True)
    assert key_of([one], "") != key_of([other], "")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([""], "empty key"),
        ([" ", "\t"], "empty key"),
        ([None], "type NoneType"),
        ([1.5], "type float"),
        ([True], "type bool"),
        ([b"\xff"], "not UTF-8"),
        (["\ud800"], "lone surrogate"),
    ],
)
def test_no_keys(values, said):
    with pytest.raises(DataError, match=f"row 7 has an? .*{said}|row 7 has .*{said}"):
        key_of(values, "row 7")
