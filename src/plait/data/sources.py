"""Sources: where batches come from, in an order that is a pure function of (seed, epoch)."""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from plait.errors import ConfigError, DataError
from plait.rng import IsolatedRng, derive_seed

__all__ = [
    "ConstantSource",
    "IterableSource",
    "LoaderSource",
    "SequenceSource",
    "Source",
    "TensorSource",
    "as_source",
    "as_tensor",
    "fast_forward",
    "on_one_device",
]

_CHUNK_BATCHES = 64
_CHUNK_BYTES = 8 << 20
_QUIET_BATCHES = 8  # so few are read again without a word
_END: Any = object()


def on_one_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that belong together; if some are on a GPU, all: what is made of text begins in the host's memory."""
    far = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    return list(tensors) if far is None else [tensor.to(far) for tensor in tensors]


@runtime_checkable
class Source(Protocol):
    """Anything that can give its batches from a place that is named by two numbers."""

    num_epochs: int | None
    """Passes there are in all; None: as many as are asked for."""
    batch_size: int | None
    seekable: bool
    """Whether `batches` gets to `start` without reading what lies before."""

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of pass `epoch` (from 0), beginning with number `start` (from 0)."""

    def fingerprint(self) -> dict[str, Any]:
        """Facts, known at once and fit for JSON, that have to be the same when a checkpoint is resumed."""


class TensorSource:
    """Rows of tensors in memory, as dicts or tuples of batches.

    Shuffled rows are gathered many batches at a time. Rows in order are views: a step that writes into its batch
    writes into the data.
    """

    seekable = True

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | NDArray[Any]] | Sequence[torch.Tensor | NDArray[Any]],
        batch_size: int,
        *,
        shuffle: bool = False,
        num_epochs: int | None = None,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        self.names = list(tensors) if isinstance(tensors, Mapping) else None
        values = list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)
        self.tensors = [_rows_tensor(value) for value in values]
        self.rows = _equal_rows(self.names or list(range(len(values))), self.tensors)
        self.batch_size: int | None = _positive("batch_size", batch_size)
        self.num_epochs = _passes(num_epochs)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_remainder = drop_remainder
        row_bytes = sum(t[:1].numel() * t.element_size() for t in self.tensors)
        self._chunk = batch_size * max(1, min(_CHUNK_BATCHES, _CHUNK_BYTES // max(1, row_bytes * batch_size)))

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        return self._batches(None, epoch, start)

    def batches_on(self, device: torch.device, epoch: int, start: int) -> Iterator[Any]:
        """The same on a GPU: rows are copied many batches at a time, and a step finds its own there."""
        return self._batches(device, epoch, start)

    def _batches(self, device: torch.device | None, epoch: int, start: int) -> Iterator[Any]:
        assert self.batch_size is not None  # noqa: S101 - the constructor set it
        size, names = self.batch_size, self.names
        rows = self.rows - self.rows % size if self.drop_remainder else self.rows
        orders = self._orders(epoch)
        copies = None if device is None else _Copies(device)
        for begin in range(start * size, rows, self._chunk):
            end = min(begin + self._chunk, rows)
            chunk = self._rows(orders, begin, end)
            if copies is not None:
                chunk = copies.of(chunk)
            # unsafe_split: to autograd each batch is a tensor of its own, that a step may change in place.
            pieces = zip(*(t.unsafe_split(size) for t in chunk), strict=True)
            if names is None:
                yield from pieces
            else:
                for values in pieces:
                    yield dict(zip(names, values))  # noqa: B905 - `strict` costs a third of this line, which is hot

    def count(self, epoch: int) -> int:
        del epoch  # the same in all
        assert self.batch_size is not None  # noqa: S101 - the constructor set it
        return self.rows // self.batch_size if self.drop_remainder else -(-self.rows // self.batch_size)

    def every(self, epoch: int, start: int, step: int) -> Iterator[Any]:
        """The batches start, start + step, ...; rows of the others are not touched."""
        assert self.batch_size is not None  # noqa: S101 - the constructor set it
        size, names, orders = self.batch_size, self.names, self._orders(epoch)
        for number in range(start, self.count(epoch), step):
            values = self._rows(orders, number * size, min((number + 1) * size, self.rows))
            yield tuple(values) if names is None else dict(zip(names, values, strict=True))

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "tensors",
            "fields": self.names if self.names is not None else len(self.tensors),
            "rows": self.rows,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_remainder": self.drop_remainder,
        }

    def _orders(self, epoch: int) -> list[torch.Tensor] | None:
        if not self.shuffle:
            return None
        order = _permutation(self.rows, self.seed, epoch)
        return [order.to(t.device) for t in self.tensors]

    def _rows(self, orders: list[torch.Tensor] | None, begin: int, end: int) -> list[torch.Tensor]:
        if orders is None:
            return [t[begin:end] for t in self.tensors]
        return [t.index_select(0, order[begin:end]) for t, order in zip(self.tensors, orders, strict=True)]


class _Copies:
    """Copies of tensors on a GPU, by way of pinned memory that is used again and again: two sets, in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sets: list[list[torch.Tensor]] = [[], []]
        self._done: list[Any] = [None, None]
        self._turn = 0

    def of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if all(tensor.is_cuda for tensor in tensors):
            return tensors
        turn = self._turn = 1 - self._turn
        if self._done[turn] is None:
            self._sets[turn] = [t if t.is_cuda else torch.empty_like(t, pin_memory=True) for t in tensors]
            self._done[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        else:
            self._done[turn].synchronize()  # the copy before the last one, which is long done
        pinned = []
        for whole, tensor in zip(self._sets[turn], tensors, strict=True):
            # what is on the card is nobody's buffer: steps may still use it when this one's turn comes again
            pinned.append(tensor if tensor.is_cuda else whole[: len(tensor)].copy_(tensor))
        there = [tensor.to(self._device, non_blocking=True) for tensor in pinned]
        self._done[turn].record(torch.cuda.current_stream(self._device))
        return there


class SequenceSource:
    """A list, or another sequence, of ready batches."""

    seekable = True
    batch_size: int | None = None

    def __init__(
        self, batches: Sequence[Any], *, shuffle: bool = False, num_epochs: int | None = None, seed: int = 0
    ) -> None:
        self.items = batches
        self.shuffle = shuffle
        self.num_epochs = _passes(num_epochs)
        self.seed = seed

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        return self.every(epoch, start, 1)

    def count(self, epoch: int) -> int:
        del epoch  # the same in all
        return len(self.items)

    def every(self, epoch: int, start: int, step: int) -> Iterator[Any]:
        """The batches start, start + step, ...; the others are not asked for."""
        count = len(self.items)
        order = _permutation(count, self.seed, epoch).tolist() if self.shuffle else range(count)
        return map(self.items.__getitem__, order[start::step])

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "sequence", "batches": len(self.items), "shuffle": self.shuffle, "seed": self.seed}


