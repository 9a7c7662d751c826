"""ONNX files are written without a word, and give what the module gives."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from plait.errors import CheckpointError
from plait.export import onnx as room
from plait.export.program import in_evaluation, trace


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids, x, scale):
        hidden = self.drop(self.norm(self.table(ids).sum(1) + x)) * scale
        return {"score": hidden.softmax(1), "top": hidden.argmax(1)}


def example(rows):
    return {"ids": torch.randint(10, (rows, 3)), "x": torch.randn(rows, 4), "scale": torch.tensor(2.0)}


def traced(module, inputs):
    with in_evaluation(module):
        return trace(module, inputs)


def test_it_is_what_the_module_is(tmp_path, capfd):
    torch.manual_seed(0)
    module = Scores().eval()
    program = traced(module, example(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        room.write(program, tmp_path)
    assert capfd.readouterr() == ("", "")
    run = room.open_run(tmp_path, {"outputs": program.outputs}, 1)
    for rows in (1, 3, 32):
        inputs = example(rows)
        found = run({name: value.numpy() for name, value in inputs.items()})
        expected = {name: value.detach().numpy() for name, value in module(**inputs).items()}
        np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-4)
        assert (found["top"] == expected["top"]).all()


class Same(nn.Module):
    def forward(self, x, y):
        return {"x": x + 1, "x_out": y * 2}


def test_an_output_with_an_inputs_name(tmp_path):
    program = traced(Same(), {"x": torch.rand(2, 3), "y": torch.rand(2, 3)})
    room.write(program, tmp_path)
    found = room.open_run(tmp_path, {"outputs": program.outputs}, 1)(
        {"x": np.ones((1, 3), "f4"), "y": np.ones((1, 3), "f4")}
    )
    assert {name: value.tolist() for name, value in found.items()} == {"x": [[2, 2, 2]], "x_out": [[2, 2, 2]]}
    outputs = [one.name for one in onnx.load(tmp_path / room.FILE).graph.output]
    assert outputs == ["x_out_out", "x_out"]


def test_what_is_in_the_file(tmp_path):
    room.write(traced(Scores(), example(2)), tmp_path)
    model = onnx.load(tmp_path / room.FILE)
    onnx.checker.check_model(model)
    assert [one.name for one in model.graph.input] == ["ids", "x", "scale"]
    assert [one.name for one in model.graph.output] == ["score", "top"]
    assert not model.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value")
    assert "Dropout" not in {node.op_type for node in model.graph.node}
    written = (tmp_path / room.FILE).read_bytes()
    assert b"site-packages" not in written, "the file tells where somebody's sources are"
    assert b".py" not in written
    assert sorted(path.name for path in tmp_path.iterdir()) == [room.FILE]


def test_weights_beside_it_when_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_MAX_BYTES", 1000)
    module = nn.Linear(100, 100)
    program = traced(module, {"input": torch.ones(2, 100)})
    room.write(program, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [room.FILE, room.FILE + ".data"]
    found = room.open_run(tmp_path, {"outputs": program.outputs}, None)({"input": np.ones((3, 100), np.float32)})
    expected = module(torch.ones(3, 100)).detach().numpy()
    np.testing.assert_allclose(found["output"], expected, rtol=1e-4, atol=1e-6)


def test_what_onnx_lacks(tmp_path):
    class Strange(nn.Module):
        def forward(self, x):
            return torch.special.modified_bessel_i1(x)

    with pytest.raises(CheckpointError, match="torch.onnx cannot write this module"):
        room.write(traced(Strange(), {"x": torch.ones(2, 3)}), tmp_path)
