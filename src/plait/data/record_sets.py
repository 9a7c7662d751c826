"""Data sets of pictures in TFRecord files, and the well-known ones by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from plait.data.columns import Column, Origin, derive, root
from plait.data.datasets import Dataset, Order, shuffled
from plait.data.folder_sets import ImageClassificationRawDataset
from plait.data.folders import ImageClassificationTFRecordMetadata
from plait.data.layouts import Pictures, get_dataset_meta, read_layout
from plait.data.picture_set import FIELDS, RAW_FIELDS, Options, PictureDataset, digest, many_hot
from plait.data.raw import Cache, ForkedReader, temporary_cache
from plait.data.stores import LOCAL, Url, place_of
from plait.errors import ConfigError, DataError
from plait.rng import derive_seed

if TYPE_CHECKING:
    from plait.data.tfrecord import RecordFile

__all__ = ["ImageClassificationTFRecordDataset", "get_dataset", "mixed"]

log = logging.getLogger("plait")

_IMAGE, _LABEL, _TEXT = "image/encoded", "image/class/label", "image/class/text"
_FETCHERS = 8


class ImageClassificationTFRecordDataset(PictureDataset):
    """Pictures in TFRecord files, as TF-Slim writes them: `image/encoded`, `image/class/label`, `image/class/text`.

    With `shuffle`, the files come in another order at each pass, and a record may move by `shuffle_buffer_size` places,
    so that files are read about in order. Files that are not local are fetched first, into `cache_dir` or a temporary
    directory. `custom_feature_keys` are features that become fields of their own; `custom_feature_values` are what they
    are where a record lacks them. `num_parallel` threads read and decode; with `reader_class=ForkedReader`, processes.
    The other arguments are those of `ImageClassificationRawDataset`.
    """

    def __init__(
        self,
        metadata: ImageClassificationTFRecordMetadata | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        shuffle_buffer_size: int = 6400,
        num_parallel: int = 8,
        num_epochs: int | None = None,
        cache_dir: str | None = None,
        preprocess_fn: Callable[..., Any] | None = None,
        image_size: int | Sequence[int] | None = None,
        remove_cache_on_finish: bool = True,
        private_num_threads: int = 0,
        custom_feature_keys: Sequence[str] | None = None,
        custom_feature_values: Sequence[Any] | None = None,
        drop_remainder: bool = False,
        augmentation_fn: Callable[..., Any] | None = None,
        label_one_hot: bool = False,
        *,
        meta: ImageClassificationTFRecordMetadata | None = None,
        reader_class: type[ForkedReader] | None = None,
        channels: int = 3,
        skip_broken: bool = False,
        seed: int = 0,
    ) -> None:
        options = Options.of(locals())
        self.metadata = _either(metadata, meta)
        self._cache, paths = _local_files(self.metadata.files, cache_dir, remove_cache_on_finish, num_parallel)
        records = _Records(paths, self.metadata.names)
        _check_reader(reader_class, records)
        custom = _custom(custom_feature_keys, custom_feature_values)
        columns = _Columns(records, self.metadata, custom, label_one_hot)
        super().__init__(
            f"the records in {self.metadata.root}",
            records.count,
            columns,
            options,
            facts={
                "files": digest(self.metadata.names, records.starts),
                "shuffle": shuffle_buffer_size if shuffle else None,
            },
            order=mixed(records.sizes, shuffle_buffer_size, seed) if shuffle else None,
            readers=private_num_threads if private_num_threads > 0 else num_parallel,
            forks=reader_class is not None,
        )


def _check_reader(reader_class: Any, records: _Records) -> None:
    if reader_class not in (None, ForkedReader):
        raise ConfigError(f"reader_class={reader_class!r}: records are read by threads (None) or by ForkedReader")
    compressed = [name for name, file in zip(records.names, records.files, strict=True) if file.compression]
    if reader_class is not None and compressed:
        raise ConfigError(
            f"reader_class=ForkedReader: {compressed[0]!r} is compressed, and can only be read from its beginning,"
            " which each process would do; leave reader_class out, or write the records uncompressed"
        )


def _either(metadata: Any, meta: Any) -> ImageClassificationTFRecordMetadata:
    found = metadata if metadata is not None else meta
    if not isinstance(found, ImageClassificationTFRecordMetadata):
        raise ConfigError(
            f"metadata is a {type(found).__name__}: give an ImageClassificationTFRecordMetadata(base_dir, file_pattern)"
        )
    return found


def _custom(keys: Sequence[str] | None, values: Sequence[Any] | None) -> dict[str, Any]:
    if isinstance(keys, str) or (values is not None and len(values) != len(keys or [])):
        raise ConfigError(
            f"custom_feature_keys={keys!r}, custom_feature_values={values!r}: give two lists of the same length"
        )
    taken = [key for key in keys or [] if key in {*FIELDS, *RAW_FIELDS}]
    if taken:
        raise ConfigError(f"custom_feature_keys has {taken[0]!r}, which is a field of every picture: leave it out")
    return dict(zip(keys or [], values or [None] * len(keys or []), strict=True))


def _local_files(
    urls: Sequence[str], cache_dir: str | None, remove: bool, threads: int
) -> tuple[Cache | None, list[str]]:
    """Local paths of all files; those behind a store, or all if there is a cache directory, are copied first."""
    places = [place_of(url) for url in urls]
    if cache_dir is None and all(place.store is LOCAL for place in places):
        return None, [place.path for place in places]
    cache = Cache(cache_dir, remove=remove) if cache_dir is not None else temporary_cache()
    log.info("copying %d files into %s, unless they are there", len(urls), cache.directory)
    with ThreadPoolExecutor(max(1, min(threads, _FETCHERS))) as pool:
        return cache, list(pool.map(cache.local, urls))


class _Records:
    """The records of several files, numbered through."""

    def __init__(self, paths: Sequence[str], names: Sequence[str]) -> None:
        self.names = names
        self.files: list[RecordFile] = [_opened(path, name) for path, name in zip(paths, names, strict=True)]
        self.sizes = np.array([len(file) for file in self.files], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.count = int(self.starts[-1])

    def place(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self.starts, number, side="right")) - 1
        return file, number - int(self.starts[file])

    def name(self, number: int) -> str:
        file, record = self.place(number)
        return f"{self.names[file]}, record {record}"

    def read(self, number: int, parse: Callable[[memoryview | bytes], dict[str, Any]]) -> dict[str, Any]:
        file, record = self.place(number)
        try:
            return parse(self.files[file][record])
        except DataError as error:
            raise _located(error, self.names[file], self.name(number)) from error


def _opened(path: str, name: str) -> RecordFile:
    from plait.data.tfrecord import RecordFile  # noqa: PLC0415 - it needs google-crc32c

    try:
        return RecordFile(path)
    except DataError as error:
        raise _located(error, name, name) from error


def _located(error: DataError, name: str, where: str) -> DataError:
    """The same error, with the file that it is about: a copy has another name, and an Example knows of none."""
    return error if name in str(error) else DataError(f"{where}: {error}")


class _Columns:
    """The columns of a record."""

    def __init__(
        self,
        records: _Records,
        metadata: ImageClassificationTFRecordMetadata,
        custom: dict[str, Any],
        label_one_hot: bool,
    ) -> None:
        self.records = records
        self.custom = custom
        self.names = metadata.labels_to_names
        self.classes = metadata.num_classes if label_one_hot else 0
        self.keys = frozenset({_IMAGE, _LABEL, _TEXT, *custom})

    def __call__(self, origin: Origin) -> dict[str, Column]:
        from plait.data.example import parse_example  # noqa: PLC0415 - only for records

        records, keys = self.records, self.keys
        name = root(origin, "image_name", records.name)
        example = root(origin, "example", lambda number: records.read(number, lambda data: parse_example(data, keys)))
        label = derive(_first, [example, _LABEL, np.int64, name, None], name="label")
        columns = {
            "image_name": name,
            "image_buf": derive(_first, [example, _IMAGE, bytes, name, None], name="image_buf"),
            "label": derive(self.label, [label, name], name="label"),
            "label_desc": derive(self.label_desc, [example, label, name], name="label_desc"),
        }
        for key, default in self.custom.items():
            columns[key] = derive(_feature, [example, key, name, default], name=key)
        return columns

    def label(self, label: Any, name: str) -> torch.Tensor:
        if not self.classes:
            return torch.tensor(int(label))
        if not 0 <= label < self.classes:
            raise DataError(
                f"{name} has the label {label}, there are {self.classes} classes, from 0 on; mend num_classes"
            )
        return many_hot([int(label)], self.classes)

    def label_desc(self, example: dict[str, Any], label: Any, name: str) -> str:
        if int(label) in self.names:
            return self.names[int(label)]
        text: bytes = _first(example, _TEXT, bytes, name, b"")
        return text.decode("utf-8", "replace")


def _values(example: dict[str, Any], key: str, name: str, default: Any) -> Any:
    values = example.get(key)
    if values is not None and len(values):
        return values
    if default is None:
        raise DataError(
            f"{name} has no feature {key!r}; it has {', '.join(sorted(example)) or 'none that is known'}. Records are"
            f" read as TF-Slim writes them ({_IMAGE}, {_LABEL}); plait.data.example.make_example makes such"
        )
    return None


def _first(example: dict[str, Any], key: str, kind: type, name: str, default: Any) -> Any:
    values = _values(example, key, name, default)
    first = default if values is None else values[0]
    if not isinstance(first, kind):
        raise DataError(f"{name} has a {type(first).__name__} as {key!r}: write {kind.__name__} there")
    return first


def _feature(example: dict[str, Any], key: str, name: str, default: Any) -> Any:
    """A feature as a field: a number or text by itself, several as a tensor or a list."""
    values = _values(example, key, name, default)
    if values is None:
        return torch.as_tensor(default) if isinstance(default, (int, float)) else default
    if isinstance(values, list):
        return bytes(values[0]) if len(values) == 1 else [bytes(value) for value in values]
    tensor = torch.from_numpy(values.copy())  # the record is read-only
    return tensor[0] if len(values) == 1 else tensor


def mixed(sizes: NDArray[np.int64], buffer: int, seed: int) -> Order:
    """Files in another order at each pass; records moved by less than `buffer` places: reading stays about in order."""
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]

    def order(epoch: int) -> NDArray[np.int64]:
        generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "epoch", epoch)))
        files = generator.permutation(len(sizes))
        numbers = np.concatenate([np.arange(starts[file], starts[file] + sizes[file]) for file in files])
        moved = np.arange(len(numbers)) + generator.random(len(numbers)) * max(1, buffer)
        return numbers[np.argsort(moved, kind="stable")]

    return order


def get_dataset(
    name: str,
    split_name: str,
    dataset_dir: Url,
    capacity: int = 256,
    *,
    shuffle: bool = True,
    num_epochs: int | None = None,
    seed: int = 0,
) -> Dataset:
    """A split of `mnist`, `cifar10`, `flowers` or `imagenet`, read from a directory; nothing is downloaded."""
    found = read_layout(name, split_name, dataset_dir)
    settings: dict[str, Any] = {"shuffle": shuffle, "num_epochs": num_epochs, "seed": seed}
    if isinstance(found, ImageClassificationTFRecordMetadata):
        return ImageClassificationTFRecordDataset(found, **settings)
    if not isinstance(found, Pictures):
        return ImageClassificationRawDataset(found, capacity=capacity, **settings)
    images, labels = found.images, found.labels
    names = get_dataset_meta(name).labels_to_names
    rows = len(labels)
    return Dataset(
        f"{split_name} of {name}",
        rows,
        {
            "image": lambda number: images[number].copy(),  # not a view: a function may write into it
            "label": lambda number: labels[number],
            "label_desc": lambda number: names[int(labels[number])],
        },
        facts={"labels": digest(found.labels), "shuffle": shuffle},
        order=shuffled(rows, seed) if shuffle else None,
        seed=seed,
        num_epochs=num_epochs,
        readers=2,
        capacity=capacity,
    )
