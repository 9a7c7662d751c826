"""A worker of a group under test: `python group_program.py JSON`. For each case it joins anew."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

from plait.cluster import buckets
from plait.cluster.collective import Collective
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.engine.update import LeftError
from plait.errors import ClusterError

CASES = {}
SETTINGS = {
    "bf16": {"compression": "bf16"},
    "local_sgd": {"local_sgd": 4},
    "local_adam": {"local_sgd": 3},
    "local_leave": {"local_sgd": 4},
    "adaptive": {"local_sgd": 4, "adaptive": True},
    "merge": {"gradient_merge": 4},
}


def case(function):
    CASES[function.__name__] = function
    return function


def main():
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    Collective._may_share = given["shared"]
    found = {}
    role = Role(index=given["index"], workers=given["workers"], master=f"127.0.0.1:{given['port']}")
    for name in given["cases"]:
        begun = time.monotonic()
        try:
            group = Collective(role, Distributed(timeout=given["timeout"], **SETTINGS.get(name, {})))
        except ClusterError as error:
            found[name] = {"refused": str(error), "seconds": time.monotonic() - begun}
            continue
        try:
            found[name] = CASES[name](group)
        finally:
            group.close()
    print(json.dumps(found))


# ---- parity


def net(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def batches(dtype, count, rows):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
        yield x.to(dtype), (x[:, :3] * 2).sin().to(dtype)


def trained(group, kind, dtype, steps=200):
    """Weights of a run in which each worker has its rows of every batch; of one process without a group."""
    model, rows = net(dtype), 4 * 3
    optimizer = kind(model.parameters())
    mine = slice(None) if group is None else slice(group.worker_id, None, group.worker_num)
    for x, y in batches(dtype, steps, rows):
        optimizer.zero_grad()
        functional.mse_loss(model(x[mine]), y[mine]).backward()
        if group is not None:
            group.reduce_gradients(list(model.parameters()))
        optimizer.step()
    return torch.cat([variable.detach().flatten() for variable in model.parameters()])


def same_everywhere(group, tensor):
    return all(torch.equal(one, tensor) for one in group.gather(tensor))


@case
def parity(group):
    kinds = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "Adam": lambda p: torch.optim.Adam(p, lr=0.003, eps=1e-4),
    }
    found = {}
    for (name, kind), dtype in itertools.product(kinds.items(), (torch.float64, torch.float32)):
        alone, ours = trained(None, kind, dtype), trained(group, kind, dtype)
        difference = float((ours - alone).abs().max() / alone.abs().max())
        found[f"{name} {str(dtype)[6:]}"] = [difference, same_everywhere(group, ours)]
    return found


# ---- uneven gradients


def grads(group, parameters, filled, step=0):
    """Give parameter i the gradient (rank + 1) * (i + 1) + step, if `filled(rank, i)`; returns the expected means."""
    means = []
    for place, parameter in enumerate(parameters):
        values = [(rank + 1) * (place + 1.0) + step if filled(rank, place) else 0.0 for rank in range(group.worker_num)]
        anywhere = any(filled(rank, place) for rank in range(group.worker_num))
        own = filled(group.worker_id, place)
        parameter.grad = torch.full_like(parameter, values[group.worker_id]).detach() if own else None
        means.append(sum(values) / group.worker_num if anywhere else None)
    return means


def as_expected(parameters, means):
    return all(
        p.grad is None if mean is None else torch.allclose(p.grad, torch.full_like(p, mean), rtol=1e-6)
        for p, mean in zip(parameters, means)
    )


def some_parameters(count=6):
    shapes = [(3, 5), (7,), (), (2, 3, 3, 3), (64, 65), (0, 4)]
    return [nn.Parameter(torch.ones(shapes[i % len(shapes)])) for i in range(count)]


@case
def uneven(group):
    parameters = some_parameters()
    found = []
    patterns = {
        "all": lambda rank, place: True,
        "only one worker": lambda rank, place: rank == place % group.worker_num,
        "nobody some": lambda rank, place: place % 2 == 0,
        "nobody any": lambda rank, place: False,
        "all again": lambda rank, place: True,
    }
    for step, (_name, filled) in enumerate(patterns.items()):
        means = grads(group, parameters, filled, step)
        group.reduce_gradients(parameters)
        found.append(as_expected(parameters, means))
    return found


@case
def alternating(group):
    """Two lists that share their first half take turns, then come at random; what is used differs, too."""
    trunk, left, right = some_parameters(4), some_parameters(3), some_parameters(5)
    order = [0, 1] * 8 + [int(n) for n in torch.randint(0, 2, (20,), generator=torch.Generator().manual_seed(0))]
    good = True
    for step, which in enumerate(order):
        parameters = [*trunk, *(right if which else left)]
        means = grads(group, parameters, lambda rank, place: (place + rank + step) % 3 > 0, step)
        group.reduce_gradients(parameters)
        good &= as_expected(parameters, means)
    return good


@case
def layouts(group):
    """Other dtypes, channels last, a view with holes, all in one list."""
    parameters = [
        nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.ones(5, dtype=torch.float64)),
        nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(6, 6)[:, ::2]),
    ]
    generator = torch.Generator().manual_seed(0)
    expected = []
    for parameter in parameters:
        values = [torch.randn(parameter.shape, generator=generator, dtype=torch.float64) for _ in range(4)]
        values = [value.to(parameter.dtype) for value in values[: group.worker_num]]
        parameter.grad = values[group.worker_id].clone(memory_format=torch.preserve_format)
        expected.append(sum(value.double() for value in values) / group.worker_num)
    group.reduce_gradients(parameters)
    return [float((p.grad.double() - mean).abs().max()) for p, mean in zip(parameters, expected)]


@case
def rows(group):
    """A gradient of rows, whole on one worker, and none on another."""
    table, other = nn.Parameter(torch.zeros(10, 2)), nn.Parameter(torch.zeros(3))
    rank, count = group.worker_id, group.worker_num
    for step in range(3):
        table.grad = other.grad = None
        ids = torch.tensor([rank, 5, 5])
        loss = functional.embedding(ids, table, sparse=step != 1 or rank > 0).sum() * (step + 1) + other.sum()
        loss.backward()
        group.reduce_gradients([table, other])
        expected = torch.zeros(10, 2)
        for one in range(count):
            expected.index_add_(0, torch.tensor([one, 5, 5]), torch.full((3, 2), step + 1.0))
        if not (table.grad.is_sparse and torch.allclose(table.grad.to_dense(), expected / count)):
            return str(table.grad)
    late = nn.Parameter(torch.zeros(10, 2))  # of the same form, and its gradient is of rows only later, on one worker
    for step in range(3):
        late.grad = None
        functional.embedding(torch.tensor([rank]), late, sparse=step > 0 and rank == 0).sum().backward()
        group.reduce_gradients([late, other])
        expected = torch.zeros(10, 2)
        expected[:count] = 1 / count
        if late.grad.is_sparse or not torch.allclose(late.grad, expected):
            return str(late.grad)
    return torch.equal(other.grad, torch.ones(3))


# ---- buckets that start early


@case
def early(group):
    """Gradients that go out in the backward pass; a pass that is not the foreseen one; gradients that change later."""
    owner, sent, inside = group._buckets, [], [False]
    buckets.BUCKET_BYTES = 1000
    start = owner.start
    owner.start = lambda flat: (sent.append(inside[0]), start(flat))[1]
    model = net(torch.float64)
    other = nn.Sequential(nn.Linear(6, 2)).double()
    good, counts = [], []
    for step in range(18):
        one = other if step == 8 else model
        parameters = list(one.parameters())
        for parameter in itertools.chain(model.parameters(), other.parameters()):
            parameter.grad = None
        x = torch.full((2, 6), 0.1 + step / 10 + group.worker_id, dtype=torch.float64)
        sent.clear()
        inside[0] = True
        if step == 8:  # what the others foresaw does come, but it is not what is asked for
            model(x).sum().backward()
        one(x).sum().backward()
        if step == 16 and group.worker_id == 1:
            one(x).sum().backward()  # only here, so only here the gradients change
        inside[0] = False
        mine = [parameter.grad.clone() for parameter in parameters]
        group.reduce_gradients(parameters)
        everyone = group.gather(mine)
        means = [sum(values) / group.worker_num for values in zip(*everyone)]
        good.append(all(torch.allclose(p.grad, mean, rtol=1e-12) for p, mean in zip(parameters, means)))
        counts.append([sum(sent), len(sent)])
    return {"good": good, "counts": counts}


@case
def leaving(group):
    """The last of a list is another tensor each time, as a message that goes along with the gradients is."""
    parameters, message, good = some_parameters(3), torch.zeros(2), True
    for step in range(4):
        listed = [*parameters, torch.zeros(2) if group.worker_id == 0 and step == 3 else message]
        means = grads(group, listed, lambda rank, place: True, step)
        group.reduce_gradients(listed)
        good &= as_expected(listed, means)
    return good


@case
def bf16(group):
    parameters = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(7, dtype=torch.float64))]
    generator = torch.Generator().manual_seed(0)
    values = [[torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters] for _ in range(4)]
    for parameter, value in zip(parameters, values[group.worker_id]):
        parameter.grad = value.clone()
    group.reduce_gradients(parameters)
    expected = [sum(v[i] for v in values[: group.worker_num]) / group.worker_num for i in range(2)]
    worst = max(float((p.grad - mean).abs().max()) for p, mean in zip(parameters, expected))
    return [worst, all(same_everywhere(group, p.grad) for p in parameters), str(parameters[1].grad.dtype)]


# ---- local SGD


def as_model(module, optimizer, loss=None):
    named = lambda: dict(module.state_dict(keep_vars=True))
    return SimpleNamespace(
        variables=named,
        loss_metrics={None: SimpleNamespace(value=loss)},
        assignments={None: {optimizer: None}},
    )


@case
def local_sgd(group):
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2))
    module[2].weight.requires_grad_(False)
    with torch.no_grad():
        module[2].weight.fill_(0.1)
        module[2].bias.fill_(float(group.worker_id))
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)
    model = as_model(module, optimizer)
    group.prepare(model)
    seen = []
    for step in range(10):
        module[2].bias.grad = torch.full((2,), float(group.worker_id + 1))
        group.reduce_gradients([module[2].bias])
        optimizer.step()
        module[1].running_mean.fill_(step + group.worker_id)
        group.after_step(model)
        seen.append([group.whole(), module[2].bias[0].item(), module[1].running_mean[0].item()])
    state = group.state_dict()
    group.settle(model)
    seen.append([group.whole(), module[2].bias[0].item(), module[1].running_mean[0].item()])
    weight = module[2].weight[0, 0].item()
    return {"seen": seen, "state": state, "frozen": weight == float(torch.tensor(0.1))}


@case
def local_adam(group):
    """Also the optimizer's state becomes the same; of a variable that only one worker has used, it stays its own."""
    module = nn.ParameterList([torch.zeros(3), torch.zeros(2)])
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    model = as_model(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        module[0].grad = torch.full((3,), float(group.worker_id + step))
        if group.worker_id == 0:
            module[1].grad = torch.ones(2)
        optimizer.step()
        group.after_step(model)
    kept = optimizer.state[module[0]]
    return [same_everywhere(group, one) for one in (module[0].data, module[1].data, *kept.values())]


@case
def local_leave(group):
    module = nn.ParameterList([torch.full((2,), float(group.worker_id))])
    model = as_model(module, torch.optim.SGD(module.parameters(), lr=1.0))
    try:
        for step in range(8):
            if group.worker_id == 0 and step == 2:
                group.leave(model, None, stop=True)
                left = "went"
                break
            group.after_step(model)
    except LeftError as error:
        left = [step, error.stop]
    return [left, module[0][0].item(), group.whole()]


@case
def adaptive(group):
    module = nn.ParameterList([torch.zeros(2)])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.4)
    model = as_model(module, optimizer)
    means = []
    for step in range(12):
        # a mean of 8 until the second mean is taken, then of 2, then of 100
        loss = (8.0 if len(means) < 1 else 2.0 if len(means) < 2 else 10000.0) + (-1) ** group.worker_id
        if group.worker_id == 2:
            loss -= 1.0
        model.loss_metrics[None].value = torch.tensor(loss)
        group.after_step(model)
        if group.whole():
            means.append([step, group.state_dict()["every"]])
    before = group.state_dict()
    group.load_state_dict(json.loads(json.dumps(before)))
    return {"means": means, "same": before == group.state_dict()}


