"""A trained module as a program of its own, for those who only use it."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.atomic import atomic_path, write_atomic
from plait.cluster.embedding import SparseEmbedding
from plait.errors import CheckpointError, ConfigError
from plait.openks.program import Call, Program
from plait.version import __version__

__all__ = ["save_inference_model"]

_FORMAT = 1
_LEAST_ROWS = 2  # torch.export takes a size of 1 for a constant


def save_inference_model(
    program: Program, dirname: str | os.PathLike[str], feeded_var_names: Any, target_vars: Any
) -> list[str]:
    """Write DIR/model.pt2, which `torch.export.load` reads, and DIR/model.json, which names inputs and outputs.

    The module is exported as it is in evaluation, for batches of any size where its operations allow that.
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
    with program.unwatched(), _in_evaluation(module), torch.no_grad():
        inputs, fixed = _inputs(module, call, feeded_var_names, device)
        names, choose = _outputs(module(**inputs, **fixed), target_vars)
        exported = _exported(_Chosen(module, inputs, fixed, choose), inputs)
    _write(Path(dirname), exported, list(inputs), names)
    return names


class _Chosen(nn.Module):
    """The module with the inputs that are fed, by name, and the outputs that are wanted, as a dict."""

    def __init__(
        self, module: nn.Module, inputs: Mapping[str, Tensor], fixed: Mapping[str, Any], choose: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.module = module

        def forward(**given: Tensor) -> Any:
            return choose(module(**given, **fixed))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        named = inspect.Signature([inspect.Parameter(name, kind) for name in inputs])
        forward.__signature__ = named  # type: ignore[attr-defined] # how torch.export learns the names
        self.forward = forward


def _check(module: nn.Module, program: Program) -> None:
    if program.settings.fully_shard and program.strategy.worker_num > 1:
        raise ConfigError(
            "with fully_shard no worker has the whole module: save_persistables, and export in a script of one process"
        )
    if any(isinstance(one, SparseEmbedding) for one in module.modules()):
        raise ConfigError("a SparseEmbedding has no fixed rows that could be exported: use nn.Embedding(sparse=True)")


@contextlib.contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    """Inside, the module evaluates, and embeddings look into their own rows instead of the servers'."""
    modes = [(one, one.training) for one in module.modules()]
    embeddings = [one for one in module.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    lookups = [(one, vars(one).pop("forward")) for one in embeddings if "forward" in vars(one)]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training
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
    rows = max([_LEAST_ROWS, *(seen[name].shape[0] for name in names if seen[name].ndim)])
    fixed = {name: value for name, value in seen.items() if name not in tensors}
    return {name: _example(seen[name], rows, device) for name in parameters if name in names}, fixed


def _example(form: Tensor, rows: int, device: torch.device) -> Tensor:
    shape = [rows if form.shape[0] == 1 else form.shape[0], *form.shape[1:]] if form.ndim else []
    return torch.zeros(shape, dtype=form.dtype, device=device)


def _outputs(output: Any, wanted: Any) -> tuple[list[str], Callable[[Any], dict[str, Any]]]:
    """The names of the outputs that are wanted, and a function that takes them out of what the module returns."""
    every = list(_named(output))
    names = _listed("target_vars", wanted) or every
    wrong = [name for name in names if name not in every]
    if wrong:
        raise ConfigError(f"target_vars has {wrong[0]!r}, the module returns {', '.join(every)}")

    def choose(value: Any) -> dict[str, Any]:
        found = _named(value)
        return {name: found[name] for name in names}

    return names, choose


def _named(output: Any) -> dict[str, Any]:
    """A dict as it is; a tensor is "output", and several are "output_0", "output_1", ..."""
    if isinstance(output, Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, (list, tuple)):
        return {f"output_{number}": value for number, value in enumerate(output)}
    raise ConfigError(f"the module returns a {type(output).__name__}: return a tensor, a dict or a tuple of them")


def _listed(what: str, given: Any) -> list[str]:
    if given is None:
        return []
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
    strange = [one for one in found if not isinstance(one, str)]
    if strange:
        raise ConfigError(f"{what} has a {type(strange[0]).__name__}: write names")
    return found


def _exported(chosen: _Chosen, inputs: Mapping[str, Tensor]) -> Any:
    from torch.export import Dim, export  # noqa: PLC0415 - heavy

    dims: dict[str, Any] = {name: {0: Dim.AUTO} if value.ndim else None for name, value in inputs.items()}
    try:
        return export(chosen, (), dict(inputs), dynamic_shapes=dims)
    except Exception as error:
        raise CheckpointError(
            f"torch.export cannot follow {type(chosen.module).__name__}: {error}. Nothing was written"
        ) from error


def _write(directory: Path, exported: Any, inputs: list[str], outputs: list[str]) -> None:
    forms = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    described = [
        {"name": name, "dtype": str(form.dtype).removeprefix("torch."), "shape": [_size(size) for size in form.shape]}
        for name, form in zip(inputs, (forms[one] for one in exported.graph_signature.user_inputs), strict=True)
    ]
    body = {
        "format": _FORMAT,
        "inputs": described,
        "outputs": outputs,
        "plait": __version__,
        "torch": torch.__version__,
    }
    try:
        with atomic_path(directory / "model.pt2") as temporary, temporary.open("wb") as stream:
            torch.export.save(exported, stream)
        write_atomic(directory / "model.json", json.dumps(body, indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error}; name a directory with room") from error


def _size(size: Any) -> int | None:
    """None: any."""
    return size if isinstance(size, int) else None
