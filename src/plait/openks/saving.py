"""Variables and optimizer state on disk, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.atomic import atomic_path
from plait.errors import CheckpointError, ClusterError, ConfigError, MismatchError, VariableError
from plait.openks.program import Program
from plait.variables.checkpoint import CheckpointDir, load_parts
from plait.variables.store import variable_name
from plait.variables.tree import snapshot
from plait.version import __version__

__all__ = ["load_persistables", "save_persistables", "shards_in"]

_FORMAT = 1


def save_persistables(
    program: Program, dirname: str | os.PathLike[str], module: nn.Module | None = None, filename: str | None = None
) -> None:
    """Save variables and optimizer state as a checkpoint in `dirname`; with `filename`, variables alone, as one file.

    The first worker writes. Others return at once, unless they have something that it lacks: shares of the
    variables, or, between two means of local SGD, variables of their own. Then all have to call this.
    """
    strategy, sharded = program.strategy, program.settings.fully_shard and program.strategy.worker_num > 1
    if not strategy.whole():
        strategy.settle(program)
    elif strategy.worker_id > 0 and not sharded:
        return
    elif filename is not None and program.role.servers:
        strategy.settle(program)  # which takes the rows from the servers, and nobody else's time
    directory = Path(dirname)
    cluster: dict[str, Any] = {}
    if strategy.worker_id == 0:
        _make(directory)
        # before the variables are looked at: it takes rows from the servers
        cluster = strategy.capture(program, None if filename else str(directory))
    tree: dict[str, Any] = {
        "format": _FORMAT,
        "variables": _variables(program, module),
        "optimizers": [] if filename else [_optimizer_state(program, module)],
        "global_step": program.global_step.value,
        "worker_num": strategy.worker_num,
        "cluster": cluster,
    }
    if sharded:
        from plait.cluster.fully_shard import gathered  # noqa: PLC0415 - heavy

        tree = gathered(tree, keep=strategy.worker_id == 0)
    if strategy.worker_id > 0:
        return
    if filename is not None:
        _write_file(directory / filename, tree["variables"])
        return
    if not strategy.durable(cluster, str(directory)):
        raise ClusterError(f"save_persistables: a server was lost before its share was in {directory}; save again")
    CheckpointDir(directory, keep=1, version=__version__).save(snapshot(tree), step=program.global_step.value)
    _prune(directory, cluster.get("servers"))


def load_persistables(program: Program, dirname: str | os.PathLike[str], module: nn.Module | None = None) -> int:
    """Go on with what was saved in `dirname`: returns after how many steps that was.

    All workers call it, with the same files before them.
    """
    found = CheckpointDir(dirname).read_latest()
    if found is None:
        raise CheckpointError(f"{dirname} holds nothing that save_persistables wrote: name the directory it was given")
    tree = found[1]
    if tree.get("format") != _FORMAT or "variables" not in tree:
        raise CheckpointError(f"{found[0].path} has format {tree.get('format')!r}, this plait reads {_FORMAT}")
    live = _variables(program, module)
    _check_same(live, tree["variables"], found[0].path)
    sharded = program.settings.fully_shard and program.strategy.worker_num > 1
    if sharded:
        from plait.cluster.fully_shard import load_full  # noqa: PLC0415 - heavy

        load_full(live, tree["variables"])
    else:
        with torch.no_grad():
            for name, value in tree["variables"].items():
                live[name].copy_(value)
    for state in tree["optimizers"]:
        _load_optimizer(program, module, state, sharded=sharded)
    program.global_step.value = int(tree["global_step"])
    program.strategy.restore(program, tree.get("cluster", {}), str(dirname))
    return program.global_step.value


def shards_in(model_dir: str | os.PathLike[str]) -> Path:
    """Where in `model_dir` the servers' shares are: in the checkpoint of `save_persistables`, or right there."""
    directory = Path(model_dir)
    if not directory.is_dir():
        raise ConfigError(f"model_dir={str(model_dir)!r} is no directory: name one that save_persistables wrote")
    if any(directory.glob("shard-*-of-*.json")):
        return directory
    saved = CheckpointDir(directory).list()
    if not saved:
        raise CheckpointError(
            f"{directory} holds nothing that save_persistables wrote: name the directory it was given"
        )
    state = load_parts(saved[-1].path)[1]
    name = state.get("cluster", {}).get("servers") if isinstance(state, Mapping) else None
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(
            f"{saved[-1].path} was saved without servers: leave model_dir out, and let the workers call"
            " algorithm.load_persistables(None, dirname) after init_worker()"
        )
    return directory / name


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be made: {error.strerror}; name another directory") from error


