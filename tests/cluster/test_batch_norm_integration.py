"""Batch normalisation on two workers against one process on the joined batch. Run as a script, it is a worker."""

from __future__ import annotations

import copy
import datetime as dt
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from plait.cluster.batch_norm import synchronise
from plait.errors import ClusterError
from plait.nets.blocks import BatchNorm, Conv, Norm, Recipe, he_normal

WORKERS, STEPS = 2, 200
ROWS = [(0, 3), (3, 8)]
"""Which rows of the joined batch each worker has."""


class Small(nn.Module):
    """A convolutional network with a layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        recipe = Recipe(norm=Norm(decay=0.9), init=he_normal)
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = Conv(4, 5, 3, recipe)
        self.last = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        return self.last(self.second(self.first(x)).mean((2, 3)))


def trained(take, total):
    """Train on the rows that `take` takes; `total` makes sums over all workers of the loss and the gradients."""
    torch.manual_seed(3)
    model = Small().double()
    if total is not None:
        assert synchronise(model) == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(4)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 2, 7, 7, generator=data, dtype=torch.float64) * 2 + 5
        y = x[:, :, :2].mean((1, 2, 3)).sub(4.5).mul(2).long().clamp(0, 2)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[take]), y[take], reduction="sum") / len(x)
        loss.backward()
        if total is not None:
            loss = total(loss, [variable.grad for variable in model.parameters()])
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **model.state_dict()}


def total(loss, gradients):
    flat = torch.cat([loss.detach().view(1), *(gradient.view(-1) for gradient in gradients)])
    dist.all_reduce(flat)
    sums = flat[1:].split([gradient.numel() for gradient in gradients])
    for gradient, value in zip(gradients, sums, strict=True):
        gradient.copy_(value.view_as(gradient))
    return flat[0]


def renorm(channels):
    layer = BatchNorm(channels, Norm(decay=0.9, renorm=True))
    layer.renorm_steps.fill_(20_000)
    layer.moving_mean.fill_(0.5)
    return layer


LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(4), (8, 4)),
    "1d with a length": (lambda: nn.BatchNorm1d(4), (8, 4, 5)),
    "2d": (lambda: nn.BatchNorm2d(4), (8, 4, 3, 2)),
    "3d": (lambda: nn.BatchNorm3d(4), (8, 4, 3, 2, 2)),
    "mean over all steps": (lambda: nn.BatchNorm2d(4, momentum=None), (8, 4, 3, 2)),
    "no affine": (lambda: nn.BatchNorm2d(4, affine=False), (8, 4, 3, 2)),
    "no statistics kept": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (8, 4, 3, 2)),
    "plait": (lambda: BatchNorm(4, Norm()), (8, 4, 3, 2)),
    "plait without gamma": (lambda: BatchNorm(4, Norm(scale=False)), (8, 4, 3, 2)),
    "plait renorm": (lambda: renorm(4), (8, 4, 3, 2)),
}
SPLITS = {"3 and 5": (3,), "1 and 7": (1,), "0 and 8": (0,)}


def layer_case(make, shape, dtype, take, sync, last=False):
    """What a layer gives and learns in three steps, then in evaluation."""
    torch.manual_seed(5)
    layer = make().to(dtype if dtype is not torch.bfloat16 else torch.float32)
    with torch.no_grad():
        for variable in layer.parameters():
            variable.uniform_(0.5, 2)
    if sync:
        assert synchronise(nn.Sequential(layer)) == 1
    data = torch.Generator().manual_seed(6)
    found = {}
    for step in range(3):
        x = (torch.randn(shape, generator=data) * 3 + 20).to(dtype)
        weights = torch.randn(shape, generator=data).to(dtype)
        if last:
            x, weights = (t.contiguous(memory_format=torch.channels_last) for t in (x, weights))
        x = x[take].requires_grad_()
        y = layer(x)
        (y * y * weights[take]).sum().backward()
        found |= {f"rows of y {step}": y.detach(), f"rows of x {step}": x.grad}
    found |= {f"sum of {name}": variable.grad for name, variable in layer.named_parameters()}
    found |= {f"same {name}": value for name, value in layer.named_buffers()}
    layer.eval()
    found["same evaluation"] = layer(torch.ones(2, *shape[1:], dtype=dtype)).detach()
    return found


def every_case(rank):
    """The layers on this worker's rows; None: on all."""
    found = {}
    for kind, (make, shape) in LAYERS.items():
        for split, (at,) in SPLITS.items():
            take = slice(None) if rank is None else slice(at, None) if rank else slice(at)
            found[kind, split, "float64"] = layer_case(make, shape, torch.float64, take, rank is not None)
    for dtype, last in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        make, shape = LAYERS["2d"]
        take = slice(None) if rank is None else slice(*ROWS[rank])
        found["2d", "3 and 5", f"{dtype} {last}"] = layer_case(make, shape, dtype, take, rank is not None, last)
    return found


def calls(rank):
    """How many all-reduces a step makes, and of how many numbers."""
    model = Small()
    synchronise(model)
    sizes, real = [], dist.all_reduce
    dist.all_reduce = lambda tensor, group=None: (sizes.append(tensor.numel()), real(tensor, group=group))
    loss = model(torch.randn(4, 2, 7, 7)).sum()
    sizes.append(0)
    loss.backward()
    dist.all_reduce = real
    return sizes


