"""Three workers, one of them slow; each step takes the first two. `backup.py OUT STEPS`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import plait
from plait import efl
from plait.engine.stage import train_loop


def main(out: str, steps: str) -> None:
    role = plait.cluster.find_role()
    x = torch.randn(960, 8, generator=torch.Generator().manual_seed(1))
    model = efl.Model()
    model.net = torch.nn.Linear(8, 1)
    model.input_fn(lambda model, mode: plait.data.TensorSource({"x": x, "y": x.sum(1)}, 16, shuffle=True))

    def loss_fn(model, sample):
        time.sleep(0.06 if role.index == 2 else 0.005)
        return ((model.net(sample["x"])[:, 0] - sample["y"]) ** 2).mean()

    model.loss_fn(loss_fn)
    sgd = lambda params: torch.optim.SGD(params, lr=0.05)
    opt = plait.train.SyncReplicasOptimizer(sgd, replicas_to_aggregate=2, total_num_replicas=3)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt))
    model.compile()
    model.fit(lambda model: model.run_stage("train", train_loop(model, None, step=int(steps), across_passes=True)))
    everybody = model.strategy.gather({"step": model.global_step.value, "dropped": model.strategy.dropped})
    weight = model.net.weight.detach()
    if role.is_chief:
        found = {"workers": everybody, "error": float((weight - 1).abs().max())}
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
