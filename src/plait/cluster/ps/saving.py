"""Saves of what servers hold: all at the same step, each server's share in a file of its own, beside a checkpoint."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from pathlib import Path

from plait.cluster.ps.client import Connection
from plait.cluster.ps.membership import Membership
from plait.cluster.roles import Role
from plait.errors import CheckpointError, ClusterError
from plait.variables.checkpoint import CheckpointDir

__all__ = ["await_saved", "name_of", "path_of", "prune", "save"]

log = logging.getLogger("plait")

TIMES = 10
"""A server may take so many timeouts to write its share."""
LOOK_SECONDS = 0.02


def name_of(step: int) -> str:
    """A new name for the shares of a checkpoint at this step."""
    return f"servers-{step:012d}-{uuid.uuid4().hex[:8]}"


def path_of(directory: str, name: str) -> str:
    return str(Path(directory).absolute() / name)


def save(members: Membership, path: str) -> None:
    """Have every server copy what it holds; each worker's step is in all of the copies, or in none."""
    upto: dict[str, int] = {}
    if members.mode != "sync":
        for answer in members.ask_all("hold"):
            for worker, step in answer.head["last"].items():
                upto[worker] = max(step, upto.get(worker, -1))
    members.ask_all("save", path=path, upto=upto)


def await_saved(role: Role, path: str, timeout: float) -> bool:
    """Whether the servers' shares are on disk; False if a server was lost before it had written its own."""
    for number, endpoint in enumerate(role.server_endpoints):
        connection = Connection(endpoint, name=f"server {number}", own="the saving thread", timeout=timeout)
        try:
            _await_one(connection, path, TIMES * timeout)
        except ClusterError as error:
            log.warning("a checkpoint is not kept: %s", error)
            return False
        finally:
            connection.close()
    return True


def _await_one(connection: Connection, path: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = connection.request("saved", {"path": path}).head
        if answer["done"]:
            return
        if answer["lost"]:
            raise ClusterError(f"{connection.where} was started again before it had written its share")
        if answer["error"]:
            raise CheckpointError(f"{connection.where} could not write its share to {path}: {answer['error']}")
        time.sleep(LOOK_SECONDS)
    raise CheckpointError(f"{connection.where} has not written its share to {path} after {seconds:g} s")


def prune(directory: str) -> None:
    """Remove the shares of checkpoints that are there no more."""
    where = Path(directory).absolute()
    kept = [info.step for info in CheckpointDir(where).list()]
    for share in sorted(where.glob("servers-*")):
        if kept and int(share.name.split("-")[1]) < min(kept):
            shutil.rmtree(share, ignore_errors=True)
