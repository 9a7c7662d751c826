"""Folders of pictures as few-shot classes: photographs, as in mini-ImageNet, and characters, as in Omniglot."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plait.errors import ConfigError, DataError
from plait.rng import derive_seed

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "MAX_PIXELS",
    "CharacterClass",
    "ImageClass",
    "read_characters",
    "read_classes",
    "read_dataset",
    "split_classes",
    "with_rotations",
]

MAX_PIXELS = 64 << 20
"""A picture of more is not decoded."""
SUFFIXES = (".jpg", ".jpeg", ".png")
SPLITS = ("train", "val", "test")
ROTATIONS = (0, 90, 180, 270)

PathLike = str | os.PathLike[str]


class ImageClass:
    """The pictures of one folder as one class: `size` x `size` x 3 values in [0, 1].

    Pictures are resized with a bicubic filter, whatever their proportions, and kept once they were read, as bytes.
    """

    def __init__(
        self, dir_path: PathLike, *, size: int = 84, seed: int = 0, rng: np.random.Generator | None = None
    ) -> None:
        if size < 1:
            raise ConfigError(f"size is {size}; it has to be 1 or more")
        self.dir_path = os.fspath(dir_path)
        self.size = size
        self.names = _pictures(Path(self.dir_path))
        self.seed = seed
        self._rng = rng or _generator(self.dir_path, seed)
        self._cache: dict[str, NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dir_path!r})"

    def sample(self, num_images: int, rng: np.random.Generator | None = None) -> list[NDArray[np.float32]]:
        """Draw `num_images` different pictures, with `rng` or else with the class's own generator."""
        if not 0 <= num_images <= len(self.names):
            raise DataError(
                f"{num_images} pictures were asked of {self.dir_path!r}, which has {len(self.names)}; ask for fewer,"
                " or leave this class out"
            )
        chosen = (rng or self._rng).choice(len(self.names), num_images, replace=False)
        return [self._read_image(self.names[place]) for place in chosen.tolist()]

    def _read_image(self, name: str) -> NDArray[np.float32]:
        """The picture with that file name."""
        found = self._cache.get(name)
        if found is None:
            found = self._cache[name] = _decode(Path(self.dir_path, name), self._picture)
        return np.divide(found, 255, dtype=np.float32)

    def _picture(self, image: Image) -> Image:
        from PIL import Image as Pillow  # noqa: PLC0415 - heavy, and only for people who read pictures

        return image.convert("RGB").resize((self.size, self.size), Pillow.Resampling.BICUBIC)


class CharacterClass(ImageClass):
    """The drawings of one character as one class: `size` x `size` values in [0, 1], paper 1 and ink 0.

    A drawing is made smaller by the mean over each new pixel's area: of a thin line a grey one is left, where the
    nearest pixel would lose it. Then it is turned by `rotation` degrees, against the clock.
    """

    def __init__(
        self,
        dir_path: PathLike,
        rotation: float = 0,
        *,
        size: int = 28,
        seed: int = 0,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__(dir_path, size=size, seed=seed, rng=rng or _generator(dir_path, seed, str(rotation)))
        self.rotation = rotation

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dir_path!r}, rotation={self.rotation})"

    def _picture(self, image: Image) -> Image:
        from PIL import Image as Pillow  # noqa: PLC0415 - as above

        drawing = image.convert("L").resize((self.size, self.size), Pillow.Resampling.BOX)
        return drawing.rotate(self.rotation, Pillow.Resampling.BILINEAR, fillcolor=255)


def read_dataset(
    data_dir: PathLike, *, size: int = 84, seed: int = 0
) -> tuple[list[ImageClass], list[ImageClass], list[ImageClass]]:
    """The classes of `data_dir`'s folders train, val and test."""
    missing = [name for name in SPLITS if not Path(data_dir, name).is_dir()]
    if missing:
        raise DataError(f"{os.fspath(data_dir)!r} has no folder {missing[0]!r}; it needs train, val and test")
    train, val, test = (read_classes(Path(data_dir, name), size=size, seed=seed) for name in SPLITS)
    return train, val, test


def read_classes(dir_path: PathLike, *, size: int = 84, seed: int = 0) -> list[ImageClass]:
    """A class for each folder in `dir_path`, by name."""
    return [ImageClass(folder, size=size, seed=seed) for folder in _folders(Path(dir_path))]


def read_characters(dir_path: PathLike, *, size: int = 28, seed: int = 0) -> list[CharacterClass]:
    """A class for each `alphabet/character*` in `dir_path`, by name."""
    alphabets = _folders(Path(dir_path))
    found = [folder for alphabet in alphabets for folder in _folders(alphabet) if folder.name.startswith("character")]
    if not found:
        raise DataError(
            f"{os.fspath(dir_path)!r} has {len(alphabets)} folders, but no character* in any; give the folder that"
            " holds the alphabets"
        )
    return [CharacterClass(folder, size=size, seed=seed) for folder in found]


def split_classes(
    classes: Sequence[CharacterClass], num_train: int = 1200, *, seed: int = 0
) -> tuple[list[CharacterClass], list[CharacterClass]]:
    """`num_train` classes drawn for training, and the others; both in the order in which they came."""
    if not 0 < num_train < len(classes):
        raise ConfigError(f"num_train is {num_train} of {len(classes)} classes; leave at least one on each side")
    rng = np.random.default_rng(derive_seed(seed, "split"))
    chosen = set(rng.choice(len(classes), num_train, replace=False).tolist())
    parts: tuple[list[CharacterClass], list[CharacterClass]] = ([], [])
    for place, one in enumerate(classes):
        parts[place not in chosen].append(one)
    return parts


def with_rotations(classes: Sequence[CharacterClass]) -> list[CharacterClass]:
    """Four classes for each one: its drawings turned by 0, 90, 180 and 270 degrees."""
    return [
        CharacterClass(one.dir_path, one.rotation + turn, size=one.size, seed=one.seed)
        for one in classes
        for turn in ROTATIONS
    ]


def _generator(dir_path: PathLike, *parts: int | str) -> np.random.Generator:
    """Other draws for each class, the same on every machine: the last two words of its path decide, not all."""
    return np.random.default_rng(derive_seed("class", *Path(dir_path).parts[-2:], *parts))


def _folders(path: Path) -> list[Path]:
    _check_folder(path)
    found = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise DataError(f"{str(path)!r} has no folder in it; give the one that holds a folder for each class")
    return found


def _pictures(path: Path) -> list[str]:
    _check_folder(path)
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    found = [name for name in names if name.lower().endswith(SUFFIXES)]
    if not found:
        raise DataError(
            f"{str(path)!r} has no picture among its {len(names)} entries; a class needs {', '.join(SUFFIXES)} files"
        )
    return found


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise DataError(f"there is no folder {str(path)!r}; give one that exists")


def _decode(path: Path, picture: Callable[[Image], Image]) -> NDArray[np.uint8]:
    """The bytes of a file's picture, after `picture(image)` brought it into shape."""
    from PIL import Image as Pillow  # noqa: PLC0415 - as above

    try:
        with Pillow.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{str(path)!r} has {image.width} x {image.height} pixels; make it smaller")
            return np.asarray(picture(_on_white(image)), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{str(path)!r} is no picture that can be read: {error}; replace or delete the file") from error


def _on_white(image: Image) -> Image:
    """A picture that one can see through, laid on white paper."""
    if not image.has_transparency_data:
        return image
    from PIL import Image as Pillow  # noqa: PLC0415 - as above

    seen = image.convert("RGBA")
    return Pillow.alpha_composite(Pillow.new("RGBA", seen.size, "white"), seen)
