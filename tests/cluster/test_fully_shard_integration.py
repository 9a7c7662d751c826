"""Sharded training on two workers against one process on the joined batch. Run as a script, it is a worker."""

from __future__ import annotations

import datetime as dt
import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import plait
from plait.cluster.batch_norm import synchronise
from plait.cluster.fully_shard import gathered, load_full, one_by_one, shard_model, sharded_state
from plait.cluster.recompute import recompute
from plait.engine.model import Model
from plait.errors import MismatchError, VariableError
from plait.nets.family import Shape
from plait.nets.resnet import create
from plait.optim import rules
from plait.optim.assign import optimizer_setter

WORKERS, ROWS = 2, 4
STEPS, MANY_STEPS = 20, 200
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5, foreach=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


class Tower(nn.Module):
    """Layers of odd sizes, one of a single row, and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)])
        self.norm = nn.BatchNorm1d(5)
        self.narrow = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.cat([x, self.narrow(self.norm(x)) * self.scale], 1)


def loss_fn(model, sample):
    with plait.variable_scope("head"):
        bare = plait.get_variable("bare", [6, 3], torch.float64)
        shared = plait.layer("shared", lambda: nn.Linear(3, 3).double())
    x = model.tower(sample.x) @ bare
    x = shared(torch.tanh(shared(x)))  # called twice
    return functional.cross_entropy(plait.layer("out", lambda: nn.Linear(3, 3).double())(x), sample.y)


def made(optimizer, rank, transform=None):
    """A compiled model over all rows of each batch (rank None), or over one worker's."""
    torch.manual_seed(7 + (rank or 0))  # the workers' modules start with values of their own
    model = Model(seed=3)
    model.tower = Tower().double()
    data = torch.Generator().manual_seed(1)
    take = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    batches = []
    for _ in range(MANY_STEPS):
        x = torch.randn(WORKERS * ROWS, 5, generator=data, dtype=torch.float64)
        batches.append({"x": x[take], "y": x[:, :3].argmax(1)[take]})
    whole = {}

    def optimizer_fn(model, task):
        whole.update(transform(model) if transform is not None else {})
        return optimizer_setter(optimizer)(model, task)

    model.input_fn(lambda model, mode: batches).loss_fn(loss_fn).optimizer_fn(optimizer_fn)
    model.compile()
    if whole:
        one_by_one(model.optimizers()[0])
        model.optimizers()[0].register_step_pre_hook(lambda *_: reduce(whole.values()))
    return model, whole


def reduce(variables):
    for variable in variables:
        dist.all_reduce(variable.grad)
        variable.grad /= WORKERS


def transform(model, scopes=()):
    assert synchronise(model) == 1
    recompute(model, scopes)
    return shard_model(model, unit_size=60)


def run(model, steps):
    losses = []
    with plait.Session(model) as session:
        for _ in range(steps):
            losses.append(session.run([model.train_op(), model.loss()])[1].detach())
    return torch.stack(losses)


def states(model):
    names = {value: name for name, value in model.variables().items()}
    optimizer = model.optimizers()[0]
    return {names[variable]: dict(state) for variable, state in optimizer.state.items()}


def flat(tree, above=""):
    """Every tensor of a tree, by its path."""
    if isinstance(tree, dict):
        return {path: leaf for key, value in tree.items() for path, leaf in flat(value, f"{above}/{key}").items()}
    return {above: tree.detach() if isinstance(tree, torch.Tensor) else torch.tensor(tree)}


def everything(model):
    return gathered({"variables": dict(model.variables()), "states": states(model)})


def trained(kind, rank, scopes=(), steps=STEPS):
    model, whole = made(OPTIMIZERS[kind], rank, None if rank is None else functools.partial(transform, scopes=scopes))
    if rank is not None:
        assert set(whole) == {"head/bare", "tower/scale"}
        split = [value for value in model.variables().values() if isinstance(value, DTensor)]
        assert len(split) == 16
        assert sum(value.to_local().numel() for value in split) < 0.7 * sum(value.numel() for value in split)
    losses = run(model, steps)
    if rank is not None:
        dist.all_reduce(losses)
        losses /= WORKERS
    return {"losses": losses, **flat(everything(model))}


def resumed(rank):
    """Five steps, all state put together and taken up by new shards, five more; and ten in one go."""
    straight, _ = made(OPTIMIZERS["adam"], rank, transform)
    run(straight, 10)
    first, _ = made(OPTIMIZERS["adam"], rank, transform)
    run(first, 5)
    saved = everything(first)
    second, _ = made(OPTIMIZERS["adam"], rank, transform)
    run(second, 5)  # brings the input to its place; what was learnt is overwritten
    load_full(second.variables(), saved["variables"])
    optimizer, names = second.optimizers()[0], {value: name for name, value in second.variables().items()}
    states = [sharded_state(value, saved["states"][names[value]]) for value in optimizer.param_groups[0]["params"]]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(states))})
    run(second, 5)
    return {"straight": flat(everything(straight)), "second": flat(everything(second))}


