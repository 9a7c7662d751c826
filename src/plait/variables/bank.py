"""The model bank's reading and matching: which variables of which files go into which of the model's.

A configuration is a dict {any name: entry} or a list of entries; later entries win. An entry is

    {"load": ["tower/*"], "exclude": ["*/bias"], "path": "ckpt/0"}            patterns
    {"load": {"name in file": "name in model"}, "exclude": [], "path": ...}   renames
    {"load": {"cell_*": "net/cell_*"}, "exclude": [], "path": ...}            renames of all that begin so

TensorFlow's checkpoints, of both kinds ("DIR/model.ckpt-1234", "DIR/inception_v3.ckpt"), keep their names; weights are
turned into torch's layout by the last part of theirs (see `tf_bundle`). What the model has no variable for, such as an
optimizer's slots, does no harm.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from plait.errors import CheckpointError, ConfigError, MismatchError
from plait.variables.checkpoint import CheckpointDir, is_checkpoint
from plait.variables.inspect import plain_table
from plait.variables.tf_bundle import TensorInfo, is_bundle, list_bundle, read_bundle, to_torch_layout
from plait.variables.tf_v1 import is_v1, list_v1, read_v1
from plait.variables.tree import split_tree

__all__ = ["Match", "apply", "match", "read_step", "read_variables", "report"]

_KEYS = ("load", "exclude", "path")
_EXAMPLE = "{'load': ['*'], 'exclude': [], 'path': 'DIR'}"
_PREFIX = "variables/"


@dataclass(frozen=True, eq=False)
class Match:
    """What happens to one variable: `source` and `file_name` are "-" where nothing loads it."""

    source: str
    file_name: str
    name: str
    status: Literal["matched", "missing", "wrong shape"]
    shape: tuple[int, ...] | None = None
    """Of the model's variable; None where the model has none of this name."""
    tensor: Tensor | None = None
    """Of the file."""


class _Reader(NamedTuple):
    list: Callable[[Path], Mapping[str, TensorInfo]]
    read: Callable[[Path, Iterable[str] | None], dict[str, Tensor]]


