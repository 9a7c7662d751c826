"""An exported module loads in plain PyTorch and gives what the trained one gives."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from plait.cluster.embedding import SparseEmbedding
from plait.errors import CheckpointError, ConfigError
from plait.export import load
from plait.openks import CPUDistributedAlgorithm, GPUDistributedAlgorithm


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, ids, x=None, scale=1.0):
        hidden = self.drop(self.norm(self.table(ids).sum(1) + (0 if x is None else x)))
        scores = self.head(hidden) * scale
        return {"score": torch.sigmoid(scores), "logit": scores}


def trained(model, call, *, kind=CPUDistributedAlgorithm, strategy=None):
    algorithm = kind()
    algorithm.init()
    optimizer = algorithm.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, module=model)
    output = call(model)
    loss = sum(value.float().mean() for value in output.values()) if isinstance(output, dict) else output[0].mean()
    optimizer.minimize(loss)
    return algorithm


def example(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, 10, (rows, 3), generator=generator), torch.randn(rows, 4, generator=generator)


@pytest.mark.parametrize("strategy", [None, {"precision": "bf16", "recompute": ["head"]}])
def test_it_gives_what_the_module_gives_in_evaluation(tmp_path, strategy):
    model = Scores()
    algorithm = trained(
        model, lambda module: module(*example(6), scale=2.0), kind=GPUDistributedAlgorithm, strategy=strategy
    )
    found = algorithm.save_inference_model(None, tmp_path, ["ids", "x"], ["score"])
    assert found == ["score"]
    assert model.training
    assert model.drop.training
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.pt2"]
    assert load(tmp_path).about["step"] == 1
    program = torch.export.load(tmp_path / "model.pt2").module()
    algorithm.stop_worker()
    model.eval()
    for rows in (1, 6, 9):
        ids, x = example(rows)
        output = program(ids=ids, x=x)
        assert output.keys() == {"score"}
        torch.testing.assert_close(output["score"], model(ids, x, scale=2.0)["score"], rtol=0, atol=0)


def test_what_the_json_says(tmp_path):
    algorithm = trained(Scores(), lambda module: module(*example(4)))
    assert algorithm.save_inference_model(None, str(tmp_path), None, None) == ["score", "logit"]
    body = json.loads((tmp_path / "model.json").read_text())
    assert body["inputs"] == [
        {"name": "ids", "dtype": "int64", "shape": [None, 3]},
        {"name": "x", "dtype": "float32", "shape": [None, 4]},
    ]
    assert body["outputs"] == [
        {"name": "score", "dtype": "float32", "shape": [None, 2]},
        {"name": "logit", "dtype": "float32", "shape": [None, 2]},
    ]


def test_it_can_be_loaded_like_any_export(tmp_path):
    model = Scores()
    algorithm = trained(model, lambda module: module(*example(4)))
    algorithm.save_inference_model(None, tmp_path / "here", ["ids"], ["logit"])
    ids, _ = example(5)
    found = load(tmp_path / "here").run({"ids": ids.numpy()})["logit"]
    torch.testing.assert_close(torch.from_numpy(found), model.eval()(ids)["logit"], rtol=0, atol=0)


def test_a_later_one_replaces_it(tmp_path):
    model = Scores()
    algorithm = trained(model, lambda module: module(*example(4)))
    algorithm.save_inference_model(None, tmp_path, ["ids"], ["logit"])
    algorithm.save_inference_model(None, tmp_path, ["ids", "x"], ["score"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.pt2"]
    assert [one["name"] for one in load(tmp_path).about["outputs"]] == ["score"]


def test_an_input_with_a_default_may_be_left_out(tmp_path):
    model = Scores()
    algorithm = trained(model, lambda module: module(*example(4)))
    algorithm.save_inference_model(None, tmp_path, "ids", "logit")
    ids, _ = example(5)
    model.eval()
    found = torch.export.load(tmp_path / "model.pt2").module()(ids=ids)["logit"]
    torch.testing.assert_close(found, model(ids)["logit"], rtol=0, atol=0)


@pytest.mark.parametrize(("output", "names"), [(lambda y: y, ["output"]), (lambda y: (y, y), ["output_0", "output_1"])])
def test_outputs_without_names(tmp_path, output, names):
    class Plain(nn.Linear):
        def forward(self, x):
            return output(super().forward(x))

    algorithm = trained(Plain(2, 2), lambda module: module(torch.ones(1, 2)))
    assert algorithm.save_inference_model(None, tmp_path, ["x"], None) == names
    assert torch.export.load(tmp_path / "model.pt2").module()(x=torch.ones(7, 2)).keys() == set(names)


@pytest.mark.parametrize(
    ("feeded", "targets", "words"),
    [
        (["ids", "y"], None, "feeded_var_names has 'y', the module was last called with ids, x"),
        (["x"], None, "feeded_var_names lacks 'ids'"),
        (["ids"], ["scores"], "target_vars has 'scores', the module returns score, logit"),
        (["ids"], [torch.ones(1)], "target_vars has a Tensor: write names"),
        (3, None, "feeded_var_names has a int: write names"),
    ],
)
def test_wrong_names(tmp_path, feeded, targets, words):
    algorithm = trained(Scores(), lambda module: module(*example(4)))
    with pytest.raises(ConfigError, match=words):
        algorithm.save_inference_model(None, tmp_path, feeded, targets)
    assert list(tmp_path.iterdir()) == []


def test_without_a_module_or_a_call(tmp_path):
    algorithm = CPUDistributedAlgorithm()
    algorithm.init()
    model = Scores()
    algorithm.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="there is no module to export"):
        algorithm.save_inference_model(None, tmp_path, None, None)
    with pytest.raises(ConfigError, match="main_program is a Scores that is not trained here"):
        algorithm.save_inference_model(None, tmp_path, None, None, model)
    algorithm.stop_worker()
    algorithm.init()
    algorithm.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), module=model)
    with pytest.raises(ConfigError, match="was not called yet"):
        algorithm.save_inference_model(None, tmp_path, None, None, model)


def test_what_cannot_be_exported(tmp_path):
    class Branch(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if y.sum() > 0 else -y

    algorithm = trained(Branch(2, 1), lambda module: module(torch.ones(3, 2)))
    with pytest.raises(CheckpointError, match="torch.export cannot follow the module"):
        algorithm.save_inference_model(None, tmp_path, None, None)
    assert list(tmp_path.iterdir()) == []


def test_rows_without_an_end_cannot_be_exported(tmp_path):
    model = nn.Sequential(SparseEmbedding(4, initializer="zeros"), nn.Linear(4, 1))
    algorithm = trained(model, lambda module: module(torch.ones(3, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="a SparseEmbedding has no fixed rows"):
        algorithm.save_inference_model(None, tmp_path, None, None)