@case
def merge(group):
    """Without overlap: backward passes between two reductions send nothing."""
    model = net(torch.float64)
    parameters = list(model.parameters())
    good = True
    for step in range(6):
        for parameter in parameters:
            parameter.grad = None
        for part in range(4):
            model(torch.full((2, 6), 1.0 + group.worker_id + part + step, dtype=torch.float64)).sum().backward()
        mine = [parameter.grad.clone() for parameter in parameters]
        group.reduce_gradients(parameters)
        means = [sum(values) / group.worker_num for values in zip(*group.gather(mine))]
        good &= all(torch.allclose(p.grad, mean, rtol=1e-12) for p, mean in zip(parameters, means))
    return [good, not any(parameter._post_accumulate_grad_hooks for parameter in parameters)]


# ---- trees and the rest


@case
def trees(group):
    rank, count = group.worker_id, group.worker_num
    ranks = range(count)
    tree = {"rank": rank, "x": [torch.full((2,), float(rank)), None, "text", 1.5], "flag": rank == 0}
    gathered = group.gather(tree)
    told = group.tell(tree if rank == 0 else None)
    group.barrier("stage 'a'", 0.1)
    large = torch.full((500_000,), float(rank))  # more than a socket takes at once
    return {
        "gather": [[one["rank"], one["x"][0].tolist(), one["x"][1:], one["flag"]] for one in gathered]
        == [[r, [r, r], [None, "text", 1.5], r == 0] for r in ranks],
        "large": [float(one.sum()) for one in group.gather(large)] == [500_000.0 * r for r in ranks],
        "tell": told["rank"] == 0 and told["x"][0].tolist() == [0.0, 0.0],
        "sum": group.reduce({"a": rank, "b": [torch.tensor([rank, 1])]}, "sum")["b"][0].tolist() == [sum(ranks), count],
        "mean": group.reduce(rank, "mean") == sum(ranks) / count,
        "min": group.reduce(float(rank), "min") == 0.0,
        "max": group.reduce(torch.tensor(rank), "max").item() == count - 1,
        "concat": [
            group.reduce(rank, "concat") == list(ranks),
            group.reduce([rank, 7], "concat") == [n for r in ranks for n in (r, 7)],
            group.reduce(torch.tensor([rank]), "concat").tolist() == list(ranks),
        ],
        "saver": group.is_saver() == (rank == 0),
    }


