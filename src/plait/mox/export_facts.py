"""What the data of a run tell those who will use its model: the names of the classes, how pictures are prepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from plait.data.columns import Column
from plait.data.layouts import get_dataset_meta
from plait.errors import ConfigError
from plait.mox.pictures import PreprocessingKeys

__all__ = ["labels_of", "preprocess_of"]

_RECIPES = {recipe for name, recipe in vars(PreprocessingKeys).items() if name.isupper()}
_CHANNELS = (1, 3)


def labels_of(source: Any, outputs: Mapping[str, Tensor]) -> list[str] | None:
    """The names of the classes, if the data set has them.

    Networks may leave the background out, the first class: then there is an output with one value less than names.
    """
    names = _names(getattr(source, "dataset", source))
    widths = {value.shape[-1] for value in outputs.values() if value.ndim > 1 and value.is_floating_point()}
    if len(names) not in widths and len(names) - 1 in widths:
        names = names[1:]
    return names if len(names) > 1 else None


def _names(dataset: Any) -> list[str]:
    metadata = getattr(dataset, "metadata", None)
    if metadata is not None:
        return list(metadata.labels_list)
    *_, name = str(getattr(dataset, "name", "")).rpartition(" of ")  # so `get_dataset` calls those without metadata
    try:
        return list(get_dataset_meta(name).labels_to_names.values())
    except ConfigError:
        return []


def preprocess_of(source: Any, inputs: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """How a picture becomes the input, if there is one input and it is a batch of pictures.

    Pixels are what the network was given: `get_model_fn` scales them itself.
    """
    pictures = list(inputs.values())
    if len(pictures) != 1 or pictures[0].ndim != 4:
        return None
    _, first, middle, last = pictures[0].shape
    if last in _CHANNELS:
        found: dict[str, Any] = {"layout": "NHWC", "size": [first, middle]}
    elif first in _CHANNELS:
        found = {"layout": "NCHW", "size": [middle, last]}
    else:
        return None
    recipes = {column.name for column in _columns(source)} & _RECIPES
    return {**found, "recipe": recipes.pop()} if len(recipes) == 1 else found


def _columns(source: Any) -> Iterator[Column]:
    """The columns of a data set's fields, and all that those are made of."""
    given = getattr(source, "columns", ())
    rows = getattr(getattr(source, "dataset", source), "row_columns", {})
    waiting = [*(given.values() if isinstance(given, Mapping) else given), *rows.values()]
    while waiting:
        column = waiting.pop()
        if isinstance(column, Column):
            yield column
            waiting.extend(column.arguments or ())
