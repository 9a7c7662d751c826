"""What `plait serve` can be told."""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import ConfigError

__all__ = ["Settings"]

_LEAST = {
    "batch": 1,
    "batch_delay": 0.0,
    "workers": 1,
    "queue": 1,
    "max_body": 1024,
    "timeout": 0.001,
    "poll": 0.01,
    "stop_timeout": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    batch: int = 16
    """Rows that are computed together at most."""
    batch_delay: float = 0.001
    """Seconds that a request waits for others while nothing is computed."""
    workers: int = 1
    """Threads that compute, each a batch."""
    threads: int | None = None
    """Threads inside one computation; otherwise the runtime's own choice."""
    queue: int = 256
    """Requests under way; one more is answered with 503."""
    max_body: int = 64 * 2**20
    """Bytes of a request's body; a longer one is answered with 413."""
    timeout: float = 30.0
    """Seconds for reading a request, and as many for its answer."""
    poll: float = 2.0
    """Seconds between two looks for new versions."""
    stop_timeout: float = 30.0
    """Seconds that requests under way are given when the server is told to stop."""
    format: str | None = None
    """Which format of an export is loaded: torch or onnx; otherwise the exporter's preference."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ConfigError(f"serve: {name} is {getattr(self, name)}; write at least {least}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"serve: threads is {self.threads}; write at least 1, or leave it out")
