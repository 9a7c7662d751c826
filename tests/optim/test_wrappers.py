from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plait.errors import ConfigError
from plait.optim import get_optimizer_fn, get_optimizer_wrapper_fn
from plait.optim.wrappers import BatchGradients, Lars, WrapperFactory

SGD = get_optimizer_fn("sgd", 1.0)
MOMENTUM = get_optimizer_fn("momentum", 0.1, momentum=0.9)


def wrap(name, inner, *args, **kwargs):
    return get_optimizer_wrapper_fn(name, inner, *args, **kwargs)()


def variables(seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = [(3,), (2, 4), ()]
    return [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]


def give(moved, seed):
    random = torch.Generator().manual_seed(seed)
    for one in moved:
        one.grad = torch.randn(one.shape, generator=random, dtype=torch.float64)


def values(moved):
    return [one.detach().clone() for one in moved]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# LARS


def reference(weights, gradients, ratio, decay, epsilon, rate, momentum):
    """You, Gitman and Ginsburg 2017: a local rate for each layer, then momentum."""
    speeds = [np.zeros_like(weight) for weight in weights]
    for step in gradients:
        for number, (w, g) in enumerate(zip(weights, step, strict=True)):
            size, slope = np.linalg.norm(w.ravel()), np.linalg.norm(g.ravel())
            local = ratio * size / (slope + decay * size + epsilon)
            speeds[number] = momentum * speeds[number] + rate * local * (g + decay * w)
            weights[number] = w - speeds[number]
    return weights


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_lars_is_the_papers_rule(decay, epsilon):
    moved = variables()
    optimizer = wrap("lars", MOMENTUM(), ratio=0.02, weight_decay=decay, epsilon=epsilon)(moved)
    start, gradients = [value.numpy() for value in values(moved)], []
    for step in range(50):
        give(moved, step)
        gradients.append([one.grad.numpy().copy() for one in moved])
        optimizer.step()
    theirs = reference(start, gradients, 0.02, decay, epsilon, rate=0.1, momentum=0.9)
    for ours, expected in zip(moved, theirs, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=1e-10)


def test_lars_takes_steps_in_proportion_to_the_weights():
    moved = [torch.full((4,), 8.0, requires_grad=True), torch.full((4,), 0.5, requires_grad=True)]
    before = values(moved)
    moved[0].grad, moved[1].grad = torch.ones(4) * 1e-6, torch.ones(4) * 1e6
    wrap("lars", SGD(), ratio=0.01)(moved).step()
    for one, start in zip(moved, before, strict=True):
        assert ((start - one).norm() / start.norm()).item() == pytest.approx(0.01, rel=1e-5)


def test_lars_moves_weights_that_are_zero_and_bears_gradients_that_are():
    zero, still, unused = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    zero.grad, still.grad = torch.tensor([1.0, -2.0]), torch.zeros(2)
    wrap("lars", SGD())([zero, still, unused]).step()
    assert zero.tolist() == [-1.0, 2.0]
    assert still.tolist() == [1.0, 1.0]
    assert unused.tolist() == [1.0, 1.0]


def test_lars_takes_variables_of_several_dtypes():
    moved = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.float64, torch.float32)]
    for one in moved:
        one.grad = torch.ones_like(one)
    wrap("lars", SGD(), ratio=0.5)(moved).step()
    assert [one.tolist() for one in moved] == [[0.5, 0.5], [0.5, 0.5]]


# Gradient accumulation


def batches(count, size):
    random = torch.Generator().manual_seed(3)
    return [torch.randn(size, 5, generator=random, dtype=torch.float64) for _ in range(count)]


