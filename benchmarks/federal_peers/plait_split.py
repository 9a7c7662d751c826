"""The split step with plait: one script for both parties. `python plait_split.py SHAPE ROLE PORT CERTIFICATES STALENESS`"""

from __future__ import annotations

import functools
import logging
import sys

import split
import torch
from torch import Tensor
from torch.nn import functional as F

import plait
from plait import efl
from plait.train import SessionRunHook

FOREVER = 1 << 40


class Obey(SessionRunHook):
    """`split.obey` for a loop that is not ours: it waits for the next order between two steps."""

    may_stop = False  # a step later will do

    def __init__(self, model: efl.FederalModel) -> None:
        self.model, self.clock = model, split.Clock()

    def after_create_session(self, session, coord) -> None:
        print("ready", flush=True)
        self.read()

    def after_run(self, run_context, run_values) -> None:
        loss = self.model.metric_values()["loss"]
        if self.paused:  # what the other party has done ahead meanwhile is not counted
            self.paused = False
            self.clock.reset()
        elif self.clock.tick() == self.count:
            print(self.clock.figures(loss), flush=True)
            if not self.read():
                run_context.request_stop()

    def read(self) -> bool:
        line = sys.stdin.readline()
        self.count, self.paused = int(line or 0), True
        return bool(line)


def lead(model: efl.FederalModel, sample: efl.Sample) -> Tensor:
    mine = model.own(sample["x"])
    theirs = model.recv("hidden", require_grad=True)
    return F.cross_entropy(model.head(torch.cat([mine, theirs], 1)), sample["y"])


def follow(model: efl.FederalModel, sample: efl.Sample) -> None:
    model.send("hidden", model.own(sample["x"]), require_grad=True)


def main(shape: split.Shape, role: str, port: str, certs: str, staleness: str) -> None:
    split.prepare()
    logging.getLogger("plait").setLevel(logging.WARNING)
    where = {"leader": "listen", "follower": "peer"}[role]
    model = efl.FederalModel(role=role, certs=certs, staleness=int(staleness), **{where: f"127.0.0.1:{port}"})
    model.own = split.half(shape, role)
    fields = {"x": torch.cat(split.features(shape, role))}
    if role == "leader":
        model.head = split.head(shape)
        fields["y"] = torch.cat(split.labels(shape))
    model.input_fn(lambda model, mode: plait.data.TensorSource(fields, shape.batch, num_epochs=FOREVER))
    model.loss_fn({"leader": lead, "follower": follow}[role])
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=split.RATE)))
    model.compile()
    hooks = [Obey(model)] if role == "leader" else []
    model.fit(efl.procedure_fn.train(max_step=FOREVER), log_step=FOREVER, hooks=hooks)


if __name__ == "__main__":
    main(split.SHAPES[sys.argv[1]], *sys.argv[2:])
