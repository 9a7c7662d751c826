"""How a cluster trains: one dataclass that refuses what does not go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from plait.engine.strategy import Strategy
from plait.errors import ConfigError

__all__ = ["COLLECTIVE", "SERVED", "Distributed"]

SERVED = ("sync", "half_async", "async", "geo")
COLLECTIVE = "collective"
MODES = ("auto", COLLECTIVE, *SERVED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distributed:
    """`compile(strategy=plait.cluster.Distributed(...))`: how several workers train one model."""

    mode: str = "auto"
    """"collective", or with servers "sync", "half_async", "async", "geo"; "auto": sync if there are servers."""
    gradient_merge: int = 1
    """Variables move every so many steps, by the mean of the gradients until then; workers talk only then."""
    local_sgd: int = 0
    """Workers move their own variables and take the mean of all every so many steps; 0: they move them together."""
    adaptive: bool = False
    """Local SGD whose number of steps follows the loss; `local_sgd` is the first number."""
    compression: str | None = None
    """"bf16": gradients travel in half the bytes."""
    sync_batch_norm: bool = False
    """Batch normalisation over the batches of all workers."""
    recompute: Sequence[str] = ()
    """Scopes of modules that are computed again in the backward pass instead of being kept."""
    precision: str | None = None
    """"bf16" or "fp16": compute in it where it is safe; None: as `SessionConfig.precision` says."""
    fully_shard: bool = False
    """Parameters, gradients and optimizer state are split over the workers (FSDP2)."""
    replicas_to_aggregate: int | None = None
    """In sync mode with servers: a step takes the first so many workers' gradients; late ones are dropped."""
    geo_steps: int = 100
    """In geo mode: a worker sends what it has moved every so many steps."""
    timeout: float = 60.0
    """Seconds that a worker waits for another, or for a server, before it gives up and says for whom."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r}: write one of {', '.join(MODES)}")
        if self.compression not in (None, "bf16"):
            raise ConfigError(f"compression={self.compression!r}: write 'bf16', or None")
        if self.precision not in (None, "bf16", "fp16"):
            raise ConfigError(f"precision={self.precision!r}: write 'bf16', 'fp16', or None")
        for name, least in (("gradient_merge", 1), ("local_sgd", 0), ("geo_steps", 1), ("replicas_to_aggregate", 1)):
            value = getattr(self, name)
            if value is None and name == "replicas_to_aggregate":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}: write a whole number from {least} on")
        if not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout!r}: write seconds, above 0")
        if isinstance(self.recompute, str):
            raise ConfigError(f"recompute={self.recompute!r}: write a list of scopes, [{self.recompute!r}]")
        self._check_together()

    def connect(self, replicas_to_aggregate: int | None = None) -> Strategy:
        """The strategy of this process, in the cluster that the environment describes."""
        from plait.cluster.connect import connected  # noqa: PLC0415 - it is made of these settings

        if replicas_to_aggregate is not None:
            return connected(dataclasses.replace(self, replicas_to_aggregate=replicas_to_aggregate))
        return connected(self)

    def _check_together(self) -> None:
        served = self.mode in SERVED
        for name, off in (
            ("local_sgd", 0),
            ("adaptive", False),
            ("compression", None),
            ("sync_batch_norm", False),
            ("fully_shard", False),
        ):
            if served and getattr(self, name) != off:
                raise ConfigError(f"{name} is for workers without servers, mode={self.mode!r} has them: leave it out")
        if self.replicas_to_aggregate is not None and self.mode not in ("sync", "auto"):
            raise ConfigError(f"replicas_to_aggregate with mode={self.mode!r}: it is for mode='sync'")
        if self.adaptive and not self.local_sgd:
            raise ConfigError("adaptive=True without local_sgd: write how many steps to begin with, local_sgd=4")
        if self.local_sgd and self.gradient_merge > 1:
            raise ConfigError("local_sgd and gradient_merge: both spare communication; choose one")
        if self.local_sgd and self.compression:
            raise ConfigError("local_sgd sends variables, which compression would round: leave one of them out")
        if self.fully_shard and (self.local_sgd or self.gradient_merge > 1 or self.compression):
            raise ConfigError(
                "fully_shard reduces gradients itself: no local_sgd, gradient_merge or compression with it"
            )
