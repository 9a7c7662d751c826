"""What no output needs is not in an export."""

from __future__ import annotations

import torch
from torch import nn

from plait.export.program import in_evaluation, open_run, trace, write
from plait.export.pruning import prune


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.discriminator = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.never = nn.Linear(5, 5)

    def forward(self, noise, unused):
        made = self.generator(noise)
        secret = torch.tensor([31.0, 41.0, 59.0])
        loss = (self.discriminator(made) * self.table.sum() + secret.sum() + unused.sum()).mean()
        return {"made": made, **({} if loss is not None else {"loss": loss})}


def pruned(module, inputs):
    with in_evaluation(module):
        program = trace(module, inputs)
    prune(program)
    return program


def test_only_what_the_outputs_need_is_left(tmp_path):
    module = Adversaries()
    program = pruned(module, {"noise": torch.ones(2, 2), "unused": torch.ones(2)})
    names = {name.removeprefix("module.") for name in program.exported.state_dict}
    # the count of batches is for training
    assert names == {name for name in module.state_dict() if name.startswith("generator")} - {
        "generator.1.num_batches_tracked"
    }
    assert program.exported.constants == {}
    operations = [node for node in program.exported.graph.nodes if node.op == "call_function"]
    assert len(operations) == 2
    assert [one["name"] for one in program.inputs] == ["noise", "unused"], "inputs stay, whoever needs them"
    write(program, tmp_path)
    run = open_run(tmp_path, {"outputs": program.outputs}, None)
    noise = torch.randn(3, 2)
    found = run({"noise": noise.numpy(), "unused": torch.zeros(3).numpy()})
    torch.testing.assert_close(torch.from_numpy(found["made"]), module.eval().generator(noise).detach())


def test_a_variable_under_two_names(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.other.weight = self.third.weight = self.one.weight

        def forward(self, x):
            self.third(x)
            return self.other(self.one(x))

    module = Tied()
    program = pruned(module, {"x": torch.ones(2, 2)})
    write(program, tmp_path)
    found = open_run(tmp_path, {"outputs": program.outputs}, None)({"x": torch.ones(3, 2).numpy()})
    torch.testing.assert_close(torch.from_numpy(found["output"]), module(torch.ones(3, 2)).detach())
