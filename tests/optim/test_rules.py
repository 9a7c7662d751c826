"""Every optimizer against NumPy references that are written from the published rules, in float64 throughout."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.optim import Adam, Ftrl, RMSProp, get_optimizer_fn

SHAPES = [(), (3,), (4, 5), (2, 3, 2, 2)]
STEPS = 100


# References: each takes the weights before a step, the gradient, the number of the step from 1, and a dict of state.


def sgd(w, g, t, s, lr):
    return w - lr * g


def momentum(w, g, t, s, lr, momentum, use_nesterov=False):
    s["accumulator"] = momentum * s.get("accumulator", 0.0) + g
    return w - lr * (g + momentum * s["accumulator"] if use_nesterov else s["accumulator"])


def adagrad(w, g, t, s, lr, initial_accumulator_value=0.1):
    s["sum"] = s.get("sum", initial_accumulator_value) + g**2
    return w - lr * g / np.sqrt(s["sum"])


def adadelta(w, g, t, s, lr, rho=0.95, epsilon=1e-8):
    s["gradients"] = rho * s.get("gradients", 0.0) + (1 - rho) * g**2
    update = np.sqrt(s.get("updates", 0.0) + epsilon) / np.sqrt(s["gradients"] + epsilon) * g
    s["updates"] = rho * s.get("updates", 0.0) + (1 - rho) * update**2
    return w - lr * update


def adam(w, g, t, s, lr, beta1=0.9, beta2=0.999, epsilon=1e-8):
    s["m"] = beta1 * s.get("m", 0.0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0.0) + (1 - beta2) * g**2
    return w - lr * np.sqrt(1 - beta2**t) / (1 - beta1**t) * s["m"] / (np.sqrt(s["v"]) + epsilon)


def rmsprop(w, g, t, s, lr, decay=0.9, momentum=0.0, epsilon=1e-10, centered=False):
    s["ms"] = decay * s.get("ms", 1.0) + (1 - decay) * g**2
    s["mg"] = decay * s.get("mg", 0.0) + (1 - decay) * g if centered else 0.0
    s["mom"] = momentum * s.get("mom", 0.0) + lr * g / np.sqrt(s["ms"] - s["mg"] ** 2 + epsilon)
    return w - s["mom"]


def ftrl(
    w, g, t, s, lr, learning_rate_power=-0.5, initial_accumulator_value=0.1,
    l1_regularization_strength=0.0, l2_regularization_strength=0.0, l2_shrinkage_regularization_strength=0.0, beta=0.0,
):  # fmt: skip
    """McMahan et al. 2013, with TensorFlow's power, shrinkage and twice l2."""
    l1 = l1_regularization_strength
    before = s.get("n", np.full_like(w, initial_accumulator_value))
    s["n"] = before + g**2
    sigma = (s["n"] ** -learning_rate_power - before**-learning_rate_power) / lr
    s["z"] = s.get("z", 0.0) + g + 2 * l2_shrinkage_regularization_strength * w - sigma * w
    slope = (beta + s["n"] ** -learning_rate_power) / lr + 2 * l2_regularization_strength
    return np.where(np.abs(s["z"]) > l1, -(s["z"] - np.sign(s["z"]) * l1) / slope, 0.0)


