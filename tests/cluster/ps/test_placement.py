"""Every element has one place, and packing and unpacking agree about it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.cluster.ps.placement import CUT, Placement, Slice
from plait.cluster.ps.spec import ModelSpec, TableSpec, VariableSpec
from plait.errors import ClusterError

SHAPES = [(3, 4), (), (200, 211), (7,), (0, 3), (CUT * 3,), (5, 5)]
DTYPES = ["float32", "int64", "float32", "float64", "float32", "float32", "float32"]


def spec(shapes=SHAPES, dtypes=DTYPES) -> ModelSpec:
    return ModelSpec(
        variables=tuple(
            VariableSpec(name=f"v{n}", shape=shape, dtype=dtype, optimizer=None)
            for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ),
        tables=(
            TableSpec(name="fixed", dim=2, dtype="float32", rows=1000, optimizer=None),
            TableSpec(name="any", dim=2, dtype="float32", rows=None, optimizer=None),
        ),
    )


def tensors(shapes=SHAPES, dtypes=DTYPES) -> list[torch.Tensor]:
    made, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = int(np.prod(shape))
        made.append(torch.arange(start, start + size).view(shape).to(getattr(torch, dtype)))
        start += size
    return made


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_every_element_is_somewhere_once(servers):
    placement = Placement(spec(), servers)
    for number, shape in enumerate(SHAPES):
        pieces = sorted(s for k in range(servers) for s in placement.slices(k) if s.variable == number)
        places = [n for piece in pieces for n in range(piece.start, piece.stop)]
        assert places == list(range(int(np.prod(shape))))
        assert len(pieces) == (servers if np.prod(shape) >= CUT * servers else 1)


def test_small_variables_go_where_there_is_least():
    placement = Placement(spec([(100,), (60,), (30,), (20,)], ["float32"] * 4), 2)
    assert placement.slices(0) == [Slice(0, 0, 100)]
    assert placement.slices(1) == [Slice(1, 0, 60), Slice(2, 0, 30), Slice(3, 0, 20)]


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_what_is_packed_is_unpacked(servers):
    placement = Placement(spec(), servers)
    given, into = tensors(), [torch.zeros_like(tensor) for tensor in tensors()]
    for server in range(servers):
        present, flats = placement.pack(server, given)
        assert present is None
        assert all(flat.dim() == 1 for flat in flats)
        assert len({flat.dtype for flat in flats}) == len(flats)
        placement.unpack(server, flats, into)
    for one, other in zip(given, into, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("servers", [1, 2])
def test_variables_in_another_order_of_memory(servers):
    shape = (8, 16, 16, 16)
    placement = Placement(spec([shape], ["float32"]), servers)
    given = torch.arange(8 * 16**3).float().view(shape)
    source = given.to(memory_format=torch.channels_last)
    into = torch.zeros_like(source, memory_format=torch.channels_last)
    for server in range(servers):
        _, flats = placement.pack(server, [source])
        placement.unpack(server, flats, [into])
    assert into.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(into, given)


def test_missing_tensors_are_named():
    placement = Placement(spec([(3,), (2,), (4,)], ["float32", "float64", "float32"]), 1)
    present, flats = placement.pack(0, [torch.ones(3), None, torch.zeros(4)])
    assert present == [0, 2]
    assert [flat.tolist() for flat in flats] == [[1, 1, 1, 0, 0, 0, 0]]
    present, flats = placement.pack(0, [None, None, None])
    assert (present, flats) == ([], [])


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_packed_is_a_copy(count):
    given = [torch.ones(3, requires_grad=True) for _ in range(count)]
    _, flats = Placement(spec([(3,)] * count, ["float32"] * count), 1).pack(0, given)
    with torch.no_grad():
        given[0].zero_()
    assert flats[0].sum() == 3 * count
    assert not flats[0].requires_grad


def test_unpack_writes_into_parameters():
    variable = torch.nn.Parameter(torch.zeros(2, 2))
    placement = Placement(spec([(2, 2)], ["float32"]), 1)
    placement.unpack(0, [torch.arange(4.0)], [variable])
    assert variable.tolist() == [[0, 1], [2, 3]]
    assert variable.requires_grad


def test_other_sizes_and_dtypes_are_refused():
    placement = Placement(spec([(2, 2)], ["float32"]), 1)
    with pytest.raises(ClusterError, match="5 elements of torch.float32"):
        placement.pack(0, [torch.zeros(5)])
    with pytest.raises(ClusterError, match="torch.float64"):
        placement.pack(0, [torch.zeros(4).double()])
    with pytest.raises(ClusterError, match=r"sent \[5\] elements, \[4\]"):
        placement.unpack(0, [torch.zeros(5)], [torch.zeros(2, 2)])
    with pytest.raises(ClusterError, match="sent"):
        placement.unpack(0, [], [torch.zeros(2, 2)])
    with pytest.raises(ClusterError, match="0 servers"):
        Placement(spec(), 0)


@pytest.mark.parametrize("present", [[1, 0], [0, 0], [7], [-1]])
def test_present_numbers_are_checked(present):
    with pytest.raises(ClusterError, match="each once, in rising order"):
        Placement(spec([(2,), (3,)], ["float32"] * 2), 1).groups(0, present)


def test_one_server_has_all_ids():
    placement = Placement(spec(), 1)
    ids = torch.tensor([3, 1, 3])
    assert placement.owner(0, ids) is None
    ((same, positions),) = placement.partition(1, ids)
    assert same is ids
    assert positions is None


@pytest.mark.parametrize("table", [0, 1])
def test_ids_are_shared_out_in_their_order(table):
    placement = Placement(spec(), 3)
    ids = torch.randint(0, 1000, (500,), generator=torch.Generator().manual_seed(0))
    owner = placement.owner(table, ids)
    parts = placement.partition(table, ids)
    back = torch.full_like(ids, -1)
    for server, part in enumerate(parts):
        assert (owner[part.positions] == server).all()
        assert (part.positions.diff() > 0).all()
        back[part.positions] = part.ids
        assert 100 < len(part.ids) < 250
    assert torch.equal(back, ids)
    if table == 0:
        assert torch.equal(owner, ids % 3)


def test_any_int64_has_an_owner():
    owner = Placement(spec(), 3).owner(1, torch.tensor([-(2**63), -1, 0, 2**63 - 1]))
    assert ((owner >= 0) & (owner < 3)).all()


def test_plans_are_kept_but_not_for_ever():
    placement = Placement(spec([(1,)] * 9, ["float32"] * 9), 1)
    for number in range(500):
        placement.groups(0, [n for n in range(9) if number >> n & 1])
    assert len(placement._plans) <= 64
    assert placement.groups(0, [1, 2]) is placement.groups(0, [1, 2])
