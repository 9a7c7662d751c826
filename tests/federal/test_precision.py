import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import CheckpointError, ConfigError, FederalError
from plait.federal.precision import Feedback, narrow, narrows, widen

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
RELATIVE = {"fp16": 2**-11, "bf16": 2**-8}
TINY = torch.finfo(torch.float32).tiny


def through(tensor, precision):
    wire, scale = narrow(tensor, precision)
    return widen(wire, tensor.dtype, scale)


@pytest.mark.parametrize("precision", WIRE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_only_what_gets_narrower_is_rounded(dtype, precision):
    tensor = torch.linspace(-3, 5, 24, dtype=dtype).reshape(2, 3, 4)
    wire, scale = narrow(tensor, precision)
    rounded = WIRE[precision].itemsize < dtype.itemsize
    assert narrows(WIRE[precision], dtype) is rounded
    assert wire.dtype == (WIRE[precision] if rounded else dtype)
    assert (wire is tensor) is not rounded
    assert (scale > 0) is (rounded and precision == "int8")
    back = widen(wire, dtype, scale)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert (back is tensor) is not rounded
    torch.testing.assert_close(back, tensor, rtol=0.02, atol=5 / 127)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("precision", [None, *WIRE])
def test_what_has_no_fractions_goes_as_it_is(dtype, precision):
    tensor = torch.ones(3, dtype=dtype)
    assert narrow(tensor, precision) == (tensor, 0.0)


@settings(max_examples=30)
@given(
    st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=20),
    st.sampled_from(sorted(WIRE)),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_how_much_rounding_loses(values, precision, dtype):
    tensor = torch.tensor(values, dtype=dtype)
    error = (through(tensor, precision) - tensor).abs()
    if precision == "int8":
        limit = max(tensor.abs().max().item() / 127, TINY) * 0.50001
        assert error.max().item() <= limit
    else:
        smallest = 2**-25 if precision == "fp16" else TINY
        assert bool((error <= tensor.abs() * RELATIVE[precision] + smallest).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_int8_is_symmetric_and_keeps_its_ends(dtype):
    tensor = torch.tensor([-6.35, 0.0, 3.0, 6.35], dtype=dtype)
    wire, scale = narrow(tensor, "int8")
    assert wire.tolist() == [-127, 0, 60, 127]
    assert scale == pytest.approx(0.05, rel=0.01)
    assert torch.tensor(scale, dtype=torch.float32).item() == scale  # what the description can hold
    assert torch.equal(widen(wire, dtype, scale), -widen(-wire, dtype, scale))


@pytest.mark.parametrize("size", [0.0, 1e-45, 2e-43, TINY, TINY * 130, 1e-30, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_of_very_small_and_great_numbers(size, dtype):
    tensor = torch.tensor([size, -size, size / 2], dtype=dtype)
    wire, scale = narrow(tensor, "int8")
    assert wire[0] == -wire[1]
    assert TINY <= scale < math.inf
    assert (widen(wire, dtype, scale) - tensor).abs().max().item() <= scale / 2 * 1.001


@pytest.mark.parametrize("precision", WIRE)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_no_number_is_refused(precision, bad, dtype):
    tensor = torch.tensor([[4321.5, bad]], dtype=dtype)
    with pytest.raises(
        FederalError, match=rf"{dtype} tensor of shape \[1, 2\] cannot be sent as {precision}"
    ) as caught:
        narrow(tensor, precision)
    assert "4321" not in str(caught.value)


def test_what_is_too_great_is_refused():
    with pytest.raises(FederalError, match="'bf16'"):
        narrow(torch.tensor([65505.0]), "fp16")
    assert through(torch.tensor([-65504.0]), "fp16").tolist() == [-65504.0]
    with pytest.raises(FederalError, match="as bf16"):
        narrow(torch.tensor([-3.4e38]), "bf16")
    with pytest.raises(FederalError, match="as int8"):
        narrow(torch.tensor([1e41], dtype=torch.float64), "int8")


@pytest.mark.parametrize("precision", WIRE)
@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_and_single_tensors(precision, shape):
    tensor = torch.ones(shape)
    assert torch.equal(through(tensor, precision), tensor)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="'fp8'.*'bf16'"):
        narrow(torch.ones(1), "fp8")


def test_a_tensor_with_a_gradient_can_be_narrowed():
    wire, _ = narrow(torch.ones(2, requires_grad=True) * 2, "int8")
    assert not wire.requires_grad


@pytest.mark.parametrize("precision", WIRE)
def test_feedback_sends_late_what_rounding_lost(precision):
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(300, 4, 8, generator=generator) * 1e-3 + 1e-4
    feedback = Feedback(precision)
    sent = [through(feedback.add(3, gradient), precision) for gradient in gradients]
    plain = sum(through(gradient, precision) for gradient in gradients)
    whole = gradients.sum(0)
    with_feedback, without = (sum(sent) - whole).abs().max(), (plain - whole).abs().max()
    assert with_feedback < without / 5
    assert torch.allclose(sum(sent) + feedback.state_dict()["3"], whole, atol=1e-6)


def test_feedback_keeps_small_gradients_beside_a_great_one():
    """Rounded alone, the small element would never arrive."""
    gradient = torch.tensor([1.0, 1e-3])
    feedback = Feedback("int8")
    total = sum(through(feedback.add(0, gradient), "int8") for _ in range(1000))
    assert through(gradient, "int8")[1] == 0
    assert total[1].item() == pytest.approx(1.0, abs=0.01)


def test_feedback_by_slot_shape_and_dtype():
    feedback = Feedback("int8")
    first = torch.tensor([1.0, 0.001])
    assert feedback.add(1, first) is first
    assert not torch.equal(feedback.add(1, first), first)
    assert feedback.add(2, first) is first
    for other in (torch.tensor([1.0, 0.001, 0.002]), torch.tensor([1.0, 0.001], dtype=torch.float64)):
        assert feedback.add(1, other) is other
    integers = torch.tensor([1, 2])
    assert feedback.add(9, integers) is integers
    assert list(feedback.state_dict()) == ["1", "2"]


def test_feedback_changes_neither_gradients_nor_what_it_gave():
    feedback = Feedback("int8")
    gradient = torch.tensor([1.0, 0.001])
    feedback.add(0, gradient)
    state = feedback.state_dict()
    kept = state["0"].clone()
    given_first = feedback.add(0, gradient)
    copy = given_first.clone()
    feedback.add(0, gradient)
    assert torch.equal(gradient, torch.tensor([1.0, 0.001]))
    assert torch.equal(given_first, copy)
    assert torch.equal(state["0"], kept)


def test_without_precision_feedback_does_nothing():
    feedback = Feedback(None)
    gradient = torch.tensor([1.0, math.nan])
    assert feedback.add(0, gradient) is gradient
    assert feedback.state_dict() == {}


def test_feedback_resumes_exactly():
    generator = torch.Generator().manual_seed(2)
    gradients = torch.randn(10, 6, generator=generator)
    whole = Feedback("int8")
    expected = [whole.add(0, gradient).clone() for gradient in gradients]
    first = Feedback("int8")
    for gradient in gradients[:4]:
        first.add(0, gradient)
    second = Feedback("int8")
    second.add(7, gradients[0])  # forgotten by loading
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    assert [torch.equal(second.add(0, g), e) for g, e in zip(gradients[4:], expected[4:], strict=True)] == [True] * 6
    assert list(second.state_dict()) == ["0"]


@pytest.mark.parametrize("state", [{"x": torch.ones(1)}, {"0": torch.ones(1, dtype=torch.int64)}, {"0": 1.0}])
def test_feedback_refuses_another_state(state):
    with pytest.raises(CheckpointError, match="slot '"):
        Feedback("int8").load_state_dict(state)
