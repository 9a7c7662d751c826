"""`align`: two tables in, the rows that both have out, in the same order at both parties."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plait.atomic import atomic_path
from plait.engine.settings import check_count
from plait.errors import ConfigError, DataError, FederalError, UnavailableError
from plait.federal.alignment import MANIFEST, read_manifest
from plait.federal.channel import Channel
from plait.federal.communicator import Communicator
from plait.federal.settings import Party
from plait.psi.exchange import REVEAL, Exchange
from plait.psi.journal import Journal
from plait.psi.keys import RULE, RULE_IGNORING_CASE, key_of
from plait.psi.output import bounds, write_manifest, write_shards
from plait.psi.pool import Pool
from plait.psi.preparing import DUPLICATES, Own, blind, sort_own
from plait.psi.progress import Progress
from plait.psi.tables import Table, open_table

__all__ = ["Alignment", "align", "summary"]

PROTOCOL = 1
BATCH = 1 << 14
"""Keys that are multiplied, sent and saved together."""
MOST_BATCH = 1 << 16
WINDOW = 16 << 20
GRACE_SECONDS = 10.0
"""For how long a party that needs nothing more looks for the other one, which may need to hear just that."""
WORK = ".psi"
"""The directory, in that of the output, of a run that is under way."""

log = logging.getLogger("plait")


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What came of it; `docs/psi.md` says what each party learns."""

    common: int | None
    """How many rows both have; None: this party is not to know."""
    rows: dict[str, int]
    """How many different keys each party has."""
    digest: str
    """That of the manifest; the same at both parties where both know the rows."""
    files: list[Path]
    """This party's rows, a file for each shard."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What was asked for."""

    table: Table
    columns: Sequence[str]
    out: Path
    party: Party
    reveal: str
    duplicates: str
    ignore_case: bool
    shards: int
    batch: int

    def facts(self) -> dict[str, Any]:
        """What both parties have to agree on."""
        return {
            "protocol": f"psi {PROTOCOL}",
            "job": self.party.job,
            "reveal": self.reveal,
            "key columns": len(self.columns),
            "keys": RULE_IGNORING_CASE if self.ignore_case else RULE,
            "shards": self.shards,
            "batch": self.batch,
        }


def align(
    ids: str | os.PathLike[str],
    key: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    reveal: str = "both",
    duplicates: str = "error",
    ignore_case: bool = False,
    shards: int = 1,
    batch: int = BATCH,
    communicator: Communicator | None = None,
    **party: Any,
) -> Alignment:
    """Find the rows whose keys the other party has, too, and write this party's own ones, in the order of both.

    A run that was killed goes on when it is started again with the same arguments.

    Args:
        ids: A table: .csv, .tsv, .tfrecord or .parquet.
        key: The column that says whose row it is, or several of them.
        out: A directory: rows go to part-*, and what was done to manifest.json.
        reveal: "both" parties learn which rows are common; the "leader" alone; or only "sizes", to both.
        duplicates: Two rows with the same key are an "error"; or the "first" of them is taken.
        ignore_case: Keys that differ in case alone are the same.
        shards: Into how many files the rows go, one for each worker.
        batch: Keys that are sent together; the same at both parties.
        communicator: One that is made already; `Communicator.pair()` gives two in one process.
        **party: The fields of a `Party`: role, listen or peer, certs, job, timeout, insecure.

    """
    source = Path(ids)
    columns = [key] if isinstance(key, str) else list(key)
    _check_choice("reveal", reveal, REVEAL)
    _check_choice("duplicates", duplicates, DUPLICATES)
    check_count("shards", shards)
    check_count("batch", batch)
    if batch > MOST_BATCH:
        raise ConfigError(f"batch={batch}: write a number up to {MOST_BATCH}, the same at both parties")
    if not columns or len(set(columns)) < len(columns):
        raise ConfigError(f"key={columns}: name one column, or several different ones")
    found = communicator.party if communicator is not None else Party.find({"window": WINDOW, **party})
    run = _Run(
        table=open_table(source),
        columns=columns,
        out=Path(out),
        party=found,
        reveal=reveal,
        duplicates=duplicates,
        ignore_case=ignore_case,
        shards=shards,
        batch=batch,
    )
    journal = _begin(run, source)
    if not (run.out / MANIFEST).exists():  # or it was killed when only this was to be removed
        if journal.load("kept") is None:
            _talk(run, journal, communicator)
        _write(run, journal, source)
    journal.remove()
    return _outcome(run.out)


def _begin(run: _Run, source: Path) -> Journal:
    work = run.out / WORK
    left = [] if work.exists() else [*run.out.glob(MANIFEST), *run.out.glob("part-*")]
    if left:
        raise ConfigError(
            f"{run.out} holds aligned rows already ({left[0].name}): name another directory, or remove it"
        )
    settings = {
        **run.facts(),
        "role": run.party.role,
        "columns": list(run.columns),
        "duplicates": run.duplicates,
        "table": _digest(source),
    }
    return Journal(work, settings)


