"""Known data sets, a few pictures of each, written here in their layouts."""

from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from plait.data import layouts
from plait.data.folders import (
    ImageClassificationRawMetadata,
    ImageClassificationTFRecordMetadata,
    split_image_classification_dataset,
)
from plait.data.labels import write_labels
from plait.data.layouts import get_dataset_meta, read_layout
from plait.data.tfrecord import TFRecordWriter
from plait.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("name", "sizes", "classes", "shape"),
    [
        ("mnist", (60_000, 10_000), 10, (28, 28, 1)),
        ("cifar10", (50_000, 10_000), 10, (32, 32, 3)),
        ("flowers", (3_320, 350), 5, (None, None, 3)),
        ("imagenet", (1_281_167, 50_000), 1001, (None, None, 3)),
    ],
)
def test_what_is_known(name, sizes, classes, shape):
    meta = get_dataset_meta(name)
    split_name_train, split_name_eval = meta.splits_to_sizes.keys()
    assert (split_name_train, split_name_eval) == ("train", "eval")
    assert tuple(meta.splits_to_sizes.values()) == sizes
    assert (meta.name, meta.num_classes, meta.image_shape) == (name, classes, shape)
    assert len(meta.labels_to_names) == (1 if name == "imagenet" else classes)


def test_what_is_known_is_everybodys_own():
    get_dataset_meta("mnist").splits_to_sizes["train"] = 1
    assert get_dataset_meta("mnist").splits_to_sizes["train"] == 60_000


def test_unknown_names(tmp_path):
    with pytest.raises(ConfigError, match="'minst' is unknown: write one of cifar10, flowers, imagenet, mnist"):
        get_dataset_meta("minst")
    with pytest.raises(ConfigError, match=r"mnist has no split 'dev': write one of \['train', 'eval'\]"):
        read_layout("mnist", "dev", tmp_path)


# mnist


def idx(values):
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


IMAGES = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
LABELS = np.array([3, 1, 4, 1, 9], np.uint8)


def write_mnist(base, images=None, labels=None, part="t10k", end="", dash="-"):
    pack = gzip.compress if end else bytes
    images, labels = idx(IMAGES) if images is None else images, idx(LABELS) if labels is None else labels
    Path(base, f"{part}-images{dash}idx3-ubyte{end}").write_bytes(pack(images))
    Path(base, f"{part}-labels{dash}idx1-ubyte{end}").write_bytes(pack(labels))


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("dash", ["-", "."])
@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("eval", "t10k"), ("test", "t10k")])
def test_mnist(tmp_path, end, dash, split, part):
    write_mnist(tmp_path, part=part, end=end, dash=dash)
    images, labels = read_layout("mnist", split, tmp_path)
    assert images.shape == (5, 28, 28, 1)
    assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
    assert (images[..., 0] == IMAGES).all()
    assert labels.tolist() == LABELS.tolist()
    assert images.flags.writeable


def test_another_number_of_pictures_is_said(tmp_path, caplog):
    write_mnist(tmp_path)
    read_layout("mnist", "eval", tmp_path)
    assert "has 5 pictures; eval of mnist has 10000" in caplog.text


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize(
    ("images", "said"),
    [
        (b"", "ends 16 bytes too early"),
        (idx(IMAGES)[:10], "ends 6 bytes too early"),
        (idx(IMAGES)[:-1], "too early|3935 bytes, its header says 3936"),
        (idx(IMAGES) + b"x", "goes on after|3937 bytes, its header says 3936"),
        (idx(LABELS) + bytes(16), "begins with 00 00 08 01, an idx3-ubyte file with 00 00 08 03"),
        (b"\0\0\x0d\x03" + idx(IMAGES)[4:], "begins with 00 00 0d 03"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), r"its shape is \[4294967295"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0, 28, 28), "its shape is"),
        (idx(IMAGES.reshape(5, 14, 56)), "are 14x56, those of mnist are 28x28"),
        (idx(IMAGES[:4]), "has 4 pictures and 5 labels for t10k"),
    ],
)
def test_damaged_pictures_of_mnist(tmp_path, end, images, said):
    write_mnist(tmp_path, images=images, end=end)
    with pytest.raises(DataError, match=said):
        read_layout("mnist", "eval", tmp_path)


def test_damaged_labels_of_mnist(tmp_path):
    write_mnist(tmp_path, labels=idx(np.array([0, 1, 10, 2, 3])))
    with pytest.raises(DataError, match="the label of picture 2 is 10, but mnist has 10 classes"):
        read_layout("mnist", "eval", tmp_path)


def test_damaged_compression(tmp_path):
    write_mnist(tmp_path, end=".gz")
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for data in [whole[:-20], b"no gzip" + whole, whole[:40] + b"\xff" * 40 + whole[80:], whole + b"x"]:
        path.write_bytes(data)
        with pytest.raises(DataError, match="gzip|damaged"):
            read_layout("mnist", "eval", tmp_path)


