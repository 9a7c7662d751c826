"""The models of a directory: the newest version of each answers, and a newer one takes its place."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plait.errors import DataError, UnavailableError
from plait.export.describe import read_about
from plait.export.loaded import Loaded, load, versions
from plait.serve.asking import Asker, Whole
from plait.serve.batching import Batch, Batcher
from plait.serve.metrics import Metrics
from plait.serve.protocol import Spec, specs_of
from plait.serve.settings import Settings

__all__ = ["Models", "Served", "find_models", "warm_up"]

log = logging.getLogger("plait")


@dataclass(frozen=True)
class Served:
    """One version of a model, ready. A request keeps the one that it began with."""

    name: str
    version: str
    loaded: Loaded
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    batcher: Batcher
    whole: Whole | None = None
    """With the other party's part, if this is a part that receives."""


class _Refused(NamedTuple):
    version: str
    files: frozenset[tuple[Any, ...]]
    """Whoever copies a version here file by file, or a damaged one again, changes these."""
    why: str


def find_models(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """Name and directory of each model: the directory itself, if there are versions in it, or those in it that have."""
    root = Path(directory).resolve()
    if versions(root):
        return {root.name: root}
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    return {folder.name: folder for folder in folders if versions(folder)}


def _files(folder: Path) -> frozenset[tuple[Any, ...]]:
    """What tells whether files were written since."""
    try:
        found = [(path, path.stat()) for path in folder.rglob("*")]
    except OSError:  # it vanishes
        return frozenset()
    return frozenset((path, stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in found)


def warm_up(served: Served) -> None:
    """One row of zeros: what cannot run at all is found before it answers anybody, and first-time work is done."""
    inputs = specs_of(served.loaded.about["inputs"]).values()
    zeros = {spec.name: np.zeros([size or 1 for size in spec.shape], spec.dtype) for spec in inputs}
    missing = served.outputs.keys() - served.loaded.run(zeros).keys()
    if missing:
        raise DataError(f"{served.name} {served.version} does not give {sorted(missing)}: export it again")


class Models:
    """What is served now. Only the event loop changes it; loading happens in a thread."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        settings: Settings,
        metrics: Metrics,
        asker: Asker | None = None,
    ) -> None:
        self._directory, self._settings, self._metrics, self._asker = directory, settings, metrics, asker
        self._executor: Executor = ThreadPoolExecutor(settings.workers, thread_name_prefix="plait-serve")
        self._served: dict[str, Served] = {}
        self._refused: dict[str, _Refused] = {}
        """The newest version of a model that could not be loaded: said once, and tried again when its files change."""
        self._waits: dict[str, str] = {}
        """The same of one that the other party has no part of yet."""

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def get(self, name: str) -> Served | None:
        return self._served.get(name)

    async def start(self) -> None:
        """Load the newest version of each model; one that cannot be loaded is an error now."""
        found = await asyncio.to_thread(find_models, self._directory)
        if not found:
            raise DataError(
                f"{self._directory} has no exported model: name the directory in which the versions are, such as the "
                "one given to `plait export`, or one with several of these"
            )
        for name, folder in found.items():
            await self._load(name, folder, (await asyncio.to_thread(versions, folder))[-1])

    async def watch(self) -> None:
        """Look for new versions, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.poll)
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - a disk that is away for a while does not end the looking
                log.warning("%s could not be read: %s", self._directory, error)

    async def look(self) -> None:
        """Load what is new. What cannot be loaded is said once, and the version before goes on."""
        for name, folder in (await asyncio.to_thread(find_models, self._directory)).items():
            newest = next(reversed(await asyncio.to_thread(versions, folder)), None)
            now = self._served.get(name)
            if newest is None or (now is not None and now.version == newest):
                continue
            files, refused = await asyncio.to_thread(_files, folder / newest), self._refused.get(name)
            if refused is not None and (refused.version, refused.files) == (newest, files):
                continue
            try:
                await self._load(name, folder, newest)
            except UnavailableError as error:  # the other party may have its part later
                if self._waits.get(name) != newest:
                    self._waits[name] = newest
                    log.warning("%s: version %s waits: %s", name, newest, error)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a new version, the old one goes on
                self._refused[name] = _Refused(newest, files, str(error))
                if refused is None or (refused.version, refused.why) != (newest, str(error)):
                    goes_on = f"version {now.version} goes on" if now else "it is not served"
                    log.warning("%s: version %s cannot be served, %s: %s", name, newest, goes_on, error)

    async def _load(self, name: str, folder: Path, version: str) -> None:
        before = self._served.get(name)
        if before is not None:
            await asyncio.to_thread(self._check_pair, folder / version)
        served = await asyncio.to_thread(self._opened, name, folder, version)
        self._served[name] = served  # those that the old one has begun keep it alive until they are done
        self._refused.pop(name, None)
        if before is None:
            log.info("%s: version %s is served", name, version)
        else:
            self._metrics.swap(name)
            log.info("%s: version %s is served, after version %s", name, version, before.version)

    def _opened(self, name: str, folder: Path, version: str) -> Served:
        settings = self._settings
        loaded = load(folder / version, format=settings.format, threads=settings.threads)
        whole = self._whole(name, loaded)
        inputs = whole.inputs if whole else specs_of(loaded.about["inputs"])
        outputs = specs_of(loaded.about["outputs"])
        tensors = [*inputs.values(), *outputs.values()]
        batcher = Batcher(
            whole.run if whole else loaded.run,
            self._executor,
            rows=settings.batch,
            delay=settings.batch_delay,
            threads=settings.workers,
            together=all(spec.has_rows for spec in tensors),
            seen=self._counter(name),
        )
        served = Served(name, version, loaded, inputs, outputs, batcher, whole)
        warm_up(served)
        return served

    def _check_pair(self, folder: Path) -> None:
        """Has the other party its part? Asked before this one is loaded: it may wait, and is looked at many times."""
        party = read_about(folder, digests=False).get("party") or {}
        if self._asker is not None and party.get("receives"):
            self._asker.ask(party["pair"], np.zeros(0, np.int64))

    def _whole(self, name: str, loaded: Loaded) -> Whole | None:
        party = loaded.about.get("party") or {}
        if party.get("sends"):
            raise DataError(f"{name} is the {party['role']}'s part, for the other party alone: serve it with --rows")
        if not party.get("receives"):
            return None
        if self._asker is None:
            raise DataError(
                f"{name} is the {party['role']}'s part of a model: say where the other party is, with --party "
                f"{party['role']} and --peer or --listen"
            )
        return Whole(loaded, self._asker)

    def _counter(self, name: str) -> Callable[[Batch], None]:
        return lambda batch: self._metrics.batch(name, batch.rows, batch.waited, batch.seconds)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
