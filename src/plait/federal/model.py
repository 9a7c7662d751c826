"""`FederalModel`: a model of which each of two parties has a part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from plait.engine.functions import ProcedureFn
from plait.engine.model import Model, connected
from plait.engine.op import Op
from plait.engine.report import show_log
from plait.engine.settings import read_config
from plait.engine.task import DEFAULT_MODE, MODE, TaskScope, current_task_scope
from plait.errors import ClusterError, ConfigError, FederalError
from plait.federal.alignment import read_digest
from plait.federal.communicator import Communicator
from plait.federal.contract import key_of
from plait.federal.exchange import Exchange
from plait.federal.part import Part, PredictFn, agree
from plait.federal.settings import Party
from plait.federal.steps import MisalignedError
from plait.federal.strategy import Federal

__all__ = ["FederalModel"]


class FederalModel(Model):
    """One party's part of a model, and the sends and receives that make it one with the other party's.

    Without arguments, the environment says which party this is: `plait party` and `plait federate` set it.

    Args:
        role: "leader" or "follower".
        communicator: one that is made already; `efl.Communicator.pair()` gives two in one process.
        sample_id: the field of the samples' ids. A keyed digest of each batch's is compared with the other party's.
        aligned: the directory that `plait psi` has written this party's rows into. Both parties' have to be of one run.
        seed: where variables begin.
        **party: the other fields of a `Party`: listen or peer, job, certs, insecure, timeout, window, wire_dtype,
            staleness.

    """

    def __init__(
        self,
        role: str | None = None,
        *,
        communicator: Communicator | None = None,
        sample_id: str | None = None,
        aligned: str | os.PathLike[str] | None = None,
        seed: int = 0,
        **party: Any,
    ) -> None:
        super().__init__(seed=seed)
        self._alignment = None if aligned is None else read_digest(aligned)
        self.communicator = communicator or Communicator(Party.find({"role": role, **party}))
        found = self.communicator.party
        self.federal_role = found.role
        self.recv_grad_ops: dict[str | None, dict[str, Op]] = {}
        """By task and name: what was received last with require_grad=True."""
        self.require_grad_ops: dict[str | None, dict[str, Op]] = {}
        """By task and name: the gradient that came last for what was sent with require_grad=True."""
        late = found.staleness > 0 and found.role == "follower"
        self._exchange = Exchange(found.role, found.peer_role, found.wire_dtype, late=late)
        self._sample_id = sample_id

    # ---- what a task is made of

    def loss_fn(self, loss_fn: Callable[..., Any], task: str | None = None) -> Model:
        """What the task minimises. A party without a loss returns None, or what it sent."""
        around = self._exchange.around_loss(loss_fn, current_task_scope) if callable(loss_fn) else loss_fn
        return super().loss_fn(around, task)

    def eval_fn(self, eval_fn: Callable[..., Any], task: str | None = None) -> Model:
        around = self._exchange.around_eval(eval_fn, current_task_scope) if callable(eval_fn) else eval_fn
        return super().eval_fn(around, task)

    def tasks(self) -> list[str | None]:
        """The names of the tasks, in an order that both parties have."""
        return sorted(super().tasks(), key=lambda task: task or "")

    def send(
        self,
        name: str,
        tensor: torch.Tensor,
        require_grad: bool = False,
        mode: MODE = DEFAULT_MODE,
        task: str | None = None,
    ) -> torch.Tensor:
        """Send a tensor to the other party; with `require_grad`, its gradient comes back. Returns the tensor.

        Call it inside a loss_fn or eval_fn. `name` stands for this tensor in both parties.
        """
        sent = self._exchange.send(name, tensor, require_grad, None if mode is DEFAULT_MODE else mode, task)
        if require_grad and self._exchange.building:
            self._note(self.require_grad_ops, "grad", name)
        return sent

    def recv(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        require_grad: bool = False,
        task: str | None = None,
        *,
        shape: Sequence[int | None] | None = None,
        mode: MODE | None = None,
        protect: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The tensor that the other party sends under this name; with `require_grad`, it gets its gradient back.

        `shape` is checked against what is sent; None where a size is open, and the first always is. `protect` is a
        function of the gradient that goes back, such as `efl.privacy.max_norm`: what it returns goes in its place. It
        is refused where private optimizers noise that gradient, row by row: `BACKEND_MODE='noise'`.
        """
        found = self._exchange.recv(name, dtype, require_grad, shape, mode, task, self._store.device, protect)
        if require_grad and self._exchange.building:
            self._note(self.recv_grad_ops, "recv", name)
        return found

    def _note(self, table: dict[str | None, dict[str, Op]], kind: str, name: str) -> None:
        scope = current_task_scope()
        if scope.mode is MODE.TRAIN:
            latest, place = self._exchange.latest, (key_of(scope), kind, name)
            table.setdefault(scope.task, {})[name] = Op(lambda: latest.get(place), name=f"{kind} {name}", scope=scope)

    # ---- life

    def compile(self, **settings: Any) -> Model:  # type: ignore[override] # as Model.compile
        """Connect to the other party, build, and compare what both have built."""
        replicas = dict(settings.get("sync_optimizer_config") or {}).get("replicas_to_aggregate")
        inner = connected(settings.pop("strategy", None), replicas)
        show_log(quiet=inner.worker_id > 0)
        with self._telling():
            federal = Federal(inner, self.communicator, self._exchange, self._sample_id, self._alignment)
            super().compile(strategy=federal, **settings)
        for key in self._exchange.lossless:
            mode, _, task = key.partition(":")
            self.metric_states.get(TaskScope(MODE(mode), task or None), {}).pop("loss", None)
        return self

    def fit(self, procedure_fn: ProcedureFn, *args: Any, **settings: Any) -> None:
        """Run a procedure to its end, together with the other party, which runs the same one."""
        if not self.compiled:
            self.compile()
        # On a GPU, autograd has one thread for all backward passes of a process, and one party's waits for the other's.
        with self._telling(), torch.autograd.set_multithreading_enabled(False):
            file = read_config(settings.get("config")).get("checkpoint", default={})
            saving = {**settings, **{"checkpoint_dir" if key == "dir" else key: file[key] for key in file}}
            facts: dict[str, Any] = {
                "procedure": getattr(procedure_fn, "facts", None) or "a function",
                "project_name": args[1] if len(args) > 1 else settings.get("project_name", "default_prj"),
                "checkpoint_dir": saving.get("checkpoint_dir") is not None,
            }
            if self.communicator.party.staleness:  # the clocks of two machines do not tick alike
                if "save_secs" in file:
                    raise ConfigError("the configuration has save_secs, and staleness=1 saves by save_steps alone")
                settings["save_secs"] = None
                facts["save_steps"] = saving.get("save_steps")
            self._federal().begin_fit(facts)
            super().fit(procedure_fn, *args, **settings)

    def part(self, predict_fn: PredictFn, inputs: Mapping[str, torch.Tensor], task: str | None = None) -> Part:
        """One party's part by itself, for `plait.export.parts.export_part`; the other party calls it, too.

        `predict_fn(model, sample)` sends, or receives and returns outputs. `inputs` has an example of each field of
        the sample that it looks at.
        """
        with self._telling():
            made = Part(self, predict_fn, inputs, key=self._sample_id, task=task)
            made.facts["pair"] = agree(self)
            return made

    def close(self) -> None:
        """Say goodbye to the other party; done at the end of the process if it is not done here."""
        self.communicator.close()

    def _federal(self) -> Federal:
        strategy: Any = self.strategy
        found: Federal = strategy
        return found

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """The other party is told why this one ends; only the kind of errors whose text might hold data or paths."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ClusterError) and self.strategy.worker_num > 1:
                self._federal().start_again(str(error))
            harmless = isinstance(error, (FederalError, MisalignedError))
            text = str(error) if harmless else f"{type(error).__name__}; its own log says more"
            self.communicator.fail(text)
            raise
        except KeyboardInterrupt:
            self.communicator.fail("it was interrupted")
            raise
