"""`Party`: who this process is in a federation, where the other party is, and how they talk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from plait.engine.settings import check_count, read_config
from plait.errors import ConfigError

__all__ = ["ROLES", "VARIABLES", "Party", "other", "split_endpoint"]

ROLES = ("leader", "follower")
PRECISIONS = (None, "fp16", "bf16", "int8")
VARIABLES = {
    "role": "PLAIT_PARTY",
    "listen": "PLAIT_LISTEN",
    "peer": "PLAIT_PEER",
    "job": "PLAIT_JOB",
    "certs": "PLAIT_CERTS",
    "insecure": "PLAIT_INSECURE",
    "timeout": "PLAIT_TIMEOUT",
}
"""The environment's variables, by the fields that they set; `plait party` sets them."""
LARGEST_PORT = 65535


def other(role: str) -> str:
    """The role of the other party."""
    return ROLES[1 - ROLES.index(role)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Party:
    """One party of two. One of them listens, the other dials; usually the leader listens."""

    role: str
    """"leader" (its word counts for ends of data, stages and tasks) or "follower"."""
    listen: str | None = None
    """Where this party listens, "0.0.0.0:50051"; or, if it dials:"""
    peer: str | None = None
    """where the other party listens, "leader.example:50051"."""
    job: str = "plait"
    """Both parties name the same job."""
    certs: str | None = None
    """A directory with ca.pem, and <role>.pem and <role>.key of this party; `plait certs init` makes them."""
    insecure: bool = False
    """Talk in plain text, beyond this machine too: only behind a tunnel of your own."""
    timeout: float = 600.0
    """For how many seconds a silent peer is waited for."""
    window: int = 64 << 20
    """How many bytes may be under way before a sender waits."""
    wire_dtype: str | None = None
    """Send floating-point tensors as "fp16", "bf16" or "int8"; None: as they are."""
    staleness: int = 0
    """1: the follower goes on with its next forward pass while gradients travel; its variables move a step late."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role={self.role!r}: write 'leader' or 'follower'")
        if (self.listen is None) == (self.peer is None):
            raise ConfigError(
                f"the {self.role} has listen={self.listen!r} and peer={self.peer!r}: give one of them; the party that "
                "can be reached listens, the other dials"
            )
        split_endpoint("listen" if self.listen is not None else "peer", self.endpoint)
        if not isinstance(self.job, str) or not 1 <= len(self.job) <= 200:
            raise ConfigError(f"job={self.job!r:.60}: write a name, the same one at both parties")
        check_count("timeout", self.timeout, whole=False)
        check_count("window", self.window)
        if self.wire_dtype not in PRECISIONS:
            raise ConfigError(f"wire_dtype={self.wire_dtype!r}: write None, 'fp16', 'bf16' or 'int8'")
        if self.staleness not in (0, 1):
            raise ConfigError(f"staleness={self.staleness!r}: write 0 or 1")

    @property
    def peer_role(self) -> str:
        return other(self.role)

    @property
    def endpoint(self) -> str:
        """Where this party listens or dials."""
        return self.listen if self.listen is not None else str(self.peer)

    def of_worker(self, index: int) -> Party:
        """Worker `index` of a party meets the worker of that index of the other, so many ports further on."""
        host, port = split_endpoint("endpoint", self.endpoint)
        if index == 0 or port == 0:
            return self
        endpoint = f"{host}:{port + index}"
        if self.listen is not None:
            return dataclasses.replace(self, listen=endpoint)
        return dataclasses.replace(self, peer=endpoint)

    @classmethod
    def find(cls, given: Mapping[str, Any] | None = None, config: str | os.PathLike[str] | None = None) -> Party:
        """What `given` says, then the environment, then the table [federal] of the configuration file."""
        known = [field.name for field in dataclasses.fields(cls)]
        table = read_config(config).get("federal", default={})
        if not isinstance(table, Mapping):
            raise ConfigError(f"the configuration's [federal] is a {type(table).__name__}: write a table")
        for what, named in (("[federal] of the configuration", table), ("FederalModel", given or {})):
            unknown = [str(name) for name in named if name not in known]
            if unknown:
                raise ConfigError(f"{what} has unknown settings {', '.join(unknown)}: it takes {', '.join(known)}")
        found = {**table, **_from_environment(), **{k: v for k, v in (given or {}).items() if v is not None}}
        if "role" not in found:
            raise ConfigError(
                "nothing says which party this is: start it with `plait party --role leader ... script.py` (or both "
                "with `plait federate leader.py follower.py`), or write FederalModel(role='leader', listen='HOST:PORT')"
            )
        _drop_opposite(found, given or {})
        return cls(**found)


def _drop_opposite(found: dict[str, Any], given: Mapping[str, Any]) -> None:
    """A program that says where it listens is not overruled by a file that says where it dials, or the reverse."""
    if "listen" in found and "peer" in found and (given.get("listen") is None) != (given.get("peer") is None):
        del found["peer" if given.get("listen") is not None else "listen"]


def _from_environment() -> dict[str, Any]:
    texts = {field: os.environ[name] for field, name in VARIABLES.items() if os.environ.get(name)}
    found: dict[str, Any] = dict(texts)
    if "insecure" in texts:
        found["insecure"] = texts["insecure"].lower() not in ("0", "false", "no")
    if "timeout" in texts:
        try:
            found["timeout"] = float(texts["timeout"])
        except ValueError:
            raise ConfigError(f"{VARIABLES['timeout']}={texts['timeout']!r}: write seconds") from None
    return found


def split_endpoint(what: str, endpoint: Any) -> tuple[str, int]:
    """The host and port of "host:port"."""
    host, _, port = str(endpoint).rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > LARGEST_PORT:
        raise ConfigError(f"{what}={endpoint!r}: write HOST:PORT, such as 127.0.0.1:50051")
    return host, int(port)
