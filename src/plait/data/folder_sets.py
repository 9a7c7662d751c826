"""Data sets of pictures that are files: a folder for each class, or several labels for each picture."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plait.data.columns import Column, Origin, derive, root
from plait.data.datasets import shuffled
from plait.data.folders import ImageClassificationRawMetadata, MultilabelClassificationRawMetadata
from plait.data.picture_set import Options, PictureDataset, digest, many_hot
from plait.data.raw import Cache, ForkedReader, ParallelReader, Reader, read_local
from plait.data.stores import LOCAL, place_of
from plait.errors import ConfigError

__all__ = ["ImageClassificationRawDataset", "MultilabelClassificationRawDataset"]

_READ_WHERE_ASKED = (ParallelReader, ForkedReader)
"""Readers with nothing of their own: threads, or processes, read."""


class ImageClassificationRawDataset(PictureDataset):
    """A folder of pictures for each class.

    Without `batch_size`, samples: each picture as it is, or as `image_size` (nearest neighbour), `augmentation_fn` or
    `preprocess_fn(image_name, image_buf, label, label_desc)` make it. With it, batches; `preprocess_fn` gets four
    lists (labels: a tensor) then, and makes pictures of the second.

    The whole list of files is shuffled at each pass, which leaves `shuffle_buffer_size` nothing to do. `num_readers`
    threads read and decode; `capacity` samples are read ahead. With a `reader_class`, that one reads
    (`AsyncRawGenerator`: in processes) and `preprocess_threads` threads decode; with `ForkedReader`, `num_readers`
    processes do all of it. `private_num_threads` above 0 sets the number of threads, or of those processes. A picture
    that cannot be decoded is an error, or (`skip_broken`) left out and counted in `skipped`.
    """

    def __init__(
        self,
        metadata: ImageClassificationRawMetadata,
        batch_size: int | None = None,
        num_readers: int = 8,
        num_epochs: int | None = None,
        shuffle: bool = True,
        shuffle_buffer_size: int = 16,
        capacity: int = 256,
        cache_dir: str | None = None,
        preprocess_fn: Callable[..., Any] | None = None,
        preprocess_threads: int = 12,
        image_size: int | Sequence[int] | None = None,
        remove_cache_on_finish: bool = True,
        private_num_threads: int = 0,
        reader_class: Any = None,
        reader_kwargs: Mapping[str, Any] | None = None,
        drop_remainder: bool = False,
        augmentation_fn: Callable[..., Any] | None = None,
        label_one_hot: bool = False,
        *,
        channels: int = 3,
        skip_broken: bool = False,
        seed: int = 0,
    ) -> None:
        options = Options.of(locals())
        _check(metadata, ImageClassificationRawMetadata)
        files = _Files(metadata, num_readers, reader_class, reader_kwargs, cache_dir, remove_cache_on_finish)
        labels, names, rows = metadata.labels, metadata.labels_to_names, len(metadata.names)
        classes = metadata.num_classes if label_one_hot else 0
        self.metadata = metadata
        super().__init__(
            f"the pictures in {metadata.root}",
            rows,
            lambda origin: {
                **files.columns(origin, None),
                "label": root(origin, "label", lambda number: _label(labels[number], classes)),
                "label_desc": root(origin, "label_desc", lambda number: names[int(labels[number])]),
            },
            options,
            facts={"files": digest(metadata.names, labels), "shuffle": shuffle},
            order=shuffled(rows, seed) if shuffle else None,
            readers=_threads(num_readers, preprocess_threads, private_num_threads, files.reader),
            forks=isinstance(files.reader, ForkedReader),
        )


class MultilabelClassificationRawDataset(PictureDataset):
    """Pictures with several labels each: `label` is a row of zeros and ones, `label_desc` their names, with commas.

    The other arguments are those of `ImageClassificationRawDataset`. `skip_label_not_found` leaves out pictures that
    have no label file.
    """

    def __init__(
        self,
        metadata: MultilabelClassificationRawMetadata,
        batch_size: int | None = None,
        num_readers: int = 8,
        num_epochs: int | None = None,
        shuffle: bool = True,
        shuffle_buffer_size: int = 16,
        capacity: int = 256,
        cache_dir: str | None = None,
        preprocess_fn: Callable[..., Any] | None = None,
        preprocess_threads: int = 12,
        image_size: int | Sequence[int] | None = None,
        remove_cache_on_finish: bool = True,
        private_num_threads: int = 0,
        reader_class: Any = None,
        reader_kwargs: Mapping[str, Any] | None = None,
        drop_remainder: bool = False,
        label_sep: str = "\n",
        skip_label_not_found: bool = False,
        augmentation_fn: Callable[..., Any] | None = None,
        *,
        channels: int = 3,
        skip_broken: bool = False,
        seed: int = 0,
    ) -> None:
        options = Options.of(locals())
        _check(metadata, MultilabelClassificationRawMetadata)
        files = _Files(metadata, num_readers, reader_class, reader_kwargs, cache_dir, remove_cache_on_finish)
        kept = np.flatnonzero(metadata.labelled) if skip_label_not_found else np.arange(len(metadata.names))
        self.metadata = metadata
        super().__init__(
            f"the pictures in {metadata.root}",
            len(kept),
            lambda origin: {**files.columns(origin, kept), **_label_columns(origin, metadata, kept, label_sep)},
            options,
            facts={"files": digest(metadata.names, kept), "shuffle": shuffle},
            order=shuffled(len(kept), seed) if shuffle else None,
            readers=_threads(num_readers, preprocess_threads, private_num_threads, files.reader),
            forks=isinstance(files.reader, ForkedReader),
        )


def _check(metadata: Any, kind: type) -> None:
    if not isinstance(metadata, kind):
        raise ConfigError(f"metadata is a {type(metadata).__name__}: give a {kind.__name__}(base_dir)")


def _label(label: np.int64, classes: int) -> np.int64 | torch.Tensor:
    return many_hot([int(label)], classes) if classes else label


def _label_columns(
    origin: Origin, metadata: MultilabelClassificationRawMetadata, kept: Any, label_sep: str
) -> dict[str, Column]:
    classes, names = metadata.num_classes, metadata.labels_to_names
    found = root(origin, "labels", lambda number: metadata.labels_of(int(kept[number]), label_sep))
    return {
        "label": derive(lambda labels: many_hot(labels, classes), [found], name="label"),
        "label_desc": derive(lambda labels: ",".join(names[label] for label in labels), [found], name="label_desc"),
    }


def _threads(num_readers: int, preprocess_threads: int, private_num_threads: int, reader: Reader) -> int:
    if private_num_threads > 0:
        return private_num_threads
    return num_readers if type(reader) in _READ_WHERE_ASKED else max(num_readers, preprocess_threads)


def _reader(reader_class: Any, num_readers: int, reader_kwargs: Mapping[str, Any]) -> Reader:
    try:
        reader: Reader = reader_class(num_readers, **reader_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reader_class={reader_class!r} cannot be made with ({num_readers}, **{dict(reader_kwargs)!r}): {error}"
        ) from error
    if not all(callable(getattr(reader, method, None)) for method in ("read", "close")):
        raise ConfigError(f"reader_class={reader_class!r} makes no reader: give it read(url) and close()")
    return reader


class _Files:
    """Whole files by number: from where they are, or from a cache."""

    def __init__(
        self,
        metadata: ImageClassificationRawMetadata | MultilabelClassificationRawMetadata,
        num_readers: int,
        reader_class: Any,
        reader_kwargs: Mapping[str, Any] | None,
        cache_dir: str | None,
        remove_cache: bool,
    ) -> None:
        self.metadata = metadata
        self.cache = None if cache_dir is None else Cache(cache_dir, remove=remove_cache)
        self.reader = _reader(reader_class or ParallelReader, num_readers, reader_kwargs or {})
        if isinstance(self.reader, ForkedReader) and not self._here:
            raise ConfigError(
                f"reader_class=ForkedReader is for files of this machine without a cache_dir, and got {metadata.root!r}"
                f" and cache_dir={cache_dir!r}; write reader_class=AsyncRawGenerator for an object store, or copy the"
                " files here (mox.file.copy_parallel)"
            )
        weakref.finalize(self, self.reader.close)

    def columns(self, origin: Origin, kept: Any) -> dict[str, Column]:
        """Names and bytes; `kept` are the numbers that are left, if not all are."""
        names, read = self.metadata.names, self._local() or self.read
        if kept is None:
            return {
                "image_name": root(origin, "image_name", names.__getitem__),
                "image_buf": root(origin, "image_buf", read),
            }
        return {
            "image_name": root(origin, "image_name", lambda row: names[kept[row]]),
            "image_buf": root(origin, "image_buf", lambda row: read(int(kept[row]))),
        }

    @property
    def _here(self) -> bool:
        return place_of(self.metadata.root).store is LOCAL and self.cache is None

    def _local(self) -> Callable[[int], bytes] | None:
        """The short way to files of this machine that nobody else is to read or keep."""
        if not self._here or type(self.reader) not in _READ_WHERE_ASKED:
            return None
        names, prefix = self.metadata.names, (place_of(self.metadata.root) / "").path
        return lambda number: read_local(prefix + names[number])

    def read(self, number: int) -> bytes:
        url = self.metadata.url_of(number)
        return self.reader.read(url) if self.cache is None else self.cache.get(url, self.reader.read)
