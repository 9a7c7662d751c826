from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster import shared_memory
from plait.cluster.shared_memory import SharedMemory, _layout
from plait.errors import ClusterError

from .test_exchange import meshes, together

DTYPES = [torch.float32, torch.float64, torch.bfloat16]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
lists = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5)


def means(group, plans, values):
    """Run each worker's part; returns what it made, with `values` overwritten."""
    del group
    return together([lambda p=p, v=v: p(v) for p, v in zip(plans, values, strict=True)])


def reference(values):
    """Summed in the order of ranks."""
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total / len(values)


@settings(max_examples=30, deadline=None)
@given(lists, st.sampled_from([2, 3, 4]), st.integers(0, 1000), st.data())
def test_means_are_the_same_bits_everywhere(forms, count, seed, data):
    generator = torch.Generator().manual_seed(seed)
    likes = [torch.zeros(shape, dtype=dtype) for shape, dtype in forms]
    with meshes(count) as group:
        shared = [SharedMemory(mesh) for mesh in group]
        plans = together([lambda s=s: s.plan(likes) for s in shared])
        for _ in range(3):
            here = [[data.draw(st.booleans()) for _ in likes] for _ in range(count)]
            values = [
                [
                    torch.randn(like.shape, generator=generator).to(like.dtype) if on else None
                    for like, on in zip(likes, row)
                ]
                for row in here
            ]
            given_values = [[None if v is None else v.clone() for v in row] for row in values]
            made = means(group, plans, values)
            for place, like in enumerate(likes):
                terms = [row[place] if row[place] is not None else torch.zeros_like(like) for row in given_values]
                for rank in range(count):
                    got = values[rank][place] if here[rank][place] else made[rank].get(place)
                    if not any(row[place] for row in here):
                        assert got is None
                    else:
                        assert torch.equal(got, reference(terms))


def test_the_largest_list_decides_how_much_memory_is_taken():
    small, large = [torch.zeros(10)], [torch.zeros(1000), torch.zeros(5, dtype=torch.float64)]
    with meshes(2) as group:
        shared = [SharedMemory(mesh) for mesh in group]
        plans = {
            name: together([lambda s=s: s.plan(likes) for s in shared])
            for name, likes in (("small", small), ("large", large), ("small again", small))
        }
        sizes = {one._arena.size for one in shared}
        assert sizes == {2 * (4032 + 64)}
        for name in ("small", "large", "small again", "large", "small"):
            likes = large if name == "large" else small
            values = [[torch.full_like(like, rank + 1.0) for like in likes] for rank in range(2)]
            means(group, plans[name], values)
            assert all(torch.equal(v, torch.full_like(v, 1.5)) for row in values for v in row)


def test_a_result_stays_while_the_next_is_made():
    """The first worker is far ahead: it copies in the next values while the other still uses the last result."""
    like = [torch.zeros(50_000)]
    with meshes(2) as group:
        plans = together([lambda s=SharedMemory(mesh): s.plan(like) for mesh in group])

        def run(rank):
            good = True
            for step in range(50):
                value = [torch.full((50_000,), float(rank + step))]
                plans[rank](value)
                good &= bool((value[0] == 0.5 + step).all())
            return good

        assert together([lambda: run(0), lambda: run(1)]) == [True, True]


def test_layouts_keep_dtypes_together_and_aligned():
    likes = [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(20), torch.zeros(0)]
    fields, runs, size = _layout(likes)
    assert [field.start for field in fields] == [0, 192, 64, 192]
    assert runs == {torch.float32: (0, 192), torch.float64: (192, 256)}
    assert size == 256


def test_a_view_has_the_layout_of_its_variable():
    like = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    (field,), _, size = _layout([like])
    assert field.view(torch.zeros(size, dtype=torch.uint8)).stride() == like.stride()


def test_memory_that_is_not_there_is_refused_by_all(monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", refuse)
    with meshes(2) as group:
        found = together([lambda s=SharedMemory(mesh): s.plan([torch.zeros(4)]) for mesh in group])
        assert all(isinstance(one, ClusterError) for one in found)
        assert "cannot share 128 bytes of memory: [Errno 28]" in str(found[0])


def test_a_peer_that_shares_less_is_refused():
    with meshes(2) as group:
        found = together(
            [lambda s=SharedMemory(mesh), n=n: s.plan([torch.zeros(n)]) for mesh, n in zip(group, (4, 10_000))]
        )
        assert isinstance(found[1], ClusterError)
        assert "worker 0 has not shared as much" in str(found[1])


@pytest.mark.parametrize("count", [2, 3])
def test_a_variable_that_needs_gradients_can_be_averaged(count):
    with meshes(count) as group:
        variables = [torch.full((3,), float(rank), requires_grad=True) for rank in range(count)]
        plans = together([lambda s=SharedMemory(mesh): s.plan(variables[:1]) for mesh in group])
        means(group, plans, [[variable] for variable in variables])
        assert all(variable.tolist() == [(count - 1) / 2] * 3 for variable in variables)