class IterableSource:
    """Any iterable of batches; one that is its own iterator (a generator, a file) gives one pass.

    A pass is opened, and what lies before `start` read again, with random states of its own; later batches draw from
    the global ones. Where a draw changes the batches after it (a shuffle buffer), give the iterable its own generator.
    """

    seekable = False
    batch_size: int | None = None

    def __init__(self, iterable: Iterable[Any], *, num_epochs: int | None = None, seed: int = 0) -> None:
        self.iterable = iterable
        self.num_epochs = _passes(num_epochs)
        self.seed = seed
        self._once = (
            _CountedIterator(iterable) if isinstance(iterable, Iterator) and iter(iterable) is iterable else None
        )
        if self._once is not None:
            self.num_epochs = 1
        if self._once is not None and num_epochs is not None and num_epochs > 1:
            warnings.warn(
                f"num_epochs={num_epochs}, but a {type(iterable).__name__} can be read only once; give a list, or an"
                " object whose __iter__ starts anew",
                stacklevel=2,
            )

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        own = IsolatedRng(derive_seed(self.seed, "epoch", epoch))
        if self._once is None:
            return _replay(self.iterable, start, start, own, "an iterable")
        return _replay(self._once, start, self._once.distance(start), own, "an iterator")

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "iterable", "batches": _length(self.iterable)}


