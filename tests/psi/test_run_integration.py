"""Two processes over mutual TLS, either of which is killed at random moments and started again."""

from __future__ import annotations

import csv
import random
import time

import pytest

from plait.federal.alignment import read_manifest
from plait.federal.certificates import init
from plait.federal.settings import ROLES
from plait.launch.environment import free_ports

from .parties import Starter, tables

SECONDS = 120.0


@pytest.fixture
def starter():
    made = Starter()
    yield made
    made.close()


class Pair:
    """Two parties, each in a directory of its own."""

    def __init__(self, starter, directory, rows, reveal="both"):
        self.directory = directory
        leader, follower = range(rows), range(rows // 3, rows + rows // 3)
        self.common = {str(number) for number in leader} & {str(number) for number in follower}
        draw = random.Random(rows)
        tables(directory, *(draw.sample([str(n) for n in ids], rows) for ids in (leader, follower)))
        init(directory / "certs", ROLES)
        self._place = f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}"
        self._starter, self._reveal, self.pids = starter, reveal, {}

    def start(self, role):
        self.pids[role] = self._starter.start(
            self.directory / f"{role}.code",
            ids=str(self.directory / f"{role}.csv"),
            key="id",
            out=str(self.directory / f"out-{role}"),
            role=role,
            **{"listen" if role == "leader" else "peer": self._place},
            certs=str(self.directory / "certs"),
            timeout=60.0,
            batch=64,
            shards=2,
            reveal=self._reveal,
        )

    def code(self, role):
        path = self.directory / f"{role}.code"
        return int(path.read_text()) if path.exists() else None

    def kill(self, role):
        self._starter.kill(self.pids[role])

    def wait(self):
        until = time.monotonic() + SECONDS
        while any(self.code(role) is None for role in ROLES):
            assert time.monotonic() < until, self.log()
            time.sleep(0.01)
        assert [self.code(role) for role in ROLES] == [0, 0], self.log()

    def log(self):
        return "\n".join((self.directory / f"{role}.log").read_text()[-3000:] for role in ROLES)

    def check(self):
        ids = [[], []]
        for found, role in zip(ids, ROLES, strict=True):
            for path in sorted((self.directory / f"out-{role}").glob("part-*")):
                with path.open(newline="") as file:
                    found += [row["id"] for row in csv.DictReader(file)]
        assert ids[0] == ids[1]
        assert set(ids[0]) == self.common
        assert len(ids[0]) == len(self.common)
        manifests = [read_manifest(self.directory / f"out-{role}") for role in ROLES]
        assert manifests[0]["digest"] == manifests[1]["digest"]
        assert not list(self.directory.rglob(".psi"))


def disturb(pair, draw, kills, longest):
    """Kill one party or the other, at any moment of a run; the seconds are from its start on."""
    for role in ROLES:
        pair.start(role)
    done = 0
    for _ in range(kills):
        time.sleep(draw.uniform(0, longest))
        alive = [role for role in ROLES if pair.code(role) is None]
        if not alive:
            break
        role = draw.choice(alive)
        pair.kill(role)
        if pair.code(role) is None:
            pair.start(role)
            done += 1
    pair.wait()
    pair.check()
    return done


def test_two_kills(starter, tmp_path):
    assert disturb(Pair(starter, tmp_path, 600), random.Random(5), 2, 0.25) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills(starter, tmp_path, seed):
    assert disturb(Pair(starter, tmp_path, 6000), random.Random(seed), 20, 0.4) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.5, 1.0])
def test_both_are_killed_at_once(starter, tmp_path, after):
    pair = Pair(starter, tmp_path, 6000)
    for role in ROLES:
        pair.start(role)
    time.sleep(after)
    for role in ROLES:
        pair.kill(role)
    for role in ROLES:
        if pair.code(role) is None:
            pair.start(role)
    pair.wait()
    pair.check()