def read_variables(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The variables in a checkpoint of plait or TensorFlow, a safetensors file or a saved state dict.

    Of a directory, the newest; plait's where it has both kinds.
    """
    source = Path(path)
    tensorflow = _tensorflow(source)
    if tensorflow:
        return {name: to_torch_layout(name, tensor) for name, tensor in tensorflow.read(source, None).items()}
    if source.is_dir():
        return _read_checkpoint(source)
    if not source.exists():
        raise CheckpointError(
            f"there is no {source}; write the path of a checkpoint directory or of a file with weights"
        )
    if source.suffix == ".safetensors":
        return _slashed(source, _load_safetensors(source))
    return _slashed(source, _state_dict(source, _load_torch(source)))


def read_step(path: str | os.PathLike[str]) -> int:
    """The training step of a plait checkpoint, by its name, or of TensorFlow's, by its `global_step`; otherwise 0."""
    source = Path(path)
    tensorflow = _tensorflow(source)
    if tensorflow:
        step = tensorflow.list(source).get("global_step")
        return int(tensorflow.read(source, ["global_step"])["global_step"]) if step and step.shape == () else 0
    one = is_checkpoint(source)
    infos = CheckpointDir(source.parent if one else source).list() if source.is_dir() else []
    steps = [info.step for info in infos if not one or info.path.name == source.name]
    return steps[-1] if steps else 0


def match(
    config: Any, variables: Mapping[str, Tensor], files: Mapping[str, dict[str, Tensor]] | None = None
) -> list[Match]:
    """Compare what `config` asks for with the model's variables; copies nothing. `files` are those read already."""
    files = dict(files or {})
    found: dict[str, Match] = {}
    entries = _entries(config)
    for entry in entries:
        source = os.fspath(entry["path"])
        if source not in files:
            files[source] = read_variables(source)
        for file_name, name in _wanted(entry, files[source], variables).items():
            found[name] = _compare(source, file_name, name, files[source][file_name], variables)
    known = [found.get(name) or _unloaded(name, tensor) for name, tensor in variables.items()] if entries else []
    return known + [item for name, item in found.items() if name not in variables]


def report(matches: Iterable[Match]) -> str:
    """One table, as plain text."""
    rows = [[item.name, _from(item), item.status, _shapes(item)] for item in matches]
    return plain_table(["variable", "from", "status", "shape"], rows)


def apply(matches: Iterable[Match], variables: Mapping[str, Tensor]) -> None:
    """Copy what matched into the live variables: all of it, or nothing if a shape is wrong."""
    items = list(matches)
    wrong = [f"{item.name} from {_from(item)}: {_shapes(item)}" for item in items if item.status == "wrong shape"]
    if wrong:
        raise MismatchError(
            f"{len(wrong)} variables have another shape than in the file, nothing was loaded;"
            " put them in `exclude` or change the model:\n  " + "\n  ".join(wrong)
        )
    with torch.no_grad():
        for item in items:
            if item.status == "matched" and item.tensor is not None:
                variables[item.name].copy_(item.tensor)


def _tensorflow(path: Path) -> _Reader | None:
    """What reads `path`, if TensorFlow wrote it; plait's own checkpoints in a directory come first."""
    if is_checkpoint(path) or (path.is_dir() and CheckpointDir(path).list()):
        return None
    if is_v1(path):
        return _Reader(list_v1, read_v1)
    return _Reader(list_bundle, read_bundle) if is_bundle(path) else None


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    if is_checkpoint(path):
        tree = CheckpointDir(path.parent).read(path)
    else:
        latest = CheckpointDir(path).read_latest()
        if latest is None:
            raise CheckpointError(
                f"{path} holds no checkpoint; write a directory of ckpt-* directories, a file, or a TensorFlow"
                " checkpoint's DIR/model.ckpt-1234"
            )
        tree = latest[1]
    tensors = split_tree(tree)[1]
    found = {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}
    if not found:
        raise CheckpointError(f"the checkpoint in {path} holds no variables")
    return found


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file  # noqa: PLC0415  one of three formats

    try:
        return dict(load_file(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _load_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own text advises to load it with weights_only=False, which runs what is in the file
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}): it is damaged, or holds more than weights;"
            " save model.state_dict() with torch.save or safetensors"
        ) from error


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a state dict; save model.state_dict()")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} is not a state dict: {name!r} is a {type(value).__name__}; save model.state_dict()"
            )
    return dict(loaded)


def _slashed(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names as plait writes them."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        slashed = name.replace(".", "/")
        if slashed in renamed:
            raise CheckpointError(f"{path} has {slashed!r} twice, once written with '.'; rename one of them")
        renamed[slashed] = tensor
    return renamed


def _entries(config: Any) -> list[Mapping[str, Any]]:
    if config is None:
        return []
    if isinstance(config, Mapping):
        named = [(f"entry {name!r}", entry) for name, entry in config.items()]
    elif isinstance(config, Sequence) and not isinstance(config, str):
        named = [(f"entry {index}", entry) for index, entry in enumerate(config)]
    else:
        raise ConfigError(f"the model bank's config is {config!r}; write {{'any name': {_EXAMPLE}}} or [{_EXAMPLE}]")
    return [_checked(label, entry) for label, entry in named]


def _checked(label: str, entry: Any) -> Mapping[str, Any]:
    where = f"the model bank's {label}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {entry!r}; write {_EXAMPLE}, inside a dict or a list of such entries")
    missing = [key for key in _KEYS if key not in entry]
    unknown = [key for key in entry if key not in _KEYS]
    if missing or unknown:
        raise ConfigError(f"{where} lacks {missing} and has unknown keys {unknown}; write exactly {_EXAMPLE}")
    load, exclude, path = (entry[key] for key in _KEYS)
    renames = isinstance(load, Mapping) and _all_text([*load.keys(), *load.values()])
    if not renames and not _is_patterns(load):
        raise ConfigError(f"{where} has load={load!r}; write a list of patterns, or a dict of names in file and model")
    if not _is_patterns(exclude):
        raise ConfigError(f"{where} has exclude={exclude!r}; write a list of patterns, [] for none")
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{where} has path={path!r}; write the path of a checkpoint or a file")
    return entry


