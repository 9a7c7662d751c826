"""Checkpoints that TensorFlow itself writes, read exactly; only where TensorFlow is installed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.variables.bank import read_step, read_variables
from plait.variables.tf_bundle import list_bundle, read_bundle

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1

TYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"]


def save(directory: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Save the default graph's variables, freshly initialised; returns the prefix and what TensorFlow says they are."""
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        values = session.run(named_variables())
        saver = v1.train.Saver()
        return Path(saver.save(session, str(directory / "model.ckpt"), global_step=1234)), values


def named_variables() -> dict[str, object]:
    """Each variable by its name in the checkpoint; a partitioned one whole."""
    whole: dict[str, object] = {}
    for variable in v1.global_variables():
        info = variable._get_save_slice_info()
        if info is None:
            whole[variable.op.name] = variable
        else:
            whole.setdefault(info.full_name, []).append(variable)
    for name, parts in [(name, parts) for name, parts in whole.items() if isinstance(parts, list)]:
        cut = next(i for i, n in enumerate(parts[0]._get_save_slice_info().full_shape) if n != parts[0].shape[i])
        whole[name] = tf.concat([part.read_value() for part in parts], cut)
    return whole


def equal(found: dict[str, torch.Tensor], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert str(found[name].dtype) == f"torch.{value.dtype}", name
        assert tuple(found[name].shape) == value.shape, name
        bits = found[name].reshape(-1).view(torch.uint8) if value.size else torch.empty(0)
        assert bits.numpy().tobytes() == value.tobytes(), name


@pytest.mark.parametrize("resource", [True, False])
def test_every_type_of_a_saver(tmp_path: Path, resource: bool):
    draw = np.random.default_rng(3)
    with tf.Graph().as_default():
        for kind in TYPES:
            start = tf.cast(draw.integers(0, 120, (3, 5)) * 1.0 if kind != "bool" else draw.random((3, 5)) > 0.5, kind)
            v1.get_variable(f"x/{kind}", initializer=start, use_resource=resource)
        v1.get_variable("scalar", initializer=tf.constant(-1.5), use_resource=resource)
        v1.get_variable("empty", initializer=tf.zeros((0, 3)), use_resource=resource)
        v1.train.get_or_create_global_step()
        prefix, values = save(tmp_path)
    equal(read_bundle(prefix), values)
    equal(read_bundle(tmp_path), values)
    assert read_step(prefix) == 0  # the step is 0 inside, whatever the file's name says


@pytest.mark.parametrize(
    ("shape", "axis", "pieces"), [((300, 5), 0, 3), ((4, 90), 1, 4), ((20000, 1), 0, 7), ((9,), 0, 2)]
)
def test_a_partitioned_variable(tmp_path: Path, shape: tuple[int, ...], axis: int, pieces: int):
    with tf.Graph().as_default():
        v1.get_variable(
            "net/cut",
            shape,
            initializer=v1.random_normal_initializer(seed=1),
            partitioner=v1.fixed_size_partitioner(pieces, axis),
        )
        v1.get_variable("net/whole", initializer=tf.range(3.0))
        prefix, values = save(tmp_path)
    assert len(list_bundle(prefix)["net/cut"].slices) == pieces
    equal(read_bundle(prefix), values)


def test_many_variables_with_optimizer_slots(tmp_path: Path):
    """Enough names for several blocks of the index's restarts, and the slots and averages of a training run."""
    with tf.Graph().as_default():
        names = [f"net/block{i // 30}/unit_{i}/conv/weights" for i in range(300)]
        weights = [v1.get_variable(name, (3, 3, 2, 4), use_resource=False) for name in names]
        loss = tf.add_n([tf.reduce_sum(w) for w in weights[:5]])
        step = v1.train.get_or_create_global_step()
        v1.train.AdamOptimizer().minimize(loss, step)
        tf.train.ExponentialMovingAverage(0.9).apply(weights[:5])
        v1.assign_add(step, 1)
        prefix, values = save(tmp_path)
    equal(read_bundle(prefix), values)
    turned = read_variables(prefix)
    for end in ("", "/Adam", "/Adam_1", "/ExponentialMovingAverage"):
        name = names[0] + end
        assert np.array_equal(turned[name].numpy(), values[name].transpose(3, 2, 0, 1))


def test_a_checkpoint_of_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    kernel, count = np.random.default_rng(0).normal(size=(3, 4)).astype("f4"), 5
    objects = tf.train.Checkpoint(net=tf.train.Checkpoint(kernel=tf.Variable(kernel)), count=tf.Variable(count))
    prefix = objects.save(str(tmp_path / "ckpt"))
    with caplog.at_level("INFO", "plait"):
        found = read_variables(prefix)
    assert "'_CHECKPOINTABLE_OBJECT_GRAPH' (string)" in caplog.text
    end = "/.ATTRIBUTES/VARIABLE_VALUE"
    assert set(found) == {f"net/kernel{end}", f"count{end}", f"save_counter{end}"}
    assert np.array_equal(found[f"net/kernel{end}"].numpy(), kernel.T)
    assert found[f"count{end}"].item() == count


def test_several_shards(tmp_path: Path):
    """Savers write a shard for each device and merge them."""
    values = [np.arange(4, dtype="f4"), np.ones((2, 2), "f8")]
    parts = [str(tmp_path / f"part-{i}") for i in range(2)]
    for i, (part, value) in enumerate(zip(parts, values, strict=True)):
        tf.raw_ops.SaveV2(prefix=part, tensor_names=[f"v{i}"], shape_and_slices=[""], tensors=[tf.constant(value)])
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(tmp_path / "m"))
    assert len(list(tmp_path.glob("m.data-*-of-00002"))) == 2
    equal(read_bundle(tmp_path / "m"), {"v0": values[0], "v1": values[1]})