class LoaderSource:
    """A torch DataLoader. Its order and its workers' seeds are made a pure function of (seed, epoch).

    Getting to `start` draws the batches before it, so that the workers' random states are what they were. Generators
    of the loader and of its samplers are seeded anew at each pass: with their own first seed, then with derived ones.
    """

    seekable = False

    def __init__(self, loader: DataLoader[Any], *, num_epochs: int | None = None, seed: int = 0) -> None:
        self.loader = loader
        self.num_epochs = _passes(num_epochs)
        self.seed = seed
        self._samplers = _samplers(loader)
        self._generators = _generators([loader, *self._samplers])
        self.batch_size: int | None = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if loader.persistent_workers:
            warnings.warn(
                "persistent_workers=True: workers keep their random states from pass to pass, so random augmentation"
                " in them will not resume exactly; write persistent_workers=False for that",
                stacklevel=2,
            )

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        own = IsolatedRng(derive_seed(self.seed, "epoch", epoch))
        batches = _LoaderPass(self, epoch)
        return _replay(batches, start, start, own, "a DataLoader", isolated=_draws_later(self.loader))

    @property
    def is_part(self) -> bool:
        """A sampler that knows of workers gives each its part."""
        return any(isinstance(sampler, DistributedSampler) for sampler in self._samplers)

    def prepare(self, epoch: int) -> None:
        """Tell samplers and generators which pass begins; afterwards the loader's iterator may be made."""
        for generator, first in self._generators:
            generator.manual_seed(derive_seed(first, "epoch", epoch) if epoch else first)
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def fingerprint(self) -> dict[str, Any]:
        loader = self.loader
        streamed = isinstance(loader.dataset, IterableDataset)
        return {
            "kind": "loader",
            "rows": _length(loader.dataset),
            "batch_size": self.batch_size,
            "drop_last": loader.drop_last,
            "sampler": type(loader.sampler).__name__,
            # Workers share a stream out between them; rows with numbers come in the same order for any count.
            "workers": loader.num_workers if streamed else None,
            "seed": self.seed,
            "generators": [first for _, first in self._generators],
        }


class ConstantSource:
    """The same batch at every step, for ever."""

    seekable = True
    num_epochs: int | None = None
    is_part = True  # every worker has the same

    def __init__(self, fields: Mapping[str, torch.Tensor | NDArray[Any]]) -> None:
        if not fields:
            raise DataError("a fixed batch has no fields, got {}; write {'x': tensor, ...}")
        for name, value in fields.items():
            if not isinstance(value, (torch.Tensor, np.ndarray)):
                raise DataError(
                    f"field {name!r} of a fixed batch is a {type(value).__name__}; give a tensor, or return the source"
                    " itself (a list of batches, an iterable, a DataLoader)"
                )
        self.fields = {name: as_tensor(value) for name, value in fields.items()}
        first = next(iter(self.fields.values()))
        self.batch_size: int | None = int(first.shape[0]) if first.ndim else None

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        del epoch, start  # the same everywhere
        return itertools.repeat(self.fields)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "constant", "fields": {name: list(value.shape) for name, value in self.fields.items()}}


def as_source(data: Any, *, seed: int = 0) -> Source:
    """The source that reads `data`: what an `input_fn` may return."""
    if isinstance(data, Source):
        return data
    from plait.data.datasets import column_source  # noqa: PLC0415 - it needs this module

    columns = column_source(data)
    if columns is not None:
        return columns
    if isinstance(data, DataLoader):
        return LoaderSource(data, seed=seed)
    if isinstance(data, Mapping):
        return ConstantSource(data)
    if isinstance(data, tuple) and data and all(isinstance(item, (torch.Tensor, np.ndarray)) for item in data):
        raise DataError(
            f"a tuple of {len(data)} tensors: one batch or {len(data)}? Write [(x, y)] for a list of one batch,"
            " {'x': x, 'y': y} for the same batch at every step, TensorSource((x, y), batch_size) for rows"
        )
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return SequenceSource(data, seed=seed)
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, torch.Tensor, np.ndarray)):
        return IterableSource(data, seed=seed)
    raise DataError(
        f"an input cannot be read from {_described(data)}; return a source (TensorSource, ...), columns of a data"
        " set, a DataLoader, a dict of tensors, a list of batches, or an iterable of dicts or tuples"
    )


def as_tensor(value: Any) -> Any:
    """NumPy's arrays of numbers, and its numbers, as tensors, without a copy where it can be; all else as it is."""
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "biufc":
        return value
    if isinstance(value, np.generic):
        return torch.as_tensor(value)
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    # torch knows no negative strides, and warns of memory that must not be written
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        value = value.copy()
    return torch.from_numpy(value)


