"""Whole clusters with parameter servers: backup workers, another number of servers, who may join."""

from __future__ import annotations

import json

import pytest

from .clusters import Cluster

SECONDS = 90.0


def finished(cluster):
    assert cluster.wait(SECONDS) == 0, cluster.output()[-6000:]


@pytest.mark.slow
def test_a_step_goes_on_without_the_slowest_worker_whose_gradients_are_dropped_and_counted(tmp_path):
    out = tmp_path / "out.json"
    with Cluster(tmp_path, "backup.py", out, 80, workers=3, servers=1) as cluster:
        finished(cluster)
    found = json.loads(out.read_text())
    assert [worker["step"] for worker in found["workers"]] == [80, 80, 80]
    assert found["workers"][2]["dropped"] > 3
    assert found["error"] < 0.2  # the weights that were looked for are ones


@pytest.mark.slow
def test_a_run_is_taken_up_with_another_number_of_servers(tmp_path):
    def train(name, steps, servers):
        out = tmp_path / f"{name}.json"
        directory = tmp_path / f"{name}-{steps}"
        directory.mkdir()
        arguments = [out, tmp_path / name, tmp_path / "progress.txt", "sync", steps, 0, 0, 1]
        with Cluster(directory, "chaos.py", *arguments, servers=servers) as cluster:
            finished(cluster)
        return json.loads(out.read_text())

    train("changed", 20, 2)
    assert train("changed", 40, 1) == train("same", 40, 1)
