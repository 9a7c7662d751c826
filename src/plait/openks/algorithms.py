"""Distributed algorithms: the life of a process in a cluster, from finding its role to leaving."""

from __future__ import annotations

import enum
import os
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import nn

from plait.cluster.connect import Among
from plait.cluster.roles import Role, split_files
from plait.cluster.settings import Distributed
from plait.errors import ConfigError
from plait.openks.optimizers import (
    BaseDistributedOptimizer,
    GeneralDistributedOptimizer,
    HeterogeneousDistributedOptimizer,
)
from plait.openks.program import Program
from plait.openks.role_maker import AutoRoleMaker, RoleMakerBase

__all__ = [
    "BaseDistributedAlgorithm",
    "CPUDistributedAlgorithm",
    "GPUDistributedAlgorithm",
    "KSDistributedFactory",
    "Mode",
]


class Mode(enum.IntEnum):
    """How an algorithm trains, by Paddle's numbers: the first two with parameter servers, the last without."""

    TRANSPILER = 1
    PSLIB = 2
    COLLECTIVE = 3


class BaseDistributedAlgorithm:
    """One process of a cluster: `init`, `distributed_optimizer`, then the life of a worker or of a server.

    A worker: `init_worker`, a loop with `optimizer.minimize(loss)`, `stop_worker`. A server: `init_server`,
    `run_server`. One process alone is a worker, and needs no other.
    """

    _optimizer_class: ClassVar[type[BaseDistributedOptimizer]] = BaseDistributedOptimizer

    def __init__(self, mode: Mode) -> None:
        if mode not in list(Mode):
            raise ConfigError(f"mode={mode!r}: write Mode.TRANSPILER, Mode.PSLIB or Mode.COLLECTIVE")
        self._mode = Mode(mode)
        self._role_maker: RoleMakerBase | None = None
        self._optimizer: BaseDistributedOptimizer | None = None
        self._model_dir: str | None = None
        self._stopped = False

    # Roles

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Find this process's role; None: from the environment. Once, before all else."""
        if self._role_maker is not None and not self._stopped:
            raise ConfigError("init() was called before: a process has one role; call it once")
        maker = AutoRoleMaker() if role_maker is None else role_maker
        if not isinstance(maker, RoleMakerBase):
            raise ConfigError(
                f"role_maker is a {type(maker).__name__}: write PaddleCloudRoleMaker(), UserDefinedRoleMaker(...) or"
                " None, which looks into the environment"
            )
        maker.generate_role()
        self._check_role(maker.role)
        self._role_maker, self._optimizer, self._model_dir, self._stopped = maker, None, None, False

    def _check_role(self, role: Role) -> None:
        if self._mode is Mode.COLLECTIVE and role.servers:
            raise ConfigError(
                f"{type(self).__name__} trains without servers, and {role.source} name {role.servers}: start none, or"
                " write KSDistributedFactory.instantiation(0)"
            )
        if self._mode is not Mode.COLLECTIVE and role.is_collective and not role.alone:
            raise ConfigError(
                f"{type(self).__name__} trains with parameter servers, and {role.source} name {role.workers} workers"
                " and no server: start some (plait launch --servers 1), or write KSDistributedFactory.instantiation(1)"
            )

    def _maker(self) -> RoleMakerBase:
        if self._role_maker is None:
            raise ConfigError("the role of this process is not known: write algorithm.init(role_maker) before")
        return self._role_maker

    def is_first_worker(self) -> bool:
        return self._maker().is_first_worker()

    def is_worker(self) -> bool:
        return self._maker().is_worker()

    def _is_worker(self) -> bool:
        return self.is_worker()

    def is_server(self) -> bool:
        return self._maker().is_server()

    def worker_index(self) -> int:
        return self._maker().worker_index()

    def worker_num(self) -> int:
        """How many workers there are; servers do not count."""
        return self._maker().worker_num()

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """The workers' "host:port", empty where nobody says it; or the same as text, with commas."""
        found = self._maker().get_trainer_endpoints()
        return ",".join(found) if to_string else found

    def server_index(self) -> int:
        return self._maker().server_index()

    def server_num(self) -> int:
        return self._maker().server_num()

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        found = self._maker().get_pserver_endpoints()
        return ",".join(found) if to_string else found

    def split_files(self, files: list[str]) -> list[str]:
        """The files of this worker: a contiguous block, in order, the first workers' one longer. A server has none."""
        if self.is_server():
            return []
        return split_files(files, self.worker_index(), self.worker_num())

    def all_reduce_worker(self, input: Any, output: list[Any] | NDArray[Any]) -> None:  # noqa: A002 - the document's
        """Put into `output` the sum of the workers' numbers at each place; of lists, or arrays of one dimension."""
        self._maker().all_reduce_worker(input, output)

    def barrier_workers(self) -> None:
        """Wait until all workers have come here; for a server nothing happens."""
        self._maker().barrier_worker()

    def barrier_worker(self) -> None:
        """Paddle's name for `barrier_workers`."""
        self.barrier_workers()

    # Life

    def distributed_optimizer(
        self, optimizer: Any, strategy: Any = None, *, module: nn.Module | None = None
    ) -> BaseDistributedOptimizer:
        """Wrap an optimizer, so that a step is one of all workers.

        Without servers, this is where the workers meet, and take the first one's variables.

        Args:
            optimizer: A `torch.optim.Optimizer`; or a function that makes one of variables, which needs `module`.
            strategy: `plait.cluster.Distributed`, or a dict of its fields; None: sync with servers, else all-reduce.
            module: What is trained: needed for sparse embeddings on servers, batch normalisation's statistics,
                recompute, mixed precision and `save_inference_model`.

        """
        role = self._maker().role
        if self._optimizer is not None:
            raise ConfigError(
                "there is a distributed optimizer already: give torch's optimizer several parameter groups instead"
            )
        made = self._optimizer_class(optimizer, strategy, module=module)
        program = _program_of(made)
        if role.is_server:
            program.refusal = f"this is server {role.index}, which takes no steps: write algorithm.run_server()"
        elif not role.is_collective:
            program.refusal = "this worker has not met the servers: write algorithm.init_worker() before the loop"
        self._optimizer = made
        if role.is_collective:
            self._connect(made)
        return made

    def _connect(self, optimizer: BaseDistributedOptimizer) -> None:
        maker = self._maker()
        optimizer._start(maker.role)  # noqa: SLF001 - a friend
        if maker.role.is_collective:
            # the group that trains is the one that talks: a process is in one
            maker._joined = Among(_program_of(optimizer).strategy)  # noqa: SLF001 - a friend

    def init_worker(self) -> None:
        """Wait for the servers and the other workers; everybody's variables become the servers' or the first one's."""
        self._check_kind("init_worker", server=False)
        if self._optimizer is None:
            raise ConfigError("init_worker() before distributed_optimizer(): which variables there are, it says")
        if _program_of(self._optimizer).refusal is not None and not self._stopped:
            self._connect(self._optimizer)

    def run_worker(self, main_programs: Any = None, scopes: Any = None) -> None:
        """The same as `init_worker`: what a worker runs is your loop."""
        del main_programs, scopes
        self.init_worker()

    def init_server(self, model_dir: str | os.PathLike[str] | None = None) -> None:
        """Begin with what `save_persistables` wrote into `model_dir`, for any number of servers; None: with nothing."""
        self._check_kind("init_server", server=True)
        if model_dir is not None:
            from plait.openks.saving import shards_in  # noqa: PLC0415 - few need it

            self._model_dir = str(shards_in(model_dir))

    def run_server(self) -> None:
        """Serve until all workers have stopped."""
        self._check_kind("run_server", server=True)
        from plait.cluster.ps.server import serve  # noqa: PLC0415 - brings ZeroMQ

        settings = Distributed() if self._optimizer is None else _program_of(self._optimizer).settings
        serve(self._maker().role, timeout=settings.timeout, model_dir=self._model_dir)

    def stop_worker(self) -> None:
        """Leave: servers end when all workers have; a worker that waits for this one in a step is told."""
        self._check_kind("stop_worker", server=False)
        if self._optimizer is not None and not self._stopped and _program_of(self._optimizer).refusal is None:
            _program_of(self._optimizer).disconnect()
        self._stopped = True

    def _check_kind(self, name: str, *, server: bool) -> None:
        maker = self._maker()
        if maker.is_server() != server:
            kind, other = ("server", "worker") if maker.is_server() else ("worker", "server")
            raise ConfigError(
                f"{name}() is for a {other}, this is {kind} {maker.role.index}: write `if algorithm.is_server():`"
                " init_server() and run_server(), `else:` init_worker() and stop_worker()"
            )

    # Files

    def save_persistables(
        self,
        executor: Any,
        dirname: str | os.PathLike[str],
        main_program: nn.Module | None = None,
        *,
        filename: str | None = None,
    ) -> None:
        """Save all variables and the optimizer's state in `dirname`: whole, or not at all.

        The first worker writes, and parameter servers their shares; other workers may call it or not, unless
        `local_sgd` or `fully_shard` makes them have what the first lacks: then all have to.

        Args:
            executor: Nothing has to be run for it; ignored.
            dirname: The directory. A save there before is replaced.
            main_program: The module whose names the variables get; None: that of `distributed_optimizer`.
            filename: NAME.safetensors: the variables alone, in one file of that name.

        """
        del executor
        from plait.openks.saving import save_persistables  # noqa: PLC0415 - few need it

        save_persistables(self._running("save_persistables"), dirname, _module(main_program), filename)

    def load_persistables(
        self, executor: Any, dirname: str | os.PathLike[str], main_program: nn.Module | None = None
    ) -> int:
        """Go on with what `save_persistables` wrote; all workers call it, after `init_worker`.

        Returns how many steps had been taken then.
        """
        del executor
        from plait.openks.saving import load_persistables  # noqa: PLC0415 - few need it

        return load_persistables(self._running("load_persistables"), dirname, _module(main_program))

    def save_inference_model(
        self,
        executor: Any,
        dirname: str | os.PathLike[str],
        feeded_var_names: Any,
        target_vars: Any,
        main_program: nn.Module | None = None,
        export_for_deployment: bool = True,
    ) -> list[str]:
        """Write the module as a program for inference: `dirname`/model.pt2 and model.json; the first worker does.

        Args:
            executor: Nothing has to be run for it; ignored.
            dirname: The directory.
            feeded_var_names: Names of `forward`'s parameters that are fed; None: all that the module was called with.
            target_vars: Names of the outputs: a dict's keys, "output" for a tensor, "output_0", ...; None: all.
            main_program: The module of `distributed_optimizer`, or None.
            export_for_deployment: Ignored: what is written can be used, and exported further.

        Returns:
            The names of the outputs; none on other workers than the first.

        """
        del executor, export_for_deployment
        from plait.openks.inference import save_inference_model  # noqa: PLC0415 - few need it

        program = self._running("save_inference_model")
        if _module(main_program) not in (None, program.module):
            raise ConfigError(
                f"main_program is a {type(main_program).__name__} that is not trained here: write"
                " distributed_optimizer(..., module=model), and leave main_program out"
            )
        if not self.is_first_worker():
            return []
        return save_inference_model(program, dirname, feeded_var_names, target_vars)

    def _running(self, name: str) -> Program:
        self._check_kind(name, server=False)
        if self._optimizer is None:
            raise ConfigError(f"{name}() before distributed_optimizer(): there is nothing to save")
        program = _program_of(self._optimizer)
        program.check_ready()
        return program


