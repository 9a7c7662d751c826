"""All of a run's state as one tree, and back: what a checkpoint holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from plait.engine.layout import laid_like, lay_states
from plait.engine.sampling import kept_seed, take_seed
from plait.engine.task import TaskScope
from plait.errors import CheckpointError, MismatchError
from plait.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["capture", "restore"]

FORMAT = 1
_ELSEWHERE = "choose another checkpoint_dir (log_dir in mox.run)"
log = logging.getLogger("plait")


def _key(scope: TaskScope) -> str:
    return f"{scope.mode}:{scope.task if scope.task is not None else ''}"


OWN = ("metrics", "streams", "seeds", "hooks", "fit_hooks", "random", "merged", "privacy")
"""The parts that each worker has of its own, even when all take their steps together."""


def capture(model: Model, directory: str | None = None) -> dict[str, Any]:
    """Everything that the rest of the run depends on. Tensors are the live ones: take a snapshot before going on.

    Where workers take their steps together, all of them call this, and the chief's is for all; `directory` is where
    it will be saved.
    """
    strategy = model.strategy
    tree = strategy.full(_capture(model))
    tree["worker_num"] = strategy.worker_num
    tree["cluster"] = strategy.capture(model, directory)
    if strategy.in_step:
        own = {name: tree[name] for name in OWN} | {"buffers": _buffers(model)}
        tree["workers"] = strategy.gather(own)
    return tree


def _merged(model: Model) -> dict[str, Any]:
    """Gradients that have not moved the variables yet."""
    if model.global_step.value % model.strategy.gradient_merge == 0:
        return {}
    found = {name: variable.grad for name, variable in model.trainable_variables().items()}
    return {name: _flat(gradient) for name, gradient in found.items() if gradient is not None}


def _flat(gradient: torch.Tensor) -> Any:
    """A gradient of rows as what it is made of, which can be written down."""
    if not gradient.is_sparse:
        return gradient
    return {"indices": gradient._indices(), "values": gradient._values()}  # noqa: SLF001 - bit for bit: not coalesced


def _buffers(model: Model) -> dict[str, torch.Tensor]:
    parameters = set(model.parameters())
    return {name: value for name, value in model.variables().items() if value not in parameters}


def _capture(model: Model) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "variables": model.variables(),
        "optimizers": [_optimizer_state(model, optimizer) for optimizer in model.optimizers()],
        "global_step": model.global_step.value,
        "scaler": None if model.scaler is None else model.scaler.state_dict(),
        "metrics": {
            _key(scope): {name: metric.state_dict() for name, metric in states.items()}
            for scope, states in model.metric_states.items()
        },
        "streams": {_key(scope): stream.state_dict() for scope, stream in model.streams.items()},
        "seeds": {_key(scope): kept_seed(stream.source) for scope, stream in model.streams.items()},
        "hooks": {_key(scope): [hook.state_dict() for hook in hooks] for scope, hooks in model.hooks.items()},
        "fit_hooks": [hook.state_dict() for hook in model.fit_hooks],
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "evaluating": model._now.left_in_evaluation(),  # noqa: SLF001 - a friend
        "history": list(model.history),
        "journal": model.stage_mgr.state_dict() if model.stage_mgr is not None else None,
        "random": rng_state(),
        "merged": _merged(model),
        "privacy": model.private_state.state_dict() if model.private_state is not None else None,
    }


def restore(model: Model, tree: Mapping[str, Any], *, positions: bool = True, directory: str | None = None) -> None:
    """Put a captured state back; without `positions`, only what was learnt: variables, optimizers, the step."""
    if tree.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint has format {tree.get('format')!r}, this plait reads {FORMAT}")
    strategy = model.strategy
    if positions and tree.get("worker_num", 1) != strategy.worker_num:
        raise MismatchError(
            f"the checkpoint was made by {tree.get('worker_num', 1)} worker(s), there are {strategy.worker_num} now, "
            "who would not know where in the data to go on: start as many, or choose another project_name, which "
            "keeps the weights and starts the stages anew"
        )
    try:
        if strategy.in_step and positions:
            tree = {**tree, **tree["workers"][strategy.worker_id]}
        tree = strategy.own(model, tree)
        _restore_learnt(model, tree)
        strategy.restore(model, tree.get("cluster", {}), directory)
        _restore_merged(model, tree.get("merged", {}) if positions else {})
        _restore_privacy(model, tree.get("privacy"), positions=positions, trained=bool(tree["global_step"]))
        if positions:
            _restore_positions(model, tree)
            set_rng_state(tree["random"])  # last: opening inputs may draw
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"the checkpoint lacks a part of the state: {error!r}") from error


def _restore_learnt(model: Model, tree: Mapping[str, Any]) -> None:
    live, optimizers = model.variables(), model.optimizers()
    _check_variables(live, tree["variables"])
    _check_optimizers(model, optimizers, tree["optimizers"])
    with torch.no_grad():
        for name, value in {**tree["variables"], **tree.get("buffers", {})}.items():
            live[name].copy_(value)
    for optimizer, state in zip(optimizers, tree["optimizers"], strict=True):
        _load_optimizer(model, optimizer, state)
    if model.scaler is not None and tree.get("scaler"):
        model.scaler.load_state_dict(dict(tree["scaler"]))
    model.global_step.value = int(tree["global_step"])


def _restore_merged(model: Model, gradients: Mapping[str, Any]) -> None:
    for name, variable in model.trainable_variables().items():
        saved = gradients.get(name)
        if isinstance(saved, Mapping):
            saved = torch.sparse_coo_tensor(saved["indices"], saved["values"], variable.shape, check_invariants=True)
        variable.grad = None if saved is None else laid_like(variable, saved.to(variable.device, copy=True))


def _restore_privacy(model: Model, saved: Mapping[str, Any] | None, *, positions: bool, trained: bool) -> None:
    state = model.private_state
    if state is not None and saved is not None:
        state.load_state_dict(saved, positions=positions)
    elif state is not None and trained:
        log.warning("the checkpoint was trained without privacy: epsilon is of the steps from here on alone")
    elif saved is not None:
        log.warning("the checkpoint was trained privately, and this program's optimizers are not private")


def _check_optimizers(
    model: Model, optimizers: Sequence[torch.optim.Optimizer], saved: Sequence[Mapping[str, Any]]
) -> None:
    if len(optimizers) != len(saved):
        raise MismatchError(
            f"the checkpoint has {len(saved)} optimizers, the model has {len(optimizers)}: it belongs to another "
            f"model; {_ELSEWHERE}"
        )
    for number, (optimizer, state) in enumerate(zip(optimizers, saved, strict=True)):
        current = _optimizer_state(model, optimizer)
        for what in ("kind", "variables"):
            if state[what] != current[what]:
                raise MismatchError(
                    f"optimizer {number}: its {what} is {state[what]} in the checkpoint, {current[what]} in the "
                    f"program; {_ELSEWHERE}"
                )


def _restore_positions(model: Model, tree: Mapping[str, Any]) -> None:
    for scope, states in model.metric_states.items():
        saved = tree["metrics"].get(_key(scope), {})
        for name, metric in states.items():
            if name in saved:
                metric.load_state_dict(saved[name])
    for scope, stream in model.streams.items():
        if _key(scope) in tree["streams"]:
            take_seed(stream, tree.get("seeds", {}).get(_key(scope)))
            stream.load_state_dict(tree["streams"][_key(scope)])
    for scope, hooks in model.hooks.items():
        for hook, state in zip(hooks, tree["hooks"].get(_key(scope), []), strict=False):
            hook.load_state_dict(state)
    for hook, state in zip(model.fit_hooks, tree["fit_hooks"], strict=False):
        hook.load_state_dict(state)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in tree["frozen"])
    model._now.load_modes(tree["evaluating"])  # noqa: SLF001 - a friend
    model.history[:] = tree["history"]
    if model.stage_mgr is not None and tree["journal"] is not None:
        model.stage_mgr.load_state_dict(tree["journal"])


def _check_variables(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    missing = [f"{name}: in the model only" for name in live if name not in saved]
    extra = [f"{name}: in the checkpoint only" for name in saved if name not in live]
    wrong = [
        f"{name}: {list(saved[name].shape)} in the checkpoint, {list(value.shape)} in the model"
        for name, value in live.items()
        if name in saved and saved[name].shape != value.shape
    ]
    if missing or extra or wrong:
        lines = [*wrong, *missing, *extra]
        more = f"\n  and {len(lines) - 8} more" if lines[8:] else ""
        raise MismatchError(
            "the checkpoint belongs to another model:\n  " + "\n  ".join(lines[:8]) + more + "\n"
            f"{_ELSEWHERE}, or load what fits into a new one (efl.stage.ModelBank; checkpoint_path= in mox.run)"
        )


def _names(model: Model) -> dict[torch.Tensor, str]:
    return {value: name for name, value in model.variables().items()}


def _optimizer_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's own state dict, by the names of variables instead of their numbers."""
    names = _names(model)
    ordered = [names.get(variable, "?") for group in optimizer.param_groups for variable in group["params"]]
    state = optimizer.state_dict()
    return {
        "kind": type(optimizer).__name__,
        "variables": ordered,
        "state": {ordered[index]: dict(values) for index, values in state["state"].items()},
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]],
    }


