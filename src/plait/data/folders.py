"""What a data set of pictures is: its files, its classes, and how to split one into several.

All that is listed here is read once, when the metadata is made. `base_dir` says which files there are and what they
are called; with a `redirect_dir`, a copy of the data set that is faster to read, say, the pictures and records
themselves are read from there, under the same relative names. Labels always come from `base_dir`.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.data import files
from plait.data.copying import copy, copy_parallel
from plait.data.labels import natural_key, read_labels, read_text, write_labels
from plait.data.stores import LOCAL, Place, Url, place_of
from plait.errors import ConfigError, DataError
from plait.rng import derive_seed

__all__ = [
    "PICTURE_SUFFIXES",
    "ImageClassificationRawMetadata",
    "ImageClassificationTFRecordMetadata",
    "MultilabelClassificationRawMetadata",
    "split_image_classification_dataset",
]

PICTURE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "bmp", "gif", "webp"})
"""What a picture's name ends with, in small or capital letters; other files are passed over."""

_MAX_LABEL_FILE_BYTES = 1 << 20
_THREADS = 16
_BLOCK = 4096
_DEFAULT_LABELS = "labels.txt"
_DEFAULT_SPLIT = {"train": 0.9, "eval": 0.1}

T = TypeVar("T")
U = TypeVar("U")
log = logging.getLogger("plait")


class _Classes:
    """The classes of a data set."""

    labels_to_names: dict[int, str]
    names_to_labels: dict[str, int]
    labels_list: list[str]
    """The names, by number."""

    def name_classes(self, named: dict[int, str]) -> None:
        """Say which classes there are, by number."""
        self.labels_to_names = named
        self.names_to_labels = {name: label for label, name in named.items()}
        self.labels_list = list(named.values())

    @property
    def num_classes(self) -> int:
        return len(self.labels_to_names)


class _Pictures(_Classes):
    """Pictures that are files."""

    names: list[str]
    """Of the files, relative to `base_dir`, in order."""
    root: str
    """Where the pictures are read: `redirect_dir`, or `base_dir` if there is none."""

    @property
    def total_num_samples(self) -> int:
        return len(self.names)

    num_samples = total_num_samples

    def url_of(self, index: int) -> str:
        """Where picture number `index` is read."""
        return (place_of(self.root) / self.names[index]).url


class ImageClassificationRawMetadata(_Pictures):
    """A folder of pictures for each class: a picture belongs to the folder in `base_dir` that it lies below.

    The classes are the folders, sorted by name (`natural_order`: `label_2` before `label_10`), unless `base_dir` has
    a file `labels_filename`: then that says the numbers, and has to name the very folders that are there. What begins
    with a dot is passed over. A folder without a picture is a class as well, with a line in the log.
    """

    labels: NDArray[np.int64]
    """The class of each picture, in the order of `names`."""

    def __init__(
        self,
        base_dir: Url,
        redirect_dir: Url | None = None,
        labels_filename: str | None = _DEFAULT_LABELS,
        *,
        natural_order: bool = False,
    ) -> None:
        base = place_of(base_dir)
        self.root = base.url if redirect_dir is None else place_of(redirect_dir).url
        folders, self.names = _class_folders(base)
        named = _labels_file(base, labels_filename)
        if named is None:
            order = sorted(folders, key=natural_key) if natural_order else sorted(folders)
            named = dict(enumerate(order))
        else:
            _check_folders(named, folders, base / str(labels_filename))
        self.name_classes(named)
        found = (self.names_to_labels[name.partition("/")[0]] for name in self.names)
        self.labels = np.fromiter(found, np.int64, len(self.names))
        if all(name.count("/") > 1 for name in self.names):
            log.warning(
                "%s: all pictures lie below the folders of classes, which are %s; is it one too high?",
                base.url,
                _few(folders),
            )
        counts = np.bincount(self.labels, minlength=self.num_classes)
        _warn_of_empty([named[label] for label in np.flatnonzero(counts == 0).tolist()], base)


