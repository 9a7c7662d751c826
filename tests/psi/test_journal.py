"""The directory of a run: batches in a row, a secret, settings that stay."""

from __future__ import annotations

import pytest

from plait.errors import ConfigError, DataError
from plait.psi.journal import Batches, Journal


def test_batches_are_counted_without_gaps(tmp_path):
    made = Batches(tmp_path / "x")
    for number in range(3):
        made.add(bytes([number]) * 64)
    made.path(7).write_bytes(b"behind a gap")
    again = Batches(tmp_path / "x")
    assert again.done == 3
    assert again.read(1) == b"\x01" * 64
    assert [points[:, 0].tolist() for points in again] == [[0, 0], [1, 1], [2, 2]]


def test_a_run_is_taken_up_with_its_name_and_secret(tmp_path):
    one = Journal(tmp_path / "work", {"a": 1})
    two = Journal(tmp_path / "work", {"a": 1})
    assert (one.run, one.secret) == (two.run, two.secret)
    assert len(one.secret) == 32
    other = Journal(tmp_path / "other", {"a": 1})
    assert other.run != one.run
    assert other.secret != one.secret


def test_with_other_settings_it_is_not(tmp_path):
    Journal(tmp_path / "work", {"a": 1, "b": 2})
    with pytest.raises(ConfigError, match=r"\(other: b, c\).*remove"):
        Journal(tmp_path / "work", {"a": 1, "b": 3, "c": 4})


def test_a_secret_that_was_forgotten_is_not_made_again(tmp_path):
    made = Journal(tmp_path / "work", {})
    made.save("agreed", {})
    made.forget_secret()
    made.forget_secret()
    assert not (tmp_path / "work" / "secret").exists()
    assert Journal(tmp_path / "work", {}).secret == b""
    assert not (tmp_path / "work" / "secret").exists()
    made.remove()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("name", ["secret", "settings.json"])
def test_damage(tmp_path, name):
    Journal(tmp_path / "work", {})
    (tmp_path / "work" / name).write_bytes(b"?")
    with pytest.raises(DataError, match="is damaged"):
        Journal(tmp_path / "work", {})
