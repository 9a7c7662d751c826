"""Shards together are one torch optimizer over whole variables, bit for bit; saves go to any number of servers."""

from __future__ import annotations

import json

import pytest
import torch

from plait.cluster.ps import rules
from plait.cluster.ps.placement import Placement
from plait.cluster.ps.shard import Push, Shard
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, TableSpec, VariableSpec
from plait.errors import CheckpointError, ClusterError, MismatchError
from plait.optim.rules import Adam, Ftrl, RMSProp

SHAPES = [(31, 17), (), (163, 151), (7,), (13, 2), (0,)]
"""The third is cut between three servers, at odd places."""
ROWS = 40

RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "plait adam": lambda p: Adam(p, lr=0.1),
    "plait rmsprop": lambda p: RMSProp(p, lr=0.1, momentum=0.5),
    "plait ftrl": lambda p: Ftrl(p, lr=0.1, l1=0.01),
}


def values(seed=0, dtype=torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=draw) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor | None]:
    """Of a worker; in every third step, some variables have none."""
    made = values(1000 + step)
    return [None if step % 3 == 2 and number in (1, 2) else one for number, one in enumerate(made)]


def model(*optimizers: OptimizerSpec, tables: bool = False) -> ModelSpec:
    variables = [
        VariableSpec(name=f"net/v{n}", shape=shape, dtype="float64", optimizer=n % len(optimizers))
        for n, shape in enumerate(SHAPES)
    ]
    start = {"kind": "normal", "scale": 0.1, "seed": 3}
    made = [
        TableSpec(name="fixed", dim=3, dtype="float64", rows=ROWS, optimizer=0, initializer=start),
        TableSpec(name="any", dim=5, dtype="float64", rows=None, optimizer=0, initializer=start),
    ]
    return ModelSpec(optimizers=optimizers, variables=tuple(variables), tables=tuple(made) if tables else ())


class Servers:
    """Shards, and what workers do to them."""

    def __init__(self, spec: ModelSpec, count: int) -> None:
        self.spec = spec
        self.placement = Placement(spec, count)
        self.shards = [Shard(spec, index, count) for index in range(count)]

    def set(self, tensors) -> None:
        for index, shard in enumerate(self.shards):
            shard.set_dense(self.placement.pack(index, tensors)[1])

    def get(self) -> list[torch.Tensor]:
        into = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for index, shard in enumerate(self.shards):
            self.placement.unpack(index, shard.dense(), into)
        return into

    def push(self, index: int, tensors, rows=None) -> Push:
        present, flats = self.placement.pack(index, tensors)
        parts = {}
        for table, (ids, given) in (rows or {}).items():
            part = self.placement.partition(table, ids)[index]
            parts[table] = (part.ids, given if part.positions is None else given[part.positions])
        return Push(present, flats, parts)

    def apply(self, pushed, rates, scale=1.0, rows=None) -> None:
        for index, shard in enumerate(self.shards):
            shard.apply([self.push(index, tensors, rows) for tensors in pushed], rates, scale)

    def rows(self, table: int, ids: torch.Tensor, **options) -> torch.Tensor:
        found = torch.zeros(len(ids), self.spec.tables[table].dim, dtype=torch.float64)
        for part, shard in zip(self.placement.partition(table, ids), self.shards, strict=True):
            pulled = shard.pull(table, part.ids, **options)
            found[slice(None) if part.positions is None else part.positions] = pulled
        return found


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_shards_are_one_optimizer(name, count):
    parameters = [torch.nn.Parameter(value) for value in values()]
    reference = RULES[name](parameters)
    servers = Servers(model(*rules.describe(reference)), count)
    servers.set(values())
    assert equal(servers.get(), values())
    for step in range(7):
        rate = 0.1 / (step + 1)
        workers = [gradients(2 * step), gradients(2 * step + 1)]
        for parameter, first, second in zip(parameters, *workers, strict=True):
            given = [gradient for gradient in (first, second) if gradient is not None]
            parameter.grad = sum(given[1:], given[0]) * 0.5 if given else None
        reference.param_groups[0]["lr"] = rate
        reference.step()
        servers.apply(workers, [rate], 0.5)
        assert equal(servers.get(), [parameter.data for parameter in parameters])
    assert [shard.version for shard in servers.shards] == [7] * count


