"""The mean of gradients through NCCL: the same code as between GPUs, in a group of one."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn

from plait.cluster.buckets import Buckets
from plait.cluster.exchange import Mesh

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def group():
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("compression", [None, "bf16"])
def test_gradients_go_through_nccl_and_come_back(group, compression):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
    parameters = list(net.parameters())
    buckets = Buckets(Mesh(0, {}, 60.0), group, compression=compression)
    plan = buckets.plan(parameters)
    buckets.watch(plan, parameters)
    for _ in range(12):  # enough to be foreseen, and sent early
        net.zero_grad()
        net(torch.randn(32, 64, device="cuda")).square().mean().backward()
        before = [parameter.grad.clone() for parameter in parameters]
        found = plan([parameter.grad for parameter in parameters])
        for place, parameter in enumerate(parameters):
            got = found.get(place, parameter.grad)
            rtol, atol = (1e-2, 1e-4) if compression else (1e-6, 1e-8)
            torch.testing.assert_close(got, before[place], rtol=rtol, atol=atol)
