"""Tables against torch's sparse optimizers, against whole variables, and against NumPy; rows on first use; memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from plait.cluster.ps import rules
from plait.cluster.ps.placement import Placement
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, TableSpec
from plait.cluster.ps.table import Table, start_rows
from plait.errors import ClusterError

NORMAL = {"kind": "normal", "scale": 0.1, "seed": 7}


def table(optimizer=("SGD", {}), *, rows=50, dim=4, dtype="float64", initializer=NORMAL, server=0, servers=1) -> Table:
    spec = TableSpec(name="t", dim=dim, dtype=dtype, rows=rows, optimizer=0, initializer=initializer)
    made = OptimizerSpec(kind=optimizer[0], options=optimizer[1]) if optimizer else None
    return Table(spec, made, server, servers)


def batches(count=30, rows=50, dim=4, size=20):
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield (
            torch.randint(0, rows, (size,), generator=draw),
            torch.randn(size, dim, dtype=torch.float64, generator=draw),
        )


def start(rows=50, dim=4) -> torch.Tensor:
    return torch.randn(rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


SPARSE = [
    (("SGD", {}), lambda p: torch.optim.SGD(p, lr=0.1)),
    (("SGD", {"maximize": True}), lambda p: torch.optim.SGD(p, lr=0.1, maximize=True)),
    (("Adagrad", {"initial_accumulator_value": 0.2}), lambda p: torch.optim.Adagrad(p, 0.1, 0, 0, 0.2)),
    (("Adagrad", {"lr_decay": 0.1}), lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1)),
    (("SparseAdam", {}), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
    (("plait.Adam", {}), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimizers meet it
@pytest.mark.parametrize(("optimizer", "maker"), SPARSE)
@pytest.mark.parametrize("rows", [50, None])
def test_torch_moves_the_same_rows_the_same_way(optimizer, maker, rows):
    embedding = torch.nn.Embedding(50, 4, sparse=True, dtype=torch.float64)
    embedding.weight.data.copy_(start())
    reference = maker([embedding.weight])
    mine = table(optimizer, rows=rows)
    mine.load(torch.arange(50), start())
    for ids, gradients in batches():
        reference.zero_grad()
        embedding(ids).backward(gradients)
        reference.step()
        mine.push(ids, gradients, lr=0.1)
        torch.testing.assert_close(mine.pull(torch.arange(50)), embedding.weight.data, rtol=1e-10, atol=1e-12)


DENSE = [
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"weight_decay": 0.01}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adadelta", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("plait.Adam", {}),
    ("plait.RMSProp", {"momentum": 0.5, "centered": True}),
    ("plait.RMSProp", {}),
    ("plait.Ftrl", {"l1": 0.01}),
]


@pytest.mark.parametrize("optimizer", DENSE)
def test_all_rows_at_once_are_one_variable(optimizer):
    """When a push has every row, a table is a variable: bit for bit, duplicates and scale included."""
    parameter = torch.nn.Parameter(start(12))
    reference = rules.make(OptimizerSpec(kind=optimizer[0], options=optimizer[1]), [parameter])
    reference.param_groups[0]["lr"] = 0.05
    mine = table(optimizer, rows=None)
    mine.load(torch.arange(12), start(12))
    draw = torch.Generator().manual_seed(1)
    for _ in range(6):
        gradients = torch.randn(17, 4, dtype=torch.float64, generator=draw)
        ids = torch.cat([torch.randperm(12, generator=draw), torch.tensor([3, 3, 0, 11, 3])])
        total = gradients[:12][ids[:12].argsort()]
        for place, gradient in zip(ids[12:], gradients[12:], strict=True):
            total[place] += gradient
        parameter.grad = total * 0.5
        reference.step()
        mine.push(ids, gradients, lr=0.05, scale=0.5)
    assert torch.equal(mine.pull(torch.arange(12)), parameter.data)


def test_numpy_says_the_same_of_adagrad():
    mine = table(("Adagrad", {"initial_accumulator_value": 0.1, "eps": 0.0}), dtype="float64")
    values, sums = start().numpy().copy(), np.full((50, 4), 0.1)
    mine.load(torch.arange(50), start())
    for ids, gradients in batches(10):
        total = np.zeros((50, 4))
        np.add.at(total, ids.numpy(), gradients.numpy())
        touched = np.unique(ids.numpy())
        sums[touched] += total[touched] ** 2
        values[touched] -= 0.3 * total[touched] / np.sqrt(sums[touched])
        mine.push(ids, gradients, lr=0.3)
    np.testing.assert_allclose(mine.pull(torch.arange(50)).numpy(), values, rtol=1e-10)


def test_rows_that_a_push_does_not_name_stay():
    mine = table(("Adam", {}))
    mine.load(torch.arange(50), start())
    mine.push(torch.tensor([3, 4]), torch.ones(2, 4, dtype=torch.float64), lr=0.1)
    before = mine.pull(torch.tensor([3])), mine.slots["exp_avg"].tensor[3].clone()
    mine.push(torch.tensor([4]), torch.ones(1, 4, dtype=torch.float64), lr=0.1)
    assert torch.equal(mine.pull(torch.tensor([3])), before[0])
    assert torch.equal(mine.slots["exp_avg"].tensor[3], before[1])
    assert torch.equal(mine.pull(torch.tensor([9])), start()[9:10])


def test_a_push_without_ids_counts_as_a_step():
    mine = table(("Adam", {}))
    mine.push(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.float64), lr=0.1)
    assert float(mine.scalars["step"]) == 1


@pytest.mark.parametrize("kind", ["zeros", "uniform", "normal", "truncated_normal"])
def test_start_values_have_their_distribution(kind):
    spec = TableSpec(name="t", dim=16, dtype="float64", rows=None, optimizer=None,
                     initializer={"kind": kind, "scale": 0.5, "seed": 1})  # fmt: skip
    rows = start_rows(spec, np.arange(-5000, 5000))
    spread = {"zeros": 0.0, "uniform": 0.5 / math.sqrt(3), "normal": 0.5, "truncated_normal": 0.5 * 0.8796}[kind]
    assert abs(float(rows.mean())) < 0.005
    assert abs(float(rows.std()) - spread) < 0.005
    most = float(rows.abs().max())
    assert {"zeros": most == 0, "uniform": most < 0.5, "normal": most > 1.5, "truncated_normal": 0.95 < most <= 1}[kind]
    if kind != "zeros":
        assert abs(float(torch.corrcoef(rows.T)[0, 1])) < 0.05
        assert len(torch.unique(rows)) == rows.numel()


def test_a_row_starts_alike_whatever_came_before_and_wherever_it_lives():
    ids = torch.tensor([5, -3, 2**62, 5, 0])
    one = table(rows=None).pull(ids)
    other = table(rows=None)
    other.pull(torch.arange(1000))
    assert torch.equal(other.pull(ids.flip(0)).flip(0), one)
    spec = ModelSpec(tables=(other.spec,), optimizers=(OptimizerSpec(kind="SGD", options={}),))
    joined = torch.zeros_like(one)
    for server, part in enumerate(Placement(spec, 3).partition(0, ids)):
        joined[part.positions] = table(rows=None, server=server, servers=3).pull(part.ids)
    assert torch.equal(joined, one)
    assert not torch.equal(one[0], one[1])
    seeded = table(rows=None, initializer={**NORMAL, "seed": 8}).pull(ids)
    assert not torch.equal(seeded, one)


def test_the_first_start_value_is_for_ever():
    """Saves hold rows that were made; a row that is made later must fit them, in every version of plait."""
    row = table(rows=None, dim=3, initializer={"kind": "uniform", "scale": 1.0, "seed": 0}).pull(torch.tensor([42]))
    torch.testing.assert_close(row, torch.tensor([FIRST], dtype=torch.float64), rtol=0, atol=1e-15)


FIRST = [-0.6325152097409636, 0.2607656193025665, 0.5791308991205837]


def test_looking_makes_no_rows():
    mine = table(rows=None)
    known = mine.pull(torch.tensor([1, 2]))
    seen = mine.pull(torch.tensor([3, 1, 3]), create=False)
    assert len(mine) == 2
    assert torch.equal(seen[1], known[0])
    assert torch.equal(seen[[0, 2]], mine.pull(torch.tensor([3, 3])))
    assert torch.equal(table(rows=None).pull(torch.tensor([3]), create=False), seen[:1])


def test_new_rows_begin_with_the_rules_state():
    mine = table(("Adagrad", {"initial_accumulator_value": 0.3}), rows=None)
    mine.pull(torch.tensor([7, 8]))
    assert (mine.slots["sum"].tensor[:2] == 0.3).all()
    fixed = table(("Adagrad", {"initial_accumulator_value": 0.3}), rows=5)
    assert (fixed.slots["sum"].tensor == 0.3).all()


@pytest.mark.parametrize("servers", [1, 3])
def test_a_fixed_table_is_shared_out(servers):
    whole = start()
    for server in range(servers):
        mine = table(server=server, servers=servers)
        assert mine.ids().tolist() == list(range(server, 50, servers))
        assert len(mine) == len(mine.ids())
        mine.load(mine.ids(), whole[mine.ids()])
        assert torch.equal(mine.pull(mine.ids()), whole[server::servers])


def test_add_is_past_the_optimizer():
    mine = table(("Adagrad", {}), rows=None, initializer={"kind": "zeros", "scale": 0.0, "seed": 0})
    mine.add(torch.tensor([1, 2, 1]), torch.ones(3, 4, dtype=torch.float64))
    assert mine.pull(torch.tensor([1, 2]))[:, 0].tolist() == [2, 1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes(dtype):
    mine = table(("Adagrad", {"initial_accumulator_value": 0.1}), dtype=dtype, rows=None)
    mine.push(torch.tensor([1, 1]), torch.ones(2, 4, dtype=getattr(torch, dtype)), lr=0.1)
    assert mine.pull(torch.tensor([1])).dtype == getattr(torch, dtype)
    assert bool(mine.pull(torch.tensor([1])).isfinite().all())


def test_memory_that_is_not_contiguous_is_taken():
    mine = table(("Adagrad", {}), rows=None)
    rows = torch.arange(12, dtype=torch.float64).view(4, 3).T
    mine.load(torch.tensor([1, 2, 3]), rows)
    assert torch.equal(mine.pull(torch.tensor([2])), rows[1:2])
    mine.push(torch.tensor([1, 2, 1]), rows, lr=0.1)


WRONG = [
    (torch.tensor([0, 50]), torch.zeros(2, 4).double(), "id 50 is not in table 't', which has 50 rows"),
    (torch.tensor([-1, 0]), torch.zeros(2, 4).double(), "id -1 is not in table 't'"),
    (torch.tensor([0.5]), torch.zeros(1, 4).double(), "send a list of int64"),
    (torch.tensor([[1]]), torch.zeros(1, 4).double(), "send a list of int64"),
    (torch.tensor([1]), torch.zeros(1, 5).double(), r"got \(1, 5\).*send \(1, 4\)"),
    (torch.tensor([1]), torch.zeros(2, 4).double(), r"got \(2, 4\)"),
    (torch.tensor([1]), torch.zeros(1, 4), "torch.float32"),
]


@pytest.mark.parametrize(("ids", "values", "text"), WRONG)
def test_what_is_wrong_is_refused(ids, values, text):
    mine = table(("Adagrad", {}))
    for call in (lambda: mine.push(ids, values, 0.1), lambda: mine.add(ids, values), lambda: mine.load(ids, values)):
        with pytest.raises(ClusterError, match=text):
            call()
    if "not in table" in text:
        with pytest.raises(ClusterError, match=text):
            mine.pull(ids)


def test_other_refusals():
    with pytest.raises(ClusterError, match="not all its own"):
        table(server=1, servers=3).pull(torch.tensor([1, 2]))
    with pytest.raises(ClusterError, match="has no optimizer"):
        table(None).push(torch.tensor([1]), torch.zeros(1, 4).double(), 0.1)
    with pytest.raises(ClusterError, match="dampening=0"):
        table(("SGD", {"momentum": 0.9, "dampening": 0.1}))


@pytest.mark.alone
def test_memory_of_200_000_rows_with_adagrad():
    mine = table(("Adagrad", {"initial_accumulator_value": 0.1}), rows=None, dim=16, dtype="float32")
    before = 0
    for batch in range(50):
        if batch == 10:
            before = resident()  # from here on, what passing work takes is taken already
        ids = torch.arange(batch * 5000, (batch + 1) * 5000) * 7919
        mine.pull(ids)
        mine.push(ids, torch.ones(5000, 16), lr=0.1)
    assert len(mine) == 250_000
    assert resident() - before <= 1.4 * 200_000 * 16 * 4 * 2


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
