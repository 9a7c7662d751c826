from __future__ import annotations

import numpy as np
import pytest

from plait.errors import DataError
from plait.feature_column.strings import Strings, decimals

WORDS = ["Oslo", "", "東京", "köln"]


@pytest.mark.parametrize(
    "given",
    [
        WORDS,
        [word.encode() for word in WORDS],
        ["Oslo", b"", "東京", "köln".encode()],
        np.array(WORDS),
        np.array(WORDS, object),
        np.array([word.encode() for word in WORDS]),
    ],
)
def test_all_forms_of_strings_are_the_same_bytes(given):
    made = Strings.of(given)
    assert made.data.tobytes() == "".join(WORDS).encode()
    assert made.offsets.tolist() == [0, 4, 4, 10, 15]
    assert made.shape == (4,)


def test_the_compact_form_gives_its_strings():
    compact = Strings(b"abcdef", [0, 1, 1, 6], shape=(3, 1))
    assert compact.tolist() == [b"a", b"", b"bcdef"]
    assert (len(compact), compact.shape, compact.lengths().tolist()) == (3, (3, 1), [1, 0, 5])


def test_rows_of_strings_keep_their_shape():
    assert Strings.of([["a", "b"], ["c", ""]]).shape == (2, 2)


@pytest.mark.parametrize(
    ("data", "offsets", "shape"),
    [(b"abc", [0, 2], None), (b"abc", [1, 3], None), (b"abc", [0, 3], (2,)), (b"a", [], None)],
)
def test_offsets_that_do_not_fit_are_refused(data, offsets, shape):
    with pytest.raises(DataError, match="offsets"):
        Strings(data, offsets, shape)


def test_what_is_no_string_is_refused():
    with pytest.raises(DataError, match="holds float, str"):
        Strings.of(["a", 1.5])


def test_decimals_are_what_python_writes():
    numbers = [0, 9, 10, -1, -10, 99, 100, 987654321, 2**63 - 1, -(2**63), 10**18, -(10**18)]
    made = decimals(np.array(numbers, np.int64))
    assert [one.decode() for one in made.tolist()] == [str(number) for number in numbers]
    assert len(decimals(np.empty(0, np.int64))) == 0