CASES = [
    (sgd, {"lr": 0.1}),
    (momentum, {"lr": 0.1, "momentum": 0.9}),
    (momentum, {"lr": 0.1, "momentum": 0.9, "use_nesterov": True}),
    (adagrad, {"lr": 0.5}),
    (adagrad, {"lr": 0.5, "initial_accumulator_value": 2.0}),
    (adadelta, {"lr": 10.0}),
    (adadelta, {"lr": 1.0, "rho": 0.8, "epsilon": 1e-4}),
    (adam, {"lr": 0.01}),
    (adam, {"lr": 0.01, "beta1": 0.7, "beta2": 0.95, "epsilon": 0.1}),
    (adam, {"lr": 0.01, "beta1": 0.0}),
    (rmsprop, {"lr": 0.01}),
    (rmsprop, {"lr": 0.01, "decay": 0.7, "momentum": 0.9, "epsilon": 0.1}),
    (rmsprop, {"lr": 0.01, "centered": True, "epsilon": 1e-3}),
    (rmsprop, {"lr": 0.01, "centered": True, "momentum": 0.5, "epsilon": 1e-3}),
    (ftrl, {"lr": 0.1}),
    (ftrl, {"lr": 0.1, "l1_regularization_strength": 0.3}),
    (ftrl, {"lr": 0.1, "l2_regularization_strength": 0.2}),
    (ftrl, {"lr": 0.1, "l1_regularization_strength": 0.3, "l2_regularization_strength": 0.2}),
    (ftrl, {"lr": 0.1, "l1_regularization_strength": 0.3, "l2_regularization_strength": 0.2,
            "l2_shrinkage_regularization_strength": 0.05, "beta": 1.0, "initial_accumulator_value": 0.5}),
    (ftrl, {"lr": 0.1, "learning_rate_power": -0.8, "l1_regularization_strength": 0.1}),
    (ftrl, {"lr": 0.1, "learning_rate_power": 0.0}),
]  # fmt: skip
IDS = [f"{rule.__name__}-{number}" for number, (rule, _) in enumerate(CASES)]


def draws(seed=0, dtype=np.float64):
    """Weights for each shape, and STEPS gradients for each, of sizes that change; some are zero."""
    random = np.random.default_rng(seed)
    weights = [random.normal(size=shape).astype(dtype) for shape in SHAPES]
    sizes = 10 ** random.uniform(-2, 1, STEPS) * (random.uniform(size=STEPS) > 0.1)
    gradients = [[(size * random.normal(size=shape)).astype(dtype) for shape in SHAPES] for size in sizes]
    return weights, gradients


def reference(rule, options, weights, gradients):
    weights = [weight.astype(np.float64) for weight in weights]
    states = [{} for _ in weights]
    for t, step in enumerate(gradients, 1):
        weights = [
            rule(w, g.astype(np.float64), t, s, **options) for w, g, s in zip(weights, step, states, strict=True)
        ]
    return weights


def trained(factory, weights, gradients):
    variables = [torch.tensor(weight, requires_grad=True) for weight in weights]
    optimizer = factory(variables)
    for step in gradients:
        for variable, gradient in zip(variables, step, strict=True):
            variable.grad = torch.tensor(gradient)
        optimizer.step()
    return [variable.detach().numpy() for variable in variables]


def factory_of(rule, options):
    options = dict(options)
    return get_optimizer_fn(rule.__name__, options.pop("lr"), **options)()


def error(ours, theirs):
    """The largest difference, relative to the largest number."""
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-10), (np.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize(("rule", "options"), CASES, ids=IDS)
def test_a_hundred_steps_agree_with_the_published_rule(rule, options, dtype, bound):
    weights, gradients = draws(dtype=dtype)
    ours = trained(factory_of(rule, options), weights, gradients)
    assert ours[0].dtype == dtype
    assert error(ours, reference(rule, options, weights, gradients)) < bound
    assert error(ours, weights) > 1e-3


@pytest.mark.parametrize(
    ("rule", "options", "other"),
    [
        (adam, {"lr": 0.01, "epsilon": 0.1}, lambda p: torch.optim.Adam(p, lr=0.01, eps=0.1)),
        (rmsprop, {"lr": 0.01}, lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-10)),
        (adagrad, {"lr": 0.5}, lambda p: torch.optim.Adagrad(p, lr=0.5)),
    ],
)
def test_where_torchs_own_rule_would_not_agree(rule, options, other):
    weights, gradients = draws()
    assert error(trained(other, weights, gradients), reference(rule, options, weights, gradients)) > 1e-3


numbers = st.floats(0.01, 1.0)


@settings(max_examples=25, deadline=None)
@given(numbers, st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.2), st.floats(0, 2), st.floats(-1, 0), numbers)
def test_ftrl_for_any_settings(lr, l1, l2, shrinkage, beta, power, start):
    options = {
        "lr": lr, "l1_regularization_strength": l1, "l2_regularization_strength": l2, "beta": beta,
        "l2_shrinkage_regularization_strength": shrinkage, "learning_rate_power": power,
        "initial_accumulator_value": start,
    }  # fmt: skip
    weights, gradients = draws(seed=1)
    gradients = [[np.clip(gradient, -1, 1) for gradient in step] for step in gradients[:20]]
    theirs = reference(ftrl, options, weights, gradients)
    assert error(trained(factory_of(ftrl, options), weights, gradients), theirs) < 1e-9


