"""Ops, placeholders and the global step."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.data import Sample
from plait.engine import op as module
from plait.engine.op import GlobalStep, Op, Placeholder, as_op, default_global_step, op, placeholder
from plait.errors import FetchError


def named():
    return 7


def test_the_names_of_the_module_are_sorted_and_there():
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_an_op_is_named_after_its_function():
    assert op(named).name == "named"
    assert op(named, name="other").name == "other"
    assert repr(op(named)) == "<Op 'named'>"


def test_an_op_takes_ops_and_callables_as_inputs():
    first = op(named)
    both = op(lambda a, b: (a, b), first, named)
    assert both.inputs[0] is first
    assert plait.Session().run(both) == (7, 7)


def test_as_op_leaves_an_op_alone():
    made = op(named)
    assert as_op(made) is made


def test_as_op_gives_the_input_of_a_sample():
    sample = Sample({"x": torch.ones(2)})
    sample.op = op(named)
    assert as_op(sample) is sample.op


@pytest.mark.parametrize(
    "thing", [torch.ones(2), 3, "loss", Sample({"x": torch.ones(2)})], ids=lambda t: type(t).__name__
)
def test_what_is_no_op_is_refused_and_the_error_says_what_to_give(thing):
    with pytest.raises(FetchError, match=rf"got {type(thing).__name__}.*give an Op, such as model\.loss\(\)"):
        as_op(thing)


def test_a_placeholder_outside_of_a_function_is_an_op():
    made = placeholder(torch.int64, [None, 3], name="ids")
    assert isinstance(made, Placeholder)
    assert (made.dtype, made.shape, made.name) == (torch.int64, (None, 3), "ids")


def test_a_placeholder_that_is_not_fed_says_how_to_feed_it():
    with pytest.raises(FetchError, match=r"'rate' was not fed: pass feed_dict=.*SessionRunArgs"):
        plait.Session().run(placeholder(name="rate"))


@pytest.mark.parametrize(
    ("shape", "value"),
    [([], 1.0), ([2], [1, 2]), ([None], [1, 2, 3]), ([None, 2], torch.ones(5, 2)), (None, torch.ones(1, 2, 3))],
)
def test_a_placeholder_takes_what_has_its_shape(shape, value):
    converted = placeholder(torch.float32, shape).convert(value)
    assert converted.dtype is torch.float32
    assert torch.equal(converted, torch.as_tensor(value, dtype=torch.float32))


@pytest.mark.parametrize(("shape", "value"), [([], [1.0]), ([2], [1, 2, 3]), ([None, 2], torch.ones(2, 3))])
def test_a_placeholder_refuses_another_shape(shape, value):
    got = list(torch.as_tensor(value).shape)
    with pytest.raises(FetchError) as caught:
        placeholder(torch.float32, shape, "x").convert(value)
    assert "'x'" in str(caught.value)
    assert f"{shape}" in str(caught.value)
    assert f"{got}" in str(caught.value)


@pytest.mark.parametrize("value", ["text", None, [[1, 2], [3]], object()], ids=["str", "None", "ragged", "object"])
def test_a_placeholder_refuses_what_is_no_tensor(value):
    with pytest.raises(FetchError, match=rf"'x' .*torch\.float32.*{type(value).__name__}"):
        placeholder(torch.float32, None, "x").convert(value)


def test_a_placeholder_converts_to_its_dtype():
    assert placeholder(torch.int32).convert([1.0, 2.0]).dtype is torch.int32


def test_the_global_step_is_an_int_and_an_op():
    step = GlobalStep(3)
    step.increment()
    assert int(step) == 4
    assert list(range(step)) == [0, 1, 2, 3]
    assert plait.Session().run({"step": step}) == {"step": 4}
    assert repr(step) == "<GlobalStep 4>"


def test_the_default_global_step_is_one_and_the_same(monkeypatch):
    monkeypatch.setattr(module, "_default_step", [])
    made = default_global_step()
    assert isinstance(made, Op)
    assert default_global_step() is made
    assert int(made) == 0
    assert plait.Session().global_step is made