class CPUDistributedAlgorithm(BaseDistributedAlgorithm):
    """Training with parameter servers; `KSDistributedFactory.instantiation(0)` gives one."""

    _optimizer_class = GeneralDistributedOptimizer

    def __init__(self) -> None:
        super().__init__(Mode.TRANSPILER)


class GPUDistributedAlgorithm(BaseDistributedAlgorithm):
    """Collective training, without servers, on GPUs or not; `KSDistributedFactory.instantiation(1)` gives one."""

    _optimizer_class = HeterogeneousDistributedOptimizer

    def __init__(self) -> None:
        super().__init__(Mode.COLLECTIVE)

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Find this process's role, and choose its GPU, so that `model.cuda()` goes there."""
        super().init(role_maker)
        role = self._maker().role
        if torch.cuda.is_available() and not role.alone:
            torch.cuda.set_device(role.local_index % torch.cuda.device_count())


class KSDistributedFactory:
    """Gives the process's algorithms."""

    _made: ClassVar[dict[int, BaseDistributedAlgorithm]] = {}
    _kinds: ClassVar[tuple[type[CPUDistributedAlgorithm], type[GPUDistributedAlgorithm]]] = (
        CPUDistributedAlgorithm,
        GPUDistributedAlgorithm,
    )

    @staticmethod
    def instantiation(flag: int) -> BaseDistributedAlgorithm:
        """0: with parameter servers; 1: collective. The same object for the same flag in all of a process."""
        if not isinstance(flag, int) or flag not in (0, 1):
            raise ConfigError(f"flag={flag!r}: write 0 for parameter servers, 1 for workers without servers")
        made = KSDistributedFactory._made
        if flag not in made:
            made[int(flag)] = KSDistributedFactory._kinds[flag]()
        return made[flag]


def _program_of(optimizer: BaseDistributedOptimizer) -> Program:
    return optimizer._program  # noqa: SLF001 - a friend


def _module(given: Any) -> nn.Module | None:
    if given is not None and not isinstance(given, nn.Module):
        raise ConfigError(f"main_program is a {type(given).__name__}: write the nn.Module that is trained, or None")
    return given
