"""Known data sets, read from a directory in the layout that they are given out in; nothing is downloaded."""

from __future__ import annotations

import contextlib
import gzip
import logging
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.data.folders import ImageClassificationRawMetadata, ImageClassificationTFRecordMetadata
from plait.data.labels import read_labels
from plait.data.stores import Place, Url, place_of
from plait.errors import ConfigError, DataError

__all__ = ["MAX_LAYOUT_BYTES", "DatasetMeta", "Pictures", "get_dataset_meta", "read_layout"]

MAX_LAYOUT_BYTES = 1 << 30
"""Of pictures that are held in memory: six times what cifar10 has."""

_READ_BYTES = 1 << 20
_EVAL_NAMES = ("eval", "validation", "val", "test")
"""What people call the second split; folders are looked for under the name that was asked for, then in this order."""
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FLOWERS = ("daisy", "dandelion", "roses", "sunflowers", "tulips")

log = logging.getLogger("plait")


@dataclass(frozen=True)
class DatasetMeta:
    """What is known of a data set before it is read."""

    name: str
    splits_to_sizes: dict[str, int]
    """Pictures of each split, as it is given out; `train` comes first, then `eval`."""
    num_classes: int
    image_shape: tuple[int | None, int | None, int]
    """Height, width, channels; None where each picture has its own."""
    labels_to_names: dict[int, str]


class Pictures(NamedTuple):
    """Pictures in memory."""

    images: NDArray[np.uint8]
    """[count, height, width, channels]"""
    labels: NDArray[np.int64]


_METAS = {
    "cifar10": ({"train": 50_000, "eval": 10_000}, 10, (32, 32, 3), _CIFAR10),
    "flowers": ({"train": 3_320, "eval": 350}, 5, (None, None, 3), _FLOWERS),
    "imagenet": ({"train": 1_281_167, "eval": 50_000}, 1001, (None, None, 3), ("background",)),
    "mnist": ({"train": 60_000, "eval": 10_000}, 10, (28, 28, 1), _DIGITS),
}


def get_dataset_meta(name: str) -> DatasetMeta:
    """Facts of a data set: `mnist`, `cifar10`, `flowers`, or `imagenet`, whose class 0 is the background.

    `labels_to_names` has the names that are part of the layout; of ImageNet's classes only the background is.
    """
    if name not in _METAS:
        raise ConfigError(f"the data set {name!r} is unknown: write one of {', '.join(sorted(_METAS))}")
    sizes, classes, shape, labels = _METAS[name]
    return DatasetMeta(name, dict(sizes), classes, shape, dict(enumerate(labels)))


def read_layout(
    name: str, split_name: str, dataset_dir: Url
) -> Pictures | ImageClassificationRawMetadata | ImageClassificationTFRecordMetadata:
    """The split `train` or `eval` (`validation`, `val` and `test` are the same) of a data set in `dataset_dir`.

    | name     | layouts | gives |
    | -------- | ------- | ----- |
    | mnist    | `train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, ..., also with `.gz` | Pictures |
    | cifar10  | the binary version: `data_batch_1.bin`, ..., `test_batch.bin` | Pictures |
    | flowers  | `flowers_train_00000-of-00005.tfrecord`, ..., or folders `train/daisy/...` | metadata |
    | imagenet | `train-00000-of-01024`, `validation-00000-of-00128`, ..., or folders `train/n01440764/...` | metadata |

    Folders of imagenet have the numbers from 1 on, in the order of their names: 0 is the background.
    """
    meta = get_dataset_meta(name)
    if split_name != "train" and split_name not in _EVAL_NAMES:
        raise ConfigError(f"{name} has no split {split_name!r}: write one of {list(meta.splits_to_sizes)}")
    training, base = split_name == "train", place_of(dataset_dir)
    if name in {"mnist", "cifar10"}:
        pictures = _mnist(base, training) if name == "mnist" else _cifar10(base, training)
        return _checked(pictures, meta, "train" if training else "eval", base)
    return _records(meta, base, training) or _folders(meta, base, split_name)


def _checked(pictures: Pictures, meta: DatasetMeta, split: str, base: Place) -> Pictures:
    wrong = np.flatnonzero(pictures.labels >= meta.num_classes)
    if len(wrong):
        raise DataError(
            f"{base.url!r}: the label of picture {wrong[0]} is {pictures.labels[wrong[0]]}, but {meta.name} has"
            f" {meta.num_classes} classes, from 0 on; is it another data set, or damaged?"
        )
    if len(pictures.labels) != meta.splits_to_sizes[split]:
        size = meta.splits_to_sizes[split]
        log.warning("%s has %d pictures; %s of %s has %d", base.url, len(pictures.labels), split, meta.name, size)
    return pictures


