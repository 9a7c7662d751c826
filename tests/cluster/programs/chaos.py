"""A training that is made to be killed: `chaos.py OUT CHECKPOINTS PROGRESS MODE STEPS SEED PAUSE STAGES`.

The chief appends every step to PROGRESS, and at the end writes the weights, the loss on all rows and the step to OUT.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import plait
from plait import efl
from plait.engine.stage import train_loop


class Progress(plait.train.SessionRunHook):
    def __init__(self, model: efl.Model, file: str, pause: float) -> None:
        self.model, self.file, self.pause = model, Path(file), pause

    def after_run(self, run_context, run_values) -> None:
        time.sleep(self.pause)
        if self.model.strategy.worker_id == 0:
            with self.file.open("a") as file:
                file.write(f"{self.model.global_step.value}\n")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, sparse=True, dtype=torch.float64)
        self.layers = nn.Sequential(
            nn.Linear(20, 16, dtype=torch.float64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1, dtype=torch.float64)
        )

    def forward(self, words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([self.words(words).flatten(1), x], 1))[:, 0]


def main(
    out: str, checkpoints: str, progress: str, mode: str, steps: str, seed: str, pause: str, stages: str = "2"
) -> None:
    role = plait.cluster.find_role()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(640, 8, generator=generator, dtype=torch.float64)
    words = torch.randint(0, 50, (640, 3), generator=generator)
    y = x.sum(1) + words.sum(1) * 0.1
    torch.manual_seed(int(seed))
    model = efl.Model(seed=int(seed))
    model.net = Net()
    source = plait.data.TensorSource({"x": x, "words": words, "y": y}, 16, shuffle=True, seed=int(seed))
    model.input_fn(lambda model, mode: source)
    model.loss_fn(lambda model, s: ((model.net(s["words"], s["x"]) - s["y"]) ** 2).mean())
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.SGD(params, lr=0.02)))
    model.compile(strategy=plait.cluster.Distributed(mode=mode, geo_steps=10, timeout=60))
    hooks = [Progress(model, progress, float(pause))]

    def procedure(model: efl.Model) -> None:
        for number in range(int(stages)):
            model.run_stage(str(number), train_loop(model, None, step=int(steps) // int(stages), across_passes=True))

    model.fit(procedure, log_step=100, checkpoint_dir=checkpoints, save_steps=7, hooks=hooks)
    if role.is_chief:
        report(model, out, x, words, y)


def report(model: efl.Model, out: str, x: torch.Tensor, words: torch.Tensor, y: torch.Tensor) -> None:
    fresh = Net().eval()
    fresh.load_state_dict({name: value.detach().clone() for name, value in model.net.state_dict().items()})
    with torch.no_grad():
        loss = float(((fresh(words, x) - y) ** 2).mean())
    weights = {name: value.flatten().tolist() for name, value in fresh.state_dict().items()}
    Path(out).write_text(json.dumps({"step": model.global_step.value, "loss": loss, "weights": weights}))


if __name__ == "__main__":
    main(*sys.argv[1:])
