"""The demo's first step: each party has a list of ids, and both find out which ones they share, and nothing more."""

from __future__ import annotations

import csv
import random
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plait.atomic import atomic_path
from plait.errors import DataError
from plait.federal.alignment import read_digest
from plait.federal.certificates import init
from plait.federal.settings import ROLES
from plait.launch.environment import HOST, free_ports
from plait.psi.run import Alignment, align

__all__ = ["align_parties", "remove", "write_lists"]

IMAGES = 1797
"""Those whom both know: the ids of the bundled images."""
OTHERS = {"leader": range(IMAGES, IMAGES + 203), "follower": range(5000, 5303)}
"""Ids that only one of the parties has."""


def write_lists(directory: Path) -> None:
    """Each party's list, as a company would have it: in an order of its own, with ids that the other one lacks."""
    for role in ROLES:
        ids = [*range(IMAGES), *OTHERS[role]]
        random.Random(role).shuffle(ids)  # noqa: S311 - any order will do
        with atomic_path(directory / f"{role}.csv") as path, path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["id"])
            writer.writerows([one] for one in ids)


def align_parties(output: Path) -> str:
    """Write the lists into OUTPUT/ids, and what both have into OUTPUT/aligned; what to say of it.

    Here both parties are threads; at two companies each types one command: `plait psi --role leader --ids ids.csv ...`.
    """
    if _is_aligned(output):
        return "the parties have found their common ids already"
    remove(output)
    write_lists(output / "ids")
    with tempfile.TemporaryDirectory(prefix="plait-") as made, ThreadPoolExecutor(len(ROLES)) as threads:
        init(Path(made) / "certs", ROLES)
        place = f"{HOST}:{free_ports(1, HOST)[0]}"

        def party(role: str) -> Alignment:
            where: dict[str, Any] = {"listen" if role == ROLES[0] else "peer": place}
            ids, out = output / "ids" / f"{role}.csv", output / "aligned" / role
            return align(ids, "id", out, role=role, certs=str(Path(made) / "certs"), **where)

        begin = time.perf_counter()
        leader, follower = threads.map(party, ROLES)
    counts = f"{leader.rows['leader']:,} ids of the leader, {follower.rows['follower']:,} of the follower"
    seconds = time.perf_counter() - begin
    return f"{counts}: {leader.common:,} in common, found in {seconds:.1f} s without showing the others"


def remove(output: Path) -> None:
    """What this step has written; nothing else that may be there."""
    for role in ROLES:
        shutil.rmtree(output / "aligned" / role, ignore_errors=True)
        (output / "ids" / f"{role}.csv").unlink(missing_ok=True)
    for name in ("aligned", "ids"):
        if (output / name).is_dir() and not any((output / name).iterdir()):
            (output / name).rmdir()


def _is_aligned(output: Path) -> bool:
    """By a run of the demo before, which was cut off later."""
    try:
        digests = {read_digest(output / "aligned" / role) for role in ROLES}
    except DataError:
        return False
    return len(digests) == 1
