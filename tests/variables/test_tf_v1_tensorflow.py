"""Checkpoints of the older kind that TensorFlow itself writes, read exactly; only where TensorFlow is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.variables.bank import read_step, read_variables
from plait.variables.tf_v1 import list_v1, read_v1

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1

SPEC = importlib.util.spec_from_file_location("v1_writer", Path(__file__).with_name("v1_writer.py"))
writer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writer)

TYPES = ["float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool"]
"""TensorFlow saves no bfloat16 this way."""


def save(directory: Path, *, sharded: bool = False) -> tuple[Path, dict[str, np.ndarray]]:
    """Save the default graph's variables, freshly initialised; returns the path and what TensorFlow says they are."""
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        values = session.run({variable.op.name: variable for variable in v1.global_variables()})
        saver = v1.train.Saver(write_version=v1.train.SaverDef.V1, sharded=sharded)
        return Path(saver.save(session, str(directory / "model.ckpt"), global_step=1234)), values


def equal(found: dict[str, torch.Tensor], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert str(found[name].dtype) == f"torch.{value.dtype}", name
        assert tuple(found[name].shape) == value.shape, name
        bits = found[name].reshape(-1).view(torch.uint8) if value.size else torch.empty(0)
        assert bits.numpy().tobytes() == value.tobytes(), name


def every_type(resource: bool = True) -> None:
    draw = np.random.default_rng(3)
    for kind in TYPES:
        low = 0 if kind == "uint8" else -120
        start = tf.cast(draw.integers(low, 120, (3, 5)) * 1.0 if kind != "bool" else draw.random((3, 5)) > 0.5, kind)
        v1.get_variable(f"x/{kind}", initializer=start, use_resource=resource)
    v1.get_variable("scalar", initializer=tf.constant(-1.5), use_resource=resource)
    v1.get_variable("empty", initializer=tf.zeros((0, 3)), use_resource=resource)
    v1.get_variable("wide", initializer=tf.constant([-(2**63), 2**63 - 1, 2**35]), use_resource=resource)
    v1.train.get_or_create_global_step()


@pytest.mark.parametrize("resource", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_every_type_of_a_saver(tmp_path: Path, resource: bool, sharded: bool):
    with tf.Graph().as_default():
        every_type(resource)
        path, values = save(tmp_path, sharded=sharded)
    assert ("?????" in path.name) == sharded
    equal(read_v1(path), values)
    equal(read_v1(tmp_path), values)
    assert read_step(path) == 0  # the step is 0 inside, whatever the file's name says


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
        path, values = save(tmp_path)
    parts = [values.pop(f"net/cut/part_{i}") for i in range(pieces)]
    equal(read_v1(path), values | {"net/cut": np.concatenate(parts, axis)})


def test_devices_that_write_a_file_each(tmp_path: Path):
    values = {"a": np.arange(4, dtype="f4"), "b": np.ones((2, 2), "f8")}
    for number, (name, value) in enumerate(values.items()):
        file = tmp_path / f"m-{number:05d}-of-00002"
        tf.raw_ops.Save(filename=str(file), tensor_names=[name], data=[tf.constant(value)])
    equal(read_v1(tmp_path / "m"), values)


def test_a_network_with_optimizer_slots(tmp_path: Path):
    """Weights that are many blocks, some larger than a block, and small ones between them."""
    with tf.Graph().as_default():
        names = [f"net/block{i // 30}/unit_{i}/conv/weights" for i in range(120)]
        weights = [v1.get_variable(name, (3, 3, 8, 16), use_resource=False) for name in names]
        weights.append(v1.get_variable("net/fc/weights", (1000, 300), use_resource=False))
        v1.train.AdamOptimizer().minimize(tf.add_n([tf.reduce_sum(w) for w in weights[-5:]]))
        path, values = save(tmp_path)
    equal(read_v1(path), values)
    assert list_v1(path).keys() == values.keys()
    turned = read_variables(path)
    for name in ("net/fc/weights", "net/fc/weights/Adam_1"):
        assert np.array_equal(turned[name].numpy(), values[name].T)
    assert np.array_equal(turned[names[0]].numpy(), values[names[0]].transpose(3, 2, 0, 1))


@pytest.mark.parametrize("compress", [False, True])
def test_tensorflow_reads_what_the_tests_write(tmp_path: Path, compress: bool):
    """So that the files of the other tests, above all the compressed ones, are what TensorFlow would write."""
    draw = np.random.default_rng(5)
    tensors = {f"x/{kind}": torch.from_numpy(draw.integers(0, 2, (6, 50)).astype(kind)) for kind in TYPES}
    tensors["scalar"] = torch.tensor(7)
    file = writer.write_v1(tmp_path / "m.ckpt", tensors, compress=compress)
    with tf.Graph().as_default(), v1.Session() as session:
        for name, tensor in tensors.items():
            dtype = getattr(tf, str(tensor.dtype).removeprefix("torch."))
            restored = session.run(tf.raw_ops.Restore(file_pattern=str(file), tensor_name=name, dt=dtype))
            assert np.array_equal(restored, tensor.numpy()), name