def kept(rank):
    """What does not change: names, kinds, copies, the numbers of evaluation."""
    torch.manual_seed(rank)
    model = Small()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    modules = dict(model.named_modules())
    variables = list(model.parameters())
    count = synchronise(model)
    x = torch.randn(4, 2, 7, 7)
    copied = copy.deepcopy(model)
    return {
        "count": count,
        "names": list(model.state_dict()) == names,
        "modules": all(module is modules[path] for path, module in model.named_modules()),
        "variables": all(a is b for a, b in zip(model.parameters(), variables, strict=True)),
        "kind": isinstance(model.first[1], nn.BatchNorm2d) and repr(model) == repr(plain),
        "again": synchronise(model),
        "evaluation": torch.equal(model.eval()(x), plain.eval()(x)),
        "copy": torch.equal(copied(x), model.train()(x)) and not torch.equal(copied(x), plain.train()(x)),
    }


def compiled(rank):
    model = Small().double()
    synchronise(model)
    plain = copy.deepcopy(model)
    fast = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 2, 7, 7, dtype=torch.float64)
    for one in (plain, fast):
        one(x).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [float((a.grad - b.grad).abs().max()) for a, b in pairs]


def lost(rank):
    """Worker 1 leaves without a word."""
    model = Small()
    synchronise(model)
    if rank == 1:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(ClusterError, match="worker 0 waited in batch normalisation for the other 1"):
        model(torch.randn(4, 2, 7, 7))
    return time.monotonic() - began


def work(cases, rank, folder):
    store = dist.FileStore(str(folder / "store"), WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS, timeout=dt.timedelta(seconds=30))
    torch.set_num_threads(1)
    for case in cases:
        if case == "trained":
            found = trained(slice(*ROWS[rank]), total)
        else:
            found = {"layers": every_case, "calls": calls, "kept": kept, "compiled": compiled, "lost": lost}[case](rank)
        torch.save(found, folder / f"{case}-{rank}.pt")
    os._exit(0)  # gloo's threads may abort the end of a process: what is asked here is on disk


def run_workers(run_ranks, cases, folder):
    """Two processes do the cases; gives what each left, by case and rank."""
    run_ranks(__file__, folder, ",".join(cases))
    files = {(case, rank): folder / f"{case}-{rank}.pt" for case in cases for rank in range(WORKERS)}
    return {key: torch.load(file) for key, file in files.items() if file.exists()}


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    return run_workers(run_ranks, ["trained", "layers", "calls", "kept"], tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module")
def alone():
    return every_case(None)


def close(ours, theirs, tolerance):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_two_hundred_steps_equal_one_process(found):
    alone = trained(slice(None), None)
    for rank in range(WORKERS):
        assert found["trained", rank].keys() == alone.keys()
        for name, value in alone.items():
            close(found["trained", rank][name], value, 1e-10)
    assert alone["losses"][-20:].mean() < 0.8 * alone["losses"][:20].mean()


@pytest.mark.parametrize("dtype", ["float64", "torch.float32 False", "torch.float32 True", "torch.bfloat16 False"])
def test_every_kind_of_layer_equals_one_process(found, alone, dtype):
    tolerance = {"float64": 1e-10, "torch.bfloat16 False": 2e-2}.get(dtype, 1e-4)
    checked = 0
    for key, whole in alone.items():
        if key[2] != dtype:
            continue
        parts = [found["layers", rank][key] for rank in range(WORKERS)]
        assert parts[0].keys() == parts[1].keys() == whole.keys()
        for name, value in whole.items():
            mine = [part[name] for part in parts]
            if name.startswith("same"):
                close(mine[0], mine[1], 0)
            joined = torch.cat(mine) if name.startswith("rows") else sum(mine) if name.startswith("sum") else mine[0]
            assert joined.dtype == value.dtype
            scale = float(value.double().abs().max()) or 1.0
            close(joined.double() / scale, value.double() / scale, tolerance)
            checked += 1
    assert checked > 5


def test_one_all_reduce_a_layer_in_each_direction(found):
    assert found["calls", 0] == [2 * 9, 2 * 11, 2 * 13, 0, 2 * 6, 2 * 5, 2 * 4]


def test_names_variables_copies_and_evaluation_stay(found):
    for rank in range(WORKERS):
        seen = found["kept", rank]
        assert seen.pop("count") == 3
        assert seen.pop("again") == 0
        assert all(seen.values()), seen


def test_a_lost_worker_is_an_error_of_the_cluster(run_ranks, tmp_path):
    assert run_workers(run_ranks, ["lost"], tmp_path)["lost", 0] < 30


@pytest.mark.slow
def test_compiled_it_is_the_same(run_ranks, tmp_path):
    assert max(run_workers(run_ranks, ["compiled"], tmp_path)["compiled", 0]) < 1e-10


if __name__ == "__main__":
    work(sys.argv[2].split(","), int(sys.argv[3]), Path(sys.argv[1]))
