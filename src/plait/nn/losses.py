"""Losses over sampled classes: sampled softmax and noise-contrastive estimation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError, DataError
from plait.nn.samplers import Candidates, Seed, check_classes, log_uniform_candidate_sampler
from plait.variables.store import may_look_at

__all__ = ["Hits", "compute_accidental_hits", "nce_loss", "sampled_softmax_loss"]

Table = Tensor | nn.Module | Sequence[Tensor | nn.Module]
"""A row for each class: a tensor; a module that looks rows up by id (`nn.Embedding`, a SparseEmbedding); or parts."""


class Hits(NamedTuple):
    """Where a class that was drawn is one of a row's true classes."""

    indices: Tensor
    """The row."""
    ids: Tensor
    """The place among the sampled candidates."""
    weights: Tensor
    """The least number of float32: added to a logit, it makes its class impossible."""


def compute_accidental_hits(
    true_classes: Tensor, sampled_candidates: Tensor, num_true: int, seed: int | None = None, name: str | None = None
) -> Hits:
    """Find the candidates that are true classes, row by row. One that was drawn twice is found twice."""
    del seed, name
    if true_classes.dim() != 2 or true_classes.shape[1] != num_true or sampled_candidates.dim() != 1:
        raise DataError(
            f"true_classes have shape {list(true_classes.shape)} and sampled_candidates "
            f"{list(sampled_candidates.shape)}: give [batch, num_true] with num_true={num_true}, and [num_sampled]"
        )
    indices, ids = _hits(true_classes, sampled_candidates).nonzero(as_tuple=True)
    least = torch.finfo(torch.float32).min
    return Hits(indices, ids, torch.full((len(ids),), least, device=ids.device))


def sampled_softmax_loss(
    weights: Table,
    biases: Table,
    labels: Tensor,
    inputs: Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Candidates | tuple[Tensor, Tensor, Tensor] | None = None,
    remove_accidental_hits: bool = True,
    partition_strategy: str = "mod",
    name: str = "sampled_softmax_loss",
    seed: Seed = None,
) -> Tensor:
    """The softmax cross-entropy of each row, over its true classes and a few that were drawn; for training only.

    Args:
        weights: a row of `dim` numbers for each class. A tensor gets a dense gradient. A module is called with ids: an
            `nn.Embedding(sparse=True)` gets a sparse gradient, a SparseEmbedding that of its rows.
        biases: a number for each class, in the same forms; a module gives one number for an id.
        labels: [batch, num_true] whole numbers: the true classes.
        inputs: [batch, dim].
        num_sampled: how many classes are drawn for the whole batch.
        num_classes: how many there are.
        num_true: how many true classes a row has; each has the same part of the row's target.
        sampled_values: what a sampler gave; None draws from `log_uniform_candidate_sampler`, each class once.
        remove_accidental_hits: whether a drawn class that is a row's true class is left out of that row.
        partition_strategy: how classes lie in several parts: "mod" in turn, "div" in blocks.
        name: has no meaning here.
        seed: of the draws, if they are made here.

    """
    del name
    true, sampled = _logits(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values,
        remove_accidental_hits, partition_strategy, seed,
    )  # fmt: skip
    return torch.cat([true, sampled], dim=1).logsumexp(dim=1) - true.mean(dim=1)


def nce_loss(
    weights: Table,
    biases: Table,
    labels: Tensor,
    inputs: Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Candidates | tuple[Tensor, Tensor, Tensor] | None = None,
    remove_accidental_hits: bool = False,
    partition_strategy: str = "mod",
    name: str = "nce_loss",
) -> Tensor:
    """The noise-contrastive loss of each row: is a class true, or was it drawn? The sum of logistic losses.

    The arguments are those of `sampled_softmax_loss`; a drawn class that is true is left in, unless it is asked for.
    """
    del name
    true, sampled = _logits(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values,
        remove_accidental_hits, partition_strategy, None,
    )  # fmt: skip
    # a row's target is 1 / num_true for each of its true classes, 0 for the drawn ones
    return functional.softplus(torch.cat([true, sampled], dim=1)).sum(dim=1) - true.mean(dim=1)


def _hits(true_classes: Tensor, sampled: Tensor) -> Tensor:
    """[batch, num_sampled]: whether the candidate is one of the row's true classes."""
    found = true_classes[:, :1] == sampled
    for column in true_classes.unbind(1)[1:]:
        found |= column.unsqueeze(1) == sampled
    return found