def _is_patterns(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and _all_text(value)


def _all_text(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _wanted(entry: Mapping[str, Any], file: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> dict[str, str]:
    """Names in the file and in the model of what an entry loads."""
    kept = [name for name in file if not any(_fits(name, pattern) for pattern in entry["exclude"])]
    if isinstance(entry["load"], Mapping):
        renames: dict[str, str] = {}
        for name, target in entry["load"].items():
            found = _renamed(name, target, file, model)
            if not found:
                raise ConfigError(f"load names {name!r}, which is not in {entry['path']}.{_nearest(name, file)}")
            renames |= found
        return {source: target for source, target in renames.items() if source in kept}
    loadable = [name for name in kept if name in model]
    for pattern in entry["load"]:
        if not any(_fits(name, pattern) for name in loadable):
            raise ConfigError(_nothing(pattern, entry["path"], file, model))
    return {name: name for name in loadable if any(_fits(name, pattern) for pattern in entry["load"])}


def _renamed(name: str, target: str, file: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> dict[str, str]:
    """What one rename stands for: itself, or, with a star at the end of both, all that begin so and the model has."""
    if not (name.endswith("*") and target.endswith("*")):
        return {name: target} if name in file else {}
    start, new = name[:-1], target[:-1]
    renames = {source: new + source.removeprefix(start) for source in file if source.startswith(start)}
    return {source: wanted for source, wanted in renames.items() if wanted in model}


def _nothing(pattern: str, path: Any, file: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str:
    """Why `pattern` loads nothing, said for the first hurdle that it fails at."""
    in_file = [name for name in file if _fits(name, pattern)]
    if not in_file:
        return f"load has {pattern!r}, which matches no variable in {path}.{_nearest(pattern, file)}"
    if not any(name in model for name in in_file):
        return (
            f"load has {pattern!r}, which matches variables in {path}, such as {in_file[0]!r}, but none that the model"
            f" has; rename with a dict.{_nearest(in_file[0], model)}"
        )
    return f"load has {pattern!r}, but exclude takes out everything that it matches in {path}; drop one of them"


def _nearest(name: str, names: Iterable[str]) -> str:
    every = list(names)
    close = difflib.get_close_matches(name, every, n=3, cutoff=0.4) or every[:3]
    return f" Nearest: {', '.join(map(repr, close))}" if close else " There are none at all."


def _compare(source: str, file_name: str, name: str, tensor: Tensor, model: Mapping[str, Tensor]) -> Match:
    if name not in model:
        return Match(source, file_name, name, "missing", tensor=tensor)
    shape = tuple(model[name].shape)
    status: Literal["matched", "wrong shape"] = "matched" if tuple(tensor.shape) == shape else "wrong shape"
    return Match(source, file_name, name, status, shape, tensor)


def _unloaded(name: str, tensor: Tensor) -> Match:
    return Match("-", "-", name, "missing", tuple(tensor.shape))


def _from(item: Match) -> str:
    if item.source == "-" or item.file_name == item.name:
        return item.source
    return f"{item.source} ({item.file_name})"


def _shapes(item: Match) -> str:
    if item.status == "wrong shape" and item.tensor is not None:
        return f"model {item.shape}, file {tuple(item.tensor.shape)}"
    shape = item.shape if item.shape is not None else item.tensor.shape if item.tensor is not None else ()
    return str(tuple(shape))
