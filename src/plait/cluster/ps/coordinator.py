"""Who lives, who waits for whom: what server 0 keeps for the whole cluster, and how the others ask it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.cluster.ps.client import Connection
from plait.cluster.ps.service import Request
from plait.cluster.ps.wire import Message
from plait.errors import ClusterError

__all__ = ["Coordinator", "ServedControl"]

RESEND = 2.0
"""Seconds after which a member says again that it waits: server 0 may have been started again in between."""
MARGIN = 5.0
"""Seconds that a member waits past its own deadline: the answer that names who is missing comes from server 0."""
GOODBYE = 2.0
MAX_DEPTH = 16
KEPT = 256
"""Gathers whose results are kept, the newest; a worker that was started again is not further behind."""
GROUPS = ("workers", "all")


class _Came(NamedTuple):
    """A member that waits in a gather."""

    request: Request
    incarnation: str
    round: int
    until: float


@dataclasses.dataclass
class _Gather:
    name: str
    came: dict[int, _Came]


class _Result(NamedTuple):
    """The last gather of a group, kept for members that ask again because the answer was lost."""

    members: dict[int, tuple[str, int]]
    head: dict[str, Any]
    tensors: list[Tensor]


class Coordinator:
    """Runs inside server 0's handler. Members are the workers, and after them the servers.

    A group has one gather at a time. A member that was started again joins it by its name, whatever its own count
    (`round`) is; the count tells a question that is repeated from a new one.
    """

    def __init__(
        self, workers: int, servers: int, *, clock: Callable[[], float] = time.monotonic, limit: float = 5.0
    ) -> None:
        self.workers, self.servers, self.limit = workers, servers, limit
        self._clock = clock
        self._beats: dict[int, tuple[str, float]] = {}
        self._finished: set[int] = set()
        self._open: dict[str, _Gather] = {}
        self._results: dict[str, _Result] = {}
        self._kept: dict[str, _Result] = {}
        """Gathers that a member which was started again may come to once more, by their names."""

    def beat(self, worker: int, incarnation: str) -> None:
        """`worker` lives. Another incarnation than before: it was started again, and waits for nothing yet."""
        self._check(worker)
        known = self._beats.get(worker)
        self._beats[worker] = (incarnation, self._clock())
        if known is None or known[0] == incarnation:
            return
        self._finished.discard(worker)
        for group, gather in list(self._open.items()):
            came = gather.came.get(worker)
            if came is not None and came.incarnation != incarnation:
                self._leave(group, gather, worker)

    def dead(self) -> list[int]:
        """Members that came, have not finished, and are silent for longer than `limit` seconds."""
        oldest = self._clock() - self.limit
        return sorted(m for m, (_, seen) in self._beats.items() if seen < oldest and m not in self._finished)

    def finish(self, worker: int) -> None:
        """`worker` has said goodbye; nobody waits for it in vain."""
        self._check(worker)
        self._finished.add(worker)
        self._end_hopeless()

    def finished(self, besides: int | None = None) -> bool:
        """Whether all workers have said goodbye; or, if there are any, all others."""
        others = set(range(self.workers)) - {besides}
        return bool(others) and self._finished.issuperset(others)

    def gather(self, request: Request) -> None:
        """Take one member's value; when all are here, answer each of them with all values, in the members' order.

        The head has `name`, `group` ("workers" or "all"), `member`, `round`, `value`, `timeout`, and the member's
        `incarnation`, if it has one.
        """
        group, member, came = self._read(request)
        kept = self._kept.get(request.head["name"])
        if kept is not None:
            request.reply(kept.head, kept.tensors)
            return
        last = self._results.get(group)
        if last is not None and member in last.members and last.members[member][0] == came.incarnation:
            done = last.members[member][1]
            if came.round == done:
                request.reply(last.head, last.tensors)
                return
            if came.round < done:
                request.refuse(f"gather {came.round} of {self._name(member)} is over, it has made {done}", "old")
                return
        gather = self._open.setdefault(group, _Gather(request.head["name"], {}))
        if gather.name != request.head["name"]:
            self._mismatch(group, gather, member, came)
            return
        gather.came[member] = came
        if len(gather.came) == self._size(group):
            self._complete(group, gather)
        else:
            self._end_hopeless()

    def refuse(self, text: str, code: str) -> None:
        """Refuse all who wait."""
        for group, gather in list(self._open.items()):
            self._refuse_all(group, gather, text, code)

    def tick(self, now: float) -> None:
        """Refuse those whose time is up, and those who wait for somebody who will not come."""
        for group, gather in list(self._open.items()):
            missing = self._missing(group, gather)
            for member, came in list(gather.came.items()):
                if now > came.until:
                    self._leave(group, gather, member)
                    seconds = came.request.head.get("patience", came.request.head["timeout"])
                    came.request.refuse(f"{gather.name!r}: {missing} did not come within {seconds:g} s", "timeout")
        self._end_hopeless()

    def _read(self, request: Request) -> tuple[str, int, _Came]:
        head = request.head
        name, group, member = head.get("name"), head.get("group"), head.get("member")
        count, incarnation = head.get("round"), head.get("incarnation", "")
        timeout = head.get("timeout", 60.0)
        if not isinstance(name, str) or group not in GROUPS or not isinstance(incarnation, str):
            raise ClusterError(f"a gather needs a name and a group of {GROUPS}, it has {name!r:.80} and {group!r:.80}")
        if type(member) is not int or not 0 <= member < self._size(group):
            raise ClusterError(
                f"{name!r:.80}: member {member!r:.80} of {group!r}, which has {self._size(group)}: count from 0"
            )
        if type(count) is not int or type(timeout) not in (int, float) or not timeout > 0:
            raise ClusterError(f"{name!r:.80}: round {count!r:.80} and timeout {timeout!r:.80}: write numbers")
        return group, member, _Came(request, incarnation, count, self._clock() + timeout)

    def _complete(self, group: str, gather: _Gather) -> None:
        del self._open[group]
        ordered = [gather.came[member] for member in range(self._size(group))]
        head = {
            "values": [came.request.head.get("value") for came in ordered],
            "counts": [len(came.request.tensors) for came in ordered],
        }
        tensors = [tensor for came in ordered for tensor in came.request.tensors]
        members = {member: (came.incarnation, came.round) for member, came in gather.came.items()}
        result = self._results[group] = _Result(members, head, tensors)
        if all(came.request.head.get("keep") for came in ordered):
            self._kept[gather.name] = result
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        for came in ordered:
            try:
                came.request.reply(head, tensors)
            except ClusterError as error:  # all values together are more than a message holds
                came.request.refuse(f"{gather.name!r}: {error}", "error")

    def _mismatch(self, group: str, gather: _Gather, member: int, came: _Came) -> None:
        """Members at different places: all are told if they have come equally far, else only the newcomer."""
        name = came.request.head["name"]
        text = f"{self._name(member)} is at {name!r}, {self._names(gather.came)} at {gather.name!r}"
        if any(other.round == came.round for other in gather.came.values()):
            self._refuse_all(group, gather, f"{text}: all must gather in the same order", "mismatch")
        came.request.refuse(f"{text}: all must gather in the same order", "mismatch")

    def _end_hopeless(self) -> None:
        """Refuse gathers that lack a member who is dead or has left."""
        if not self._open:
            return
        dead = self.dead()
        for group, gather in list(self._open.items()):
            missing = [m for m in range(self._size(group)) if m not in gather.came]
            if lost := [m for m in missing if m in dead]:
                text = f"{gather.name!r}: {self._names(lost)} is lost: silent for more than {self.limit:g} s"
                self._refuse_all(group, gather, text, "dead")
            elif left := [m for m in missing if m in self._finished]:
                self._refuse_all(group, gather, f"{gather.name!r}: {self._names(left)} has finished", "finished")

    def _refuse_all(self, group: str, gather: _Gather, text: str, code: str) -> None:
        self._open.pop(group, None)
        for came in gather.came.values():
            came.request.refuse(text, code)

    def _leave(self, group: str, gather: _Gather, member: int) -> None:
        del gather.came[member]
        if not gather.came:
            del self._open[group]

    def _size(self, group: str) -> int:
        return self.workers if group == "workers" else self.workers + self.servers

    def _missing(self, group: str, gather: _Gather) -> str:
        return self._names([m for m in range(self._size(group)) if m not in gather.came])

    def _names(self, members: Sequence[int] | dict[int, _Came]) -> str:
        return ", ".join(self._name(member) for member in sorted(members))

    def _name(self, member: int) -> str:
        return f"worker {member}" if member < self.workers else f"server {member - self.workers}"

    def _check(self, member: int) -> None:
        if type(member) is not int or not 0 <= member < self.workers + self.servers:
            raise ClusterError(
                f"member {member!r:.80}: this cluster has {self.workers} workers and {self.servers} servers"
            )


class ServedControl:
    """`plait.cluster.control.Control` over a connection to server 0, which it closes with itself.

    `member` is the worker's index, or the number of workers plus the server's index. `check` is called while waiting.
    """

    def __init__(
        self,
        connection: Connection,
        member: int,
        workers: int,
        *,
        timeout: float = 60.0,
        check: Callable[[], None] | None = None,
        incarnation: str | None = None,
    ) -> None:
        self._connection, self._member, self._workers = connection, member, workers
        self._timeout, self._check = timeout, check
        self._incarnation = uuid.uuid4().hex if incarnation is None else incarnation
        self._rounds = dict.fromkeys(GROUPS, 0)
        self._closed = False

    def gather(self, name: str, value: Any, *, everyone: bool = False, keep: bool = False) -> list[Any]:
        """Every worker's value, with `everyone` the servers' after them, when all have called it.

        With `keep`, `name` is used once, and a member that was started again, and comes to it again, gets the same.
        """
        group = "all" if everyone else "workers"
        if self._member >= self._workers and not everyone:
            raise ClusterError(f"gather {name!r} is for workers, and this is a server: write everyone=True")
        tensors: list[Tensor] = []
        head = {
            "name": name,
            "group": group,
            "member": self._member,
            "round": self._rounds[group],
            "incarnation": self._incarnation,
            "timeout": self._timeout,
            "keep": keep,
            "value": _pack(value, tensors, name),
        }
        self._rounds[group] += 1
        return _results(self._ask(head, tensors), name)

    def close(self) -> None:
        """Say goodbye, for a worker, and close the connection."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ClusterError):  # a server that is gone needs no goodbye
            if self._member < self._workers:
                self._connection.send("bye", {"worker": self._member}).wait(GOODBYE)
        self._connection.close()

    def _ask(self, head: dict[str, Any], tensors: list[Tensor]) -> Message:
        until = time.monotonic() + self._timeout + MARGIN
        while True:
            left = until - time.monotonic()
            deadline = {"timeout": max(left - MARGIN, 0.001), "patience": self._timeout}
            pending = self._connection.send("gather", {**head, **deadline}, tensors)
            if left <= RESEND:
                return pending.wait(max(left, 0.0), self._check)
            if pending.ready(RESEND, self._check):
                return pending.result()
            self._connection.forget(pending)


def _pack(value: Any, tensors: list[Tensor], name: str, depth: int = 0) -> Any:
    """The tree as JSON; what JSON does not have is a dict with one key that begins with "$"."""
    if depth > MAX_DEPTH:
        raise ClusterError(f"gather {name!r}: the value is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        return [_pack(item, tensors, name, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        packed = {key: _pack(item, tensors, name, depth + 1) for key, item in value.items()}
        return {"$dict": packed} if any(key.startswith("$") for key in packed) else packed
    raise ClusterError(
        f"gather {name!r}: a {type(value).__name__} cannot be sent: "
        "send dicts with text as keys, lists, None, bool, int, float, str and tensors"
    )


def _unpack(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tensor" in value:
        return tensors[value["$tensor"]].clone(memory_format=torch.contiguous_format)
    return {key: _unpack(item, tensors) for key, item in value.get("$dict", value).items()}


def _results(message: Message, name: str) -> list[Any]:
    try:
        tensors = iter(message.tensors)
        shares = [list(itertools.islice(tensors, count)) for count in message.head["counts"]]
        return [_unpack(value, share) for value, share in zip(message.head["values"], shares, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ClusterError(f"gather {name!r}: server 0 answered what is no result of a gather") from error