def _logits(
    weights: Table,
    biases: Table,
    labels: Tensor,
    inputs: Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int,
    sampled_values: Candidates | tuple[Tensor, Tensor, Tensor] | None,
    remove_accidental_hits: bool,
    partition_strategy: str,
    seed: Seed,
) -> tuple[Tensor, Tensor]:
    """The logits of true and of drawn classes, less the logarithms of their expected counts."""
    _check(labels, inputs, num_true)
    if sampled_values is None:
        sampled_values = log_uniform_candidate_sampler(labels, num_true, num_sampled, True, num_classes, seed)
    sampled, true_expected, sampled_expected = sampled_values
    check_classes("labels", labels, num_classes)
    _check_expected(labels, true_expected)
    ids = torch.cat([labels.reshape(-1), sampled.to(labels.dtype)])
    rows = _lookup(weights, ids, num_classes, partition_strategy)
    bias = _lookup(biases, ids, num_classes, partition_strategy).reshape(len(ids))
    known = labels.numel()
    if rows.shape[1:] != inputs.shape[1:]:
        raise DataError(f"a class has {list(rows.shape[1:])} weights, and a row of inputs {list(inputs.shape[1:])}")
    true_rows, true_bias = rows[:known].reshape(*labels.shape, rows.shape[1]), bias[:known].view_as(labels)
    true = torch.einsum("bd,btd->bt", inputs, true_rows) + true_bias
    drawn = torch.addmm(bias[known:], inputs, rows[known:].t())
    true = true - true_expected.to(true.dtype).log()
    drawn = drawn - sampled_expected.to(drawn.dtype).log()
    if remove_accidental_hits:
        drawn = drawn.masked_fill(_hits(labels, sampled), torch.finfo(drawn.dtype).min)
    return true, drawn


def _check_expected(labels: Tensor, expected: Tensor) -> None:
    never = expected <= 0
    if may_look_at(never) and bool(never.any()):
        raise DataError(
            f"class {int(labels[never.to(labels.device)][0])} is among the labels, and is never drawn: its expected"
            " count is 0, of which there is no logarithm; give it a count above 0, or leave such rows out"
        )


def _check(labels: Any, inputs: Any, num_true: int) -> None:
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 2 or labels.shape[1] != num_true:
        shown = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise DataError(
            f"labels are {shown}: give whole numbers of shape [batch, num_true] with num_true={num_true}, such as "
            "labels.unsqueeze(1)"
        )
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or len(inputs) != len(labels):
        shown = str(list(inputs.shape)) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DataError(f"inputs are {shown}: give [batch, dim] for the {len(labels)} rows of the labels")


def _lookup(table: Table, ids: Tensor, num_classes: int, strategy: str) -> Tensor:
    if isinstance(table, Sequence):
        return _in_parts([_finder(part) for part in table], ids, num_classes, strategy)
    return _finder(table)(ids)


def _finder(table: Any) -> Callable[[Tensor], Tensor]:
    if isinstance(table, nn.Module):
        return table
    if not isinstance(table, Tensor) or not table.dim():
        raise ConfigError(f"weights or biases are a {type(table).__name__}: give a tensor, a module, or a list of them")
    return lambda ids: _rows_of(table, ids)


def _rows_of(table: Tensor, ids: Tensor) -> Tensor:
    try:
        return table.index_select(0, ids)
    except IndexError:
        asked = int(ids.max())
        raise DataError(f"weights or biases have {len(table)} rows, and class {asked} is asked for: give all") from None


def _in_parts(parts: Sequence[Callable[[Tensor], Tensor]], ids: Tensor, num_classes: int, strategy: str) -> Tensor:
    """Rows of a table that lies in parts: the n-th id is row `ids // parts` of part `ids % parts`, or in blocks."""
    count = len(parts)
    if strategy == "mod":
        part, row = ids % count, ids // count
    elif strategy == "div":
        size, longer = divmod(num_classes, count)
        begin = longer * (size + 1)  # the first parts have a row more
        part = torch.where(ids < begin, ids // (size + 1), longer + (ids - begin) // max(size, 1))
        row = torch.where(ids < begin, ids % (size + 1), (ids - begin) % max(size, 1))
    else:
        raise ConfigError(f"partition_strategy={strategy!r}: write 'mod' or 'div'")
    places = [(part == number).nonzero().squeeze(1) for number in range(count)]
    rows = torch.cat([find(row[place]) for find, place in zip(parts, places, strict=True)])
    back = torch.cat(places).argsort()
    return rows[back]
