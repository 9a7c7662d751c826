"""TF-Slim's own networks and ours, with the same weights out of one checkpoint; only where TensorFlow is installed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from plait import nets
from plait.variables import bank
from plait.variables.tf_v1 import is_v1

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # TF-Slim's layers are those of Keras 2
tf = pytest.importorskip("tensorflow")
pytest.importorskip("tf_slim")
tf_keras = pytest.importorskip("tf_keras")
# tf-keras has moved what TensorFlow still looks for under the old name
for part in ("", ".normalization"):
    sys.modules.setdefault(
        f"tf_keras.legacy_tf_layers{part}", importlib.import_module(f"tf_keras.src.legacy_tf_layers{part}")
    )
import tf_slim as slim  # noqa: E402 - after it is known to be there
from tf_slim.nets import alexnet, inception, overfeat, resnet_v1, resnet_v2, vgg  # noqa: E402 - same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*layer.apply. is deprecated:UserWarning"),  # TF-Slim's calls, not ours
]

v1 = tf.compat.v1
CLASSES = 10
TOLERANCE = 1e-4
"""Of the largest number in a tensor: float32, summed in another order, through up to a hundred layers."""

SLIM = {
    "alexnet_v2": (alexnet.alexnet_v2, alexnet.alexnet_v2_arg_scope, 224),
    "inception_v1": (inception.inception_v1, inception.inception_v1_arg_scope, 224),
    "inception_v2": (inception.inception_v2, inception.inception_v2_arg_scope, 224),
    "inception_v3": (inception.inception_v3, inception.inception_v3_arg_scope, 299),
    "overfeat": (overfeat.overfeat, overfeat.overfeat_arg_scope, 231),
    "resnet_v1_50": (resnet_v1.resnet_v1_50, resnet_v1.resnet_arg_scope, 224),
    "resnet_v2_50": (resnet_v2.resnet_v2_50, resnet_v2.resnet_arg_scope, 224),
    "vgg_16": (vgg.vgg_16, vgg.vgg_arg_scope, 224),
}


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, list[float]]]:
    """How far each network is from TensorFlow's: its logits, then the end points compared; shown when all have run."""
    found: dict[str, list[float]] = {}
    yield found
    lines = [f"largest difference from TensorFlow / largest number (allowed: {TOLERANCE:.0e})"]
    for name, (logits, *maps) in found.items():
        points = f"  {len(maps):3} end points {max(maps):.1e}" if maps else ""
        lines.append(f"  {name:26} logits {logits:.1e}{points}")
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")


def pictures(size: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2, size, size, 3)).astype(np.float32)