def pictures(rank):
    """A network of plait's, with recomputation, its blocks as units; two steps of plait's own Adam."""
    torch.manual_seed(0)
    net = nn.Module()
    net.net = create("resnet_v1_20", Shape(classes=3, channels=3, height=16, width=16)).double()
    if rank is not None:
        synchronise(net)
        recompute(net, ["net/block*"])
        assert shard_model(net, dist.group.WORLD, unit_size=1) == {}
    optimizer = rules.Adam(net.parameters(), lr=0.01)
    take = slice(None) if rank is None else slice(rank * 2, rank * 2 + 2)
    for step in range(3):
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        net.net(x[take])[0].logsumexp(1).mean().backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        seen = net.net(x)[0]
    return flat(gathered({"variables": dict(net.state_dict()), "seen": seen}))


def refused(rank):
    model = nn.Module()
    model.a, model.b = nn.Linear(3, 3), nn.Linear(3, 3)
    model.b.weight = model.a.weight
    with pytest.raises(VariableError, match="'a/weight' and 'b/weight' are one variable in two modules"):
        shard_model(model)
    model = nn.Module()
    model.a = model.b = nn.Linear(3, 3)  # one module under two names is one unit
    assert shard_model(model) == {}
    live = dict(model.a.named_parameters())
    with pytest.raises(MismatchError, match=r"has no \['c'\], and another shape for \['bias'\]"):
        load_full(live, {"c": torch.ones(1), "bias": torch.ones(2)})
    assert gathered({"x": [live["bias"], 1]}, keep=False) == {"x": [None, 1]}
    return "refused"


CASES = {
    "sgd": functools.partial(trained, "sgd"),
    "adam": functools.partial(trained, "adam"),
    "recompute": functools.partial(trained, "sgd", scopes=["tower/blocks/*", "head/shared"]),
    "resumed": resumed,
    "pictures": pictures,
    "refused": refused,
}
LONG_CASES = {
    "sgd": functools.partial(trained, "sgd", steps=MANY_STEPS),
    "adam": functools.partial(trained, "adam", steps=MANY_STEPS),
}


TABLES = {"short": CASES, "long": LONG_CASES}


def work(cases, rank, folder):
    store = dist.FileStore(str(folder / "store"), WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS, timeout=dt.timedelta(seconds=30))
    torch.set_num_threads(1)
    for case, make in cases.items():
        torch.save(make(rank), folder / f"{case}-{rank}.pt")
    os._exit(0)  # gloo's threads may abort the end of a process: what is asked here is on disk


def run_workers(run_ranks, folder, which):
    """What two processes that do the cases have left, by case and rank."""
    run_ranks(__file__, folder, which)
    return {(case, rank): torch.load(folder / f"{case}-{rank}.pt") for case in TABLES[which] for rank in range(WORKERS)}


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    return run_workers(run_ranks, tmp_path_factory.mktemp("workers"), "short")


def assert_close(ours, theirs, tolerance=1e-10):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(ours[name]) is torch.Tensor
        torch.testing.assert_close(
            ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["sgd", "adam", "recompute"])
def test_steps_equal_one_process(found, kind):
    alone = trained("adam" if kind == "adam" else "sgd", None)
    for rank in range(WORKERS):
        assert_close(found[kind, rank], alone)


@pytest.mark.slow
def test_two_hundred_steps_equal_one_process(run_ranks, tmp_path):
    found = run_workers(run_ranks, tmp_path, "long")
    for kind in LONG_CASES:
        alone = trained(kind, None, steps=MANY_STEPS)
        for rank in range(WORKERS):
            assert_close(found[kind, rank], alone)
        assert alone["losses"][-10:].mean() < 0.7 * alone["losses"][:10].mean()


def test_a_checkpoint_is_whole_and_is_taken_up_again(found):
    for rank in range(WORKERS):
        seen = found["resumed", rank]
        assert seen["straight"].keys() == seen["second"].keys()
        for name, value in seen["straight"].items():
            assert torch.equal(seen["second"][name], value), name


def test_a_network_of_plait(found):
    alone = pictures(None)
    for rank in range(WORKERS):
        assert_close(found["pictures", rank], alone)


def test_what_cannot_be_split_or_loaded_is_refused_by_name(found):
    assert [found["refused", rank] for rank in range(WORKERS)] == ["refused"] * WORKERS


if __name__ == "__main__":
    work(TABLES[sys.argv[2]], int(sys.argv[3]), Path(sys.argv[1]))