@case
def broadcast(group):
    rank = group.worker_id
    tensors = [
        torch.full((3, 2), float(rank)),
        torch.full((2,), rank, dtype=torch.int64),
        torch.tensor(rank == 0),
        torch.full((4,), rank + 0.5, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.full((2, 3, 2, 2), float(rank)).to(memory_format=torch.channels_last),
        nn.Parameter(torch.full((2,), float(rank))),
    ]
    group.broadcast(tensors)
    return [tensor.flatten().tolist() for tensor in tensors]


@case
def calls(group):
    """Python functions entered in a reduction of 20 gradients, once everything is planned; waiting is not counted."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    for _ in range(3):
        group.reduce_gradients(parameters)
    entered, waiting = [], {"_wait", "_from", "frame", "pull", "push"}
    sys.setprofile(lambda frame, event, argument: entered.append(frame.f_code.co_name) if event == "call" else None)
    group.reduce_gradients(parameters)
    sys.setprofile(None)
    return sum(name not in waiting for name in entered)


@case
def other_program(group):
    try:
        group.gather(1) if group.worker_id == 0 else group.barrier("end of stage", 1.0)
    except ClusterError as error:
        return str(error)
    return "nothing noticed"


@case
def other_model(group):
    parameters = [nn.Parameter(torch.ones(2 + group.worker_id)), nn.Parameter(torch.ones(3))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        group.reduce_gradients(parameters)
    except ClusterError as error:
        return str(error)
    return "nothing noticed"


@case
def killed(group):
    """The last worker is killed in the middle of training; the others say when they noticed, and what."""
    parameters = [nn.Parameter(torch.ones(100_000))]
    try:
        for step in range(1000):
            parameters[0].grad = torch.ones(100_000)
            if step == 20 and group.worker_id == group.worker_num - 1:
                print(json.dumps({"at": time.time()}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            group.reduce_gradients(parameters)
    except ClusterError as error:
        return {"at": time.time(), "error": str(error), "step": step}
    return "nothing noticed"


@case
def stopped(group):
    """A worker that neither comes nor dies."""
    begun = time.monotonic()
    try:
        if group.worker_id == 1:
            time.sleep(group._mesh.timeout + 1.0)
        group.reduce_gradients(some_parameters())
    except ClusterError as error:
        return {"seconds": time.monotonic() - begun, "error": str(error)}
    return "nothing noticed"


def mapped():
    return "memfd:plait" in Path("/proc/self/maps").read_text()


@case
def nothing_left(group):
    parameters = some_parameters()
    grads(group, parameters, lambda rank, place: True)
    group.reduce_gradients(parameters)
    shared = mapped()
    del parameters
    group.close()
    return [shared, mapped()]


if __name__ == "__main__":
    main()
