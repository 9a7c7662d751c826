"""Version directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from plait.atomic import sync_file
from plait.errors import CheckpointError, ConfigError

__all__ = ["NEXT", "check_version", "is_number", "publish", "replace_files"]

NEXT = -1
"""The version that stands for the next number."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_LEFT = re.compile(r"\..*\.[0-9a-f]{32}\.partial")
_LEFT_SECONDS = 3600.0
"""For so long nothing was written into what a killed export left."""


def is_number(version: str) -> bool:
    return _NUMBER.fullmatch(version) is not None


def check_version(directory: str | os.PathLike[str], version: int | str) -> str | None:
    """The name of the version directory, None for the next number; an error if it cannot be, or is already there."""
    if version == NEXT:
        return None
    wrong = isinstance(version, bool) or not isinstance(version, (int, str)) or not _NAME.fullmatch(str(version))
    if wrong:
        raise ConfigError(
            f"version is {version!r}: write -1 for the next number, a number from 0 up, or a name of letters, digits,"
            " '_', '.' and '-' that starts with a letter or a digit"
        )
    _check_digits(str(version))
    if os.path.lexists(Path(directory, str(version))):
        raise ConfigError(f"{directory} has a version {version} already: write another, or -1 for the next number")
    return str(version)


def _check_digits(version: str) -> None:
    """What looks like a number is one: as a name it would never be the newest, to everybody's surprise."""
    if version.isdigit() and not is_number(version):
        raise ConfigError(
            f"version is {version}: write a number of at most 18 digits without zeros before it, or put a letter there"
        )


def publish(directory: str | os.PathLike[str], version: int | str, fill: Callable[[Path], object]) -> Path:
    """Let `fill` write into a hidden folder, and give that its name: the version directory.

    What was written is on disk before it has the name. If `fill` fails, nothing is left.
    """
    above, name = Path(directory), check_version(directory, version)
    with _hidden(above, "next" if name is None else name) as folder:
        fill(folder)
        _sync(folder)
        published = _named(folder, above, name)
        sync_file(above)
    return published


def replace_files(directory: str | os.PathLike[str], fill: Callable[[Path], object], last: str) -> None:
    """Let `fill` write files into a hidden folder; they then take the place of those in `directory`, `last` at last.

    For a directory without versions: each file is whole, and `last` is never newer than the others.
    """
    target = Path(directory)
    with _hidden(target, target.name) as folder:
        fill(folder)
        _sync(folder)
        for file in sorted(folder.iterdir(), key=lambda file: (file.name == last, file.name)):
            file.replace(target / file.name)
        sync_file(target)


@contextlib.contextmanager
def _hidden(above: Path, name: str) -> Iterator[Path]:
    folder = above / f".{name}.{uuid.uuid4().hex}.partial"
    new: list[Path] = []
    try:
        new += [path for path in (above, *above.parents) if not path.exists()]
        above.mkdir(parents=True, exist_ok=True)
        _sweep(above)
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        raise CheckpointError(f"{above} cannot be written: {error}; name a directory with room") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the first that has something in it ends this
            for path in new:
                path.rmdir()


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync_file(path)


def _named(folder: Path, above: Path, name: str | None) -> Path:
    """Rename; a directory that somebody else has published meanwhile is never replaced, for it is not empty."""
    while True:
        chosen = _next(above) if name is None else name
        _check_digits(chosen)
        target = above / chosen
        try:
            return folder.rename(target)
        except OSError:
            if not target.exists():
                raise
            if name is not None:
                raise ConfigError(f"{target} was published by somebody else meanwhile: write another version") from None


def _next(above: Path) -> str:
    numbers = [int(entry.name) for entry in above.iterdir() if is_number(entry.name)]
    return str(max(numbers, default=0) + 1)


def _sweep(above: Path) -> None:
    """Remove what exports that were killed have left; one that still runs has written something meanwhile."""
    for folder in above.glob(".*.partial"):
        if _LEFT.fullmatch(folder.name) and time.time() - _touched(folder) > _LEFT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _touched(folder: Path) -> float:
    """When something in it was last written. What vanishes under our eyes is somebody else's to remove."""
    try:
        return max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
    except FileNotFoundError:
        return time.time()
