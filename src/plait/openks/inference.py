"""A trained module as a program of its own, for those who only use it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.cluster.embedding import SparseEmbedding
from plait.errors import ConfigError
from plait.export.describe import ABOUT
from plait.export.exporter import write_export
from plait.export.program import in_evaluation, named_outputs
from plait.export.publish import replace_files
from plait.openks.program import Call, Program

__all__ = ["save_inference_model"]


def save_inference_model(
    program: Program, dirname: str | os.PathLike[str], feeded_var_names: Any, target_vars: Any
) -> list[str]:
    """Write DIR/model.pt2, which `torch.export.load` reads, and DIR/model.json, which names inputs and outputs.

    The module is exported as it is in evaluation, for batches of any size.
    """
    module, call = program.module, program.seen
    if module is None:
        raise ConfigError("there is no module to export: write distributed_optimizer(..., module=model)")
    if call is None:
        raise ConfigError("the module was not called yet, so its inputs are not known: export it after a step")
    _check(module, program)
    if program.role.servers:
        program.strategy.settle(program)  # the rows of embeddings are on the servers
    device = program.config.resolved_device()
    with program.unwatched(), _with_own_rows(module), in_evaluation(module):
        inputs, fixed = _inputs(module, call, feeded_var_names, device)
        names, choose = _outputs(module(**inputs, **fixed), target_vars)
        facts = {"step": program.global_step.value}
        fill = functools.partial(write_export, _Chosen(module, fixed, choose), inputs, facts=facts)
        replace_files(dirname, fill, last=ABOUT)
    return names


class _Chosen(nn.Module):
    """The module with what is the same in every call, and with the outputs that are wanted, as a dict."""

    def __init__(self, module: nn.Module, fixed: Mapping[str, Any], choose: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self.fixed = dict(fixed)
        self.choose = choose

    def forward(self, **given: Tensor) -> Any:
        return self.choose(self.module(**given, **self.fixed))


def _check(module: nn.Module, program: Program) -> None:
    if program.settings.fully_shard and program.strategy.worker_num > 1:
        raise ConfigError(
            "with fully_shard no worker has the whole module: save_persistables, and export in a script of one process"
        )
    if any(isinstance(one, SparseEmbedding) for one in module.modules()):
        raise ConfigError("a SparseEmbedding has no fixed rows that could be exported: use nn.Embedding(sparse=True)")


@contextlib.contextmanager
def _with_own_rows(module: nn.Module) -> Iterator[None]:
    """Inside, embeddings look into their own rows instead of the servers'."""
    embeddings = [one for one in module.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    lookups = [(one, vars(one).pop("forward")) for one in embeddings if "forward" in vars(one)]
    try:
        yield
    finally:
        for one, lookup in lookups:
            one.forward = lookup  # type: ignore[method-assign] # only this object's


def _inputs(
    module: nn.Module, call: Call, wanted: Any, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Examples of the inputs that are fed, and arguments that are the same in every call, as they last were."""
    parameters = inspect.signature(module.forward).parameters
    seen = inspect.signature(module.forward).bind(*call.args, **call.kwargs).arguments
    names = _listed("feeded_var_names", wanted) or [name for name, value in seen.items() if isinstance(value, Tensor)]
    tensors = [name for name, value in seen.items() if isinstance(value, Tensor)]
    wrong = [name for name in names if name not in tensors]
    if wrong:
        raise ConfigError(f"feeded_var_names has {wrong[0]!r}, the module was last called with {', '.join(tensors)}")
    needed = [name for name in seen if parameters[name].default is inspect.Parameter.empty]
    lacking = [name for name in needed if name in tensors and name not in names]
    if lacking:
        raise ConfigError(f"feeded_var_names lacks {lacking[0]!r}, without which {type(module).__name__} does nothing")
    fixed = {name: value for name, value in seen.items() if name not in tensors}
    return {name: torch.zeros_like(seen[name], device=device) for name in parameters if name in names}, fixed


def _outputs(output: Any, wanted: Any) -> tuple[list[str], Callable[[Any], dict[str, Any]]]:
    """The names of the outputs that are wanted, and a function that takes them out of what the module returns."""
    every = list(named_outputs(output))
    names = _listed("target_vars", wanted) or every
    wrong = [name for name in names if name not in every]
    if wrong:
        raise ConfigError(f"target_vars has {wrong[0]!r}, the module returns {', '.join(every)}")

    def choose(value: Any) -> dict[str, Any]:
        found = named_outputs(value)
        return {name: found[name] for name in names}

    return names, choose


def _listed(what: str, given: Any) -> list[str]:
    if given is None:
        return []
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
    strange = [one for one in found if not isinstance(one, str)]
    if strange:
        raise ConfigError(f"{what} has a {type(strange[0]).__name__}: write names")
    return found
