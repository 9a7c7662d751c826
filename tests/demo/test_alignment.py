from __future__ import annotations

import csv

import pytest

from plait import efl
from plait.demo import alignment, digits
from plait.federal.alignment import read_digest


def ids(path):
    with path.open(newline="") as file:
        return [int(row["id"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    directory.joinpath("said").write_text(alignment.align_parties(directory))
    return directory


def test_two_lists_in_different_orders_that_overlap(output):
    leader, follower = (ids(output / "ids" / f"{role}.csv") for role in ("leader", "follower"))
    assert (len(leader), len(follower), len(set(leader) & set(follower))) == (2000, 2100, 1797)
    assert leader != sorted(leader)
    common = set(leader) & set(follower)
    assert [one for one in leader if one in common] != [one for one in follower if one in common]


def test_both_find_the_images(output):
    found = [ids(output / "aligned" / role / "part-00000-of-00001.csv") for role in ("leader", "follower")]
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(1797))
    assert len({read_digest(output / "aligned" / role) for role in ("leader", "follower")}) == 1
    said = (output / "said").read_text()
    assert said.startswith("2,000 ids of the leader, 2,100 of the follower: 1,797 in common, found in ")


def test_the_images_of_the_demo_are_all_common(output):
    for mode in (efl.MODE.TRAIN, efl.MODE.EVAL):
        one, other = digits.source(mode, "left"), digits.source(mode, "left", aligned=output / "aligned" / "leader")
        assert all(a.equal(b) for a, b in zip(one.tensors, other.tensors, strict=True))


def test_what_was_done_is_not_done_again_and_can_be_removed(output):
    assert alignment.align_parties(output) == "the parties have found their common ids already"
    (output / "ids" / "mine.txt").write_text("mine")
    alignment.remove(output)
    assert sorted(path.name for path in output.iterdir()) == ["ids", "said"]
    assert [path.name for path in (output / "ids").iterdir()] == ["mine.txt"]