class MultilabelClassificationRawMetadata(_Pictures):
    """Pictures with several labels each: those of `images/0.jpg` are in `labels/0.jpg.txt`.

    The classes are those of `labels_filename` in `base_dir`. Without that file, all label files are read, and the
    classes are what is found in them, sorted: then labels are separated by any white space, or by `label_sep` if it
    is given; for names with spaces in them, write the file.
    """

    labelled: NDArray[np.bool_]
    """Which pictures have a label file, in the order of `names`."""

    def __init__(
        self,
        base_dir: Url,
        images_sub_dir: str = "images",
        labels_sub_dir: str = "labels",
        labels_extension: str = "txt",
        redirect_dir: Url | None = None,
        labels_filename: str | None = _DEFAULT_LABELS,
        *,
        label_sep: str | None = None,
    ) -> None:
        base = place_of(base_dir)
        self.root = base.url if redirect_dir is None else place_of(redirect_dir).url
        images, self._labels = base / images_sub_dir.strip("/"), base / labels_sub_dir.strip("/")
        self._prefix = f"{images_sub_dir.strip('/')}/".lstrip("/")
        self._suffix = f".{labels_extension.lstrip('.')}"
        pictures = [name for name, is_folder in _below(images) if not is_folder and _is_picture(name)]
        if not pictures:
            raise DataError(f"{images.url!r} has no pictures in it: {_suffixes()}")
        with_labels = {name for name, is_folder in _below(self._labels) if not is_folder}
        self.names = [self._prefix + name for name in pictures]
        self.labelled = np.array([name + self._suffix in with_labels for name in pictures], np.bool_)
        named = _labels_file(base, labels_filename)
        if named is None:
            named = dict(enumerate(self._found_labels(label_sep)))
        else:
            _check_unique(named, base / str(labels_filename))
        self.name_classes(named)

    def labels_url_of(self, index: int) -> str:
        """The label file of picture number `index`, whether or not it is there."""
        return (self._labels / (self.names[index].removeprefix(self._prefix) + self._suffix)).url

    def labels_of(self, index: int, label_sep: str = "\n") -> list[int]:
        """The classes of picture number `index`, in the order of its label file, each once.

        The file is cut at each `label_sep`. A piece that is no known name, while all words in it are, stands for those
        words: with the newline as `label_sep`, `cat dog` on one line are two labels.
        """
        url = self.labels_url_of(index)
        if not self.labelled[index]:
            raise DataError(
                f"the picture {self.names[index]!r} has no label file {url!r}: write one (an empty one, if it has no"
                " label), or give the data set skip_label_not_found=True"
            )
        if not label_sep:
            raise ConfigError("label_sep is empty: write what stands between two labels, such as '\\n' or ','")
        text = read_text(url, _MAX_LABEL_FILE_BYTES)
        pieces = [piece.strip() for piece in text.split(label_sep)]
        return list(dict.fromkeys(label for piece in pieces if piece for label in self._known(piece, url)))

    def _known(self, piece: str, url: str) -> list[int]:
        numbers, words = self.names_to_labels, piece.split()
        if piece in numbers:
            return [numbers[piece]]
        unknown = [word for word in words if word not in numbers]
        if not unknown:
            return [numbers[word] for word in words]
        label = piece if len(unknown) == len(words) else unknown[0]
        near = difflib.get_close_matches(unknown[0][:100], numbers, cutoff=0.5)
        raise DataError(
            f"{url!r} has the label {label[:100]!r}, which is none of the {self.num_classes} classes;"
            f" near it are {near or self.labels_list[:3]}: mend it, add it to the file of labels, or say by label_sep"
            " what stands between two labels"
        )

    def _found_labels(self, label_sep: str | None) -> list[str]:
        """All labels there are, by name."""
        urls = [self.labels_url_of(int(index)) for index in np.flatnonzero(self.labelled)]
        log.info(
            "%s: no file of labels says the classes, reading %d label files to find them", self._labels.url, len(urls)
        )
        found: set[str] = set()
        for text in _in_threads(lambda url: read_text(url, _MAX_LABEL_FILE_BYTES), urls, "reading labels"):
            found.update(piece.strip() for piece in (text.split(label_sep) if label_sep else text.split()))
        found.discard("")
        if not found:
            raise DataError(
                f"{self._labels.url!r} has label files for {len(urls)} of {len(self.names)} pictures, and no label in"
                f" them; write '0.jpg{self._suffix}' for '0.jpg', with the names of its labels"
            )
        return sorted(found)


