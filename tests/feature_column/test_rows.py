from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from plait.data.recycling import Recycled
from plait.feature_column import rows
from plait.feature_column.rows import added, alike, fetched, followed, joined

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
built = pytest.mark.skipif(rows.loops is None, reason="there was no compiler when plait was installed")


def numbers(*values):
    return torch.tensor(values)


def by_hand(table, ids, starts):
    return torch.cat([table[start + one.flatten()] for one, start in zip(ids, starts.tolist(), strict=True)], 1)


def test_where_there_is_a_compiler_installing_plait_builds_the_loops():
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if shutil.which("cc") is None or not header.exists():
        pytest.skip("there is no compiler")
    assert rows.loops is not None, "write: pip install -e ."


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3, 4, 8, 16, 32, 33])
def test_rows_are_those_of_the_ids(kind, width):
    table = torch.randn(60, width).to(kind)
    starts, sizes = numbers(0, 10, 10, 30), numbers(10, 20, 20, 30)
    ids = [torch.randint(0, size, (37,)) for size in sizes.tolist()]
    found, places = fetched(table, ids, starts, sizes)
    assert torch.equal(found, by_hand(table, ids, starts))
    assert torch.equal(places, torch.stack(ids, 1) + starts)
    assert torch.equal(places, joined(ids, starts, sizes))


@pytest.mark.usefixtures("ways")
def test_ids_may_lie_anywhere_in_memory():
    table, starts, sizes = torch.randn(30, 4), numbers(0, 10, 20), numbers(10, 10, 10)
    together = torch.randint(0, 10, (12, 3))
    expected = by_hand(table, together.unbind(1), starts)
    for ids in (
        [*together.unbind(1)],
        [*together.split(1, 1)],
        [one.clone() for one in together.unbind(1)],
        [one.repeat_interleave(2)[::2] for one in together.unbind(1)],
    ):
        assert torch.equal(fetched(table, ids, starts, sizes)[0], expected)
    same = numbers(7).expand(12)
    assert torch.equal(fetched(table, [same] * 3, starts, sizes)[0], by_hand(table, [same] * 3, starts))


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("bad", [-1, 10, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("example", [0, 20])
@pytest.mark.parametrize("column", [0, 2])
def test_an_id_outside_of_its_table_is_none(bad, example, column):
    table, starts, sizes = torch.randn(30, 4), numbers(0, 10, 20), numbers(10, 10, 10)
    ids = [torch.randint(0, 10, (21,)) for _ in range(3)]
    assert fetched(table, ids, starts, sizes) is not None
    ids[column][example] = bad
    assert fetched(table, ids, starts, sizes) is None
    assert joined(ids, starts, sizes) is None


@built
@given(st.data())
def test_loops_and_torch_agree(data):
    """Of any ids, inside or not, rows, places and sums of gradients are the same numbers."""
    sizes = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    starts = torch.tensor([0, *sizes.cumsum(0).tolist()[:-1]])
    batch, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    ids = [
        torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=batch, max_size=batch)))
        for size in sizes.tolist()
    ]
    if data.draw(st.booleans()):
        ids[data.draw(st.integers(0, len(ids) - 1))][data.draw(st.integers(0, batch - 1))] = data.draw(
            st.integers(-(2**63), 2**63 - 1)
        )
    table = torch.randn(int(sizes.sum()), width)
    gradient = torch.randn(batch * len(ids), width)
    found = []
    for loops in (rows.loops, None):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(rows, "loops", loops)
            both = fetched(table, ids, starts, sizes)
            sums = None if both is None else added(table.shape, both[1], gradient, Recycled())
            found.append(None if both is None else [*both, sums])
    in_c, in_torch = found
    assert (in_c is None) == (in_torch is None)
    assert in_c is None or all(torch.equal(one, other) for one, other in zip(in_c, in_torch, strict=True))


