"""What a federation is measured against: all data in one place; and the leader's data alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from plait import efl
from plait.data import Sample, TensorSource
from plait.demo import agreed, digits, follower, leader

__all__ = ["train_alone", "train_centralised"]

Logits = Callable[[Sample], torch.Tensor]


def train_centralised(passes: int = agreed.PASSES) -> efl.Model:
    """Both parties' networks in one process: the same layers by the same names, which therefore begin the same."""
    return _train(("left", "right", "digit"), lambda s: leader.answer(leader.look(s), follower.look(s)), passes)


def train_alone(passes: int = agreed.PASSES) -> efl.Model:
    """What the leader would have without the follower: a network of left halves."""
    return _train(("left", "digit"), lambda s: leader.answer(leader.look(s)), passes)


def _train(fields: tuple[str, ...], logits_of: Logits, passes: int) -> efl.Model:
    model = efl.Model()
    model.input_fn(functools.partial(_input_fn, fields))
    model.loss_fn(functools.partial(_loss_fn, logits_of))
    model.eval_fn(functools.partial(_eval_fn, logits_of))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(agreed.ADAM))
    with _one_thread():
        agreed.fit(model.compile(), passes)
    return model


def _input_fn(fields: tuple[str, ...], model: efl.Model, mode: efl.MODE) -> TensorSource:
    del model
    return digits.source(mode, *fields)


def _loss_fn(logits_of: Logits, model: efl.Model, sample: Sample) -> torch.Tensor:
    del model
    return functional.cross_entropy(logits_of(sample), sample.digit)


def _eval_fn(logits_of: Logits, model: efl.Model, sample: Sample) -> None:
    logits = logits_of(sample)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.digit, logits))
    model.add_metric("loss", functional.cross_entropy(logits, sample.digit))


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the parties: another number of threads would add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