class ImageClassificationTFRecordMetadata(_Classes):
    """TFRecord files of pictures: those in `base_dir` that fit a pattern, or one of several (a list, or with commas).

    The names of classes are those of `label_map_file`, where there is one; `num_samples` is counted when it is asked
    for and was not given, which reads through all files once.
    """

    def __init__(
        self,
        base_dir: Url,
        file_pattern: str | Sequence[str] | None = None,
        num_samples: int | None = None,
        redirect_dir: Url | None = None,
        num_classes: int = 0,
        label_map_file: str | None = _DEFAULT_LABELS,
        *,
        file_patterns: str | Sequence[str] | None = None,
    ) -> None:
        base = place_of(base_dir)
        root = base if redirect_dir is None else place_of(redirect_dir)
        self.root = root.url
        self.names = _record_names(base, _patterns(file_pattern, file_patterns))
        self.files = [(root / name).url for name in self.names]
        self.name_classes(_labels_file(base, label_map_file) or {})
        if num_samples is not None and num_samples < 0:
            raise ConfigError(f"num_samples={num_samples} is less than none: leave it out, and they are counted")
        if num_classes < 0 or (num_classes and self.labels_to_names and num_classes != len(self.labels_to_names)):
            raise ConfigError(
                f"num_classes={num_classes}, but {label_map_file} names {len(self.labels_to_names)} classes; leave"
                " num_classes out, or mend the file"
            )
        self._num_samples, self._num_classes = num_samples, num_classes

    @property
    def num_classes(self) -> int:
        found = len(self.labels_to_names) or self._num_classes
        if not found:
            raise DataError(
                f"how many classes the records of {self.root!r} have is not known: give num_classes=, or put a file"
                " labels.txt with a line 'number: name' for each beside them"
            )
        return found

    @property
    def num_samples(self) -> int:
        if self._num_samples is None:
            self._num_samples = _count_records(self.files)
        return self._num_samples

    @property
    def total_num_samples(self) -> int:
        return self.num_samples


def split_image_classification_dataset(
    split_spec: Mapping[str, float] | str | None,
    src_dir: Url,
    dst_dir: Url,
    overwrite: bool = False,
    *,
    seed: int = 0,
) -> None:
    """Copy a folder of pictures for each class into several of them: `dst_dir/train/...`, `dst_dir/eval/...`.

    `split_spec` is `{'train': 0.9, 'eval': 0.1}` (the same as None), or `'train:0.9,eval:0.1'`. Each class is split by
    itself; each split gets at least one picture of a class that has as many as there are splits. Which picture goes
    where follows from `seed` and the pictures' names alone. Each split gets a `labels.txt` with the same numbers.

    A split that is there already is an error, or (`overwrite`) is removed first, with all that is in it.
    """
    shares = _shares(split_spec)
    source, target = place_of(src_dir), place_of(dst_dir)
    metadata = ImageClassificationRawMetadata(src_dir)
    occupied = [place for split in shares if (place := _occupied(source, target / split, overwrite)) is not None]
    for place in occupied:
        files.remove(place.url, recursive=True)
    for split, names in _chosen(metadata, shares, seed).items():
        place = target / split
        write_labels((place / _DEFAULT_LABELS).url, metadata.labels_list)
        for folder in set(metadata.labels_list) - {name.partition("/")[0] for name in names}:
            place.store.make_dirs((place / folder).path)
        copy_parallel(source.url, place.url, names)


