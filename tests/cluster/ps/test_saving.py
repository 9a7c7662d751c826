from __future__ import annotations

from pathlib import Path

from plait.cluster.ps import saving
from plait.cluster.ps.shard_files import read_shards
from plait.variables.checkpoint import CheckpointDir

from .in_process import make_model, servers, worker


def test_what_the_servers_save_is_what_they_hold(tmp_path):
    with servers(2) as role, worker(role, mode="async") as strategy:
        model = make_model(strategy)
        path = saving.path_of(str(tmp_path), saving.name_of(0))
        strategy.save(path)
        assert saving.await_saved(role, path, 5.0)
        found = read_shards(Path(path))
        for name, value in model.variables().items():
            assert (found[name].view(value.shape) == value).all()


def test_a_save_that_a_server_does_not_know_is_lost(tmp_path):
    with servers() as role, worker(role) as strategy:
        make_model(strategy)
        assert not saving.await_saved(role, str(tmp_path / "never"), 5.0)


def test_shares_older_than_every_checkpoint_are_removed(tmp_path):
    for step in (3, 7):
        (tmp_path / saving.name_of(step)).mkdir()
    CheckpointDir(tmp_path).save({"a": 1}, step=5)
    saving.prune(str(tmp_path))
    assert [path.name.split("-")[1] for path in tmp_path.glob("servers-*")] == ["000000000007"]


def test_nothing_is_removed_where_there_is_no_checkpoint(tmp_path):
    (tmp_path / saving.name_of(3)).mkdir()
    saving.prune(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
