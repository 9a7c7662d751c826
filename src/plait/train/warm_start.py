"""Where variables begin: those of another checkpoint, by name, by other names, and row by row of a vocabulary."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from plait.engine.model import Model
from plait.engine.report import log
from plait.errors import ConfigError, MismatchError
from plait.train.config import VocabInfo, WarmStartSettings
from plait.variables import bank

__all__ = ["warm_start"]


def warm_start(model: Model, settings: WarmStartSettings) -> None:
    """Copy what the settings name into the model's variables, on whoever holds them."""
    variables = model.variables()
    saved = bank.read_variables(settings.ckpt_to_initialize_from)
    renamed = dict(settings.var_name_to_prev_var_name or {})
    vocabularies = dict(settings.var_name_to_vocab_info or {})
    for name in [*renamed, *vocabularies]:
        if name not in variables:
            raise ConfigError(f"WarmStartSettings name {name!r}: the model has {', '.join(list(variables)[:5])}, ...")
    chosen = _chosen(settings.vars_to_warm_start, model)
    wanted = {name: renamed.get(name, name) for name in dict.fromkeys([*chosen, *renamed, *vocabularies])}
    path = os.fspath(settings.ckpt_to_initialize_from)
    missing = [old for name, old in wanted.items() if old not in saved]
    if missing:
        raise MismatchError(
            f"{path} has no {missing[0]!r} (and {len(missing) - 1} more): choose others with vars_to_warm_start=, or "
            "give their names there in var_name_to_prev_var_name="
        )
    values = {
        name: _moved_rows(name, variables[name], saved[old], vocabularies[name]) if name in vocabularies else saved[old]
        for name, old in wanted.items()
    }
    for name, value in values.items():
        if value.shape != variables[name].shape:
            raise MismatchError(
                f"{name!r} has shape {list(variables[name].shape)} in the model and {list(value.shape)} in {path}: "
                "leave it out of vars_to_warm_start="
            )
    with torch.no_grad():
        for name, value in values.items():
            variables[name].copy_(value)
    model.strategy.broadcast(list(variables.values()))  # whoever holds them takes them, too
    log.info("%d of %d variables begin as in %s", len(values), len(variables), path)


def _chosen(patterns: Any, model: Model) -> list[str]:
    """One pattern chooses among trainable variables, a list of them among all, as in TensorFlow."""
    if patterns is None:
        return []
    names = model.trainable_variables() if isinstance(patterns, str) else model.variables()
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    return [name for name in names if any(re.match(pattern, name) for pattern in listed)]


def _moved_rows(name: str, variable: torch.Tensor, old: torch.Tensor, info: VocabInfo) -> torch.Tensor:
    """Each word's row where the new vocabulary has it; words that are new, and buckets, keep their first values."""
    places = {word: place for place, word in enumerate(_words(info.old_vocab, info.old_vocab_size))}
    words = _words(info.new_vocab, info.new_vocab_size)
    size = info.new_vocab_size + info.num_oov_buckets
    if variable.shape[info.axis] != size or len(words) < info.new_vocab_size:
        raise ConfigError(
            f"VocabInfo of {name!r}: {len(words)} words and {info.num_oov_buckets} buckets for "
            f"{variable.shape[info.axis]} rows; write the numbers of words and buckets that the column has"
        )
    known = [(new, places[word]) for new, word in enumerate(words) if word in places]
    made = variable.detach().clone()
    if known:
        to, origin = (torch.tensor(one, device=made.device) for one in zip(*known, strict=True))
        made.index_copy_(info.axis, to, old.to(made).index_select(info.axis, origin))
    return made


def _words(path: str, size: int) -> list[str]:
    try:
        words = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the vocabulary {path} cannot be read: {error}") from error
    return words if size < 0 else words[:size]
