"""A SavedModel gives what the module gives: all networks, with plait and with TensorFlow alone."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from plait import nets  # noqa: E402 - after it is known to be there
from plait.errors import CheckpointError, ConfigError  # noqa: E402 - same
from plait.export import export, load  # noqa: E402 - same
from plait.export.formats import FORMATS, Format  # noqa: E402 - same
from plait.nets.blocks import BatchNorm  # noqa: E402 - same
from plait.nets.normalise import normalise  # noqa: E402 - same

TOLERANCE = 1e-4
"""Of the largest output."""
MANY = {"lenet", "resnet_v1_18", "mobilenet_v2"}
"""The networks that are tried with 32 pictures, too."""


class Logits(nn.Module):
    """A network with its logits only."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, images):
        return {"logits": self.net(images)[0]}


def trained(module, example):
    """As if it had been trained: norms that fit the signal, but not quite, with scales and offsets of all kinds.

    What a residual unit adds is small beside what it passes on. With first weights it is not, and in networks of a
    hundred layers float32 then has no four digits, whoever calculates: torch itself is 8e-4 off float64 for
    resnet_v1_200.
    """
    norms = [one for one in module.modules() if isinstance(one, BatchNorm)]
    usual = [one.momentum for one in norms]
    for one in norms:
        one.momentum = 1.0
        for name, value in one.named_parameters():
            (value.data.uniform_(0.7, 1.3) if name == "gamma" else value.data.normal_(0, 0.1))
    for unit in (one for name, one in module.named_modules() if re.search(r"unit_\d+$", name)):
        scales = [
            value for name, value in unit.named_parameters() if re.search("^(?!.*shortcut).*(gamma|weights)$", name)
        ]
        scales[-1].data.mul_(0.3)
    with torch.no_grad():
        module.train()(example)
    for one, momentum in zip(norms, usual, strict=True):
        one.momentum = momentum
        one.moving_mean += 0.1 * one.moving_variance.sqrt() * torch.randn_like(one.moving_mean)
        one.moving_variance *= torch.empty_like(one.moving_variance).uniform_(0.8, 1.25)
    return module.eval()


def compared(module, loaded, name, images):
    """How far the two are apart. Where that is much, they have to be about as far from what float64 gives."""
    with torch.no_grad():
        expected = module(images)["logits"].numpy()
    found = loaded.run({name: images.numpy()})["logits"]
    apart = np.abs(found - expected).max() / np.abs(expected).max()
    if apart >= TOLERANCE:
        assert type(module) is Logits, f"{apart:.2g} with {len(images)} rows"
        with torch.no_grad():
            exact = copy.deepcopy(module.net).double()(images.double())[0].numpy()
        theirs, ours = (np.abs(one - exact).max() / np.abs(exact).max() for one in (found, expected))
        print(f"with {len(images)} rows {apart:.1e} apart; off float64: TensorFlow {theirs:.1e}, torch {ours:.1e}")
        assert theirs < 2 * ours, f"{apart:.2g} with {len(images)} rows: {theirs:.2g} off float64, torch {ours:.2g}"
    assert (found.argmax(1) == expected.argmax(1)).all()
    assert np.ptp(expected, axis=1).min() > 1e-3, "the logits are all alike: the test tests nothing"
    return apart


@pytest.mark.slow
@pytest.mark.parametrize("name", nets.NETS)
def test_all_networks(tmp_path, name):
    torch.manual_seed(0)
    facts = nets.info(name)
    shape = (facts.channels, facts.image_size, facts.image_size)
    module = trained(Logits(nets.build(name, 10)), torch.randn(4, *shape))
    where = export(module, {"images": torch.randn(2, *shape)}, tmp_path, formats=["tf"])
    loaded = load(where, format="tf")
    assert loaded.about["outputs"] == [{"name": "logits", "dtype": "float32", "shape": [None, 10]}]
    apart = [
        compared(module, loaded, "images", torch.randn(rows, *shape))
        for rows in ((1, 3, 32) if name in MANY else (1, 3))
    ]
    print(f"{name}: {max(apart):.1e} of the largest logit, {loaded.about['checked']['tf']:.1e} when it was exported")


class Pixels(Logits):
    """A network with what comes before it: pictures in bytes, resized and normalised."""

    def __init__(self, name, size):
        super().__init__(nets.build(name, 10, height=size, width=size))
        self.name, self.size = name, size

    def forward(self, pictures):
        x = pictures.float().permute(0, 3, 1, 2)
        x = nn.functional.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=False)
        x = normalise(x.permute(0, 2, 3, 1), nets.info(self.name).preprocessing)
        return super().forward(x.permute(0, 3, 1, 2))


@pytest.mark.parametrize(("name", "size"), [("cifarnet", 32), ("mobilenet_v1_025", 64), ("resnet_v1_20", 32)])
def test_from_pixels_to_logits(tmp_path, name, size):
    torch.manual_seed(0)
    pictures = torch.randint(256, (4, 40, 50, 3), dtype=torch.uint8)
    module = trained(Pixels(name, size), pictures)
    loaded = load(export(module, {"pictures": pictures}, tmp_path, formats=["tf"]))
    compared(module, loaded, "pictures", torch.randint(256, (3, 40, 50, 3), dtype=torch.uint8))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids, x, scale):
        hidden = self.norm(self.table(ids).sum(1) + x) * scale
        return {"score": hidden.softmax(1), "top": hidden.argmax(1), "x": x, "any/name at all": hidden.sum(1) > 0}


def several():
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(10, (4, 3)), "x": torch.randn(4, 4), "scale": torch.tensor(2.0)}
    return Several().eval(), inputs


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    module, inputs = several()
    return export(module, inputs, tmp_path_factory.mktemp("exports"), formats=["torch", "tf"], labels=list("abcd"))


def test_several_inputs_and_outputs(where):
    module, inputs = several()
    loaded = load(where, format="tf")
    expected = {name: value.detach().numpy() for name, value in module(**inputs).items()}
    found = loaded.run({name: value.numpy() for name, value in inputs.items()})
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


PLAIN = """
import sys
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
serve = model.signatures["serving_default"]
_, inputs = serve.structured_input_signature
print(sorted((one.name, one.shape.as_list(), one.dtype.name) for one in inputs.values()))
found = serve(ids=tf.zeros([5, 3], tf.int64), x=tf.ones([5, 4]), scale=tf.constant(2.0))
print(sorted((name, one.shape.as_list(), one.dtype.name) for name, one in found.items()))
print(not {"plait", "torch"} & set(sys.modules), bool(np.isclose(found["score"].numpy().sum(), 5)))
"""


def test_tensorflow_alone_opens_it(where):
    done = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN, str(where)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "[('ids', [None, 3], 'int64'), ('scale', [], 'float32'), ('x', [None, 4], 'float32')]",
        "[('any/name at all', [5], 'bool'), ('score', [5, 4], 'float32'), ('top', [5], 'int64'), ('x', [5, 4], 'float32')]",  # noqa: E501 - as it is printed
        "True True",
    ]


ELSEWHERE = """
import sys
import tensorflow as tf
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
print(serve(input=tf.ones([3, 4, 8, 8]))["output"].numpy().tobytes().hex())
"""


def test_machines_that_have_other_kernels(tmp_path):
    """Without oneDNN, TensorFlow calculates as it does on machines for which it has none: it can do less there."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, dilation=2, stride=(1, 2), padding=1),
        nn.ReLU6(),
        nn.Conv2d(8, 4, 3, groups=4, padding=1),
        nn.MaxPool2d(2, padding=1, ceil_mode=True),
    ).eval()
    where = export(module, {"input": torch.ones(2, 4, 8, 8)}, tmp_path, formats=["tf"])
    done = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, str(where)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = module(torch.ones(3, 4, 8, 8)).detach().numpy()
    found = np.frombuffer(bytes.fromhex(done.stdout.strip()), np.float32).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_what_is_in_it(where):
    files = {path.relative_to(where).as_posix() for path in where.rglob("*") if path.is_file()}
    assert files >= {"saved_model.pb", "variables/variables.index", "model.pt2", "labels.txt"}
    assert load(where, format="tf").about["files"].keys() == files - {"model.json"}
    names = {name for name, _ in tf.train.list_variables(str(where / "variables" / "variables"))}
    assert "weights/table..weight/.ATTRIBUTES/VARIABLE_VALUE" in names
    for path in (where / "saved_model.pb", where / "variables" / "variables.index"):
        written = path.read_bytes()
        assert b"site-packages" not in written, "the file tells where somebody's sources are"
        assert b".py" not in written


def test_threads_share_it(where):
    _, inputs = several()
    given, run, found = {name: value.numpy() for name, value in inputs.items()}, load(where, format="tf").run, []
    threads = [threading.Thread(target=lambda: found.extend(run(given)["score"] for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all((one == found[0]).all() for one in found)


THREADS = """
import sys
from plait.errors import ConfigError
from plait.export import load
load(sys.argv[1], format="tf", threads=1)
load(sys.argv[1], format="tf", threads=1)
try:
    load(sys.argv[1], format="tf", threads=2)
except ConfigError as error:
    print(error)
"""


def test_the_number_of_threads_is_set_once(where):
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(where)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "threads is 2, but TensorFlow has worked in this process with 1 threads" in done.stdout


class Sum(nn.Module):
    def forward(self, name, _hidden):
        return name + _hidden


def test_names_of_inputs(tmp_path):
    where = export(nn.Linear(2, 3), {"input": torch.ones(1, 2)}, tmp_path, formats=["tf"])
    assert load(where).run({"input": np.ones((5, 2), np.float32)})["output"].shape == (5, 3)
    with pytest.raises(ConfigError, match="no inputs with a name like '_hidden'"):
        export(Sum(), {"name": torch.ones(2), "_hidden": torch.ones(2)}, tmp_path, formats=["tf"])


class Bare(nn.Module):
    """Without weights, with an input that it does not need and an output that is an input."""

    def forward(self, x, labels):
        return {"x": x, "double": 2 * x}


def test_a_module_without_weights(tmp_path):
    inputs = {"x": torch.randn(2, 3), "labels": torch.zeros(2, dtype=torch.int64)}
    loaded = load(export(Bare(), inputs, tmp_path, formats=["tf"]))
    x = np.ones((4, 3), np.float32)
    found = loaded.run({"x": x, "labels": np.zeros(4, np.int64)})
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["double"], 2 * x)


class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.modified_bessel_i1(x)


def test_an_operator_that_is_not_known_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Format, "write", lambda *given: pytest.fail("something was written"))
    with pytest.raises(
        ConfigError, match=r"no operator aten.special_modified_bessel_i1.default.*'torch' carries every"
    ):
        export(Bessel(), {"x": torch.ones(2, 3)}, tmp_path, formats=["torch", "tf"])
    assert list(tmp_path.iterdir()) == []


def test_what_differs_from_the_module_is_not_published(tmp_path, monkeypatch):
    class Wrong(Format):
        def open_run(self, folder, about, threads):
            right = super().open_run(folder, about, threads)
            return lambda inputs: {name: value * np.float32(1.002) for name, value in right(inputs).items()}

    monkeypatch.setitem(FORMATS, "tf", Wrong(module="plait.export.savedmodel"))
    with pytest.raises(CheckpointError, match="format 'tf' gives another 'output'"):
        export(nn.Linear(2, 3), {"input": torch.ones(1, 2)}, tmp_path, formats=["tf"])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
    def full(*given, **more):
        raise OSError("No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", full)
    with pytest.raises(CheckpointError, match=r"TensorFlow cannot write this module: No space left on device"):
        export(nn.Linear(2, 3), {"input": torch.ones(1, 2)}, tmp_path, formats=["tf"])