def test_ftrl_with_l1_gives_exact_zeros_and_without_none():
    weights, gradients = draws()
    zeros = {}
    for l1 in (0.0, 20.0):
        ours = trained(lambda p, l1=l1: Ftrl(p, lr=0.1, l1=l1), weights, gradients)
        zeros[l1] = sum(int((weight == 0).sum()) for weight in ours)
    assert zeros[0.0] == 0
    assert zeros[20.0] > 5


def test_ftrl_leaves_a_weight_at_zero_that_never_had_a_gradient():
    variable = torch.zeros(3, requires_grad=True)
    optimizer = Ftrl([variable], lr=0.1, initial_accumulator_value=0.0)
    for _ in range(3):
        variable.grad = torch.tensor([0.0, 1.0, 0.0])
        optimizer.step()
    assert variable.tolist() == [0.0, variable[1].item(), 0.0]
    assert variable[1].item() < 0


def test_a_centered_rmsprop_survives_a_constant_gradient():
    variable = torch.zeros(1000, requires_grad=True)
    optimizer = RMSProp([variable], lr=1e-9, centered=True)
    gradient = torch.linspace(0.1, 30, 1000)
    for _ in range(300):  # the variance is zero but for rounding
        variable.grad = gradient.clone()
        optimizer.step()
    assert variable.isfinite().all()


KINDS = [
    lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    lambda p: RMSProp(p, lr=0.01, momentum=0.9, centered=True, eps=1e-3, weight_decay=0.1),
    lambda p: Ftrl(p, lr=0.1, l1=0.01, l2=0.01),
]


@pytest.mark.parametrize("kind", KINDS, ids=["adam", "rmsprop", "ftrl"])
def test_bfloat16_stays_near_float32(kind):
    weights, gradients = draws(dtype=np.float32)
    exact = trained(kind, weights, gradients[:20])
    variables = [torch.tensor(weight).bfloat16().requires_grad_() for weight in weights]
    optimizer = kind(variables)
    for step in gradients[:20]:
        for variable, gradient in zip(variables, step, strict=True):
            variable.grad = torch.tensor(gradient).bfloat16()
        optimizer.step()
    assert {variable.dtype for variable in variables} == {torch.bfloat16}
    assert error([variable.detach().float().numpy() for variable in variables], exact) < 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=["adam", "rmsprop", "ftrl"])
def test_a_state_that_is_saved_and_loaded_goes_on_to_the_last_bit(kind, dtype):
    weights, gradients = draws()

    def walk(variables, optimizer, steps):
        for step in steps:
            for variable, gradient in zip(variables, step, strict=True):
                variable.grad = torch.tensor(gradient).to(dtype)
            optimizer.step()

    one = [torch.tensor(weight).to(dtype).requires_grad_() for weight in weights]
    optimizer = kind(one)
    walk(one, optimizer, gradients[:10])
    saved = copy.deepcopy(optimizer.state_dict())
    two = [variable.detach().clone().requires_grad_() for variable in one]
    again = kind(two)
    again.load_state_dict(saved)
    walk(one, optimizer, gradients[10:20])
    walk(two, again, gradients[10:20])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", [lambda p: Adam(p, lr=0.1), *KINDS[1:]], ids=["adam", "rmsprop", "ftrl"])
def test_variables_without_a_gradient_stay_and_do_not_age(kind):
    late, early = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    alone = torch.ones(2, requires_grad=True)
    both, one = kind([late, early]), kind([alone])
    for step in range(4):
        late.grad = torch.tensor([1.0, -2.0]) if step >= 2 else None
        early.grad = torch.tensor([0.5, 0.5])
        both.step()
        assert (late.tolist() == [1.0, 1.0]) == (step < 2)
    for _ in range(2):
        alone.grad = torch.tensor([1.0, -2.0])
        one.step()
    assert torch.equal(late, alone)


