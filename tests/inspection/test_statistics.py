from __future__ import annotations

import math

import pytest
import torch

from plait.inspection import statistics
from plait.inspection.statistics import Statistics, gap


def of(*tensors):
    found = Statistics()
    for tensor in tensors:
        found.add(tensor)
    return found.facts()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_they_are_those_of_torch(dtype):
    numbers = (torch.randn(7, 11, generator=torch.Generator().manual_seed(0)) * 3).abs().to(dtype)
    found, wide = of(numbers), numbers.double()
    assert found["mean"] == pytest.approx(float(wide.mean()))
    assert found["deviation"] == pytest.approx(float(wide.std(correction=0)))
    assert (found["min"], found["max"]) == (float(wide.min()), float(wide.max()))
    assert found["zeros"] == pytest.approx(float((wide == 0).double().mean()))


def test_blocks_are_put_together(monkeypatch):
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) + 100
    whole = of(numbers)
    monkeypatch.setattr(statistics, "_BLOCK", 7)
    assert of(numbers) == pytest.approx(whole, rel=1e-12)
    assert of(numbers[:300], numbers[300:]) == pytest.approx(whole, rel=1e-12)


def test_what_is_not_finite_is_counted_and_left_out():
    found = of(torch.tensor([1.0, 3.0, 0.0, math.nan, math.inf, -math.inf, math.nan, 0.0]))
    assert (found["nans"], found["infinite"], found["zeros"]) == (2, 2, 0.25)
    assert (found["mean"], found["min"], found["max"]) == (1.0, 0.0, 3.0)


def test_of_nothing_there_is_nothing():
    assert of(torch.empty(0, 3)) == dict.fromkeys(["mean", "deviation", "min", "max", "zeros"]) | {
        "nans": 0,
        "infinite": 0,
    }
    assert of(torch.tensor([math.nan]))["mean"] is None


def test_complex_numbers_are_two():
    assert of(torch.tensor([1 + 3j]))["mean"] == 2.0


def test_the_same_bits():
    for tensor in (torch.tensor(3), torch.tensor([math.nan, -0.0]), torch.empty(0), torch.tensor([1j]).conj()):
        assert gap(tensor, tensor.clone()).same


@pytest.mark.parametrize(
    ("one", "other", "absolute", "relative"),
    [
        (torch.tensor([1.0, -4.0]), torch.tensor([1.0, 4.0]), 8.0, 2.0),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0, 0.0),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0]), 1.0, 0.5),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf, math.inf),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), 1.0, 2.0**-60),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0, 1.0),
        (torch.tensor([1.0]), torch.tensor([1.0]).double(), 0.0, 0.0),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2j]), 2.0, 1.0),
    ],
)
def test_how_far_apart(one, other, absolute, relative):
    found = gap(one, other)
    assert not found.same
    assert (found.absolute, found.relative) == (absolute, relative)


def test_a_nan_that_only_one_has(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 1)
    found = gap(torch.tensor([1.0, math.nan, 1.0]), torch.tensor([1.0, 2.0, 9.0]))
    assert math.isnan(found.absolute)
    assert math.isnan(found.relative)


def test_the_last_block_counts(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 4)
    one, other = torch.zeros(9), torch.zeros(9)
    other[-1] = 1
    assert gap(one, other).absolute == 1
