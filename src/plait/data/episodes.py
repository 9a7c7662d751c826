"""Few-shot tasks: a few classes, a few samples of each to learn from, others to be asked about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from plait.data.sources import as_tensor
from plait.errors import ConfigError, DataError
from plait.rng import derive_seed

__all__ = ["EpisodeSource", "FewShotClass", "TensorClass", "tensor_classes"]

Task: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""The rows of a task and their labels: first those to learn from, then those that are asked about."""


class FewShotClass(Protocol):
    """Samples that belong together. The folders of `plait.data.fewshot` are such classes."""

    def __len__(self) -> int:
        """How many samples there are."""

    def sample(self, num_images: int, rng: np.random.Generator, /) -> Any:
        """Draw `num_images` different samples with `rng` alone: a list of arrays or tensors, or one with rows."""


class TensorClass:
    """Some rows of a tensor as a class."""

    def __init__(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        self.values = values
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, num_images: int, rng: np.random.Generator) -> torch.Tensor:
        chosen = torch.from_numpy(rng.choice(len(self.rows), num_images, replace=False))
        return self.values.index_select(0, self.rows[chosen].to(self.values.device))


def tensor_classes(images: torch.Tensor | NDArray[Any], labels: torch.Tensor | NDArray[Any]) -> list[TensorClass]:
    """The rows of `images` as one class for each label, in the labels' order. No row is copied."""
    values, numbers = as_tensor(images), as_tensor(labels)
    if not isinstance(values, torch.Tensor) or values.ndim == 0:
        raise DataError(f"images is a {type(images).__name__}; give a tensor or an array with a row for each image")
    if not isinstance(numbers, torch.Tensor) or numbers.ndim != 1 or numbers.is_floating_point():
        raise DataError(f"labels is {_shown(labels)}; give whole numbers, one for each of the {len(values)} images")
    if len(numbers) != len(values):
        raise DataError(f"there are {len(values)} images and {len(numbers)} labels; give one label for each image")
    found = torch.unique(numbers, sorted=True)
    return [TensorClass(values, (numbers == label).nonzero().flatten()) for label in found]


class EpisodeSource:
    """Tasks drawn from `classes`: `ways` of them, `shots` samples of each to learn from, `queries` to be asked about.

    A batch is one task: `support_x` [ways * shots, ...] with `support_y`, `query_x` [ways * queries, ...] with
    `query_y`; labels are 0 to ways - 1 and mean another class in each task. `x` and `y` are both parts together,
    the support first. With `tasks`, a batch is that many: the four parts get a leading dimension, `x` and `y` do not.

    Each task is a pure function of (seed, epoch, its number), so any place is reached at once. A pass has `length`
    batches; every pass has other tasks.
    """

    seekable = True

    def __init__(
        self,
        classes: Sequence[FewShotClass],
        ways: int = 5,
        shots: int = 1,
        queries: int = 1,
        *,
        tasks: int | None = None,
        length: int = 1000,
        num_epochs: int | None = None,
        seed: int = 0,
    ) -> None:
        wanted = {"ways": ways, "shots": shots, "tasks": tasks, "length": length, "num_epochs": num_epochs}
        for name, value in wanted.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it has to be 1 or more")
        if queries < 0:
            raise ConfigError(f"queries is {queries}; it has to be 0 or more")
        _check_classes(classes, ways, shots, queries)
        self.classes = classes
        self.ways, self.shots, self.queries = ways, shots, queries
        self.tasks = tasks
        self.length = length
        self.num_epochs = num_epochs
        self.seed = seed
        self.batch_size: int | None = ways * (shots + queries) * (tasks or 1)
        numbers = torch.arange(ways)
        self._labels = torch.cat([numbers.repeat_interleave(shots), numbers.repeat_interleave(queries)])

    def batches(self, epoch: int, start: int) -> Iterator[dict[str, torch.Tensor]]:
        return self.every(epoch, start, 1)

    def count(self, epoch: int) -> int:
        del epoch  # the same in all
        return self.length

    def every(self, epoch: int, start: int, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """The batches start, start + step, ...; the others are not made."""
        return (self._batch(epoch, number) for number in range(start, self.length, step))

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "episodes",
            "classes": len(self.classes),
            "samples": sum(len(one) for one in self.classes),
            "ways": self.ways,
            "shots": self.shots,
            "queries": self.queries,
            "tasks": self.tasks,
            "length": self.length,
            "seed": self.seed,
        }

    def _batch(self, epoch: int, number: int) -> dict[str, torch.Tensor]:
        support = self.ways * self.shots
        if self.tasks is None:
            x, y = self._task(epoch, number)
            parts = (x[:support], y[:support], x[support:], y[support:])
        else:
            drawn = [self._task(epoch, number * self.tasks + place) for place in range(self.tasks)]
            x, y = (torch.stack(column) for column in zip(*drawn, strict=True))
            parts = (x[:, :support], y[:, :support], x[:, support:], y[:, support:])
            x, y = x.flatten(0, 1), y.flatten(0, 1)
        return {"x": x, "y": y, **dict(zip(("support_x", "support_y", "query_x", "query_y"), parts, strict=True))}

    def _task(self, epoch: int, number: int) -> Task:
        rng = np.random.default_rng(derive_seed(self.seed, "episode", epoch, number))
        chosen = rng.choice(len(self.classes), self.ways, replace=False)
        count = self.shots + self.queries
        rows = [_rows(self.classes[place].sample(count, rng), count, place) for place in chosen.tolist()]
        try:
            x = torch.stack(rows)
        except RuntimeError as error:
            shapes = ", ".join(str(list(one.shape[1:])) for one in rows)
            raise DataError(f"classes have samples of different shapes: {shapes}; give them one shape") from error
        return torch.cat([x[:, : self.shots].flatten(0, 1), x[:, self.shots :].flatten(0, 1)]), self._labels.clone()


def _check_classes(classes: Any, ways: int, shots: int, queries: int) -> None:
    if isinstance(classes, str):
        raise DataError(f"classes is {classes!r}; give a list of classes, such as read_classes({classes!r})")
    if len(classes) < ways:
        raise DataError(f"there are {len(classes)} classes for ways={ways}; give more classes, or fewer ways")
    for place, one in enumerate(classes):
        if len(one) < shots + queries:
            folder = f" in {one.dir_path!r}" if hasattr(one, "dir_path") else ""
            raise DataError(
                f"class {place}{folder} has {len(one)} samples, and a task needs shots={shots} and queries={queries} of"
                " them; give it more samples, leave the class out, or ask for fewer"
            )


def _rows(drawn: Any, count: int, place: int) -> torch.Tensor:
    try:
        values = [as_tensor(np.asarray(one) if isinstance(one, (int, float)) else one) for one in drawn]
        rows = drawn if isinstance(drawn, torch.Tensor) else torch.stack(values)
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"sample() of class {place} gave {_shown(drawn)}: {error}; return a list of arrays of one shape"
        ) from error
    if len(rows) != count:
        raise DataError(f"sample({count}) of class {place} gave {len(rows)} samples; return as many as were asked for")
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a {type(value).__name__}"
