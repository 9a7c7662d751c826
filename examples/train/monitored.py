"""A session with hooks around a plain PyTorch training step: no tasks, no stages, no Model."""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import train


class LossWatcher(train.SessionRunHook):
    """Asks for the loss at every run, and stops the loop when it is small."""

    def __init__(self, loss_op, enough):
        self.loss_op = loss_op
        self.enough = enough
        self.loss = None

    def begin(self):
        print("begin: no session yet")

    def after_create_session(self, session, coord):  # noqa: ARG002 - a hook's arguments
        print(f"after_create_session: at step {int(session.global_step)}")

    def before_run(self, run_context):  # noqa: ARG002 - same
        return train.SessionRunArgs(self.loss_op)

    def after_run(self, run_context, run_values):
        self.loss = float(run_values.results)
        if self.loss < self.enough:
            run_context.request_stop()

    def end(self, session):
        print(f"end: loss {self.loss:.4f} at step {int(session.global_step)}")


def training_step():
    """The network, its optimizer, and two Ops: the loss before the update, and the update that needs it."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.rand(64, 4)
    y = x.sum(dim=1, keepdim=True)
    step = train.get_or_create_global_step()

    def forward():
        with torch.enable_grad():  # a session computes gradients only for a Model's training step
            return functional.mse_loss(net(x), y)

    def update(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.increment()

    loss = plait.op(forward, name="loss")
    return net, optimizer, loss, plait.op(update, loss, name="update")


def main():
    net, optimizer, loss_op, train_op = training_step()
    hooks = [LossWatcher(loss_op, enough=0.001), train.StopAtStepHook(last_step=2000)]
    saver = train.Saver({"net": net, "optimizer": optimizer})
    with (
        tempfile.TemporaryDirectory() as checkpoint_dir,
        train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, saver=saver) as session,
    ):
        while not session.should_stop():
            session.run(train_op)


if __name__ == "__main__":
    main()