def test_each_group_has_its_rate_and_rule():
    parameters = [torch.nn.Parameter(value) for value in values()]
    reference = torch.optim.SGD(
        [{"params": parameters[0::2], "lr": 0.1}, {"params": parameters[1::2], "lr": 0.2, "momentum": 0.9}]
    )
    servers = Servers(model(*rules.describe(reference)), 2)
    servers.set(values())
    for step in range(3):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        reference.step()
        servers.apply([gradients(step)], [0.1, 0.2])
    assert equal(servers.get(), [parameter.data for parameter in parameters])


def test_sgd_of_everything_absent_changes_nothing():
    servers = Servers(model(*rules.describe(RULES["adam"]([torch.zeros(1)]))), 2)
    servers.set(values())
    servers.apply([[None] * len(SHAPES)], [0.1])
    assert equal(servers.get(), values())


def test_tables_are_moved_with_the_variables():
    spec = model(*rules.describe(RULES["adagrad"]([torch.zeros(1)])), tables=True)
    one, three = Servers(spec, 1), Servers(spec, 3)
    for servers in (one, three):
        servers.set(values())
        train(servers, range(5))
    ids = torch.arange(ROWS)
    for table in (0, 1):
        assert torch.equal(one.rows(table, ids), three.rows(table, ids))
        assert one.rows(table, ids).abs().sum() > 0


def test_two_pushes_of_rows_are_one_joined():
    spec = model(*rules.describe(RULES["adam"]([torch.zeros(1)])), tables=True)
    apart, joined = Shard(spec, 0, 1), Shard(spec, 0, 1)
    first, second = rows_of(1), rows_of(2)
    apart.apply([Push([], [], first), Push([], [], second)], [0.1], 0.5)
    both = {table: tuple(map(torch.cat, zip(first[table], second[table], strict=True))) for table in (0, 1)}
    joined.apply([Push([], [], both)], [0.1], 0.5)
    for table in (0, 1):
        assert torch.equal(apart.pull(table, torch.arange(ROWS)), joined.pull(table, torch.arange(ROWS)))


def test_geo_adds():
    servers = Servers(model(*rules.describe(RULES["adam"]([torch.zeros(1)])), tables=True), 2)
    servers.set(values())
    before = servers.rows(1, torch.arange(ROWS))
    deltas = gradients(2)
    for index, shard in enumerate(servers.shards):
        shard.add(servers.push(index, deltas, {1: (torch.tensor([3, 3]), torch.ones(2, 5, dtype=torch.float64))}))
    expected = [value if delta is None else value + delta for value, delta in zip(values(), deltas, strict=True)]
    assert equal(servers.get(), expected)
    moved = servers.rows(1, torch.arange(ROWS)) - before
    torch.testing.assert_close(moved[3], torch.full((5,), 2.0, dtype=torch.float64))
    assert moved[:3].abs().sum() == 0


def test_dense_is_a_copy_and_pushes_stay_as_they_are():
    shard = Shard(model(*rules.describe(RULES["momentum"]([torch.zeros(1)]))), 0, 1)
    present, flats = shard.placement.pack(0, values())
    kept = [flat.clone() for flat in flats]
    before = shard.dense()
    for _ in range(2):
        shard.apply([Push(present, flats, {})], [0.1])
    assert equal(flats, kept)
    assert all(not flat.any() for flat in before)


def test_untrained_variables_are_held():
    spec = ModelSpec(
        optimizers=(OptimizerSpec(kind="SGD", options={}),),
        variables=(
            VariableSpec(name="w", shape=(2,), dtype="float32", optimizer=0),
            VariableSpec(name="seen", shape=(), dtype="int64", optimizer=None),
        ),
    )
    shard = Shard(spec, 0, 1)
    shard.set_dense([torch.ones(2), torch.tensor([5])])
    shard.apply([Push([0], [torch.ones(2)], {})], [0.5])
    assert [flat.tolist() for flat in shard.dense()] == [[0.5, 0.5], [5]]
    with pytest.raises(ClusterError, match="'seen' has no optimizer"):
        shard.apply([Push(None, [torch.ones(2), torch.tensor([1])], {})], [0.5])
    shard.add(Push(None, [torch.ones(2), torch.tensor([1])], {}))
    assert shard.dense()[1].tolist() == [6]