def fast_forward(iterator: Iterator[Any], count: int, what: str) -> None:
    """Draw and drop `count` batches; many, with a warning and, on a terminal, a progress bar."""
    items: Iterable[Any] = itertools.islice(iterator, count)
    if count > _QUIET_BATCHES:
        warnings.warn(
            f"{what} cannot seek; reading {count} batches again to get to where the checkpoint was", stacklevel=2
        )
        items = _with_progress(items, count)
    drawn = sum(1 for _ in items)
    if drawn < count:
        raise DataError(
            f"{what} ended after {drawn} of the {count} batches that lie before the checkpoint; the data is shorter"
            " than it was: give the same data, or start without the checkpoint"
        )


def _with_progress(items: Iterable[Any], count: int) -> Iterable[Any]:
    if not sys.stderr.isatty():
        return items
    from rich.console import Console  # noqa: PLC0415 - heavy, and only for people who watch
    from rich.progress import track  # noqa: PLC0415 - same

    return track(items, "reading again", total=count, console=Console(stderr=True), transient=True)


def _replay(
    iterable: Iterable[Any], start: int, skip: int, own: IsolatedRng, what: str, *, isolated: bool = False
) -> Iterator[Any]:
    """The batches of `iterable` from number `start` on, which is reached by dropping `skip`.

    Opening, skipping and the very first batch, at which many draw their order, happen with random states of their own;
    with `isolated`, every batch does.
    """
    with own:
        iterator = iter(iterable)
        fast_forward(iterator, skip, what)
        first = list(itertools.islice(iterator, 1)) if start == 0 else []
    yield from first
    if not isolated:
        yield from iterator
    while isolated:
        with own:
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch


class _CountedIterator:
    """An iterator that can be read once, and how much of it was."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._taken = 0
        self._failed: str | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            # A generator that raised is at its end: read again, it would look like the end of the data.
            self._failed = repr(error) if inspect.isgenerator(self._iterator) else None
            raise
        self._taken += 1
        return item

    def distance(self, start: int) -> int:
        """How many have to be skipped to get to number `start`."""
        if self._failed is not None:
            raise DataError(
                f"the generator failed at batch {self._taken} ({self._failed}) and cannot go on; start anew"
            )
        if start < self._taken:
            raise DataError(
                f"batch {start} was asked for, but {self._taken} were taken from an iterator that can be read only once"
                "; give a list, or an object whose __iter__ starts anew"
            )
        return start - self._taken


class _LoaderPass:
    """A pass of a loader: made ready when it is opened, not before."""

    def __init__(self, source: LoaderSource, epoch: int) -> None:
        self._source = source
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self._source.prepare(self._epoch)
        return iter(self._source.loader)


# Each draws its whole order, or a seed for it, before its first index.
_KNOWN_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# Seeding a generator changes its `initial_seed`; a second source over the same loader needs the first one. Kept by the
# generator's owner, a loader or sampler: before torch 2.12 a generator itself cannot be referred to weakly.
_first_seeds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    found = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def _generators(owners: list[Any]) -> list[tuple[torch.Generator, int]]:
    found: dict[int, tuple[torch.Generator, int]] = {}
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            first = found.get(id(generator), (generator, generator.initial_seed()))[1]
            found[id(generator)] = (generator, _first_seeds.setdefault(owner, first))
    return list(found.values())


def _draws_later(loader: DataLoader[Any]) -> bool:
    """Whether draws after the first batch may decide, in this process, what later batches are."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.num_workers == 0
    return not all(type(sampler) in _KNOWN_SAMPLERS for sampler in _samplers(loader))


def _permutation(count: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
    return torch.randperm(count, generator=generator)


def _rows_tensor(value: Any) -> torch.Tensor:
    tensor = as_tensor(value)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
        raise DataError(f"rows cannot be taken from {_described(value)}; give tensors or arrays of numbers with rows")
    return tensor.detach()


def _equal_rows(names: Sequence[str | int], tensors: list[torch.Tensor]) -> int:
    sizes = {name: len(tensor) for name, tensor in zip(names, tensors, strict=True)}
    if not sizes:
        raise DataError("no tensors were given; write TensorSource({'x': x, 'y': y}, batch_size)")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise DataError(f"tensors have different numbers of rows ({listed}); their first dimensions have to be equal")
    return next(iter(sizes.values()))


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name} is {value}; it has to be 1 or more")
    return value


def _passes(num_epochs: int | None) -> int | None:
    return None if num_epochs is None else _positive("num_epochs", num_epochs)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _described(value: Any) -> str:
    shape = f" of shape {list(value.shape)}" if isinstance(value, (torch.Tensor, np.ndarray)) else ""
    return "None" if value is None else f"a {type(value).__name__}{shape}"
