"""Parameters, gradients and optimizer state split over the workers (FSDP2), and put together for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from plait.errors import ConfigError, MismatchError, VariableError
from plait.variables.store import variable_name

__all__ = ["UNIT_SIZE", "gathered", "load_full", "one_by_one", "own_tree", "shard_model", "sharded_state"]

UNIT_SIZE = 1_000_000
"""Below so many numbers, a gathering of its own costs more time than it saves memory."""


def shard_model(
    model: nn.Module, mesh_or_group: DeviceMesh | dist.ProcessGroup | None = None, *, unit_size: int = UNIT_SIZE
) -> dict[str, nn.Parameter]:
    """Split the model's parameters over the workers, before its optimizers are made.

    Parameters travel in units: all of a unit are put together when it is called, and parted again afterwards. A unit is

    - a module that the model or a scope holds, since nobody calls what is above it: `model.tower`, `plait.layer("fc")`;
    - inside such a one, what stands in an `nn.Sequential` or in a module that is never called (an `nn.ModuleList`, a
      block of plait's networks), if it has at least `unit_size` numbers.

    So a unit must be called as a module; what reads `model.tower.weight` outside of a call sees its own part only.
    Gradients come out as the mean over the workers. All start from the values of the group's first worker.

    Returns the variables that stay whole on every worker, by name: those that no module call announces, such as
    `plait.get_variable`'s, and single numbers. Their gradients are left to whoever reduces gradients otherwise, and
    their optimizers need `one_by_one`.
    """
    mesh = _mesh(model, mesh_or_group)
    units = list(dict.fromkeys(_units(model, unit_size, called=False)))
    unit_of = _unit_of_each(model, units)
    named = dict(model.named_parameters())
    whole = {path: value for path, value in named.items() if unit_of[value] is None or value.ndim == 0}
    for value in named.values():
        value.data = value.data.contiguous()  # nothing else can be split
        dist.broadcast(value.data, group=mesh.get_group(), group_src=0)
    for unit in units:
        unit.register_forward_hook(_without_views)
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=set(whole.values()))
    return {variable_name(path): value for path, value in whole.items()}


def _mesh(model: nn.Module, given: DeviceMesh | dist.ProcessGroup | None) -> DeviceMesh:
    if isinstance(given, DeviceMesh):
        return given
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    group = given if given is not None else dist.distributed_c10d._get_default_group()  # noqa: SLF001 - it has no other
    return DeviceMesh.from_group(group, device)


def _units(above: nn.Module, unit_size: int, *, called: bool) -> Iterator[nn.Module]:
    """What is below a module, inner units first; `called`: whether a call of something above goes before theirs."""
    for module in above.children():
        can_be_called = _can_be_called(module)
        yield from _units(module, unit_size, called=called or can_be_called)
        numbers = sum(value.numel() for value in module.parameters())
        in_a_row = isinstance(above, nn.Sequential) or not _can_be_called(above)
        if can_be_called and numbers and (not called or (in_a_row and numbers >= unit_size)):
            yield module


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _unit_of_each(model: nn.Module, units: Sequence[nn.Module]) -> dict[nn.Parameter, nn.Module | None]:
    """The innermost unit that has a parameter; one in two units would be there in a call of one of them only."""
    found: dict[nn.Parameter, tuple[str, nn.Module | None]] = {}

    def look(module: nn.Module, path: str, unit: nn.Module | None) -> None:
        unit = module if module in units else unit
        for name, value in module.named_parameters(path, recurse=False):
            before, its_unit = found.setdefault(value, (name, unit))
            if its_unit is not unit:
                raise VariableError(
                    f"{variable_name(before)!r} and {variable_name(name)!r} are one variable in two modules, which"
                    " fully_shard gathers at different times: put both modules into one, and call that"
                )
        for name, child in module._modules.items():  # noqa: SLF001 - children() leaves a second name out
            if child is not None:
                look(child, f"{path}.{name}" if path else name, unit)

    look(model, "", None)
    return {value: unit for value, (_, unit) in found.items()}


def _without_views(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Copy what is a view among a unit's outputs: one that is changed in place would go past FSDP's hook on it."""
    if isinstance(output, Tensor):
        return output.clone() if output._base is not None and output.requires_grad else output  # noqa: SLF001 - Tensor's
    if isinstance(output, dict):
        return {key: _without_views(_module, _args, value) for key, value in output.items()}
    if type(output) in (list, tuple):
        return type(output)(_without_views(_module, _args, value) for value in output)
    return output


def one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that has split and whole variables in one group move them one after the other.

    Torch's functions over many tensors at once refuse both kinds together.
    """
    for group in optimizer.param_groups:
        if len({isinstance(value, DTensor) for value in group["params"]}) < 2:
            continue
        if "foreach" not in group:
            raise ConfigError(
                f"{type(optimizer).__name__} moves many variables at once, and fully_shard leaves some of them whole:"
                " take an optimizer of torch.optim, or make variables with plait.layer instead of plait.get_variable"
            )
        group.update({key: False for key in ("foreach", "fused") if key in group})


# Checkpoints ----------------------------------------------------------------------------------------------------------


def gathered(tree: Any, *, keep: bool = True) -> Any:
    """The tree with every split tensor whole and on the CPU; all workers call it, with trees alike.

    Without `keep`, this worker only takes part: it gives what it has, and gets None in the places of tensors.
    """
    if isinstance(tree, Mapping):
        return {key: gathered(value, keep=keep) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(gathered(value, keep=keep) for value in tree)
    if not isinstance(tree, Tensor):
        return tree
    value = tree.detach()
    full = _full(value) if isinstance(value, DTensor) else value
    return full.cpu() if keep else None


@torch.no_grad()
def load_full(live: Mapping[str, Tensor], full: Mapping[str, Tensor]) -> None:
    """Write whole tensors into those of the same names, split or not; every worker has them all and calls it alone."""
    missing = [name for name in full if name not in live]
    wrong = [name for name in full if name in live and full[name].shape != live[name].shape]
    if missing or wrong:
        raise MismatchError(
            f"nothing was loaded: the model has no {missing[:5]}, and another shape for {wrong[:5]}; load a checkpoint"
            " of this model"
        )
    for name, value in full.items():
        target = live[name]
        if isinstance(target, DTensor):
            target.to_local().copy_(_own_rows(value, target))
        else:
            target.copy_(value)


def sharded_state(variable: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state for one variable, as `load_state_dict` takes it: whole tensors split as the variable is."""
    return {key: _like(value, variable) for key, value in state.items()}


def own_tree(variables: Mapping[str, Tensor], tree: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint whose variables and optimizer states are split as the live variables are."""
    optimizers = [
        {**one, "state": {name: sharded_state(variables[name], state) for name, state in one["state"].items()}}
        for one in tree["optimizers"]
    ]
    own = {
        name: _like(value, variables[name]) if name in variables else value for name, value in tree["variables"].items()
    }
    return {**tree, "variables": own, "optimizers": optimizers}


def _like(value: Any, variable: Tensor) -> Any:
    if not isinstance(variable, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != variable.shape:  # a count of steps
        return value
    own = _own_rows(value, variable).to(variable.device, copy=True)
    return DTensor.from_local(
        own, variable.device_mesh, variable.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def _full(split: DTensor) -> Tensor:
    """The whole tensor, by one plain collective: DTensor's own way has crashed on gloo where CUDA was at hand."""
    if split.placements != (Shard(0),):
        return split.full_tensor()
    mesh, rows, own = split.device_mesh, split.shape[0], split.to_local()
    each = -(-rows // mesh.size())
    padded = own.new_zeros(each, *split.shape[1:])
    padded[: len(own)] = own
    parts = own.new_empty(mesh.size(), *padded.shape)
    dist.all_gather(list(parts), padded, group=mesh.get_group())
    return parts.flatten(0, 1)[:rows]


def _own_rows(full: Tensor, split: DTensor) -> Tensor:
    """The part of a whole tensor that is this worker's: rows are dealt out in blocks, as FSDP does it."""
    mesh, rows = split.device_mesh, full.shape[0]
    each = -(-rows // mesh.size())
    start = min(rows, mesh.get_local_rank() * each)
    return full[start : start + each]
