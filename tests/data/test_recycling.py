from __future__ import annotations

import mmap
import threading

import pytest
import torch

from plait.data.recycling import Recycled


def test_a_block_that_nobody_holds_is_used_again():
    recycled = Recycled()
    first = recycled.empty((4, 8), torch.float32)
    place = first.data_ptr()
    del first
    assert recycled.empty((8, 4), torch.float32).data_ptr() == place


def test_a_block_that_is_held_is_not():
    recycled = Recycled()
    held = [recycled.empty((64,), torch.uint8) for _ in range(5)]
    assert len({tensor.data_ptr() for tensor in held}) == 5


def test_views_and_arrays_hold_it():
    recycled = Recycled()
    for hold in (lambda t: t[3:5], lambda t: t.numpy(), lambda t: t.view(torch.uint8).detach(), lambda t: {"x": [t]}):
        tensor = recycled.empty((16,), torch.int64)
        place, kept = tensor.data_ptr(), hold(tensor)
        del tensor
        assert recycled.empty((16,), torch.int64).data_ptr() != place
        del kept


def test_other_sizes_get_other_blocks_and_few_are_kept():
    recycled = Recycled(most=2)
    places = [recycled.empty((size,), torch.uint8).data_ptr() for size in (10, 20, 30)]
    assert len(recycled._blocks) == 2
    assert recycled.empty((30,), torch.uint8).data_ptr() == places[2]


def test_threads_never_share_one():
    recycled, wrong = Recycled(), []

    def work(number):
        for _ in range(300):
            tensor = recycled.empty((256,), torch.int64).fill_(number)
            if not tensor.eq(number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_types_and_scalars():
    recycled = Recycled()
    assert recycled.empty((2, 3), torch.bfloat16).dtype is torch.bfloat16
    assert recycled.empty((), torch.float64).shape == ()


def test_no_more_blocks_are_kept_than_asked_for():
    for most in (1, 3):
        recycled = Recycled(most)
        held = [recycled.empty((16,), torch.uint8) for _ in range(5)]
        assert len(recycled._blocks) == most
        last = held[-1].data_ptr()
        del held
        again = [recycled.empty((16,), torch.uint8) for _ in range(most)]
        assert last in {tensor.data_ptr() for tensor in again}


@pytest.mark.parametrize("size", [1, 100, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (5 << 20) + 3])
def test_blocks_begin_with_a_line_and_large_ones_with_a_large_page(size):
    recycled = Recycled()
    first = recycled.empty((size,), torch.uint8).fill_(7)
    assert first.data_ptr() % (2 << 20 if size >= 2 << 20 else 64) == 0
    assert (first.numel(), int(first.sum(dtype=torch.int64))) == (size, 7 * size)
    place, second = first.data_ptr(), recycled.empty((size,), torch.uint8)
    assert second.data_ptr() != place
    del first
    assert recycled.empty((size,), torch.uint8).data_ptr() == place


def test_where_there_are_no_large_pages_small_ones_do(monkeypatch):
    asked = []

    class Mapped(mmap.mmap):
        def madvise(self, *arguments):
            asked.append(arguments)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Mapped)
    assert Recycled().empty((4 << 20,), torch.uint8).fill_(1).all()
    assert asked == [(mmap.MADV_HUGEPAGE,)]
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert Recycled().empty((4 << 20,), torch.uint8).data_ptr() % 64 == 0
