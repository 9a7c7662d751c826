"""The split step with NVIDIA FLARE's collab API in its simulator: the server is the leader, one client the follower.

One call a step: the follower sends its half's output and gets the gradient. `python nvflare_collab.py SHAPE STEPS FOLDER`,
in an environment with torch and nvflare 2.9; the figures are in FOLDER/steps.json.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import split
import torch
from nvflare.collab import CollabRecipe, collab
from nvflare.recipe import SimEnv
from torch import Tensor
from torch.nn import functional as F

TIMEOUT = 600.0


class Leader:
    @collab.init
    def prepare(self) -> None:
        split.prepare()
        shape = split.SHAPES[collab.get_app_prop("shape")]
        self.own, self.head = split.half(shape, "leader"), split.head(shape)
        self.optimizer = split.sgd(self.own, self.head)
        self.batches = itertools.cycle(zip(split.features(shape, "leader"), split.labels(shape), strict=True))

    @collab.main
    def run(self) -> None:
        collab.clients[0](timeout=TIMEOUT).follow()

    @collab.publish
    def step(self, hidden: Tensor) -> tuple[Tensor, float]:
        x, y = next(self.batches)
        theirs = hidden.detach().requires_grad_()
        loss = F.cross_entropy(self.head(torch.cat([self.own(x), theirs], 1)), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return theirs.grad, loss.item()


class Follower:
    @collab.publish
    def follow(self) -> None:
        split.prepare()
        shape, steps = split.SHAPES[collab.get_app_prop("shape")], collab.get_app_prop("steps")
        own = split.half(shape, "follower")
        optimizer = split.sgd(own)
        batches = itertools.cycle(split.features(shape, "follower"))
        leader = collab.server(timeout=TIMEOUT)

        def step() -> float:
            hidden = own(next(batches))
            gradient, loss = leader.step(hidden.detach())
            optimizer.zero_grad()
            hidden.backward(gradient)
            optimizer.step()
            return loss

        split.timed(step, 20)
        split.save(collab.get_app_prop("result"), split.timed(step, steps))


def main(shape: str, steps: int, folder: Path) -> None:
    recipe = CollabRecipe("split", server=Leader(), client=Follower(), sync_task_timeout=TIMEOUT)
    recipe.set_server_prop("shape", shape)
    for name, value in {"shape": shape, "steps": steps, "result": str(folder / "steps.json")}.items():
        recipe.set_client_prop(name, value)
    for add in (recipe.add_server_file, recipe.add_client_file):
        add(str(Path(split.__file__).resolve()))
    run = recipe.execute(SimEnv(num_clients=1, workspace_root=str(folder), log_config="ERROR"))
    print(run.get_status())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).resolve())