@pytest.mark.alone
@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_header_takes_no_memory_that_the_file_does_not_fill(tmp_path, end):
    write_mnist(tmp_path, images=struct.pack(">4B3I", 0, 0, 8, 3, 1_000_000, 28, 28) + bytes(1000), end=end)
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            read_layout("mnist", "eval", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_mnist_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="neither 'train-images-idx3-ubyte' nor 'train-images-idx3-ubyte.gz'"):
        read_layout("mnist", "train", tmp_path)
    with pytest.raises(DataError, match="neither"):
        read_layout("mnist", "train", tmp_path / "none")


def test_broken_files_of_mnist_give_pictures_or_a_data_error(tmp_path):
    rng, whole, errors = random.Random(0), idx(IMAGES), 0
    packed = gzip.compress(whole)
    write_mnist(tmp_path)
    plain = tmp_path / "t10k-images-idx3-ubyte"
    for turn in range(400):
        data = bytearray(packed if turn % 2 else whole)
        place = rng.randrange(40 if turn % 4 < 2 else len(data))
        if rng.random() < 0.3:
            del data[place : place + rng.randint(1, 9)]
        else:
            data[place] ^= 1 << rng.randrange(8)
        plain.unlink(missing_ok=True)
        (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(data) if turn % 2 else plain.write_bytes(data)
        try:
            assert read_layout("mnist", "eval", tmp_path).images.shape == (5, 28, 28, 1)
        except DataError:
            errors += 1
    assert errors > 150


# cifar10


def cifar_batch(count, seed):
    rng = np.random.default_rng(seed)
    labels, images = rng.integers(0, 10, (count, 1), np.uint8), rng.integers(0, 256, (count, 3, 32, 32), np.uint8)
    return labels[:, 0], images, np.concatenate([labels, images.reshape(count, -1)], axis=1).tobytes()


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_cifar10(tmp_path, folder):
    base = tmp_path / folder
    base.mkdir(exist_ok=True)
    batches = [cifar_batch(3, number) for number in range(12)]
    for number, (_, _, data) in enumerate(batches[1:], 1):
        (base / f"data_batch_{number}.bin").write_bytes(data)
    (base / "test_batch.bin").write_bytes(batches[0][2])
    images, labels = read_layout("cifar10", "train", tmp_path)
    assert images.shape == (33, 32, 32, 3)
    assert labels.tolist() == np.concatenate([batch[0] for batch in batches[1:]]).tolist()
    assert (images.transpose(0, 3, 1, 2) == np.concatenate([batch[1] for batch in batches[1:]])).all()
    assert (images.dtype, labels.dtype, images.flags.c_contiguous) == (np.uint8, np.int64, True)
    images, labels = read_layout("cifar10", "eval", tmp_path)
    assert labels.tolist() == batches[0][0].tolist()


def test_cifar10_that_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="is no directory"):
        read_layout("cifar10", "train", tmp_path / "none")
    with pytest.raises(DataError, match=r"lacks some of data_batch_1\.bin"):
        read_layout("cifar10", "train", tmp_path)
    with pytest.raises(DataError, match=r"lacks some of test_batch\.bin"):
        read_layout("cifar10", "eval", tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match="lacks some"):
        read_layout("cifar10", "train", tmp_path)
    for data in [b"", bytes(3072), bytes(3074)]:
        (tmp_path / "test_batch.bin").write_bytes(data)
        with pytest.raises(DataError, match="not a whole number of pictures of 3073 bytes"):
            read_layout("cifar10", "eval", tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"\x0a" + bytes(3072))
    with pytest.raises(DataError, match="the label of picture 0 is 10"):
        read_layout("cifar10", "eval", tmp_path)
    monkeypatch.setattr(layouts, "MAX_LAYOUT_BYTES", 3072)
    with pytest.raises(DataError, match="at most 3072 are read"):
        read_layout("cifar10", "eval", tmp_path)


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-py"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_python_version_of_cifar10_is_refused(tmp_path, folder, split):
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in ["data_batch_1", "test_batch", "batches.meta"]:
        (tmp_path / folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(DataError, match=r"can run any program.*binary version.*cifar-10-binary\.tar\.gz"):
        read_layout("cifar10", split, tmp_path)


# flowers and imagenet


def write_records(base, name, count=1):
    with TFRecordWriter(base / name) as writer:
        for number in range(count):
            writer.write(bytes([number]))


def test_flowers_as_records(tmp_path):
    for number in range(5):
        write_records(tmp_path, f"flowers_train_{number:05}-of-00005.tfrecord", 2)
        write_records(tmp_path, f"flowers_validation_{number:05}-of-00005.tfrecord")
    metadata = read_layout("flowers", "train", tmp_path)
    assert isinstance(metadata, ImageClassificationTFRecordMetadata)
    assert [Path(url).name[:19] for url in metadata.files] == [f"flowers_train_{number:05}" for number in range(5)]
    assert metadata.num_samples == 10
    assert metadata.labels_list == ["daisy", "dandelion", "roses", "sunflowers", "tulips"]
    assert read_layout("flowers", "eval", tmp_path).num_samples == 5
    write_labels(tmp_path / "labels.txt", ["e", "d", "c", "b", "a"])
    assert read_layout("flowers", "train", tmp_path).labels_list == ["e", "d", "c", "b", "a"]


def test_imagenet_as_records(tmp_path):
    for number in range(3):
        write_records(tmp_path, f"train-{number:05}-of-00003")
    write_records(tmp_path, "validation-00000-of-00001", 2)
    write_records(tmp_path, "train-notes", 2)
    metadata = read_layout("imagenet", "train", tmp_path)
    assert metadata.names == [f"train-{number:05}-of-00003" for number in range(3)]
    assert (metadata.num_classes, metadata.num_samples) == (1001, 3)
    assert read_layout("imagenet", "validation", tmp_path).num_samples == 2


def test_files_of_records_that_are_missing_are_named(tmp_path):
    for number in [0, 2, 3]:
        write_records(tmp_path, f"train-{number:05}-of-00005")
    with pytest.raises(DataError, match=r"3 files 'train-\.\.\.' of 5; missing are the numbers \[1, 4\]"):
        read_layout("imagenet", "train", tmp_path)
    for number in [1, 4]:
        write_records(tmp_path, f"train-{number:05}-of-00005")
    read_layout("imagenet", "train", tmp_path)
    write_records(tmp_path, "train-00000-of-00001")
    with pytest.raises(DataError, match="of 1 or 5"):
        read_layout("imagenet", "train", tmp_path)


def fill(base, *names):
    for name in names:
        path = Path(base, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_flowers_as_folders(tmp_path, caplog):
    kinds = list(get_dataset_meta("flowers").labels_to_names.values())
    fill(tmp_path / "all", *[f"{kind}/{number}.jpg" for kind in kinds for number in range(4)])
    with pytest.raises(DataError, match="split_image_classification_dataset makes such folders"):
        read_layout("flowers", "train", tmp_path / "all")
    split_image_classification_dataset("train:0.75,validation:0.25", tmp_path / "all", tmp_path / "split")
    metadata = read_layout("flowers", "train", tmp_path / "split")
    assert isinstance(metadata, ImageClassificationRawMetadata)
    assert metadata.labels_list == kinds
    assert metadata.num_samples == 15
    assert read_layout("flowers", "eval", tmp_path / "split").num_samples == 5
    assert not caplog.records


def test_imagenet_as_folders_begins_at_one(tmp_path, caplog):
    fill(tmp_path, "train/n02/a.JPEG", "train/n01/b.JPEG", "val/n01/c.JPEG", "val/n02/d.JPEG")
    metadata = read_layout("imagenet", "train", tmp_path)
    assert metadata.names == ["n01/b.JPEG", "n02/a.JPEG"]
    assert metadata.labels.tolist() == [1, 2]
    assert metadata.labels_to_names == {0: "background", 1: "n01", 2: "n02"}
    assert metadata.names_to_labels["n02"] == 2
    assert metadata.num_classes == 3
    assert "has 3 classes; imagenet has 1001" in caplog.text
    assert read_layout("imagenet", "eval", tmp_path).labels.tolist() == [1, 2]


def test_splits_that_number_different_classes(tmp_path):
    fill(tmp_path, "train/n01/a.jpg", "train/n02/a.jpg", "eval/n02/a.jpg")
    with pytest.raises(DataError, match=r"do not number the same classes: \['n01'\] are only in one"):
        read_layout("imagenet", "eval", tmp_path)
    (tmp_path / "eval/n01").mkdir()
    assert read_layout("imagenet", "eval", tmp_path).labels.tolist() == [2]
    write_labels(tmp_path / "train/labels.txt", ["n02", "n01"])
    with pytest.raises(DataError, match=r"their labels\.txt differ, or only one has it"):
        read_layout("imagenet", "eval", tmp_path)


def test_of_several_folders_for_the_second_split_the_one_asked_for_is_taken(tmp_path):
    fill(tmp_path, "test/a/1.jpg", "validation/a/2.jpg")
    assert read_layout("flowers", "test", tmp_path).names == ["a/1.jpg"]
    assert read_layout("flowers", "eval", tmp_path).names == ["a/2.jpg"]
    with pytest.raises(DataError, match="nor a folder 'train' with"):
        read_layout("flowers", "train", tmp_path)
