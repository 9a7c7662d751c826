"""What data sets of pictures share: how a row's bytes become a picture, and rows become batches."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plait.data.columns import Column, ColumnFunction, Origin, applied, derive, this_pass
from plait.data.datasets import Dataset, Order, SkippedSample, stacked
from plait.data.jpeg import Frame
from plait.data.pictures import decode, resize
from plait.data.undecoded import Undecoded
from plait.errors import ConfigError, DataError, FunctionError

__all__ = ["Options", "PictureDataset", "digest", "many_hot"]

RAW_FIELDS = ("image_name", "image_buf", "label", "label_desc")
FIELDS = ("image_name", "image", "label", "label_desc")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments that all data sets of pictures have."""

    batch_size: int | None
    num_epochs: int | None
    capacity: int = 256
    preprocess_fn: Callable[..., Any] | None
    image_size: int | Sequence[int] | None
    drop_remainder: bool
    augmentation_fn: Callable[..., Any] | None
    channels: int
    skip_broken: bool
    seed: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Those among the arguments of a constructor."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in arguments]
        return cls(**{name: arguments[name] for name in names})

    def __post_init__(self) -> None:
        if self.batch_size is not None and not (self.preprocess_fn or self.image_size or self.augmentation_fn):
            raise ConfigError(
                f"batch_size={self.batch_size} needs pictures of one size: give image_size=, preprocess_fn= or"
                " augmentation_fn="
            )
        if self.channels not in (1, 3):
            raise ConfigError(f"channels={self.channels!r}: write 3 for RGB or 1 for gray")

    @property
    def size(self) -> tuple[int, int] | None:
        if self.image_size is None:
            return None
        sizes = [self.image_size] * 2 if isinstance(self.image_size, int) else list(self.image_size)
        if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ConfigError(f"image_size={self.image_size!r}: write a number, or [height, width]")
        return sizes[0], sizes[1]


class PictureDataset(Dataset):
    """Pictures with labels.

    Fields are `image` (uint8, [height, width, channels]), `label`, `label_desc` (the class's name), `image_name` and,
    in samples, `image_buf`, the file's bytes.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        raw: Callable[[Origin], dict[str, Column]],
        options: Options,
        *,
        facts: Mapping[str, Any],
        order: Order | None,
        readers: int,
        forks: bool = False,
    ) -> None:
        """`raw` gives the columns `image_name`, `image_buf`, `label` and `label_desc`, and others if it likes."""
        preprocess, augmentation = options.preprocess_fn, options.augmentation_fn
        in_batches = options.batch_size is not None

        def fields(origin: Origin) -> dict[str, Column]:
            columns = raw(origin)
            if preprocess is not None and in_batches:
                return columns
            if preprocess is not None:
                columns |= _preprocessed(preprocess, columns)
            else:
                image = derive(
                    _decoder(options, name), [columns["image_buf"], columns["image_name"]], name="image", arrays=True
                )
                columns = {"image": image, **columns}
            if augmentation is not None:
                columns["image"] = applied(augmentation, columns["image"])
            if in_batches:
                del columns["image_buf"]  # batches of files are of no use, and large
            return columns

        super().__init__(
            name,
            rows,
            fields,
            facts=facts,
            order=order,
            seed=options.seed,
            num_epochs=options.num_epochs,
            batch_size=options.batch_size,
            drop_remainder=options.drop_remainder,
            join=_batch_preprocessed(preprocess) if preprocess is not None and in_batches else None,
            readers=readers,
            forks=forks,
            capacity=options.capacity,
        )
        if preprocess is not None and in_batches:
            self.columns = {"image" if key == "image_buf" else key: column for key, column in self.columns.items()}
            if augmentation is not None:
                self.columns["image"] = self.columns["image"].map(_each(augmentation))


def _preprocessed(preprocess_fn: Callable[..., Any], columns: Mapping[str, Column]) -> dict[str, Column]:
    """What a preprocess_fn makes of one sample."""
    four = derive(preprocess_fn, [columns[name] for name in RAW_FIELDS])
    checked = derive(_four, [four])
    return {name: derive(_item, [checked, place], name=name) for place, name in enumerate(FIELDS)}


def _batch_preprocessed(preprocess_fn: Callable[..., Any]) -> Callable[[list[list[Any]]], Sequence[Any]]:
    """What a preprocess_fn makes of a batch: of lists of names, files and classes, and of a tensor of labels."""

    def join(rows: list[list[Any]]) -> Sequence[Any]:
        columns = stacked(rows)
        return [*_four(preprocess_fn(*columns[:4])), *columns[4:]]

    return join


def _each(augmentation_fn: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """An augmentation_fn for all pictures of a batch, one by one."""
    function = augmentation_fn.function if isinstance(augmentation_fn, ColumnFunction) else augmentation_fn

    @functools.wraps(function)  # so that it is seen whether it takes a generator
    def augmented(images: Any, *rng: Any) -> torch.Tensor:
        return torch.stack([torch.as_tensor(function(image, *rng)) for image in images])

    return augmented


def _four(values: Any) -> list[Any]:
    if not isinstance(values, (tuple, list)) or len(values) != len(FIELDS):
        got = f"{len(values)} values" if isinstance(values, (tuple, list)) else f"a {type(values).__name__}"
        raise FunctionError(f"preprocess_fn gave {got}: return {', '.join(FIELDS)}")
    return list(values)


def _item(values: Sequence[Any], place: int) -> Any:
    return values[place]


def _decoder(options: Options, where: str) -> Callable[[Any, str], NDArray[Any] | Undecoded]:
    """What decodes a row's picture: the whole of it in the first pass, so that damage is seen.

    In later passes a recipe may decode the part that it cuts out, and no more. With `skip_broken` damaged ones stay, so
    that all passes are like the first.
    """
    channels, size, skip_broken = options.channels, options.size, options.skip_broken
    in_parts = channels == 3 and not skip_broken

    def decoded(data: Any, name: str, rows: int | None = None) -> NDArray[Any]:
        try:
            return decode(data, name, channels=channels, rows=rows)
        except DataError as error:
            if skip_broken:
                raise SkippedSample(str(error)) from error
            raise DataError(f"{where}: {error}") from error

    def picture(data: Any, name: str) -> NDArray[Any] | Undecoded:
        if size is not None:
            return resize(decoded(data, name), *size, method="nearest")
        frame = Frame.of(data) if in_parts and this_pass() > 0 else None
        if frame is None:
            return decoded(data, name)
        return Undecoded((frame.height, frame.width, channels), functools.partial(decoded, data, name))

    return picture


def digest(*parts: Any) -> str:
    """A short word for lists of names and arrays of labels: for other data, another word."""
    found = hashlib.sha256()
    for part in parts:
        # surrogates: names of files need not be text
        found.update(part.tobytes() if isinstance(part, np.ndarray) else "\0".join(part).encode(errors="surrogatepass"))
    return found.hexdigest()[:16]


def many_hot(labels: Sequence[int], classes: int) -> torch.Tensor:
    """A row of zeros with ones at `labels`."""
    row = torch.zeros(classes)
    row[list(labels)] = 1
    return row
