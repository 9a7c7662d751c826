"""The directory of a run that is under way: its secret, and every batch that is done, so that a killed run goes on."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.atomic import atomic_path, write_atomic
from plait.errors import ConfigError, DataError
from plait.psi.curve import POINT_BYTES
from plait.psi.points import Bytes, as_points

__all__ = ["Batches", "Journal"]

_NAME_BYTES = 16


class Batches:
    """Numbered files of points, written one after the other, each whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.done = 0
        """How many there are, from 0 on without a gap."""
        while self.path(self.done).exists():
            self.done += 1

    def path(self, number: int) -> Path:
        return self._directory / f"{number:08d}.bin"

    def add(self, points: bytes) -> None:
        write_atomic(self.path(self.done), points)
        self.done += 1

    def read(self, number: int) -> bytes:
        return self.path(number).read_bytes()

    def __iter__(self) -> Iterator[Bytes]:
        return (as_points(self.read(number)) for number in range(self.done))


class Journal:
    """Begins a run in a directory, or takes up the one that was begun there with the same settings."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        self._check(settings)
        self.run = self._name()
        """What this run is called; it tells nothing of the secret."""
        self.secret = self._secret()
        """The scalar of this run; empty when it was forgotten."""

    def _check(self, settings: Mapping[str, Any]) -> None:
        known = self.load("settings")
        if known is None:
            self.save("settings", dict(settings))
        elif known != settings:
            differ = [name for name in {**known, **settings} if known.get(name) != settings.get(name)]
            raise ConfigError(
                f"a run with other settings is under way in {self.directory.parent} (other: {', '.join(differ)}): "
                f"start it with the same ones to go on, or remove {self.directory} at both parties to begin anew"
            )

    def _name(self) -> str:
        if self.load("run") is None:
            self.save("run", secrets.token_hex(_NAME_BYTES))
        return str(self.load("run"))

    def _secret(self) -> bytes:
        path = self.directory / "secret"
        if self.load("agreed") is not None:
            return b""
        if not path.exists():
            with atomic_path(path) as temporary:
                temporary.chmod(0o600)
                temporary.write_bytes(secrets.token_bytes(POINT_BYTES))
        data = path.read_bytes()
        if len(data) != POINT_BYTES:
            raise DataError(f"{path} is damaged: remove {self.directory} at both parties to begin anew")
        return data

    def batches(self, name: str) -> Batches:
        return Batches(self.directory / name)

    def load(self, name: str) -> Any:
        """What was saved under a name; None: nothing was."""
        path = self.directory / f"{name}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        except ValueError:
            raise DataError(f"{path} is damaged: remove {self.directory} at both parties to begin anew") from None

    def save(self, name: str, value: Any) -> None:
        write_atomic(self.directory / f"{name}.json", json.dumps(value, sort_keys=True))

    def forget_secret(self) -> None:
        """Overwrite the secret, as far as the file system lets one, and remove it."""
        path = self.directory / "secret"
        if path.exists():
            with path.open("r+b") as file:
                file.write(bytes(POINT_BYTES))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        self.secret = b""

    def remove(self) -> None:
        """The settings last: who is killed in the middle of it is asked for the same ones."""
        self.forget_secret()
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "settings.json":
                path.unlink()
        shutil.rmtree(self.directory)
