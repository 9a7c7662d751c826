"""What is on disk: readable by others, whole, and checked byte by byte."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from plait.cluster.ps import shard_files
from plait.cluster.ps.shard import Push, Shard
from plait.cluster.ps.shard_files import ShardState, open_shards, read_shards, write_shard
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, TableSpec, VariableSpec
from plait.errors import CheckpointError

SPEC = ModelSpec(
    optimizers=(OptimizerSpec(kind="Adagrad", options={"initial_accumulator_value": 0.1}),),
    variables=(
        VariableSpec(name="net/w", shape=(130, 130), dtype="float32", optimizer=0),
        VariableSpec(name="net/b", shape=(130,), dtype="bfloat16", optimizer=0),
        VariableSpec(name="seen", shape=(), dtype="int64", optimizer=None),
        VariableSpec(name="flags", shape=(3,), dtype="bool", optimizer=None),
        VariableSpec(name="none", shape=(0, 2), dtype="float64", optimizer=None),
    ),
    tables=(
        TableSpec(name="items", dim=3, dtype="float32", rows=11, optimizer=0),
        TableSpec(name="users", dim=2, dtype="float64", rows=None, optimizer=None),
    ),
)
VALUES = [
    torch.randn(130, 130, generator=torch.Generator().manual_seed(0)),
    torch.arange(130).to(torch.bfloat16),
    torch.tensor(7),
    torch.tensor([True, False, True]),
    torch.zeros(0, 2, dtype=torch.float64),
]
IDS = torch.tensor([2**62, -5, 0, 17, 3])


def save(directory, servers=2) -> None:
    for index in range(servers):
        shard = Shard(SPEC, index, servers)
        shard.set_dense(shard.placement.pack(index, VALUES)[1])
        own = shard.tables[0].ids()
        shard.load_rows(0, own, torch.stack([own, own, own], 1).float())
        users = shard.placement.partition(1, IDS)[index].ids
        shard.load_rows(1, users, torch.stack([users, -users], 1).double())
        shard.snapshot({"steps": {"0": 3}})(directory)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_everything_is_joined_by_name(tmp_path, servers):
    save(tmp_path, servers)
    found = read_shards(tmp_path)
    assert set(found) == {"net/w", "net/b", "seen", "flags", "none", "items", "users", "users/ids"}
    for spec, value in zip(SPEC.variables, VALUES, strict=True):
        assert torch.equal(found[spec.name], value)
        assert found[spec.name].dtype == value.dtype
    assert found["items"][:, 0].tolist() == list(range(11))
    assert found["users/ids"].tolist() == sorted(IDS.tolist())
    assert torch.equal(found["users"][:, 0], found["users/ids"].double())


def test_safetensors_reads_the_file(tmp_path):
    save(tmp_path, 1)
    tensors = load_file(tmp_path / "shard-00000-of-00001.safetensors")
    assert torch.equal(tensors["values/net/w"], VALUES[0].view(-1))
    assert torch.equal(tensors["slots/sum/net/w"], torch.full((130 * 130,), 0.1))
    assert tensors["values/flags"].tolist() == [True, False, True]
    assert tensors["ids/users"].tolist() == IDS.tolist()
    assert tensors["values/none"].shape == (0,)


def test_the_names_of_files(tmp_path):
    save(tmp_path / "new" / "save", 2)
    names = sorted(path.name for path in (tmp_path / "new" / "save").iterdir())
    stems = ["shard-00000-of-00002", "shard-00001-of-00002"]
    assert names == sorted(f"{stem}.{ending}" for stem in stems for ending in ("json", "safetensors"))
    body = json.loads((tmp_path / "new" / "save" / names[0]).read_bytes())["body"]
    assert (body["server"], body["servers"], body["version"], body["extra"]) == (0, 2, 0, {"steps": {"0": 3}})


def test_blocks_do_not_show(tmp_path, monkeypatch):
    save(tmp_path / "one")
    monkeypatch.setattr(shard_files, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(shard_files, "_BLOCK_ROWS", 2)
    save(tmp_path / "many")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()
    assert read_shards(tmp_path / "many")["users/ids"].tolist() == sorted(IDS.tolist())
    loaded = Shard(SPEC, 0, 1)
    loaded.load(tmp_path / "many")
    assert torch.equal(loaded.pull(1, IDS)[:, 0], IDS.double())


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_files, "_write_tensors", full)
    with pytest.raises(CheckpointError, match=r"shard-00000-of-00001 cannot be written.*No space left"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_extra_must_be_json(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written"):
        Shard(SPEC, 0, 1).snapshot({"x": object()})(tmp_path)


@pytest.mark.parametrize("name", ["shard-00001-of-00002.json", "shard-00001-of-00002.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match="shard-00001-of-00002"):
        read_shards(tmp_path)
    with pytest.raises(CheckpointError, match="shard-00001-of-00002"):
        Shard(SPEC, 0, 1).load(tmp_path)


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_any_altered_byte_is_noticed(tmp_path, ending):
    save(tmp_path)
    file = tmp_path / f"shard-00001-of-00002.{ending}"
    good = file.read_bytes()
    for place in [*range(0, len(good), len(good) // 40), len(good) - 1]:
        file.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match="shard-00001-of-00002"):
            read_shards(tmp_path)
    for wrong in (good[:-1], good + b"\0", b""):
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match="shard-00001-of-00002"):
            read_shards(tmp_path)


def test_directories_that_hold_no_save(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be listed"):
        open_shards(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no shards"):
        open_shards(tmp_path)
    save(tmp_path, 1)
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="shards of 1 servers and of 2"):
        open_shards(tmp_path)


def test_renamed_shards_and_strange_numbers(tmp_path):
    save(tmp_path)
    shutil.copy(tmp_path / "shard-00000-of-00002.json", tmp_path / "shard-00007-of-00002.json")
    with pytest.raises(CheckpointError, match="has 3 shards"):
        open_shards(tmp_path)
    os.replace(tmp_path / "shard-00007-of-00002.json", tmp_path / "shard-00001-of-00002.json")
    with pytest.raises(CheckpointError, match="it was renamed"):
        open_shards(tmp_path)


def test_shards_of_different_models(tmp_path):
    save(tmp_path, 2)
    other = ModelSpec(variables=SPEC.variables[2:3])
    write_shard(tmp_path, ShardState(spec=other, server=1, servers=2, version=0, extra={}, scalars={}, tensors={}))
    with pytest.raises(CheckpointError, match="shards 0 and 1 are of different models"):
        open_shards(tmp_path)


def test_versions_and_state_of_a_trained_shard(tmp_path):
    shard = Shard(SPEC, 0, 1)
    present, flats = shard.placement.pack(0, [VALUES[0], None, None, None, None])
    rows = {0: (torch.tensor([2, 2]), torch.ones(2, 3))}
    shard.apply([Push(present, flats, rows)], [0.1])
    shard.apply([Push(present, flats, rows)], [0.1])
    shard.snapshot()(tmp_path)
    saved = open_shards(tmp_path)
    assert saved.versions == [2]
    assert saved.scalars(0, "net/w") == {"step": 2.0}
    assert saved.scalars(0, "items") == {"step": 2.0}
    loaded = Shard(SPEC, 0, 1)
    loaded.load(tmp_path)
    loaded.snapshot()(tmp_path / "again")
    for path in tmp_path.glob("shard-*"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
