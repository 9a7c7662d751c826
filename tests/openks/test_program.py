"""What a strategy sees of a loop that is written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.cluster import Distributed
from plait.cluster.roles import Role
from plait.engine.update import Flags, LeftError
from plait.errors import ConfigError
from plait.openks.program import Program


def program_of(module=None, **settings):
    model = module if module is not None else nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, Program(optimizer, Distributed(**settings), model)


def test_variables_have_the_modules_names_and_are_its_own():
    model, program = program_of()
    assert set(program.variables()) == {path.replace(".", "/") for path in model.state_dict()}
    assert program.variables()["0/weight"] is model[0].weight
    assert program.module is model
    assert program.optimizers()[0].param_groups[0]["params"][0] is model[0].weight
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_what_the_module_was_called_with_is_kept_without_values():
    model, program = program_of()
    program.connect(Role())
    model(torch.ones(5, 2))
    (form,), kwargs = program.seen
    assert (form.device.type, form.shape, form.dtype) == ("meta", (5, 2), torch.float32)
    assert kwargs == {}
    with program.unwatched():
        model(torch.ones(7, 2))
    assert program.seen.args[0].shape == (5, 2)
    program.disconnect()
    model(torch.ones(7, 2))
    assert program.seen.args[0].shape == (5, 2)


def test_no_step_before_and_after():
    _, program = program_of()
    with pytest.raises(ConfigError, match="belongs to no algorithm"):
        program.check_ready()
    program.connect(Role())
    program.check_ready()
    program.disconnect()
    with pytest.raises(ConfigError, match="stop_worker"):
        program.check_ready()


class InStep:
    """A strategy of two workers, one of whom leaves."""

    worker_id, worker_num, gradient_merge, in_step = 0, 2, 1, True

    def __init__(self):
        self.called = []

    def reduce_gradients(self, parameters):
        self.called.append(len(parameters))
        parameters[-1].grad = torch.tensor([1.0, 0.0])

    def leave(self, model, task, *, stop):
        self.called.append("leave")

    def close(self):
        self.called.append("close")


@pytest.mark.parametrize("stepped", [True, False])
def test_who_was_left_does_not_leave_again(stepped):
    model, program = program_of()
    program.connect(Role())
    strategy = program.strategy = InStep()
    program._flags = Flags(torch.device("cpu"))
    before = model[0].weight.detach().clone()
    if stepped:
        pairs = program.run_backward(model(torch.randn(4, 2)).square().sum(), list(model.parameters()))
        with pytest.raises(LeftError):
            program.move(dict(pairs))
    assert torch.equal(model[0].weight, before)
    assert program.global_step.value == 0
    program.disconnect()
    assert strategy.called == ([5, "close"] if stepped else ["leave", "close"])


def test_rows_that_servers_do_not_know():
    table = nn.Embedding(5, 2, sparse=True)
    program = Program(torch.optim.SGD(table.parameters(), lr=0.1), Distributed())
    program.connect(Role())
    program._mover = lambda: None
    program.role = Role(servers=1, server_endpoints=("127.0.0.1:1",))
    pairs = program.run_backward(table(torch.tensor([1, 2])).sum(), [table.weight])
    with pytest.raises(ConfigError, match=r"shape \(5, 2\) is rows.*module=model"):
        program.move(dict(pairs))
