"""A module is followed as it is in evaluation, for batches of any size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.errors import CheckpointError, FunctionError
from plait.export.program import FILE, in_evaluation, named_outputs, open_run, trace, write


def traced(module, **inputs):
    with in_evaluation(module):
        return trace(module, inputs)


def module_of(function):
    class Module(nn.Module):
        def forward(self, x):
            return function(x)

    return Module()


def test_modes_are_put_back():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2).eval())
    with in_evaluation(module):
        assert not any(one.training for one in module.modules())
        assert not torch.is_grad_enabled()
    assert [one.training for one in module.modules()] == [True, True, True, False]


def test_names_of_outputs():
    x = torch.ones(1)
    assert named_outputs(x) == {"output": x}
    assert named_outputs((x, x)) == {"output_0": x, "output_1": x}
    assert named_outputs({"a": x}) == {"a": x}
    with pytest.raises(FunctionError, match="the module returns a int"):
        named_outputs(3)


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_the_batch_may_have_any_size(tmp_path, rows):
    class Two(nn.Module):
        def forward(self, y, x):
            return {"sum": x + y, "same": x, "top": (x + y).argmax(1)}

    program = traced(Two(), x=torch.ones(rows, 3), y=torch.ones(rows, 3))
    assert [one["name"] for one in program.inputs] == ["x", "y"]
    assert {one["name"]: (one["dtype"], one["shape"]) for one in program.outputs} == {
        "sum": ("float32", [None, 3]),
        "same": ("float32", [None, 3]),
        "top": ("int64", [None]),
    }
    write(program, tmp_path)
    run = open_run(tmp_path, {"outputs": program.outputs}, None)
    for count in (1, 2, 7):
        x, y = torch.randn(count, 3), torch.randn(count, 3)
        found = run({"x": x.numpy(), "y": y.numpy()})
        assert (found["sum"] == (x + y).numpy()).all()
        assert found["top"].shape == (count,)


def test_a_number_and_a_table_may_be_inputs():
    class Scaled(nn.Module):
        def forward(self, x, scale, table):
            return (x * scale) @ table

    program = traced(Scaled(), x=torch.ones(2, 3), scale=torch.tensor(2.0), table=torch.ones(3, 4))
    assert [one["shape"] for one in program.inputs] == [[None, 3], [], [3, 4]]


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x: x if x.sum() > 0 else -x, CheckpointError, "torch.export cannot follow the module"),
        (lambda x: x + torch.ones(4, 3), FunctionError, "works for batches of 4 only, as 'x' shows"),
        (lambda x: (x, {"a": x}), FunctionError, "returns a dict as 'output_1'"),
        (lambda x: x.bfloat16(), FunctionError, "returns torch.bfloat16 as 'output'"),
    ],
)
def test_what_cannot_be_exported(function, error, words):
    with pytest.raises(error, match=words):
        traced(module_of(function), x=torch.ones(4, 3))


def test_nothing_of_the_sources_or_the_example_is_in_the_file(tmp_path):
    example = torch.full((50, 2), 1234.5)
    write(traced(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), input=example), tmp_path)
    written = (tmp_path / FILE).read_bytes()
    assert example[:2].numpy().tobytes() not in written
    assert b"site-packages" not in written
    assert b".py" not in written


def test_threads(tmp_path, torch_settings):
    program = traced(nn.Linear(2, 2), input=torch.ones(2, 2))
    write(program, tmp_path)
    open_run(tmp_path, {"outputs": program.outputs}, 2)
    assert torch.get_num_threads() == 2