def test_the_state_of_torchs_adam_can_be_taken_over():
    variable = torch.ones(2, requires_grad=True)
    theirs = torch.optim.Adam([variable], lr=0.1)
    variable.grad = torch.tensor([1.0, 2.0])
    theirs.step()
    ours = Adam([variable], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert ours.state[variable]["step"] == 2


def test_weight_decay_is_added_to_the_gradient():
    plain, decayed = (torch.full((2,), 3.0, requires_grad=True) for _ in range(2))
    plain.grad, decayed.grad = torch.tensor([1.3, 0.3]), torch.tensor([1.0, 0.0])
    Adam([plain], lr=0.1).step()
    Adam([decayed], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(plain, decayed)
    assert decayed.grad.tolist() == [1.0, 0.0]  # the user's gradient is not touched


def test_groups_have_their_own_settings_and_a_closure_gives_the_loss():
    slow, fast = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = Adam([{"params": [slow], "lr": 0.001}, {"params": [fast]}], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (slow + fast).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    torch.testing.assert_close(1 - slow, torch.full((2,), 0.001), rtol=1e-3, atol=0)
    torch.testing.assert_close(1 - fast, torch.full((2,), 0.1), rtol=1e-3, atol=0)


def test_nothing_to_do_and_empty_variables_are_fine():
    for kind, size in itertools.product(KINDS, (2, 0)):
        variable = torch.ones(size, requires_grad=True)
        optimizer = kind([variable])
        optimizer.step()
        variable.grad = torch.zeros_like(variable)
        optimizer.step()
        assert variable.isfinite().all()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: Adam(p, lr=-1.0), "lr is -1.0: write a number that is not negative"),
        (lambda p: Adam(p, eps=float("nan")), "eps is nan"),
        (lambda p: Adam(p, betas=(0.9, 1.0)), "beta2 is 1.0: write a number from 0 to below 1"),
        (lambda p: RMSProp(p, alpha=1.5), "alpha is 1.5: write a number from 0 to 1"),
        (lambda p: RMSProp(p, momentum=-1), "momentum is -1"),
        (lambda p: Ftrl(p, lr=0.0), "lr is 0.0: FTRL divides by it"),
        (lambda p: Ftrl(p, l1=-1.0), "l1 is -1.0"),
        (lambda p: Ftrl(p, initial_accumulator_value=-1.0), "initial_accumulator_value is -1.0"),
        (lambda p: Ftrl(p, learning_rate_power=0.5), "learning_rate_power is 0.5: write -0.5"),
    ],
)
def test_settings_that_cannot_work(make, text):
    with pytest.raises(ConfigError, match=text):
        make([torch.ones(1, requires_grad=True)])


def test_ftrl_says_when_its_rate_has_come_to_zero():
    variable = torch.ones(1, requires_grad=True)
    variable.grad = torch.ones(1)
    optimizer = Ftrl([variable])
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ConfigError, match="the learning rate has come to 0.0"):
        optimizer.step()


def test_a_sparse_gradient_is_refused():
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = Adam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda values: Adam(values, lr=0.05),
        lambda values: RMSProp(values, lr=0.05),
        lambda values: RMSProp(values, lr=0.05, momentum=0.9, centered=True),
        lambda values: Ftrl(values, lr=0.05, l1=0.01, l2=0.02, l2_shrinkage=0.01, beta=0.1),
    ],
)
def test_a_rate_that_is_a_tensor_moves_as_a_number_does(make):
    """As in a step that is recorded in a graph: nothing is looked at."""
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    moved = []
    for recorded in (False, True):
        values = [value.clone().requires_grad_() for value in start]
        optimizer = make(values)
        group = optimizer.param_groups[0]
        if recorded:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
            if "capturable" in group:
                group["capturable"] = True
        for step in range(20):
            for value in values:
                value.grad = torch.sin(value.detach() * 7 + step)
            optimizer.step()
        moved.append(values)
    for number, tensor in zip(*moved, strict=True):
        torch.testing.assert_close(tensor, number, rtol=1e-6, atol=1e-7)