def _mnist(base: Place, training: bool) -> Pictures:
    part = "train" if training else "t10k"
    images = _idx(_first(base, part, "images", 3), 3)
    labels = _idx(_first(base, part, "labels", 1), 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{base.url!r}: the pictures are {images.shape[1]}x{images.shape[2]}, those of mnist are 28x28")
    if len(images) != len(labels):
        raise DataError(f"{base.url!r} has {len(images)} pictures and {len(labels)} labels for {part}: get both anew")
    return Pictures(images[..., None], labels.astype(np.int64))


def _first(base: Place, part: str, what: str, rank: int) -> Place:
    names = [f"{part}-{what}{dash}idx{rank}-ubyte{end}" for end in ("", ".gz") for dash in "-."]
    for name in names:
        there = (base / name).find()
        if there is not None and not there.is_directory:
            return base / name
    raise DataError(f"{base.url!r} has neither {names[0]!r} nor {names[2]!r}; put the files of mnist there")


def _idx(place: Place, rank: int) -> NDArray[np.uint8]:
    """An array of bytes: two zeros, 8 for bytes, the rank, the sizes (big endian), then the values."""
    with _opened(place) as stream:
        start = _exactly(stream, 4 + 4 * rank, place)
        if start[:4] != bytes([0, 0, 8, rank]):
            raise DataError(
                f"{place.url!r} begins with {start[:4].hex(' ')}, an idx{rank}-ubyte file with 00 00 08 0{rank}; is it"
                " another file?"
            )
        shape = struct.unpack(f">{rank}I", start[4:])
        count = int(np.prod(shape, dtype=object))
        if not 0 < count <= MAX_LAYOUT_BYTES:
            raise DataError(f"{place.url!r} says its shape is {list(shape)}; between 1 and {MAX_LAYOUT_BYTES} are read")
        if not place.path.endswith(".gz"):
            _check_length(place, len(start) + count)
        values = _exactly(stream, count, place)
        if stream.read(1):
            raise DataError(f"{place.url!r} goes on after the {count} values that its header says; get it anew")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _check_length(place: Place, expected: int) -> None:
    length = place.stat().length
    if length != expected:
        raise DataError(f"{place.url!r} has {length} bytes, its header says {expected}: it is damaged, get it anew")


@contextlib.contextmanager
def _opened(place: Place) -> Iterator[IO[bytes]]:
    with place.store.open(place.path) as file:
        if not place.path.endswith(".gz"):
            yield file
            return
        try:
            with gzip.GzipFile(fileobj=file) as inflated:
                yield inflated  # type: ignore[misc]  # it has what is used of IO
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{place.url!r} is no whole gzip file ({error}): get it anew") from error


def _exactly(stream: IO[bytes], count: int, place: Place) -> bytearray:
    """So many bytes; memory is taken as they come, not as a header promises."""
    data = bytearray()
    while len(data) < count:
        piece = stream.read(min(_READ_BYTES, count - len(data)))
        if not piece:
            raise DataError(f"{place.url!r} ends {count - len(data)} bytes too early: it is damaged, get it anew")
        data += piece
    return data


def _cifar10(base: Place, training: bool) -> Pictures:
    places = _cifar10_files(base, training)
    row = 1 + 3 * 32 * 32
    lengths = [place.stat().length for place in places]
    for place, length in zip(places, lengths, strict=True):
        if not length or length % row:
            raise DataError(f"{place.url!r} has {length} bytes, which is not a whole number of pictures of {row} bytes")
    if sum(lengths) > MAX_LAYOUT_BYTES:
        raise DataError(f"{base.url!r} has {sum(lengths)} bytes of pictures, at most {MAX_LAYOUT_BYTES} are read")
    rows = np.empty((sum(lengths) // row, row), np.uint8)
    start = 0
    for place, length in zip(places, lengths, strict=True):
        with place.store.open(place.path) as file:
            data = _exactly(file, length, place)
        rows[start : start + length // row] = np.frombuffer(data, np.uint8).reshape(-1, row)
        start += length // row
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Pictures(np.ascontiguousarray(images), rows[:, 0].astype(np.int64))


def _cifar10_files(base: Place, training: bool) -> list[Place]:
    """In `base`, or in the folder that unpacking makes there."""
    names = _names(base)
    for folder in ("cifar-10-batches-bin", "cifar-10-batches-py"):
        if folder in names and not {"test_batch.bin", "test_batch"} & names:
            base, names = base / folder, _names(base / folder)
    if not training and "test_batch.bin" in names:
        return [base / "test_batch.bin"]
    numbers = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"data_batch_([1-9][0-9]?)\.bin", name)))
    if training and numbers and numbers == list(range(1, len(numbers) + 1)):
        return [base / f"data_batch_{number}.bin" for number in numbers]
    if {"test_batch", "data_batch_1", "batches.meta"} & names:
        raise DataError(
            f"{base.url!r} has the Python version of cifar10, whose files can run any program when they are read: put"
            " the binary version there (cifar-10-binary.tar.gz, with data_batch_1.bin)"
        )
    missing = "data_batch_1.bin to data_batch_5.bin" if training else "test_batch.bin"
    raise DataError(f"{base.url!r} lacks some of {missing}: put the binary version of cifar10 there")


def _names(base: Place) -> set[str]:
    try:
        return {name for name, _ in base.store.scan(base.path or ".")}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{base.url!r} is no directory: write the one that the data set is in") from error


def _records(meta: DatasetMeta, base: Place, training: bool) -> ImageClassificationTFRecordMetadata | None:
    """The split as TFRecord files; None where there are none."""
    start = ("flowers_" if meta.name == "flowers" else "") + ("train" if training else "validation")
    middle, end = ("_", ".tfrecord") if meta.name == "flowers" else ("-", "")
    pattern = re.compile(re.escape(start + middle) + r"([0-9]{5})-of-([0-9]{5})" + re.escape(end))
    found = {name: match for name in _names(base) if (match := pattern.fullmatch(name))}
    if not found:
        return None
    totals = sorted({int(match[2]) for match in found.values()})
    numbers = {int(match[1]) for match in found.values()}
    missing = sorted(set(range(totals[-1])) - numbers)
    if len(totals) > 1 or missing or len(numbers) > totals[-1]:
        raise DataError(
            f"{base.url!r} has {len(found)} files '{start}{middle}...' of {' or '.join(map(str, totals))}; missing are"
            f" the numbers {missing[:5]}: put all files of one set there"
        )
    number = "[0-9]" * 5
    wanted = f"{start}{middle}{number}-of-{number}{end}"
    metadata = ImageClassificationTFRecordMetadata(base.url, wanted, num_classes=meta.num_classes)
    if not metadata.labels_to_names and len(meta.labels_to_names) == meta.num_classes:
        metadata.name_classes(meta.labels_to_names)
    return metadata


class _WithBackground(ImageClassificationRawMetadata):
    """Class folders whose numbers begin at 1."""

    def __init__(self, base_dir: Url) -> None:
        super().__init__(base_dir)
        self.name_classes(dict(enumerate(["background", *self.labels_list])))
        self.labels += 1


def _folders(meta: DatasetMeta, base: Place, split_name: str) -> ImageClassificationRawMetadata:
    names, training = _names(base), split_name == "train"
    wanted = ["train"] if training else list(dict.fromkeys([split_name, *_EVAL_NAMES]))
    split = next((name for name in wanted if name in names), None)
    if split is None:
        raise DataError(
            f"{base.url!r} has neither TFRecord files of {meta.name} nor a folder {_either(wanted)} with a folder for"
            " each class; split_image_classification_dataset makes such folders out of one that has all classes"
        )
    place = base / split
    metadata = (_WithBackground if meta.name == "imagenet" else ImageClassificationRawMetadata)(place.url)
    if metadata.num_classes != meta.num_classes:
        log.warning("%s has %d classes; %s has %d", place.url, metadata.num_classes, meta.name, meta.num_classes)
    if not training and "train" in names:
        offset = 1 if meta.name == "imagenet" else 0
        _check_same_classes(metadata.labels_list[offset:], place, base / "train")
    return metadata


def _either(names: list[str]) -> str:
    return " or ".join(map(repr, names))


def _check_same_classes(classes: list[str], place: Place, train: Place) -> None:
    """A class that one split lacks, or an order of its own, would give the same numbers to different classes."""
    listed = [name for name, info in train.store.scan(train.path) if info.is_directory and not name.startswith(".")]
    if (train / "labels.txt").find() is not None:
        listed = list(read_labels((train / "labels.txt").url).values())
    if listed != classes:
        differing = sorted(set(listed) ^ set(classes))
        what = f"{differing[:5]} are only in one" if differing else "their labels.txt differ, or only one has it"
        raise DataError(
            f"{place.url!r} and {train.url!r} do not number the same classes: {what}; give both the same labels.txt,"
            " and an empty folder to a class without pictures"
        )
