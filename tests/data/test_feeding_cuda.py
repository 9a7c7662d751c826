"""On a GPU: batches come in order, whatever happens to the one who reads them."""

from __future__ import annotations

import threading

import pytest
import torch

import plait
from plait import efl
from plait.data.feeding import ahead

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")


def batches(count, closed, error=None):
    try:
        for number in range(count):
            yield {"x": torch.full((3,), float(number)), "names": ["a", "b", "c"]}
        if error is not None:
            raise error
    finally:
        closed.append(True)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "plait-feeding"]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_all_come_in_order(count):
    closed = []
    found = [(sample.x.device.type, sample.x.tolist()) for sample in ahead(batches(count, closed), CUDA)]
    assert found == [("cuda", [float(number)] * 3) for number in range(count)]
    assert closed
    assert threads() == []


@pytest.mark.parametrize("read", [1, 2, 5])
def test_closing_ends_the_thread_and_the_source(read):
    closed = []
    found = ahead(batches(100, closed), CUDA)
    for _ in range(read):
        next(found)
    assert len(threads()) == (read > 1)
    found.close()
    assert closed
    assert threads() == []


def test_an_error_of_the_source_comes_after_what_it_gave():
    found = ahead(batches(4, [], ValueError("broken")), CUDA)
    assert [float(next(found).x[0]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="broken"):
        next(found)
    assert threads() == []


def test_a_model_that_is_only_built_has_no_thread():
    model = efl.Model()
    model.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}] * 5)
    model.loss_fn(lambda model, sample: plait.layer("fc", torch.nn.Linear, 2, 1)(sample.x).mean())
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda variables: torch.optim.SGD(variables, lr=0.1)))
    model.compile()
    assert threads() == []
    model.fit(efl.procedure_fn.train())
    assert int(model.global_step) == 5
    assert threads() == []