@contextlib.contextmanager
def _directory(place: Place) -> Iterator[None]:
    """What lists `place`: if it is no directory, the error says so."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        kind = "is a file" if isinstance(error, NotADirectoryError) else "is not there"
        raise DataError(f"{place.url!r} {kind}: write the directory of a data set") from error


def _below(base: Place) -> list[tuple[str, bool]]:
    """(relative name, whether it is a folder) of all that lies below `base` and is not hidden, by name."""
    with _directory(base):
        if base.store is LOCAL:
            found = list(_local_below(base.path or ".", "", ()))
        else:
            found = [(name, info.is_directory) for name, info in base.store.tree(base.path)]
    return sorted(item for item in found if not item[0].startswith(".") and "/." not in item[0])


def _local_below(path: str, prefix: str, above: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    # not the store's tree: that asks for size and time of each file, which is slow for a million on a network
    above = (*above, os.path.realpath(path))
    with os.scandir(path) as entries:
        for entry in entries:
            is_folder = entry.is_dir()
            yield prefix + entry.name, is_folder
            # links are followed, data often hangs on them; but not in circles
            if is_folder and not entry.name.startswith(".") and os.path.realpath(entry.path) not in above:
                yield from _local_below(entry.path, f"{prefix}{entry.name}/", above)


def _is_picture(name: str) -> bool:
    return name.rpartition(".")[2].lower() in PICTURE_SUFFIXES


def _suffixes() -> str:
    return "files that end with " + ", ".join(f".{suffix}" for suffix in sorted(PICTURE_SUFFIXES))


def _class_folders(base: Place) -> tuple[list[str], list[str]]:
    """The folders right below `base`, and the pictures somewhere below them."""
    found = _below(base)
    folders = [name for name, is_folder in found if is_folder and "/" not in name]
    pictures = [name for name, is_folder in found if not is_folder and "/" in name and _is_picture(name)]
    if not pictures:
        raise DataError(
            f"{base.url!r} has {len(folders)} folders and no picture in them; a data set has a folder for each class,"
            f" with pictures in it: {_suffixes()}"
        )
    return folders, pictures


def _labels_file(base: Place, name: str | None) -> dict[int, str] | None:
    """What the file of labels says; None where there is none. One with a name of the user's has to be there."""
    if name is None or (base / name).find() is None:
        if name not in {None, _DEFAULT_LABELS}:
            raise DataError(f"the file of labels {(base / str(name)).url!r} is not there; write it, or give no name")
        return None
    return read_labels((base / name).url)


def _check_unique(named: dict[int, str], file: Place) -> None:
    seen: dict[str, int] = {}
    for label, name in named.items():
        if seen.setdefault(name, label) != label:
            raise DataError(
                f"{file.url!r} has {name!r} for the numbers {seen[name]} and {label}; give each class a name of its own"
            )


def _check_folders(named: dict[int, str], folders: list[str], file: Place) -> None:
    _check_unique(named, file)
    only_named = sorted(set(named.values()) - set(folders))
    only_there = sorted(set(folders) - set(named.values()))
    if only_named or only_there:
        raise DataError(
            f"{file.url!r} and the folders beside it differ: {_few(only_named)} only in the file, {_few(only_there)}"
            " only among the folders; make them the same"
        )


def _few(names: list[str]) -> str:
    return f"{names[:5]}" if len(names) <= 5 else f"{names[:5]} and {len(names) - 5} more"


def _warn_of_empty(empty: list[str], base: Place) -> None:
    if empty:
        log.warning("%s: no picture in %s; they are classes all the same, remove what is none", base.url, _few(empty))


