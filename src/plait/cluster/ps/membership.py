"""A worker's place in a cluster with servers: its connections, who lives, which generation it belongs to."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from plait.cluster.ps.client import Connection, Heartbeat, Pending, Refused, say_goodbye, wait_all
from plait.cluster.ps.coordinator import ServedControl
from plait.cluster.ps.wire import Message
from plait.cluster.roles import Role
from plait.engine.update import LeftError
from plait.errors import AbortedError, ClusterError, UnavailableError

__all__ = ["LIMIT", "Membership"]

log = logging.getLogger("plait")

LIMIT = 5.0
"""Seconds of silence after which a process is taken for dead."""
LOOK_SECONDS = 0.05


class Membership:
    """One worker among others, and its servers.

    In `sync` mode a generation is over when a worker or server is lost: whoever waits gets an error that a run can
    recover from, and everybody joins the next one. In other modes there is one generation, and who is lost comes back.
    """

    def __init__(self, role: Role, mode: str, timeout: float) -> None:
        self.role, self.mode, self.timeout = role, mode, timeout
        self.worker = role.index
        self.generation = 0
        self.connections = [
            Connection(endpoint, name=f"server {number}", own=f"worker {role.index}", timeout=timeout)
            for number, endpoint in enumerate(role.server_endpoints)
        ]
        self.servers = range(len(self.connections))
        self._incarnation = uuid.uuid4().hex
        self._heartbeat = Heartbeat(
            role.server_endpoints, {"worker": role.index, "incarnation": self._incarnation}, limit=LIMIT
        )
        self._heartbeat.start()
        self._control: ServedControl | None = None

    def join(self) -> None:
        """Be a member: in sync mode of a new generation, which begins when all workers have come."""
        self.await_servers()
        head = {
            "worker": self.worker,
            "incarnation": self._incarnation,
            "generation": self.generation,
            "mode": self.mode,
        }
        self.generation = int(self._joined(head).head["generation"])
        self._control = ServedControl(
            self.connections[0],
            self.worker,
            self.role.workers,
            timeout=self.timeout,
            check=self.check if self.mode == "sync" else None,
            incarnation=f"{self._incarnation}-{self.generation}",
        )

    def _joined(self, head: dict[str, Any]) -> Message:
        try:
            return self.connections[0].send("join", head).wait(self.timeout + LIMIT, self._heartbeat.check)
        except Refused as error:
            if error.code == "timeout":
                raise ClusterError(f"{error}: see that all are started, with the same PLAIT_SECRET") from None
            if error.code != "finished":
                raise
            log.warning("worker %d was started again after all others had finished: nothing is left", self.worker)
            self.leave()
            raise SystemExit(0) from None

    def leave(self) -> None:
        """Say goodbye to every server; they end when everybody has."""
        say_goodbye(self.connections, self.worker)
        self._heartbeat.stop()

    def check(self) -> None:
        """Raise if a server is lost, or this generation is over."""
        self._heartbeat.check()
        notice = self._heartbeat.notices.get(0) or {}
        if self.mode == "sync" and notice.get("generation") == self.generation and notice.get("broken"):
            raise AbortedError(str(notice["broken"]))

    def belongs(self) -> bool:
        """Whether this worker's generation goes on, on every server."""
        try:
            found = [self.ask(server, "status").head for server in self.servers]
        except (ClusterError, UnavailableError, AbortedError):
            return False
        return all(one["ready"] and one["generation"] == self.generation and not one["broken"] for one in found)

    def await_servers(self) -> None:
        """Until every server answers; what was asked before is forgotten."""
        until = time.monotonic() + self.timeout
        for server, connection in enumerate(self.connections):
            connection.reset()
            pending = connection.send("status")
            while not pending.ready(1.0):
                connection.forget(pending)
                if time.monotonic() > until:
                    raise ClusterError(
                        f"worker {self.worker} waited {self.timeout:g} s for {connection.where}: see that it was "
                        "started, and with the same PLAIT_SECRET, if there is one"
                    )
                pending = connection.send("status")
            self._heartbeat.expect(server, str(pending.result().head["incarnation"]))

    def await_ready(self) -> None:
        """Until the chief has made every server ready."""
        until = time.monotonic() + self.timeout
        for server, connection in enumerate(self.connections):
            while True:
                status = self.ask(server, "status").head
                if status["ready"] and status["generation"] == self.generation:
                    break
                if time.monotonic() > until:
                    raise ClusterError(
                        f"worker {self.worker} waited {self.timeout:g} s for the chief (worker 0) to make "
                        f"{connection.where} ready"
                    )
                time.sleep(LOOK_SECONDS)

    def ask(
        self, server: int, kind: str, head: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> Message:
        return self.answers([self.connections[server].send(kind, head, tensors)])[0]

    def ask_all(self, kind: str, **head: Any) -> list[Message]:
        """The same question to every server, about this generation."""
        return self.answers([one.send(kind, {"g": self.generation, **head}) for one in self.connections])

    def answers(self, pendings: Sequence[Pending]) -> list[Message]:
        """What the servers answer; what is wrong with the cluster becomes an error that a run can recover from."""
        try:
            return wait_all(pendings, self.timeout, self.check)
        except Refused as error:
            if error.code in ("left", "stop"):
                raise LeftError(stop=error.code == "stop") from None
            if error.code in ("stale", "dead", "finished"):
                raise AbortedError(str(error)) from error
            raise

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every worker's value, when all have called this."""
        if self._control is None:
            raise ClusterError(f"gather {name!r}: worker {self.worker} has not joined yet; compile() the model first")
        try:
            return self._control.gather(name, value, keep=self.mode != "sync")
        except Refused as error:
            if error.code in ("stale", "dead"):
                raise AbortedError(str(error)) from error
            raise
