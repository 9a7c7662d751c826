"""The manifest of `plait psi`: which rows two parties have aligned, by a digest that both hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.atomic import file_digest
from plait.errors import DataError

__all__ = ["MANIFEST", "digest_of", "read_digest", "read_manifest"]

MANIFEST = "manifest.json"


def digest_of(shared: Mapping[str, Any]) -> str:
    """What stands for the part of a manifest that is the same at both parties."""
    return hashlib.sha256(json.dumps(shared, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest that `plait psi` has written. DataError: it, or a file that it names, is not whole."""
    path = Path(directory) / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        shared = dict(found["shared"])
        whole = digest_of(shared) == found["digest"]
        files = {path.with_name(str(one["name"])): int(one["bytes"]) for one in found["files"]}
        rows = [int(one["rows"]) for one in found["files"]]
    except FileNotFoundError:
        raise DataError(f"{path} is not there: give the directory that `plait psi --out` has written") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is no manifest of `plait psi`: align the rows again") from None
    if not whole or (rows and rows != shared.get("shard rows", rows)):
        raise DataError(f"{path} was changed by hand, its digest is another one: align the rows again")
    for file, size in files.items():
        if not file.is_file() or file.stat().st_size != size:
            raise DataError(f"{file} is not as `plait psi` has written it ({size} bytes): align the rows again")
    return dict(found)


def read_digest(directory: str | os.PathLike[str]) -> str:
    """The digest of the rows in a directory, for the other party to compare.

    Files are read wholly: two rows that have changed places leave everything but the file's own digest as it was.
    """
    found = read_manifest(directory)
    for one in found["files"]:
        file = Path(directory) / str(one["name"])
        if file_digest(file) != one.get("sha256"):
            raise DataError(f"{file} is not as `plait psi` has written it, its digest is another one: align again")
    if not found["files"]:
        raise DataError(f"{directory} holds no rows: reveal='{found['shared']['reveal']}' gives this party none")
    return str(found["digest"])