@built
def test_many_rows_are_left_to_the_threads_of_torch(monkeypatch):
    table, starts, sizes = torch.randn(9, 4), numbers(0, 0), numbers(9, 9)
    ids = [torch.randint(0, 9, (50,)) for _ in range(2)]
    asked = []
    monkeypatch.setattr(rows, "joined", lambda *given: asked.append(1) or joined(*given))
    for threads, most, by_torch in ((1, 10, 0), (2, 10, 1), (2, 100, 0)):
        monkeypatch.setattr(rows, "_MANY", most)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        asked.clear()
        assert torch.equal(fetched(table, ids, starts, sizes)[0], by_hand(table, ids, starts))
        assert len(asked) == by_torch


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("ids_of", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", [*KINDS, torch.complex64])
@pytest.mark.parametrize("width", [1, 7, 16])
def test_rows_are_added_in_their_order(kind, ids_of, width):
    """To the bit what torch does, whoever does it."""
    places = torch.randint(0, 50, (5000,), dtype=ids_of)
    given = torch.randn(5000, width, dtype=kind)
    expected = torch.zeros(50, width, dtype=kind).index_add_(0, places, given)
    memory = Recycled()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(added((50, width), places[:, None], given, memory), expected)
        assert torch.equal(added((50, width), places[:, None], given.t().contiguous().t(), memory), expected)
        spread = places.repeat_interleave(2)[::2]
        assert torch.equal(added((50, width), spread[:, None], given, memory), expected)
        for columns in (2, 8, 40, 5000):
            many = places.view(-1, columns)
            assert torch.equal(added((50, width), many, given, memory), expected)
            assert torch.equal(added((50, width), many.t().contiguous().t(), given, memory), expected)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("bad", [-1, 50])
def test_a_place_outside_is_said(bad):
    places = torch.zeros(100, dtype=torch.int64)
    places[70] = bad
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match="out of"):
        added((50, 4), places.view(20, 5), torch.ones(100, 4), Recycled())


@pytest.mark.usefixtures("ways")
def test_as_many_places_as_rows():
    with torch.no_grad(), pytest.raises(RuntimeError, match="index_add"):
        added((5, 4), torch.zeros(3000, 1, dtype=torch.int64), torch.ones(2500, 4), Recycled())


def test_who_follows():
    seen = []
    torch.func.vmap(lambda x: seen.append(followed()) or x)(torch.ones(2))
    torch.jit.trace(lambda x: seen.append(followed()) or x, (torch.ones(2),), check_trace=False)
    with _Seen():
        seen.append(followed())
    assert seen == [True, True, True]
    assert not followed()


class _Seen(TorchDispatchMode):
    """The names of what torch does."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_who_follows_a_backward_pass_sees_what_is_added():
    with torch.no_grad(), _Seen() as seen:
        added((50, 4), torch.zeros(100, 1, dtype=torch.int64), torch.ones(100, 4), Recycled())
    assert "index_add_" in seen.names


@pytest.mark.filterwarnings("ignore")  # torch calls nested tensors a prototype
def test_what_is_alike():
    one, two = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert alike([one, two])
    assert alike([one[:, None], two[:, None]])
    strange = [
        two.int(), two[:1], two[:, None], torch.nn.Parameter(two, requires_grad=False), two.to_sparse(), [3, 4],
        torch.nested.nested_tensor([two, two[:1]]), two.bool(),
    ]  # fmt: skip
    for other in strange:
        assert not alike([one, other])
        assert not alike([other, one])
    assert not alike([one[:0], two[:0]])


@built
def test_the_loops_refuse_other_arguments():
    for call, count in ((rows.loops.fetch, 10), (rows.loops.add, 10)):
        with pytest.raises(TypeError, match=f"got 2 arguments, and wants {count}"):
            call(1, 2)
        with pytest.raises(TypeError):
            call(*["text"] * count)
    with pytest.raises(TypeError, match="got 1 arguments, and wants 2"):
        rows.loops.fetch(0, 0, 0, 4, [0, 0], [1], 0, 0, 0, 0)
    for strides in ([()], ["text"], 1):
        with pytest.raises((TypeError, SystemError)):
            rows.loops.fetch(0, 0, 0, 4, [0], strides, 0, 0, 0, 0)
