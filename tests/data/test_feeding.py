from __future__ import annotations

import threading

import pytest
import torch

from plait.data import Sample
from plait.data.feeding import ahead, placed

CPU, META = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("raw", [{"x": torch.ones(2)}, (torch.ones(2), torch.ones(2)), {"x": "words"}])
def test_what_is_on_the_cpu_has_to_be_copied(raw):
    assert not placed(Sample.of(raw), META)


def test_an_empty_source_gives_nothing():
    assert list(ahead(iter(()), META)) == []


def test_batches_that_are_there_are_handed_on(monkeypatch):
    monkeypatch.setattr("plait.data.feeding.placed", lambda sample, device: True)
    closed = []

    def batches():
        try:
            for number in range(5):
                yield {"x": torch.full((2,), number)}
        finally:
            closed.append(True)

    found = ahead(batches(), META)
    assert [int(sample.x[0]) for sample, _ in zip(found, range(3), strict=False)] == [0, 1, 2]
    found.close()
    assert closed


def test_the_first_batch_needs_no_thread_and_closing_then_ends_the_source(monkeypatch):
    monkeypatch.setattr("plait.data.feeding._there", lambda sample, device: sample)
    closed = []

    def batches():
        try:
            yield {"x": torch.ones(2)}
        finally:
            closed.append(True)

    found = ahead(batches(), META)
    assert torch.equal(next(found).x, torch.ones(2))
    assert "plait-feeding" not in {thread.name for thread in threading.enumerate()}
    found.close()
    assert closed
