"""One process: a pretended second worker that has the same batch."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn

from plait.cluster.batch_norm import synchronise
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm, Norm


@pytest.fixture
def twin(monkeypatch):
    """A second worker whose values are always those of the first."""

    def all_reduce(tensor, group=None):
        if tensor.ndim == 2:  # the moments: a row each
            tensor[1] = tensor[0]
        else:
            tensor.mul_(2)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def test_without_a_group_nothing_changes():
    layer = nn.BatchNorm2d(3)
    assert synchronise(nn.Sequential(layer)) == 0
    assert type(layer) is nn.BatchNorm2d


def test_with_one_worker_nothing_changes(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    layer = nn.BatchNorm2d(3)
    assert synchronise(nn.Sequential(layer)) == 0
    assert type(layer) is nn.BatchNorm2d


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm2d(3), lambda: BatchNorm(3, Norm(decay=0.5))])
def test_it_is_as_if_the_batch_were_there_twice(twin, make):
    ours, plain = make(), make()
    assert synchronise(nn.Sequential(ours)) == 1
    x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    doubled = torch.cat([x, x]).detach().requires_grad_()
    weights = torch.linspace(-1, 2, 48).view(4, 3, 2, 2)
    out, expected = ours(x), plain(doubled)
    torch.testing.assert_close(out, expected[:4])
    (out.square() * weights).sum().backward()
    (expected.square() * weights.repeat(2, 1, 1, 1)).sum().backward()
    torch.testing.assert_close(x.grad, doubled.grad[:4])
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad * 2, theirs.grad)
    for mine, theirs in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_large_mean_costs_no_digits(twin):
    layer = nn.BatchNorm1d(2, affine=False)
    synchronise(nn.Sequential(layer))
    x = torch.tensor([[0.0, 1.0], [1.0, 3.0], [3.0, 4.0]])
    torch.testing.assert_close(layer(x + 4096), layer(x), rtol=0, atol=1e-3)  # such a mean has no more digits


def test_one_value_of_each_channel_is_enough_where_there_are_others(twin):
    layer = nn.BatchNorm1d(2)
    synchronise(nn.Sequential(layer))
    assert layer(torch.ones(1, 2)).tolist() == [[0, 0]]
    assert torch.isfinite(layer.running_var).all()


def test_a_frozen_layer_stays_as_it_is(twin):
    layer = nn.BatchNorm1d(2)
    synchronise(nn.Sequential(layer))
    layer.eval()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(torch.randn(4, 2))
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_a_wrong_number_of_dimensions_is_refused_as_before(twin):
    layer = nn.BatchNorm2d(2)
    synchronise(nn.Sequential(layer))
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.ones(2, 2))


def test_a_second_gradient_is_refused(twin):
    layer = nn.BatchNorm1d(2)
    synchronise(nn.Sequential(layer))
    x = torch.randn(4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class Own(nn.BatchNorm2d):
    def forward(self, input):  # noqa: A002 - torch's name
        return super().forward(input) + 1


def test_a_layer_with_a_forward_of_its_own_is_refused_by_name(twin):
    model = nn.Module()
    model.tower = nn.Sequential(nn.BatchNorm2d(2), Own(2))
    with pytest.raises(ConfigError, match=r"tower/1 is a Own with a forward of its own"):
        synchronise(model)
    assert type(model.tower[0]) is nn.BatchNorm2d


def test_torchs_own_synchronised_layers_are_left_alone(twin):
    assert synchronise(nn.Sequential(nn.SyncBatchNorm(2), nn.InstanceNorm2d(2))) == 0
