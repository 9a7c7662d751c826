"""Data sets of pictures on a real S3 server, started here: read by threads, by processes, and from copies."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import numpy as np
import pytest

from plait.data import files
from plait.data.datasets import column_source
from plait.data.example import make_example
from plait.data.folder_sets import ImageClassificationRawDataset, MultilabelClassificationRawDataset
from plait.data.folders import (
    ImageClassificationRawMetadata,
    ImageClassificationTFRecordMetadata,
    MultilabelClassificationRawMetadata,
)
from plait.data.pictures import encode_png
from plait.data.raw import AsyncRawGenerator
from plait.data.record_sets import ImageClassificationTFRecordDataset, get_dataset
from plait.data.tfrecord import TFRecordWriter
from plait.errors import DataError

from .s3_server import *  # noqa: F403 - fixtures
from .s3_server import KEYS


def picture(number):
    return encode_png(np.full((4, 4, 3), number, np.uint8))


@pytest.fixture
def folder(bucket):
    """Eight pictures in two classes."""
    for number in range(8):
        files.write(f"{bucket}/set/class_{number % 2}/{number}.png", picture(number))
    return f"{bucket}/set"


@pytest.fixture
def records(bucket, tmp_path):
    """Eight records in two files."""
    for file in range(2):
        with TFRecordWriter(tmp_path / "local") as writer:
            for number in range(file * 4, file * 4 + 4):
                fields = {"image/encoded": picture(number), "image/class/label": number % 3}
                writer.write(make_example(fields))
        files.write(f"{bucket}/records/train_{file}", (tmp_path / "local").read_bytes())
    return f"{bucket}/records"


def rows(dataset, epoch=0):
    """(colour, label) of every picture."""
    source = column_source(dataset.get(["image", "label"]))
    return [
        (int(image.max()), int(label.argmax() if label.ndim else label)) for image, label in source.batches(epoch, 0)
    ]


PICTURES = [(number, number % 2) for number in (0, 2, 4, 6, 1, 3, 5, 7)]
RECORDS = [(number, number % 3) for number in range(8)]


def test_a_folder(folder):
    dataset = ImageClassificationRawDataset(ImageClassificationRawMetadata(folder), num_readers=4, shuffle=False)
    assert rows(dataset) == PICTURES
    again = column_source(dataset.get(["image"])).batches(0, 5)
    assert [int(image.max()) for (image,) in again] == [3, 5, 7]


def test_processes_ask_as_set_auth_says(folder, server, monkeypatch):
    for name in [*KEYS, "AWS_ENDPOINT_URL"]:
        monkeypatch.delenv(name)
    files.set_auth(ak="key", sk="secret", server=server, path_style=True)
    reader = AsyncRawGenerator(1)
    assert reader.read(f"{folder}/class_1/3.png") == picture(3)
    with pytest.raises(DataError, match=r"class_1/missing\.png' cannot be read"):
        reader.read(f"{folder}/class_1/missing.png")
    reader.close()


@pytest.mark.parametrize("reader_class", [None, AsyncRawGenerator])
def test_the_second_pass_reads_the_copies(folder, tmp_path, reader_class):
    dataset = ImageClassificationRawDataset(
        ImageClassificationRawMetadata(folder),
        num_readers=2,
        shuffle=False,
        reader_class=reader_class,
        cache_dir=str(tmp_path / "cache"),
    )
    assert rows(dataset) == PICTURES
    files.remove(folder, recursive=True)
    assert rows(dataset) == PICTURES
    del dataset
    gc.collect()
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_object_that_went_is_named(folder):
    dataset = ImageClassificationRawDataset(ImageClassificationRawMetadata(folder), num_readers=2)
    files.remove(f"{folder}/class_1/3.png")
    with pytest.raises(DataError, match=r"s3://.*/set/class_1/3\.png' cannot be read"):
        rows(dataset)


def test_several_labels(bucket):
    for number in range(3):
        files.write(f"{bucket}/many/images/{number}.png", picture(number))
        files.write(f"{bucket}/many/labels/{number}.png.txt", "cat" if number == 1 else "dog")
    metadata = MultilabelClassificationRawMetadata(f"{bucket}/many")
    dataset = MultilabelClassificationRawDataset(metadata, num_readers=2, shuffle=False)
    assert rows(dataset) == [(0, 1), (1, 0), (2, 1)]


def test_records_are_fetched_to_a_directory_that_goes(records, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dataset = ImageClassificationTFRecordDataset(ImageClassificationTFRecordMetadata(records, "train*"), shuffle=False)
    (directory,) = tmp_path.glob("plait-cache-*")
    files.remove(records, recursive=True)
    assert rows(dataset) == rows(dataset) == RECORDS
    del dataset
    gc.collect()
    assert not directory.exists()


def test_records_are_fetched_once_into_a_cache(records, tmp_path):
    metadata = ImageClassificationTFRecordMetadata(records, "train*")
    assert metadata.num_samples == 8
    for remove in (False, True):
        dataset = ImageClassificationTFRecordDataset(
            metadata, cache_dir=str(tmp_path / "cache"), shuffle=False, remove_cache_on_finish=remove
        )
        assert rows(dataset) == RECORDS
        if not remove:
            files.remove(records, recursive=True)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.name[0] != "."]) == 2


def test_a_broken_file_is_named_as_it_is_called_there(records, tmp_path):
    files.write(f"{records}/train_1", b"no record in here")
    metadata = ImageClassificationTFRecordMetadata(records, "train*")
    with pytest.raises(DataError, match=r"^train_1: .*CRC is wrong"):
        ImageClassificationTFRecordDataset(metadata)
    files.remove(f"{records}/train_1")
    with pytest.raises(DataError, match="s3://.*/train_1' cannot be copied"):
        ImageClassificationTFRecordDataset(metadata, cache_dir=str(tmp_path / "cache"))
    assert not [path for path in Path(tmp_path, "cache").iterdir() if path.suffix == ".tmp"]


def test_a_known_data_set(bucket):
    for name in ("a", "b"):
        files.write(f"{bucket}/imagenet/train/{name}/x.png", picture(1))
    assert rows(get_dataset("imagenet", "train", f"{bucket}/imagenet", shuffle=False)) == [(1, 1), (1, 2)]