def good() -> Push:
    return Push(None, [torch.ones(3)], {0: (torch.tensor([1]), torch.ones(1, 2))})


WRONG = [
    (good()._replace(flats=[torch.ones(4)]), [0.1], "its slices are"),
    (good()._replace(flats=[torch.ones(3).double()]), [0.1], "its slices are"),
    (good()._replace(flats=[]), [0.1], "its slices are"),
    (good()._replace(flats=[torch.ones(3, 1)]), [0.1], "its slices are"),
    (good()._replace(present=[1]), [0.1], "each once, in rising order"),
    (good()._replace(rows={1: good().rows[0]}), [0.1], "there is no table 1"),
    (good()._replace(rows={-1: good().rows[0]}), [0.1], "there is no table -1"),
    (good()._replace(rows={0: (torch.tensor([9]), torch.ones(1, 2))}), [0.1], "id 9 is not in table 't'"),
    (good()._replace(rows={0: (torch.tensor([1]), torch.ones(1, 3))}), [0.1], "table 't' got"),
    (good(), [], "0 learning rates came for 1 optimizers"),
    (good(), [float("nan")], "learning rate of Adagrad is nan"),
    (good(), [-1.0], "learning rate"),
]


@pytest.mark.parametrize(("push", "rates", "text"), WRONG)
def test_a_wrong_push_changes_nothing(push, rates, text):
    spec = ModelSpec(
        optimizers=(OptimizerSpec(kind="Adagrad", options={}),),
        variables=(VariableSpec(name="w", shape=(3,), dtype="float32", optimizer=0),),
        tables=(TableSpec(name="t", dim=2, dtype="float32", rows=5, optimizer=0),),
    )
    shard = Shard(spec, 0, 1)
    with pytest.raises(ClusterError, match=text):
        shard.apply([good(), push], rates)
    assert (shard.version, shard.dense()[0].tolist()) == (0, [0, 0, 0])
    assert not shard.pull(0, torch.arange(5)).any()
    shard.apply([good()], [0.1])
    assert shard.dense()[0].all()


def test_ftrl_needs_a_rate_above_zero():
    shard = Shard(model(*rules.describe(RULES["plait ftrl"]([torch.zeros(1)]))), 0, 1)
    with pytest.raises(ClusterError, match="above 0"):
        shard.apply([], [0.0])


def test_a_server_that_is_not_there():
    with pytest.raises(ClusterError, match="no server 2 of 2"):
        Shard(model(OptimizerSpec(kind="SGD", options={})), 2, 2)


def test_what_cannot_fit_is_refused_before_memory_is_taken():
    adagrad = (OptimizerSpec(kind="Adagrad", options={"initial_accumulator_value": 0.1}),)
    huge = TableSpec(name="t", dim=2**20, dtype="float32", rows=2**20, optimizer=0)
    wide = VariableSpec(name="w", shape=(2**20, 2**20), dtype="float32", optimizer=0)
    for spec in (ModelSpec(optimizers=adagrad, tables=(huge,)), ModelSpec(optimizers=adagrad, variables=(wide,))):
        with pytest.raises(ClusterError, match=r"server 0 of 1 would need 8796093022208 bytes.*use more servers"):
            Shard(spec, 0, 1)
    unknown = ModelSpec(
        optimizers=(OptimizerSpec(kind="evil", options={}),),
        variables=(VariableSpec(name="w", shape=(2,), dtype="float32", optimizer=0),),
    )
    with pytest.raises(ClusterError, match="no optimizer 'evil'"):
        Shard(unknown, 0, 1)


# ---- saves


def rows_of(step: int) -> dict:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (15,), generator=draw)
    return {
        0: (ids, torch.randn(15, 3, dtype=torch.float64, generator=draw)),
        1: (ids - 10, torch.randn(15, 5, dtype=torch.float64, generator=draw)),
    }


def train(servers: Servers, steps) -> None:
    for step in steps:
        servers.apply([gradients(step)], [0.05] * len(servers.spec.optimizers), 1.0, rows_of(step))


