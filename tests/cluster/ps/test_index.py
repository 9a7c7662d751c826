"""The index against a dict, and its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster.ps import index as module
from plait.cluster.ps.index import Index, mix, reserve
from plait.errors import ClusterError

LEAST, MOST = -(2**63), 2**63 - 1


def array(values) -> np.ndarray:
    return np.array(values, np.int64)


def naive(known: dict[int, int], ids, create: bool) -> list[int]:
    if create:
        return [known.setdefault(int(i), len(known)) for i in ids]
    return [known.get(int(i), -1) for i in ids]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.one_of(st.integers(LEAST, MOST), st.integers(-3, 3), st.sampled_from([LEAST, MOST, 0]))),
            st.booleans(),
        )
    )
)
def test_it_is_a_dict(batches):
    index, known = Index(), {}
    for ids, create in batches:
        assert index.slots(array(ids), create=create).tolist() == naive(known, ids, create)
    assert len(index) == len(known)
    assert index.ids().tolist() == list(known)


def test_it_grows_and_keeps_every_slot():
    index, known = Index(), {}
    draw = np.random.default_rng(0)
    for _ in range(40):
        ids = draw.integers(-20_000, 20_000, 3_000)
        assert index.slots(ids, create=True).tolist() == naive(known, ids, create=True)
    everything = array(range(-20_500, 20_500))
    assert index.slots(everything, create=False).tolist() == naive(known, everything, create=False)


def test_ids_of_one_server_spread_over_all_places():
    """Servers share ids out by the hash; the ids of one must not crowd together here."""
    every = np.arange(400_000)
    ids = every[mix(every) % np.uint64(8) == 3]
    index = Index()
    index.slots(ids, create=True)
    used = index._table[: len(index._table) // 8] >= 0
    assert 0.3 < used.mean() < 0.65


def test_memory_is_at_most_24_bytes_an_id():
    index = Index()
    for start in range(0, 200_000, 7_000):
        index.slots(np.arange(start, start + 7_000), create=True)
        if len(index) > 1000:
            assert 8 + index._table.nbytes / len(index) <= 24


def test_looking_does_not_create():
    index = Index()
    assert index.slots(array([5, 5]), create=False).tolist() == [-1, -1]
    assert len(index) == 0
    assert index.slots(array([]), create=True).tolist() == []


def test_more_rows_than_fit_are_refused():
    index = Index(most=3)
    index.slots(array([1, 2, 3]), create=True)
    with pytest.raises(ClusterError, match="4 rows are more than this server could hold, 3"):
        index.slots(array([4]), create=True)
    assert index.slots(array([1, 4]), create=False).tolist() == [0, -1]


def test_mix_is_splitmix64():
    # the published first outputs for seed 1234567
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + n * gamma) % 2**64 for n in range(3)], np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.alone
def test_reserved_memory_costs_what_is_touched():
    memory = reserve(None, 16, torch.float32)
    before = resident()
    assert memory[10_000_000].sum() == 0
    memory[:1000] = 1.0
    assert resident() - before < 4 << 20
    assert memory.numel() * 4 > 1 << 30


def test_no_address_space_is_an_error(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(module.mmap, "mmap", refuse)
    with pytest.raises(ClusterError, match="64000 bytes of address space"):
        reserve(1000, 16, torch.float32)
    with pytest.raises(ClusterError, match="bytes of address space"):
        reserve(None, 16, torch.float32)


def test_fewer_addresses_are_taken_where_many_are_refused(monkeypatch):
    real = module.mmap.mmap

    def limited(handle: int, size: int, **options: int) -> object:
        if size > 1 << 30:
            raise OSError(12, "Cannot allocate memory")
        return real(handle, size, **options)

    monkeypatch.setattr(module.mmap, "mmap", limited)
    assert 1 << 28 < reserve(None, 16, torch.float32).numel() * 4 <= 1 << 30


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
