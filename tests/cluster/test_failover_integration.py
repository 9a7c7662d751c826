"""Processes killed with -9 at random moments: training goes on, and ends where it would have."""

from __future__ import annotations

import json
import statistics

import pytest

from .clusters import Cluster, descendants, kill_often

STEPS = 120
PAUSE = 0.01
SECONDS = 90.0
"""A run without kills may take so long, on a busy machine."""


def train(directory, mode, servers, *, kills=0, target="", seed=0, steps=STEPS):
    """Run the program, kill `target` so many times, and return what the chief found at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    out, progress = directory / "out.json", directory / "progress.txt"
    arguments = [out, directory / "checkpoints", progress, mode, steps, seed if mode in ("async", "geo") else 0, PAUSE]
    deadline = SECONDS + 30.0 * kills
    with Cluster(directory, "chaos.py", *arguments, servers=servers, max_restarts=10 * kills + 2) as cluster:
        killed = kill_often(cluster, target, kills, progress, seed, deadline) if kills else 0
        code = cluster.wait(deadline)
        assert code == 0, cluster.output()[-6000:]
        assert killed == kills, f"the run was over after {killed} kills"
        assert not descendants(cluster.process.pid)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found = {}

    def of(mode, servers, steps=STEPS):
        key = mode, servers, steps
        if key not in found:
            found[key] = train(tmp_path_factory.mktemp("undisturbed"), mode, servers, steps=steps)
        return found[key]

    return of


CASES = [
    ("collective", 0, "worker 1"),
    ("collective", 0, "worker 0"),
    ("sync", 2, "worker 1"),
    ("sync", 2, "worker 0"),
    ("sync", 2, "server 0"),
    ("sync", 2, "server 1"),
]


@pytest.mark.parametrize(
    ("mode", "servers", "target"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in (CASES[3], CASES[4]))],
)
def test_workers_in_step_end_with_the_bits_of_an_undisturbed_run(mode, servers, target, undisturbed, tmp_path):
    assert train(tmp_path, mode, servers, kills=1, target=target, seed=3) == undisturbed(mode, servers)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "servers", "target"), CASES)
def test_ten_kills_change_no_bit_for_workers_in_step(mode, servers, target, undisturbed, tmp_path):
    found = train(tmp_path, mode, servers, kills=10, target=target, seed=7, steps=STEPS * 4)
    assert found == undisturbed(mode, servers, STEPS * 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "geo"])
def test_ten_kills_leave_the_loss_within_the_spread_of_undisturbed_seeds(mode, tmp_path):
    steps = STEPS * 10
    quiet = [train(tmp_path / f"seed-{seed}", mode, 2, seed=seed, steps=steps)["loss"] for seed in range(5)]
    spread = max(quiet) - min(quiet)
    found = {}
    for target in ("worker 1", "worker 0", "server 0", "server 1"):
        one = train(tmp_path / target.replace(" ", "-"), mode, 2, kills=10, target=target, seed=2, steps=steps)
        assert one["step"] == steps
        found[target] = one["loss"]
    print(mode, "undisturbed", quiet, "killed", found)
    assert all(abs(loss - statistics.mean(quiet)) <= spread for loss in found.values()), (quiet, found)
