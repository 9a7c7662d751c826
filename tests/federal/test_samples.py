"""The digest of a batch's ids: the same for the same ids in the same order, and for nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.errors import DataError
from plait.federal.samples import digest, session_key

KEY = session_key("one", "two")


def test_both_parties_come_to_the_same_key():
    assert session_key("two", "one") == KEY
    assert session_key("one", "three") != KEY
    assert len(KEY) == 32


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([5, 7, -1]),
        torch.tensor([5, 7, -1], dtype=torch.int32),
        torch.tensor([5, 0, 7, 0, -1, 0])[::2],
        np.array([5, 7, -1]),
        np.array([5, 7, -1], dtype=np.int16),
        [5, 7, -1],
        (5, 7, -1),
    ],
    ids=repr,
)
def test_whole_numbers_however_they_are_held(ids):
    assert digest(ids, KEY) == digest(torch.tensor([5, 7, -1]), KEY)


@pytest.mark.parametrize("ids", [["a", "bc"], ("a", "bc"), [b"a", b"bc"], np.array(["a", "bc"])], ids=repr)
def test_texts_however_they_are_held(ids):
    assert digest(ids, KEY) == digest(["a", "bc"], KEY)


def test_other_ids_another_order_and_another_key_differ():
    found = [
        digest([1, 2, 3], KEY),
        digest([1, 3, 2], KEY),
        digest([1, 2], KEY),
        digest([1, 2, 3], session_key("one", "three")),
        digest(["ab", "c"], KEY),
        digest(["a", "bc"], KEY),
        digest(["a", "b", "c"], KEY),
        digest([2**70], KEY),
    ]
    assert len(set(found)) == len(found)


def test_a_digest_is_short_and_shows_no_id():
    found = digest(list(range(4711, 4811)), KEY)
    assert len(found) == 32
    assert "4711" not in found


def test_no_ids():
    assert digest([], KEY) == digest(torch.zeros(0, dtype=torch.int64), KEY)


@pytest.mark.parametrize("ids", [torch.ones(2), np.ones(2), torch.ones(2, dtype=torch.complex64)])
def test_fractions_are_no_ids(ids):
    with pytest.raises(DataError, match="give whole numbers or texts"):
        digest(ids, KEY)
