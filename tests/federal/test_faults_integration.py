"""Parties are killed, stopped, cut off from each other: training goes on, and ends where it would have."""

from __future__ import annotations

import pytest

from .parties import Starter, Two, moments


@pytest.fixture(scope="module")
def starter():
    found = Starter()
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(starter, tmp_path_factory):
    found = {}

    def of(*options):
        if options not in found:
            with Two(starter, tmp_path_factory.mktemp("undisturbed"), *options) as two:
                two.start()
                two.end()
                found[options] = two.outcome()
        return found[options]

    return of


MOMENTS = ("open", "opened", "build", "built", "agreed", "newest", "step", "evaluation", "update", "named", "write", "saved", "last", "done", "end")


@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_moment(starter, undisturbed, tmp_path, role, moment):
    with Two(starter, tmp_path, timeout=10) as two:
        other = "follower" if role == "leader" else "leader"
        two.start(role, kill_at=moment)
        two.start(other)
        two.end()
        assert two.outcome() == undisturbed()