def trained(factory, data):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = factory(list(net.parameters()))
    for batch in data:
        optimizer.zero_grad()
        (net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return values(net.parameters())


RULES = {
    "sgd": get_optimizer_fn("sgd", 0.1),
    "momentum": MOMENTUM,
    "adam": get_optimizer_fn("adam", 0.01),
    "ftrl": get_optimizer_fn("ftrl", 0.1, l1=0.001),
    "adadelta": get_optimizer_fn("adadelta", 1.0),
    "lars": get_optimizer_wrapper_fn("lars", MOMENTUM(), ratio=0.1, weight_decay=0.01),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_k_batches_equal_one_of_k_times_the_size(rule, count):
    small = batches(20, 6)
    large = [torch.cat(small[start : start + count]) for start in range(0, 20, count)]
    ours = trained(wrap("batch_gradients", RULES[rule](), num_batches=count), small)
    expected = trained(RULES[rule](), large)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=2), min_size=1, max_size=20))
def test_any_gradients_are_applied_as_means_and_in_time(count, gradients):
    moved = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = wrap("batch_gradients", SGD(), count)([moved])
    for number, gradient in enumerate(gradients, 1):
        moved.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        applied = torch.tensor(gradients[: number // count * count], dtype=torch.float64).reshape(-1, 2).sum(0) / count
        torch.testing.assert_close(moved.detach(), -applied, rtol=1e-12, atol=1e-12)


def test_a_variable_that_only_some_batches_use():
    some, never = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = wrap("batch_gradients", SGD(), num_batches=4)([some, never])
    for gradient in (None, 2.0, 4.0, None):
        some.grad = None if gradient is None else torch.tensor([gradient])
        optimizer.step()
    assert some.item() == -1.5
    assert never.grad is None


def test_gradients_that_are_zeroed_in_place_are_safe():
    moved = torch.zeros(1, requires_grad=True)
    optimizer = wrap("batch_gradients", SGD(), num_batches=3)([moved])
    for _ in range(3):
        (moved * 6).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert moved.item() == -6.0


def test_the_gradients_are_summed_where_they_lie_and_forgotten_after_the_step():
    moved = variables()
    optimizer = wrap("batch_gradients", SGD(), num_batches=2)(moved)
    give(moved, 0)
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 3
    give(moved, 1)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.state_dict()["param_groups"][0]["batches_done"] == 0


# Both


def stack(order, moved, num_batches=3, schedule=None):
    inner = get_optimizer_fn("adam", schedule or 0.01)()
    for name in order:
        inner = wrap(name, inner, **({"ratio": 0.1} if name == "lars" else {"num_batches": num_batches}))
    return inner(moved)


ORDERS = [("lars",), ("batch_gradients",), ("lars", "batch_gradients"), ("batch_gradients", "lars"), ("lars", "lars")]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cut", [1, 4, 5, 6])
def test_a_state_that_is_saved_anywhere_goes_on_to_the_last_bit(order, cut):
    def schedule(step):
        return 0.1 / (1 + step)

    one = variables()
    optimizer = stack(order, one, schedule=schedule)
    for step in range(cut):
        give(one, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    two = [value.requires_grad_() for value in values(one)]
    again = stack(order, two, schedule=schedule)
    again.load_state_dict(saved)
    for moved, one_optimizer in ((one, optimizer), (two, again)):
        for step in range(cut, cut + 7):
            give(moved, step)
            one_optimizer.step()
    assert same(one, two)
    assert optimizer.param_groups[0]["lr"] == again.param_groups[0]["lr"] < 0.1


def test_loading_does_not_tie_the_sums_to_what_was_loaded():
    one, two = variables(), variables()
    optimizer, again = (stack(("batch_gradients",), moved) for moved in (one, two))
    give(one, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    again.load_state_dict(saved)
    give(two, 1)
    again.step()
    assert torch.equal(saved["state"][0]["gradient_sum"], before["state"][0]["gradient_sum"])


@pytest.mark.parametrize("order", ORDERS)
def test_groups_and_state_are_the_inner_ones_also_after_loading(order):
    moved = variables()
    optimizer = stack(order, moved)
    for _ in range(2):
        innermost = optimizer
        while hasattr(innermost, "inner"):
            innermost = innermost.inner
            assert optimizer.param_groups is innermost.param_groups
            assert optimizer.state is innermost.state
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        give(moved, 0)
        optimizer.step()
    assert set(optimizer.state[moved[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.zero_grad()
    assert all(one.grad is None for one in moved)


def test_a_rate_set_from_outside_reaches_the_inner_rule():
    moved = torch.zeros(1, requires_grad=True)
    optimizer = wrap("batch_gradients", SGD(), num_batches=1)([moved])
    optimizer.param_groups[0]["lr"] = 5.0
    moved.grad = torch.ones(1)
    optimizer.step()
    assert moved.item() == -5.0


def test_the_clock_is_that_of_the_schedule_inside():
    moved = variables()
    optimizer = stack(("lars", "batch_gradients"), moved, num_batches=2, schedule=lambda step: 1.0 / (1 + step))
    now = itertools.count(10)
    optimizer.clock = lambda: next(now)
    rates = []
    for step in range(4):
        give(moved, step)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1 / 11, 1 / 11, 1 / 12]
    assert not hasattr(stack(("lars",), variables()), "clock")


@pytest.mark.parametrize("order", [("lars",), ("batch_gradients",)])
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_is_returned(order):
    moved = torch.ones(2, requires_grad=True)
    optimizer = stack(order, [moved], num_batches=1)
    calls = []

    def closure():
        loss = (moved**2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert calls == [2.0]
    assert moved.tolist() != [1.0, 1.0]


def test_an_optimizer_that_is_there_can_be_wrapped_too():
    moved = variables()
    inner = torch.optim.SGD(moved, lr=1.0)
    lars = wrap("lars", inner)
    both = wrap("batch_gradients", lars, num_batches=2)
    assert isinstance(lars, Lars)
    assert isinstance(both, BatchGradients)
    assert both.inner is lars
    assert lars.inner is inner
    assert both.sync_on_apply


def test_a_factory_shows_itself_and_keeps_the_scope():
    factory = wrap("lars", get_optimizer_fn("sgd", 0.1, "tower")(), ratio=0.01)
    assert isinstance(factory, WrapperFactory)
    assert factory.scope == "tower"
    assert repr(factory) == "lars(sgd(learning_rate=0.1, scope='tower'), ratio=0.01)"
    assert wrap("batch_gradients", lambda params: torch.optim.SGD(params, lr=1.0), 2).scope is None


@pytest.mark.parametrize(
    ("name", "inner", "kwargs", "text"),
    [
        ("easgd", SGD(), {}, "no optimizer wrapper 'easgd': there are batch_gradients, lars"),
        ("lars", SGD(), {"foo": 1}, "'foo'; it takes ratio=0.001, weight_decay=0.0, epsilon=0.0"),
        ("lars", SGD(), {"ratio": 0.0}, "lars: ratio is 0.0"),
        ("lars", SGD(), {"weight_decay": -1.0}, "weight_decay -1.0"),
        ("batch_gradients", SGD(), {}, "'num_batches'; it takes num_batches, sync_on_apply=True"),
        ("batch_gradients", SGD(), {"num_batches": 0}, "num_batches is 0; write a whole number from 1 up"),
        ("batch_gradients", SGD(), {"num_batches": 2.0}, "num_batches is 2.0"),
        ("lars", SGD, {}, r"with the \(\) after get_optimizer_fn"),
        ("lars", 0.1, {}, "wraps an optimizer or a factory, got 0.1"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_where_it_is_written(name, inner, kwargs, text):
    with pytest.raises(ConfigError, match=text):
        get_optimizer_wrapper_fn(name, inner, **kwargs)


def test_gradients_are_not_accumulated_twice():
    with pytest.raises(ConfigError, match="batch_gradients stands twice"):
        stack(("batch_gradients", "lars", "batch_gradients"), variables())