_HOW = frozenset(("capturable", "foreach", "fused"))
"""How a step is computed, not what: that is chosen for the device of now, which may be another one."""


def _load_optimizer(model: Model, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    current = _optimizer_state(model, optimizer)
    numbers = {name: index for index, name in enumerate(current["variables"])}
    groups = optimizer.state_dict()["param_groups"]
    for group, all_values in zip(groups, saved["groups"], strict=True):
        values = {key: value for key, value in all_values.items() if key not in _HOW}
        if not hasattr(optimizer, "clock"):  # a scheduled rate is the program's
            _warn_of_changes(optimizer, group, values)
        group.update({key: _like(group.get(key), value) for key, value in values.items()})
    state = {numbers[name]: dict(values) for name, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    lay_states(optimizer)


def _warn_of_changes(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    lowered = saved.get("lr_scale", 1.0) != 1.0  # by a hook, on a plateau: no change of the program
    for key, value in saved.items():
        now = value if key == "lr" and lowered else group.get(key)
        if isinstance(value, (int, float)) and isinstance(now, (int, float)) and now != value:
            log.warning(
                "%s: %s is %s in the program and %s in the checkpoint, which is used",
                type(optimizer).__name__,
                key,
                now,
                value,
            )


def _like(current: Any, saved: Any) -> Any:
    """JSON has no tuples: give back what the optimizer had, such as Adam's betas."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved
