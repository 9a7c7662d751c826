from __future__ import annotations

import functools

import pytest
import torch

from plait.cluster.alone import Alone
from plait.cluster.ps.strategy import Served
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.engine.settings import GradientConfig
from plait.errors import ClusterError, ConfigError
from plait.optim.factories import get_optimizer_fn

from .in_process import far, make_model, servers, train, worker

STEPS = 20


@pytest.fixture
def alone():
    return train(make_model(Alone()), STEPS)


@pytest.mark.parametrize("mode", ["sync", "half_async"])
@pytest.mark.parametrize("count", [1, 2])
def test_one_worker_that_waits_equals_one_process(mode, count, alone):
    with servers(count) as role, worker(role, mode=mode) as strategy:
        assert far(train(make_model(strategy), STEPS), alone) < 1e-14


def test_geo_with_one_worker_equals_one_process(alone):
    with servers(2) as role, worker(role, mode="geo", geo_steps=3) as strategy:
        assert far(train(make_model(strategy), STEPS), alone) < 1e-12


def test_an_asynchronous_worker_is_a_step_behind_and_learns(alone):
    with servers() as role, worker(role, mode="async") as strategy:
        found = train(make_model(strategy), 4 * STEPS)
    start = {name: value.detach() for name, value in make_model(Alone()).variables().items()}
    assert far(found, alone) > 0
    assert far(found, start) > 0.1


def test_gradient_merge_equals_one_process():
    expected = train(make_model(Alone(Distributed(gradient_merge=3))), 18)
    with servers(2) as role, worker(role, mode="sync", gradient_merge=3) as strategy:
        assert far(train(make_model(strategy), 18), expected) < 1e-14


@pytest.mark.parametrize("name", ["adam", "adagrad", "ftrl", "momentum", "rmsprop", "adadelta"])
def test_the_servers_apply_the_optimizers_of_mox(name):
    options = {"momentum": 0.9} if name == "momentum" else {}
    factory = get_optimizer_fn(name, 0.05, **options)
    dense = functools.partial(torch.nn.Embedding, 12, 3, dtype=torch.float64)
    torch.manual_seed(0)
    expected = train(make_model(Alone(), factory(), embedding=dense()), STEPS)
    torch.manual_seed(0)
    with servers(2) as role, worker(role) as strategy:
        found = train(make_model(strategy, factory(), embedding=dense()), STEPS)
    assert far(found, expected) < 1e-14


def test_a_schedule_is_followed_on_the_servers():
    factory = get_optimizer_fn("sgd", lambda step: 0.1 / (1 + step))
    expected = train(make_model(Alone(), factory()), STEPS)
    with servers() as role, worker(role) as strategy:
        assert far(train(make_model(strategy, factory()), STEPS), expected) < 1e-14


def test_each_steps_rows_are_asked_for_once_and_ahead():
    with servers() as role, worker(role) as strategy:
        model = make_model(strategy)
        asked, ask = [], strategy.held.ask_rows

        def ask_rows(table, ids, version, **more):
            asked.append((model.global_step.value, version))
            return ask(table, ids, version, **more)

        strategy.held.ask_rows = ask_rows
        train(model, 5)
    # the first step finds out which field the rows belong to; in the end the whole table is taken
    assert asked == [(0, 0), (1, 2), (1, 1), (2, 3), (3, 4), (4, 5), (5, 0)]


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_run_is_taken_up_from_its_checkpoint(mode, tmp_path):
    settings = {"mode": mode, "geo_steps": 4}
    with servers(2) as role, worker(role, **settings) as strategy:
        expected = train(make_model(strategy), 24)
    with servers(2) as role, worker(role, **settings) as strategy:
        train(make_model(strategy), 12, checkpoint_dir=tmp_path)
    with servers(1) as role, worker(role, **settings) as strategy:
        found = train(make_model(strategy), 24, checkpoint_dir=tmp_path)
    assert far(found, expected) < (1e-14 if mode == "sync" else 0.2)


def test_old_shares_are_removed_with_their_checkpoints(tmp_path):
    with servers() as role, worker(role) as strategy:
        train(make_model(strategy), 20, checkpoint_dir=tmp_path, save_steps=2, keep=2)
    assert len(list(tmp_path.glob("servers-*"))) <= 3


def test_a_variable_of_two_optimizers_is_refused():
    with servers() as role, worker(role) as strategy:
        model = make_model(Alone())
        model.assignments["other"] = {torch.optim.SGD(model.out.parameters(), lr=0.1): ([], None)}
        strategy.begin(model)
        with pytest.raises(ConfigError, match="'out/weight' is moved by two optimizers.*the same optimizer_fn"):
            strategy.prepare(model)


def test_clipping_is_refused():
    strategy = Served(Role(workers=1, servers=1, server_endpoints=("127.0.0.1:9",)), Distributed())
    model = make_model(Alone())
    model.gradient = GradientConfig(clip=1.0)
    with pytest.raises(ConfigError, match="gradient_clip with parameter servers"):
        strategy.begin(model)


def test_more_replicas_than_workers_are_refused():
    role = Role(workers=2, servers=1, server_endpoints=("127.0.0.1:9",))
    with pytest.raises(ConfigError, match="replicas_to_aggregate=3: write 1 to 2"):
        Served(role, Distributed(replicas_to_aggregate=3))


def test_what_needs_the_cluster_says_so_before_compile():
    strategy = Served(Role(workers=1, servers=1, server_endpoints=("127.0.0.1:9",)), Distributed())
    with pytest.raises(ClusterError, match="compile"):
        strategy.members  # noqa: B018 - a property


def test_a_server_that_does_not_come_is_named():
    role = Role(workers=1, servers=1, server_endpoints=("127.0.0.1:9",))
    strategy = Served(role, Distributed(timeout=1.5))
    try:
        with pytest.raises(ClusterError, match=r"worker 0 waited 1.5 s for server 0 \(127.0.0.1:9\)"):
            make_model(strategy)
    finally:
        strategy.close()