def _write_file(path: Path, variables: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 - one of two ways

    if path.suffix != ".safetensors":
        raise ConfigError(f"filename={path.name!r}: write a name that ends in .safetensors, which is what it will be")
    try:
        with atomic_path(path) as temporary:
            mode = temporary.stat().st_mode
            save_file(snapshot(dict(variables)), temporary)
            temporary.chmod(mode)  # safetensors ignores the umask
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; name a directory with room") from error


def _prune(directory: Path, kept: str | None) -> None:
    """The shares of saves before; their checkpoint is gone."""
    for share in directory.glob("servers-*"):
        if share.name != kept and share.is_dir():
            shutil.rmtree(share, ignore_errors=True)


def _variables(program: Program, module: nn.Module | None) -> dict[str, Tensor]:
    if module is None or module is program.module:
        return program.variables()
    return {variable_name(path): value for path, value in module.state_dict(keep_vars=True).items()}


def _names(program: Program, module: nn.Module | None) -> list[str]:
    """The names of the optimizer's variables, in its order."""
    names = {value: name for name, value in _variables(program, module).items()}
    moved = [value for group in program.optimizer.param_groups for value in group["params"]]
    lacking = [tuple(value.shape) for value in moved if value not in names]
    if lacking:
        raise VariableError(
            f"main_program lacks a variable of shape {lacking[0]} that the optimizer moves: give the whole module"
        )
    return [names[value] for value in moved]


def _optimizer_state(program: Program, module: nn.Module | None) -> dict[str, Any]:
    """The optimizer's own state, by the names of variables."""
    names, state = _names(program, module), program.optimizer.state_dict()
    return {
        "kind": type(program.optimizer).__name__,
        "variables": names,
        "state": {names[number]: dict(values) for number, values in state["state"].items()},
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]],
    }


def _load_optimizer(
    program: Program, module: nn.Module | None, saved: Mapping[str, Any], *, sharded: bool = False
) -> None:
    optimizer, names = program.optimizer, _names(program, module)
    for what, now in (("kind", type(optimizer).__name__), ("variables", names)):
        if saved[what] != now:
            raise MismatchError(f"the optimizer's {what} was {saved[what]} when it was saved, it is {now} now")
    live = _variables(program, module)
    state = {names.index(name): dict(values) for name, values in saved["state"].items()}
    if sharded:
        from plait.cluster.fully_shard import sharded_state  # noqa: PLC0415 - heavy

        state = {number: sharded_state(live[names[number]], values) for number, values in state.items()}
    groups = optimizer.state_dict()["param_groups"]
    for group, values in zip(groups, saved["groups"], strict=True):
        # JSON has no tuples, such as Adam's betas
        group.update({key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in values.items()})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _check_same(live: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    wrong = [
        f"{name}: {list(saved[name].shape) if name in saved else 'not'} there, "
        f"{list(live[name].shape) if name in live else 'not'} here"
        for name in sorted({*live, *saved})
        if name not in live or name not in saved or live[name].shape != saved[name].shape
    ]
    if wrong:
        raise MismatchError(f"{path} is of another model:\n  " + "\n  ".join(wrong[:8]))
