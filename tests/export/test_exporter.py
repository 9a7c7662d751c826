"""Exports give what the module gives, in every format and for every size of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from plait import nets
from plait.errors import CheckpointError, ConfigError
from plait.export import export, load, versions
from plait.export.formats import FORMATS, Format


class Logits(nn.Module):
    """A network with its logits only."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, images):
        return {"logits": self.net(images)[0]}


class Generator(nn.Module):
    """Of a GAN: pictures out of noise."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(16, 64 * 4 * 4)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(32, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise):
        return {"pictures": self.layers(self.dense(noise).view(-1, 64, 4, 4))}


def net(name, size):
    built = nets.build(name, 10, height=size, width=size)
    return Logits(built), {"images": torch.randn(4, nets.info(name).channels, size, size)}


def round_trip(module, inputs, folder):
    """Both formats against the module, which has seen a batch in training so that its norms are not the first ones."""
    with torch.no_grad():
        module.train()(**inputs)
    where = export(module, inputs, folder, formats=["torch", "onnx"])
    assert module.training
    loaded = {kind: load(where, format=kind) for kind in ("torch", "onnx")}
    assert loaded["onnx"].about["checked"].keys() == loaded.keys()
    module.eval()
    (name, example), *_ = inputs.items()
    for rows in (1, 3, 32):
        given = torch.randn(rows, *example.shape[1:], generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            ((output, expected),) = module(**{name: given}).items()
        for one in loaded.values():
            found = one.run({name: given.numpy()})[output]
            scale = expected.abs().max().item()
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5 * scale)
            assert (found.reshape(rows, -1).argmax(1) == expected.flatten(1).argmax(1).numpy()).all()


@pytest.mark.parametrize(("name", "size"), [("lenet", 28), ("resnet_v1_18", 32), ("mobilenet_v2", 32)])
def test_round_trips_of_networks(tmp_path, name, size):
    torch.manual_seed(0)
    round_trip(*net(name, size), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("resnet_v1_18", 224), ("mobilenet_v2", 224), ("inception_v3", 299), ("nasnet_mobile", 224)]
)
def test_round_trips_of_large_networks(tmp_path, name, size):
    torch.manual_seed(0)
    round_trip(*net(name, size), tmp_path)


def test_round_trip_of_a_generator(tmp_path):
    torch.manual_seed(0)
    round_trip(Generator(), {"noise": torch.randn(4, 16)}, tmp_path)


def test_what_is_in_a_version(tmp_path):
    module = nn.Linear(2, 3)
    facts = {"step": 7, "metrics": {"accuracy": 0.5}, "epsilon": 1.5, "preprocess": {"name": "lenet_preprocessing"}}
    where = export(module, {"input": torch.ones(1, 2)}, tmp_path, labels=["a", "b", "c"], facts=facts)
    assert where == tmp_path / "1"
    assert sorted(path.name for path in where.iterdir()) == ["labels.txt", "model.json", "model.pt2"]
    assert (where / "labels.txt").read_text() == "a\nb\nc\n"
    about = load(where).about
    assert about.items() >= facts.items()
    assert about["inputs"] == [{"name": "input", "dtype": "float32", "shape": [None, 2]}]
    assert about["outputs"] == [{"name": "output", "dtype": "float32", "shape": [None, 3]}]
    assert about["checked"] == {"torch": 0.0}
    assert export(module, {"input": torch.ones(1, 2)}, tmp_path, version="best") == tmp_path / "best"
    assert versions(tmp_path) == ["best", "1"]


class Untouched(nn.Module):
    def forward(self, x):
        pytest.fail("work was done")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "here"}, "has a version here already"),
        ({"formats": ["coreml"]}, "there is no format 'coreml'"),
        ({"labels": []}, "labels has"),
        ({"facts": {"loss": 1}}, "facts has 'loss'"),
        ({"inputs": {}}, "inputs is {}"),
        ({"inputs": {"x": [1.0]}}, "input 'x' is a list"),
        ({"inputs": {"not a name": torch.ones(1)}}, "inputs has the name 'not a name'"),
    ],
)
def test_mistakes_are_told_before_any_work(tmp_path, changes, words):
    (tmp_path / "here").mkdir()
    inputs = changes.pop("inputs", {"x": torch.ones(1)})
    with pytest.raises(ConfigError, match=words):
        export(Untouched(), inputs, tmp_path, **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_what_differs_from_the_module_is_not_published(tmp_path, monkeypatch):
    class Wrong(Format):
        def open_run(self, folder, about, threads):
            right = super().open_run(folder, about, threads)
            return lambda inputs: {name: value * 1.001 for name, value in right(inputs).items()}

    monkeypatch.setitem(FORMATS, "onnx", Wrong(module="plait.export.onnx"))
    with pytest.raises(CheckpointError, match="format 'onnx' gives another 'output'"):
        export(nn.Linear(2, 3), {"input": torch.ones(1, 2)}, tmp_path, formats=["torch", "onnx"])
    assert list(tmp_path.iterdir()) == []


def test_neither_the_module_nor_torchs_random_numbers_change(tmp_path):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before, state = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    export(module, {"input": torch.ones(1, 2)}, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(value.requires_grad for value in module.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_module_on_a_gpu_is_exported_for_cpus(tmp_path):
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).cuda()
    where = export(module, {"input": torch.ones(2, 3, 8, 8, device="cuda")}, tmp_path, formats=["torch", "onnx"])
    assert load(where, format="torch").about["checked"]["onnx"] < 1e-4
    assert next(module.parameters()).is_cuda