def _digest(source: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with source.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def summary(found: Alignment) -> str:
    """What came of it, for people."""
    keys = ", ".join(f"{count:,} of the {role}" for role, count in sorted(found.rows.items(), reverse=True))
    common = "only the leader learns how many are common" if found.common is None else f"{found.common:,} in common"
    lines = [f"keys      {keys}; {common}", *(f"rows      {file}" for file in found.files)]
    return "\n".join([*lines, f"digest    {found.digest}"])


# ---- with the other party


def _talk(run: _Run, journal: Journal, communicator: Communicator | None) -> None:
    """Meet the other party, as often as one of the two is started anew, until both have all that they need."""
    agreed = journal.load("agreed") is not None
    party = replace(run.party, timeout=min(GRACE_SECONDS, run.party.timeout)) if agreed else run.party
    link = communicator or Communicator(party)
    pool = Pool(journal.secret)
    try:
        channel = link.connect(0, run.facts())
        with Progress() as progress:
            exchange = Exchange(channel, journal, pool, reveal=run.reveal, batch=run.batch, say=progress)
            while not _tried(lambda: _meet(run, journal, channel, exchange, pool, progress)):
                pass
        link.close()
    except BaseException as error:
        with contextlib.suppress(FederalError):
            link.fail(_told(error))
        if journal.load("agreed") is None or not isinstance(error, FederalError):
            raise
        log.info("the %s needs nothing more of this party, or is gone: %s", party.peer_role, error)
    finally:
        pool.close()
    journal.forget_secret()
    journal.save("kept", value=True)


def _tried(meet: Callable[[], None]) -> bool:
    """Whether it could be done; not if the other party was started anew in the middle of it."""
    try:
        meet()
    except UnavailableError as error:
        log.warning("%s; it is met again", error)
        return False
    return True


def _meet(run: _Run, journal: Journal, channel: Channel, exchange: Exchange, pool: Pool, progress: Progress) -> None:
    channel.open()
    own = _prepare(run, journal, pool, progress)
    peer = exchange.meet(own)
    if journal.load("agreed") is None:
        if peer.agreed is None:
            exchange.swap(own, peer)
        found = exchange.find(own, peer)
        if found is not None and run.reveal != "sizes":
            with atomic_path(journal.directory / "matched.bin") as temporary:
                temporary.write_bytes(found.rows.astype("<u8").tobytes())
        told = found is not None and run.reveal != "leader"
        journal.save("found", None if found is None else {"common": len(found.rows), "order": found.digest})
        exchange.agree(journal.load("found") if told else {}, peer)
    exchange.part()


def _prepare(run: _Run, journal: Journal, pool: Pool, progress: Progress) -> Own:
    """The party's own points. They need the secret, and are there already when it was forgotten."""
    if journal.load("own") is None:
        blind(_keys(run), journal, pool, run.batch, lambda done: progress("own keys", done, None))
    return sort_own(journal, run.batch, run.duplicates)


def _keys(run: _Run) -> Iterator[Callable[[], bytes]]:
    for number, values in enumerate(run.table.keys(run.columns), 1):
        yield lambda values=values, number=number: key_of(  # type: ignore[misc] # mypy cannot infer it
            values, f"row {number}", ignore_case=run.ignore_case
        )


def _told(error: BaseException) -> str:
    """What the other party hears: of errors whose text may hold data or paths, the kind only."""
    return str(error) if isinstance(error, FederalError) else f"{type(error).__name__}; its own log says more"


# ---- alone


def _write(run: _Run, journal: Journal, source: Path) -> None:
    """Write the output. Rows are found by their numbers, so the table has to be that of the keys."""
    known, peer, own = journal.load("found"), journal.load("peer"), journal.load("own")
    rows = {run.party.role: int(own["count"]), run.party.peer_role: int(peer["rows"])}
    common = None if known is None else int(known["common"])
    learns = common is not None and run.reveal != "sizes"
    shared = {
        **run.facts(),
        "runs": sorted([journal.run, str(peer["run"])]),
        "rows": rows,
        **({} if known is None else known),
        "shard rows": np.diff(bounds(common or 0, run.shards)).tolist() if learns else [],
    }
    files = []
    if learns:
        matched = np.fromfile(journal.directory / "matched.bin", "<u8")
        _check_same(source, journal)
        files = write_shards(run.table, matched, run.shards, run.out, journal.directory / "writing")
        _check_same(source, journal)
    write_manifest(run.out, shared, {"role": run.party.role, "files": files})


def _check_same(source: Path, journal: Journal) -> None:
    if _digest(source) != journal.load("settings")["table"]:
        raise DataError(
            f"{source} was changed while the run was under way: put it back as it was, and start again to go on; or "
            "begin anew at both parties, in empty directories"
        )


def _outcome(out: Path) -> Alignment:
    found = read_manifest(out)
    shared, files = found["shared"], [out / str(one["name"]) for one in found["files"]]
    return Alignment(common=shared.get("common"), rows=shared["rows"], digest=found["digest"], files=files)


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r}: write {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