def everything(servers: Servers) -> list[torch.Tensor]:
    ids = torch.arange(-10, ROWS)
    return [*servers.get(), servers.rows(0, ids[10:]), servers.rows(1, ids, create=False)]


@pytest.mark.parametrize("name", [name for name in RULES if name != "dampened"])
def test_a_save_goes_on_with_any_number_of_servers(name, tmp_path):
    spec = model(*rules.describe(RULES[name]([torch.zeros(1)])), tables=True)
    saved = Servers(spec, 2)
    saved.set(values())
    train(saved, range(4))
    for shard in saved.shards:
        shard.snapshot({"worker": shard.index})(tmp_path)
    kept = everything(saved)
    train(saved, range(4, 7))
    for count in (1, 2, 3):
        loaded = Servers(spec, count)
        for shard in loaded.shards:
            assert shard.load(tmp_path) == [{"worker": 0}, {"worker": 1}]
            assert shard.version == 4
        assert equal(everything(loaded), kept)
        train(loaded, range(4, 7))
        assert equal(everything(loaded), everything(saved))


def test_a_snapshot_is_of_the_moment_it_was_taken(tmp_path):
    spec = model(*rules.describe(RULES["adam"]([torch.zeros(1)])), tables=True)
    servers = Servers(spec, 1)
    servers.set(values())
    train(servers, range(2))
    extra = {"steps": {"0": 2}}
    write = servers.shards[0].snapshot(extra)
    kept = everything(servers)
    train(servers, range(2, 4))
    extra["steps"]["0"] = 4
    assert not list(tmp_path.iterdir())
    write(tmp_path)
    assert servers.shards[0].load(tmp_path) == [{"steps": {"0": 2}}]
    assert equal(everything(servers), kept)
    assert servers.shards[0].version == 2


def test_without_a_copy_the_same_is_written(tmp_path):
    servers = Servers(model(*rules.describe(RULES["adam"]([torch.zeros(1)])), tables=True), 1)
    servers.set(values())
    train(servers, range(2))
    servers.shards[0].snapshot()(tmp_path / "copied")
    servers.shards[0].snapshot(copy=False)(tmp_path / "live")
    for one in (tmp_path / "copied").iterdir():
        assert one.read_bytes() == (tmp_path / "live" / one.name).read_bytes()


def test_loading_forgets_what_was_there(tmp_path):
    spec = model(OptimizerSpec(kind="SGD", options={"momentum": 0.9}), tables=True)
    fresh, used = Shard(spec, 0, 1), Servers(spec, 1)
    fresh.snapshot()(tmp_path)
    train(used, range(3))
    used.shards[0].load(tmp_path)
    assert not any(tensor.any() for tensor in used.get())
    assert len(used.shards[0].tables[1]) == 0
    assert not used.shards[0]._optimizers[0].state[used.shards[0]._parameters[0]]


def test_a_save_of_another_model_is_refused(tmp_path):
    spec = model(OptimizerSpec(kind="SGD", options={}), tables=True)
    Shard(spec, 0, 1).snapshot()(tmp_path)
    tree = json.loads(json.dumps(spec.to_json()))
    for change, text in [
        (lambda t: t["variables"][0].update(shape=[17, 31]), r"variable 0 as .*\[31, 17\].*\[17, 31\]"),
        (lambda t: t["tables"][0].update(rows=41), "table 0 as .*'rows': 40.*'rows': 41"),
        (lambda t: t["optimizers"][0].update(kind="Adam"), "optimizer 0 as .*SGD.*Adam"),
        (lambda t: t["variables"].pop(), "have 6 variables; there are 5 now"),
    ]:
        other = json.loads(json.dumps(tree))
        change(other)
        shard = Shard(ModelSpec.from_json(other), 0, 1)
        with pytest.raises(MismatchError, match=text):
            shard.load(tmp_path)


def test_a_damaged_save_leaves_the_shard_as_it_was(tmp_path):
    spec = model(OptimizerSpec(kind="SGD", options={}), tables=True)
    servers = Servers(spec, 1)
    servers.set(values())
    train(servers, range(2))
    kept = everything(servers)
    servers.shards[0].snapshot()(tmp_path)
    file = tmp_path / "shard-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="was altered"):
        servers.shards[0].load(tmp_path)
    assert equal(everything(servers), kept)