def _in_threads(work: Callable[[T], U], items: Sequence[T], what: str) -> Iterator[U]:
    """What `work` makes of each, in order; with progress on a terminal. A failure ends it."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="plait-read") as pool:
        try:
            # by blocks: a million futures at once would take a gigabyte
            blocks = (items[start : start + _BLOCK] for start in range(0, len(items), _BLOCK))
            yield from _with_progress((done for block in blocks for done in pool.map(work, block)), len(items), what)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _with_progress(items: Iterable[U], count: int, what: str) -> Iterable[U]:
    if not sys.stderr.isatty():
        return items
    from rich.console import Console  # noqa: PLC0415 - heavy, and only for people who watch
    from rich.progress import track  # noqa: PLC0415 - same

    return track(items, what, total=count, console=Console(stderr=True), transient=True)


def _patterns(pattern: str | Sequence[str] | None, patterns: str | Sequence[str] | None) -> list[str]:
    if (pattern is None) == (patterns is None):
        raise ConfigError(
            f"file_pattern={pattern!r} and file_patterns={patterns!r} are two spellings of one thing: give one,"
            " such as file_pattern='*train*.tfrecord'"
        )
    given = pattern if pattern is not None else patterns
    parts = given.split(",") if isinstance(given, str) else list(given or ())
    wanted = [part.strip() for part in parts if part.strip()]
    if not wanted:
        raise ConfigError(f"file_pattern={given!r} names no file: write a pattern such as '*train*.tfrecord'")
    return wanted


def _record_names(base: Place, patterns: list[str]) -> list[str]:
    """Files that fit, relative to `base`, by name; each pattern has to fit one."""
    deep = any("/" in pattern for pattern in patterns)
    with _directory(base):
        listed = base.store.tree(base.path or ".") if deep else base.store.scan(base.path or ".")
    there = [name for name, info in listed if not info.is_directory]
    found: set[str] = set()
    for pattern in patterns:
        fitting = [name for name in there if _fits(name, pattern)]
        if not fitting:
            raise DataError(f"no file in {base.url!r} fits {pattern!r}; files there: {_few(there)}")
        found.update(fitting)
    return sorted(found)


def _fits(name: str, pattern: str) -> bool:
    """Part by part; what begins with a dot only where the pattern does."""
    names, patterns = name.split("/"), pattern.split("/")
    pairs = zip(names, patterns, strict=False)
    return len(names) == len(patterns) and all(
        fnmatch.fnmatchcase(part, wanted) and (part[:1] != "." or wanted[:1] == ".") for part, wanted in pairs
    )


def _count_records(urls: list[str]) -> int:
    log.info("counting the records of %d files; num_samples= saves this", len(urls))
    return sum(_in_threads(_records_in, urls, "counting records"))


def _records_in(url: str) -> int:
    from plait.data.tfrecord import RecordFile  # noqa: PLC0415 - brings the checksums, and only to count

    place = place_of(url)
    if place.store is LOCAL:
        return len(RecordFile(place.path))
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        local = str(Path(folder, "records"))
        copy(url, local)
        return len(RecordFile(local))


def _shares(split_spec: Mapping[str, float] | str | None) -> dict[str, float]:
    """The splits, by name, with shares that add up to 1."""
    given: Any = _DEFAULT_SPLIT if split_spec is None else split_spec
    pairs: list[Any] = []
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        pairs = [part.split(":") for part in given.split(",")] if isinstance(given, str) else list(given.items())
        pairs = [(name.strip(), float(share)) for name, share in pairs]
        plain = all(name and name[0] != "." and "/" not in name for name, _ in pairs)
        total = sum(share for _, share in pairs)
        if plain and len(dict(pairs)) == len(pairs) and all(share > 0 for _, share in pairs) and abs(total - 1) < 1e-6:
            return {name: share / total for name, share in pairs}
    raise ConfigError(
        f"split_spec={split_spec!r} is no list of splits with shares that add up to 1: write"
        " {'train': 0.9, 'eval': 0.1} or 'train:0.9,eval:0.1'"
    )


def _occupied(source: Place, place: Place, overwrite: bool) -> Place | None:
    """`place`, if there is something that has to be removed; an error, if it may not be."""
    inner, outer = f"{_real(place)}/", f"{_real(source)}/"
    if inner.startswith(outer) or outer.startswith(inner):
        raise ConfigError(
            f"the split {place.url!r} and src_dir={source.url!r} lie in one another: give another dst_dir"
        )
    there = place.find()
    if there is None or (there.is_directory and not place.store.scan(place.path)):
        return None
    if not overwrite:
        raise ConfigError(f"{place.url!r} is there already: give another dst_dir, or overwrite=True to replace it")
    return place


def _real(place: Place) -> str:
    return os.path.realpath(place.path) if place.store is LOCAL else f"s3://{place.path.rstrip('/')}"


def _chosen(metadata: ImageClassificationRawMetadata, shares: dict[str, float], seed: int) -> dict[str, list[str]]:
    """The names of the pictures of each split."""
    chosen: dict[str, list[str]] = {split: [] for split in shares}
    order = np.argsort(metadata.labels, kind="stable")
    ends = np.cumsum(np.bincount(metadata.labels, minlength=metadata.num_classes))
    for label, indices in enumerate(np.split(order, ends[:-1])):
        names = [metadata.names[index] for index in indices.tolist()]
        if 0 < len(names) < len(shares):
            log.warning("class %r has %d pictures, fewer than splits", metadata.labels_to_names[label], len(names))
        # not a shuffle: a picture more or less moves hardly any of the others
        names.sort(key=lambda name: derive_seed(seed, "split", name))
        start = 0
        for split, count in zip(shares, _counts(len(names), list(shares.values())), strict=True):
            chosen[split] += names[start : start + count]
            start += count
    return {split: sorted(names) for split, names in chosen.items()}


def _counts(total: int, shares: list[float]) -> list[int]:
    """Whole numbers that add up to `total`, near their shares, and none 0 where there is enough for all."""
    counts = [int(total * share) for share in shares]
    # the rest goes to those that were cut the most; then those without any take from those with the most
    by_rest = sorted(range(len(shares)), key=lambda place: counts[place] - total * shares[place])
    for place in by_rest[: total - sum(counts)]:
        counts[place] += 1
    while total >= len(counts) and 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts
