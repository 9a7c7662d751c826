"""Columns of ids: from whole numbers, from hashes, from a vocabulary; and with weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import ConfigError, DataError
from plait.feature_column.columns import CategoricalColumn, check_count, check_key
from plait.feature_column.inputs import MISSING, Ids, Inputs, Ragged, Raw
from plait.feature_column.spec import STRING, Spec, VarLenFeature, as_dtype
from plait.feature_column.strings import Strings, decimals

__all__ = [
    "HashedColumn",
    "IdentityColumn",
    "VocabularyColumn",
    "WeightedColumn",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "integers",
    "weighted_categorical_column",
]


def integers(key: str, value: Tensor | Strings, what: str) -> Tensor:
    """Whole numbers, as int64; an empty list, which NumPy takes for one of floats, is one of them, too."""
    if isinstance(value, Strings) or ((value.is_floating_point() or value.dtype is torch.bool) and value.numel()):
        kind = "strings" if isinstance(value, Strings) else str(value.dtype).removeprefix("torch.")
        raise DataError(f"{what} of feature {key!r} takes whole numbers, got {kind}")
    return value.long()


def _split(raw: Raw) -> tuple[Tensor | Strings, Tensor | None]:
    return (raw.values, raw.offsets) if isinstance(raw, Ragged) else (raw, None)


def _words(value: Tensor | Strings) -> Tensor | Strings:
    """The value of a feature of strings: an empty list does not tell its kind."""
    if isinstance(value, Strings) or value.numel():
        return value
    return Strings(b"", [0], value.shape)


def _batch(value: Tensor | Strings, ids: Tensor) -> Tensor:
    """Dense ids as [batch, k]."""
    return ids.view(value.shape[0], -1) if value.shape[0] else ids.view(0, 1)


@dataclass(frozen=True)
class _KeyColumn(CategoricalColumn):
    key: str

    def __post_init__(self) -> None:
        check_key(self.key)

    @property
    def name(self) -> str:
        return self.key


@dataclass(frozen=True)
class IdentityColumn(_KeyColumn):
    number_buckets: int
    default_value: int | None = None

    @property
    def num_buckets(self) -> int:
        return self.number_buckets

    @property
    def plain_key(self) -> str | None:
        return self.key

    @property
    def parse_example_spec(self) -> Spec:
        return {self.key: VarLenFeature(torch.int64)}

    def ids(self, inputs: Inputs) -> Ids:
        value, offsets = _split(inputs.raw(self.key))
        found = integers(self.key, value, "categorical_column_with_identity")
        if self.default_value is not None:
            outside = (found < 0) | (found >= self.number_buckets)
            if offsets is None:
                outside &= found != -1
            found = found.masked_fill(outside, self.default_value)
        return Ids(found if found.ndim == 2 or offsets is not None else found.flatten(1), offsets)


def categorical_column_with_identity(key: str, num_buckets: int, default_value: int | None = None) -> IdentityColumn:
    """Whole numbers from 0 to `num_buckets` - 1 are their own ids; others become `default_value`, where there is one.

    Of dense features, -1 says that there is no value.
    """
    buckets = check_count(f"categorical_column_with_identity({key!r}): num_buckets", num_buckets)
    if default_value is not None and not 0 <= default_value < num_buckets:
        raise ConfigError(
            f"categorical_column_with_identity({key!r}): default_value is {default_value}; write 0 to {num_buckets - 1}"
        )
    return IdentityColumn(key, buckets, default_value)


@dataclass(frozen=True)
class HashedColumn(_KeyColumn):
    hash_bucket_size: int
    dtype: Any = STRING

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    @property
    def parse_example_spec(self) -> Spec:
        return {self.key: VarLenFeature(self.dtype)}

    def ids(self, inputs: Inputs) -> Ids:
        value, offsets = _split(inputs.raw(self.key))
        value = _words(value) if self.dtype == STRING else value
        strings, absent = _as_strings(self.key, value, self.dtype, "categorical_column_with_hash_bucket")
        buckets = _hashed(strings, self.hash_bucket_size)
        if offsets is not None:
            return Ids(torch.from_numpy(buckets), offsets)
        buckets[absent] = -1
        return Ids(_batch(value, torch.from_numpy(buckets)))


def categorical_column_with_hash_bucket(key: str, hash_bucket_size: int, dtype: Any = STRING) -> HashedColumn:
    """Strings, or whole numbers as they are written, to TensorFlow's fingerprint modulo `hash_bucket_size`.

    Of dense features, '' (of numbers, -1) says that there is no value.
    """
    buckets = check_count(f"categorical_column_with_hash_bucket({key!r}): hash_bucket_size", hash_bucket_size)
    return HashedColumn(key, buckets, _id_dtype("categorical_column_with_hash_bucket", key, dtype))


def _as_strings(key: str, value: Tensor | Strings, dtype: Any, what: str) -> tuple[Strings, NDArray[np.bool_]]:
    """The strings that are hashed, in one row; and where a dense feature has none."""
    if dtype == STRING:
        if not isinstance(value, Strings):
            raise DataError(f"{what} of feature {key!r} takes strings, got {value.dtype}; or write dtype=torch.int64")
        return value, value.lengths() == 0
    numbers = integers(key, value, what).reshape(-1).cpu().numpy()
    return decimals(numbers), numbers == -1


def _hashed(strings: Strings, buckets: int) -> NDArray[np.int64]:
    found: NDArray[np.int64] = (strings.fingerprints() % np.uint64(buckets)).view(np.int64)
    return found


@dataclass(frozen=True)
class VocabularyColumn(_KeyColumn):
    """Of a list, or of a file whose lines are read when ids are first asked for."""

    vocabulary: tuple[Any, ...] | str
    vocabulary_size: int | None
    dtype: Any
    default_value: int
    num_oov_buckets: int

    @property
    def num_buckets(self) -> int:
        return len(self.words) + self.num_oov_buckets

    @property
    def parse_example_spec(self) -> Spec:
        return {self.key: VarLenFeature(self.dtype)}

    @cached_property
    def words(self) -> tuple[Any, ...]:
        """Bytes, or whole numbers, in the order of their ids."""
        if not isinstance(self.vocabulary, str):
            return self.vocabulary
        return _read_words(self.key, self.vocabulary, self.vocabulary_size, self.dtype)

    @cached_property
    def _numbers(self) -> dict[Any, int]:
        numbers: dict[Any, int] = {word: number for number, word in enumerate(self.words)}
        for word, number in list(numbers.items()):
            if isinstance(word, bytes):  # text is looked up as it comes
                numbers[_text(word)] = number
        return numbers

    def ids(self, inputs: Inputs) -> Ids:
        value, offsets = _split(inputs.raw(self.key))
        value = _words(value) if self.dtype == STRING else value
        what = "a vocabulary column"
        if isinstance(value, Strings) and self.dtype == STRING:
            items, absent = value.tolist(), value.lengths() == 0
        elif self.dtype != STRING:
            flat = integers(self.key, value, what).reshape(-1).cpu().numpy()
            items, absent = flat.tolist(), flat == -1
        else:
            raise DataError(f"{what} of feature {self.key!r} has words, and got numbers; write dtype=torch.int64")
        lost = MISSING if self.num_oov_buckets else self.default_value
        found = np.fromiter(map(self._numbers.get, items, itertools.repeat(lost)), np.int64, len(items))
        if self.num_oov_buckets and bool((unknown := found == MISSING).any()):
            found[unknown] = self._spread([items[place] for place in np.flatnonzero(unknown)])
        if offsets is not None:
            return Ids(torch.from_numpy(found), offsets)
        found[absent] = MISSING
        return Ids(_batch(value, torch.from_numpy(found)), missing=MISSING)

    def _spread(self, items: list[Any]) -> NDArray[np.int64]:
        """Ids behind the vocabulary for what is not in it."""
        strings = Strings.of(np.array(items, object)) if self.dtype == STRING else decimals(np.array(items, np.int64))
        return len(self.words) + _hashed(strings, self.num_oov_buckets)


def _text(word: bytes) -> str | bytes:
    try:
        return word.decode()
    except UnicodeDecodeError:
        return word


def _read_words(key: str, path: str, size: int | None, dtype: Any) -> tuple[Any, ...]:
    try:
        lines = Path(path).read_bytes().replace(b"\r", b"").split(b"\n")
    except OSError as error:
        raise DataError(f"the vocabulary of {key!r} cannot be read: {error}") from error
    lines = lines[:-1] if lines[-1] == b"" else lines
    if size is not None and size > len(lines):
        raise ConfigError(f"vocabulary_size of {key!r} is {size}, and {path} has {len(lines)} lines; leave it out")
    try:
        words = tuple(line if dtype == STRING else int(line) for line in lines[:size])
    except ValueError as error:
        raise DataError(f"{path} has a line that is no whole number: {error}; write dtype='string'") from None
    return _checked_words(key, words)


def _checked_words(key: str, words: tuple[Any, ...]) -> tuple[Any, ...]:
    if not words or len(set(words)) < len(words):
        twice = sorted({word for word in words if words.count(word) > 1}) if len(words) < 10_000 else "some words"
        what = f"has {twice} twice" if words else "is empty"
        raise ConfigError(f"the vocabulary of {key!r} {what}; each word stands in it once")
    return words


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[Any],
    dtype: Any = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyColumn:
    """Words to their places in a list. Others become `default_value` (-1: left out), or are spread over oov buckets."""
    given = () if isinstance(vocabulary_list, (str, bytes)) else np.asarray(vocabulary_list, object).ravel()
    words = tuple(word.encode() if isinstance(word, str) else word for word in given)
    kinds = {isinstance(word, bytes) for word in words}
    if len(kinds) != 1 or not all(isinstance(word, (bytes, int, np.integer)) for word in words):
        raise ConfigError(f"the vocabulary of {key!r} is {vocabulary_list!r:.80}; write strings, or whole numbers")
    kind = _id_dtype(
        "categorical_column_with_vocabulary_list",
        key,
        (STRING if True in kinds else torch.int64) if dtype is None else dtype,
    )
    if (kind == STRING) is not (True in kinds):
        raise ConfigError(f"the vocabulary of {key!r} has not the dtype that was given, {dtype!r}; leave dtype out")
    _check_oov(key, default_value, num_oov_buckets)
    if default_value >= len(words):
        raise ConfigError(
            f"the vocabulary of {key!r} has {len(words)} words, and default_value={default_value}: write a "
            "word's place, or -1"
        )
    words = words if kind == STRING else tuple(int(word) for word in words)
    return VocabularyColumn(key, _checked_words(key, words), None, kind, default_value, num_oov_buckets)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str,
    vocabulary_size: int | None = None,
    num_oov_buckets: int = 0,
    default_value: int | None = None,
    dtype: Any = STRING,
) -> VocabularyColumn:
    """The same with the first `vocabulary_size` lines of a file, or all of them."""
    if not vocabulary_file:
        raise ConfigError(f"vocabulary_file of {key!r} is {vocabulary_file!r}; write the path of a text file")
    if vocabulary_size is not None and vocabulary_size < 1:
        raise ConfigError(f"vocabulary_size of {key!r} is {vocabulary_size}; write 1 or more, or leave it out")
    lost = -1 if default_value is None else default_value
    _check_oov(key, lost, num_oov_buckets)
    kind = _id_dtype("categorical_column_with_vocabulary_file", key, dtype)
    return VocabularyColumn(key, str(vocabulary_file), vocabulary_size, kind, lost, num_oov_buckets)


def _check_oov(key: str, default_value: int, num_oov_buckets: int) -> None:
    if num_oov_buckets < 0 or (num_oov_buckets and default_value != -1):
        raise ConfigError(
            f"the vocabulary of {key!r} has default_value={default_value} and num_oov_buckets={num_oov_buckets}: write "
            "one of them, and no negative number of buckets"
        )


def _id_dtype(what: str, key: str, dtype: Any) -> Any:
    kind = as_dtype(dtype)
    if kind != STRING and (kind.is_floating_point or kind.is_complex or kind is torch.bool):
        raise ConfigError(f"{what}({key!r}): dtype is {dtype!r}; write 'string' or torch.int64")
    return kind


@dataclass(frozen=True)
class WeightedColumn(CategoricalColumn):
    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    @property
    def parse_example_spec(self) -> Spec:
        return {**self.categorical_column.parse_example_spec, self.weight_feature_key: VarLenFeature(self.dtype)}

    def ids(self, inputs: Inputs) -> Ids:
        found = inputs.ids(self.categorical_column)
        weights, offsets = _split(inputs.raw(self.weight_feature_key))
        if isinstance(weights, Strings):
            raise DataError(f"feature {self.weight_feature_key!r} is strings, and has to be weights of {self.name!r}")
        alike = (offsets is None) == (found.offsets is None)
        if alike and found.offsets is not None and offsets is not None:
            alike = torch.equal(found.offsets, offsets.to(found.offsets.device))
        weights = weights.flatten(1) if offsets is None else weights
        if not alike or weights.shape != found.values.shape:
            raise DataError(
                f"{self.name!r}: the weights are not where the values are; give one for each, in rows of the same "
                f"lengths (got {list(weights.shape)} for {list(found.values.shape)})"
            )
        return found._replace(weights=weights.to(torch.float32))


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: Any = torch.float32
) -> WeightedColumn:
    """Ids with the weights that another feature has for them."""
    kind = as_dtype(dtype)
    if not isinstance(categorical_column, CategoricalColumn) or kind == STRING:
        raise ConfigError(
            f"weighted_categorical_column({categorical_column!r}, dtype={dtype!r}): give a categorical column, and a "
            "dtype of numbers"
        )
    return WeightedColumn(categorical_column, weight_feature_key, kind)