def values_for(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Weights that keep the scale from layer to layer, and statistics and biases that are not what they begin with."""
    leaf = name.rpartition("/")[2]
    if leaf in ("moving_variance", "gamma"):
        found = draw.uniform(0.5, 1.5, shape)
    elif leaf in ("weights", "depthwise_weights", "kernel", "depthwise_kernel"):
        inputs = np.prod(shape[:2]) if leaf.startswith("depthwise") else np.prod(shape[:-1])
        found = draw.normal(size=shape) * np.sqrt(2 / inputs)
    else:
        found = draw.normal(size=shape) * 0.1
    return found.astype(np.float32)


def run_slim(
    name: str, images: np.ndarray, directory: Path, version: int = v1.train.SaverDef.V2
) -> tuple[str, np.ndarray, dict[str, np.ndarray]]:
    """Save TF-Slim's network with random weights; returns the checkpoint, the logits and the end points."""
    function, scope, _ = SLIM[name]
    draw = np.random.default_rng(2)
    with tf.Graph().as_default(), v1.Session() as session:
        with slim.arg_scope(scope()):
            logits, end_points = function(tf.constant(images), CLASSES, is_training=False)
        for variable in v1.global_variables():
            variable.load(values_for(variable.op.name, tuple(variable.shape), draw), session)
        maps = {key: value for key, value in end_points.items() if value.shape.rank == 4}
        logits, maps = session.run([logits, maps])
        checkpoint = v1.train.Saver(write_version=version).save(session, str(directory / "model.ckpt"), global_step=1)
    return checkpoint, logits.reshape(len(images), CLASSES), maps  # some keep their logits as a map of 1x1


def run_ours(name: str, images: np.ndarray, checkpoint: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    net = nets.build(name, CLASSES, height=images.shape[1], width=images.shape[2]).eval()
    live = {f"{net.scope}/{path.replace('.', '/')}": value for path, value in net.state_dict(keep_vars=True).items()}
    matches = bank.match([{"load": ["*"], "exclude": [], "path": checkpoint}], live)
    assert [found.name for found in matches if found.status != "matched"] == []
    assert set(bank.read_variables(checkpoint)) - set(live) <= {"global_step"}
    bank.apply(matches, live)
    with torch.no_grad():
        return net(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous())


def distance(ours: torch.Tensor, theirs: np.ndarray) -> float:
    """The largest difference, relative to the largest number."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours.numpy() - theirs).max() / np.abs(theirs).max())


def check_logits(found: float, ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert distance(ours[:1], theirs[1:]) > 10 * TOLERANCE  # the two pictures can be told apart
    assert found < TOLERANCE


@pytest.mark.parametrize("name", SLIM)
def test_slims_weights_give_slims_logits(name: str, tmp_path: Path, figures: dict[str, list[float]]):
    images = pictures(SLIM[name][2])
    checkpoint, logits, maps = run_slim(name, images, tmp_path)
    ours, end_points = run_ours(name, images, checkpoint)
    shared = [key for key in maps if key in end_points and end_points[key].ndim == 4]
    assert shared
    points = {key: distance(end_points[key].permute(0, 2, 3, 1), maps[key]) for key in shared}
    figures[name] = [distance(ours, logits), *points.values()]
    check_logits(figures[name][0], ours, logits)
    assert {key: found for key, found in points.items() if not found < TOLERANCE} == {}


def test_a_checkpoint_of_the_older_kind_gives_the_same_logits(tmp_path: Path, figures: dict[str, list[float]]):
    images = pictures(SLIM["inception_v1"][2])
    checkpoint, logits, _ = run_slim("inception_v1", images, tmp_path, v1.train.SaverDef.V1)
    assert is_v1(Path(checkpoint))
    ours, _ = run_ours("inception_v1", images, checkpoint)
    figures["inception_v1, older kind"] = [distance(ours, logits)]
    check_logits(figures["inception_v1, older kind"][0], ours, logits)


def slim_name(layer: str, leaf: str) -> str:
    """What TF-Slim calls a variable of Keras's MobileNetV2."""
    ends = {"kernel": "weights", "depthwise_kernel": "depthwise_weights", "bias": "biases"}
    normal = layer.endswith(("_BN", "_bn")) or layer == "bn_Conv1"
    layer = layer.removesuffix("_BN").removesuffix("_bn").removeprefix("bn_")
    whole = {"Conv1": "Conv", "Conv_1": "Conv_1", "predictions": "Logits/Conv2d_1c_1x1"}
    if layer not in whole:
        block, _, part = layer.rpartition("_")
        number = block.removeprefix("block_") if block.startswith("block_") else ""
        whole[layer] = f"expanded_conv{'_' + number if number else ''}/{part}"
    return f"MobilenetV2/{whole[layer]}/{'BatchNorm/' if normal else ''}{ends.get(leaf, leaf)}"


def test_the_mobilenet_v2_of_keras_gives_the_same_logits(tmp_path: Path, figures: dict[str, list[float]]):
    """TF-Slim's package lacks this network; Keras has it, under other names."""
    draw = np.random.default_rng(4)
    images = pictures(64)
    theirs = tf_keras.applications.MobileNetV2((64, 64, 3), weights=None, classes=CLASSES, classifier_activation=None)
    saved = {}
    for layer in theirs.layers:
        leaves = [weight.name.split("/")[-1].split(":")[0] for weight in layer.weights]
        values = [
            values_for(leaf, tuple(weight.shape), draw) for leaf, weight in zip(leaves, layer.weights, strict=True)
        ]
        layer.set_weights(values)
        saved |= {slim_name(layer.name, leaf): value for leaf, value in zip(leaves, values, strict=True)}
    dense = "MobilenetV2/Logits/Conv2d_1c_1x1/weights"
    saved[dense] = saved[dense][None, None]
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "model.ckpt"),
        tensor_names=list(saved),
        shape_and_slices=[""] * len(saved),
        tensors=[tf.constant(value) for value in saved.values()],
    )
    logits = theirs(images, training=False).numpy()
    ours, _ = run_ours("mobilenet_v2", images, str(tmp_path / "model.ckpt"))
    figures["mobilenet_v2"] = [distance(ours, logits)]
    check_logits(figures["mobilenet_v2"][0], ours, logits)
