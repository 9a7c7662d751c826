from __future__ import annotations

import threading

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
