"""A runtime that gives other numbers than the module is noticed; one that rounds elsewhere is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from plait.errors import CheckpointError
from plait.export.check import TOLERANCE, compare, difference, worked_out
from plait.export.program import in_evaluation, trace


def trials_of(module, **inputs):
    with in_evaluation(module):
        return worked_out(module, inputs, trace(module, inputs))


def eager(module, change=lambda name, value: value):
    """A runtime that changes the module's outputs."""

    def run(inputs):
        with torch.no_grad():
            found = module.eval()(**{name: torch.from_numpy(value) for name, value in inputs.items()})
        return {"output": change("output", found.numpy())}

    return run


@pytest.mark.parametrize(
    ("expected", "found", "apart"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[10.0, 0.0]], [[10.0, 0.001]], 0.001),
        ([[10.0], [0.1]], [[10.0], [0.11]], 0.1 / 1.1),
        ([[0.0, 0.0]], [[0.0, 1e-30]], np.inf),
        ([[np.inf, 1.0]], [[3.0, 1.0]], 0.0),
        ([[1.0, 2.0]], [[np.nan, 2.0]], np.inf),
        ([[1.0, 2.0]], [[np.inf, 2.0]], np.inf),
        (2.0, 2.0, 0.0),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0.0),
    ],
)
def test_relative_differences(expected, found, apart):
    assert difference(np.array(expected), np.array(found)) == pytest.approx(apart)


def test_random_inputs_and_edges():
    trials = trials_of(nn.Sigmoid(), input=torch.zeros(2, 3))
    assert [(trial.kind, len(trial.inputs["input"])) for trial in trials] == [
        (kind, rows) for kind in ("random", "zeros", "large") for rows in (1, 3)
    ]
    assert (trials[2].inputs["input"] == 0).all()
    assert np.abs(trials[5].inputs["input"]).max() > 50
    assert {trial.tolerance for trial in trials[:4]} == {TOLERANCE}


def test_whole_numbers_are_those_of_the_example():
    trials = trials_of(nn.Embedding(10, 2), input=torch.tensor([[7], [3], [9]]))
    drawn = [set(trial.inputs["input"].flatten().tolist()) for trial in trials]
    assert all(one <= {3, 7, 9} for one in drawn)
    assert drawn[2:] == [{3}, {3}, {9}, {9}]


def test_the_module_itself_passes():
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Softmax(1))
    assert compare("torch", eager(module), trials_of(module, input=torch.zeros(2, 3))) == 0.0


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_other_numbers_do_not(factor):
    module = nn.Linear(3, 2)
    trials = trials_of(module, input=torch.zeros(2, 3))
    with pytest.raises(CheckpointError, match=r"format 'onnx' gives another 'output' .* Nothing was published"):
        compare("onnx", eager(module, lambda _, value: value * np.float32(factor)), trials)


@pytest.mark.parametrize("change", [lambda _, value: value[:, :1], lambda _, value: value.astype(np.float64)])
def test_another_shape_or_kind_does_not(change):
    module = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match="difference is inf"):
        compare("onnx", eager(module, change), trials_of(module, input=torch.zeros(2, 3)))


def test_a_runtime_that_fails():
    def run(inputs):
        raise RuntimeError("no such operator")

    with pytest.raises(CheckpointError, match="cannot be run with random inputs: no such operator"):
        compare("onnx", run, trials_of(nn.Linear(3, 2), input=torch.zeros(2, 3)))


def test_the_module_is_asked_for_all_digits(torch_settings):
    class Noting(nn.Linear):
        def forward(self, x):
            seen.append(torch.get_float32_matmul_precision())
            return super().forward(x)

    seen = []
    torch.set_float32_matmul_precision("high")
    trials_of(Noting(3, 2), x=torch.zeros(2, 3))
    assert seen[-6:] == ["highest"] * 6
    assert torch.get_float32_matmul_precision() == "high"


class Top(nn.Module):
    def forward(self, x):
        return x.argmax(1)


def test_places_may_differ_where_many_values_are_equal():
    module = Top()
    trials = trials_of(module, x=torch.zeros(2, 4))
    ties = lambda _, value: np.full_like(value, 2) if (value == 0).all() and len(value) == 3 else value
    compare("onnx", eager(module, ties), trials)
    with pytest.raises(CheckpointError, match="for random inputs"):
        compare("onnx", eager(module, lambda _, value: value + 1), trials)


def test_where_rounding_alone_makes_a_difference_more_is_allowed():
    """A softmax of large values that are nearly equal shows the last digits of float32."""
    torch.manual_seed(0)

    class Sharp(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(1)

    module = Sharp(64, 8, bias=False)
    with torch.no_grad():
        module.weight.copy_(300 * torch.randn(64) + 0.003 * torch.randn(8, 64))
    trials = trials_of(module, x=torch.zeros(2, 64))
    assert max(trial.tolerance for trial in trials[4:]) > 10 * TOLERANCE

    def exact(inputs):
        logits = torch.from_numpy(inputs["x"]).double() @ module.weight.detach().double().T
        return {"output": logits.softmax(1).float().numpy()}

    apart = [difference(trial.outputs["output"], exact(trial.inputs)["output"]) for trial in trials[4:]]
    assert max(apart) > TOLERANCE
    compare("onnx", exact, trials[4:])


class Chaotic(nn.Module):
    """Doubles every difference fourteen times, as a deep network of first weights does."""

    def forward(self, x):
        for _ in range(14):
            x = (2 * x).remainder(1.0) + 1.0
        return x


def test_for_ordinary_inputs_not_much_more_is_allowed():
    module = Chaotic()
    trials = trials_of(module, x=torch.zeros(2, 8))
    tolerances = [trial.tolerance for trial in trials[:4]]
    assert all(TOLERANCE < tolerance <= 10 * TOLERANCE for tolerance in tolerances)
    with pytest.raises(CheckpointError, match="for random inputs"):
        compare("onnx", eager(module, lambda _, value: value * np.float32(1.005)), trials)


class Step(nn.Module):
    def forward(self, x):
        return (x > 0).float() + 1


def test_a_step_at_zero_is_still_looked_at():
    module = Step()
    trials = trials_of(module, x=torch.zeros(2, 4))
    wrong = lambda _, value: np.full_like(value, 2) if (value == 1).all() else value
    with pytest.raises(CheckpointError, match="for zeros inputs"):
        compare("onnx", eager(module, wrong), trials)
