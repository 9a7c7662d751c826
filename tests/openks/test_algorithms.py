"""The life of an algorithm in one process, and what is said in the wrong order or place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.errors import ConfigError
from plait.openks import (
    AutoRoleMaker,
    BaseDistributedAlgorithm,
    CPUDistributedAlgorithm,
    GPUDistributedAlgorithm,
    KSDistributedFactory,
    Mode,
    PaddleCloudRoleMaker,
    Role,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)

SERVERS = ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.fixture(autouse=True)
def fresh_factory(monkeypatch):
    monkeypatch.setattr(KSDistributedFactory, "_made", {})


def maker(role=Role.WORKER, index=0):
    return UserDefinedRoleMaker(index, role, worker_num=2, server_endpoints=SERVERS)


def algorithm_of(role_maker=None, kind=CPUDistributedAlgorithm):
    algorithm = kind()
    algorithm.init(role_maker)
    return algorithm


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_modes():
    assert [(mode.name, mode.value) for mode in Mode] == [("TRANSPILER", 1), ("PSLIB", 2), ("COLLECTIVE", 3)]
    with pytest.raises(ConfigError, match="mode=4: write Mode.TRANSPILER"):
        BaseDistributedAlgorithm(4)


def test_the_factory_gives_one_object_for_each_flag():
    assert type(KSDistributedFactory.instantiation(0)) is CPUDistributedAlgorithm
    assert type(KSDistributedFactory.instantiation(1)) is GPUDistributedAlgorithm
    assert KSDistributedFactory.instantiation(0) is KSDistributedFactory.instantiation(0)
    assert KSDistributedFactory().instantiation(1) is KSDistributedFactory.instantiation(1)


@pytest.mark.parametrize("flag", [2, -1, None, "0", 0.0])
def test_the_factory_refuses_other_flags(flag):
    with pytest.raises(ConfigError, match="write 0 for parameter servers, 1"):
        KSDistributedFactory.instantiation(flag)


@pytest.mark.parametrize("kind", [CPUDistributedAlgorithm, GPUDistributedAlgorithm])
def test_one_process_is_the_first_worker_and_the_only_one(kind):
    algorithm = algorithm_of(kind=kind)
    assert algorithm.is_first_worker()
    assert algorithm.is_worker()
    assert algorithm._is_worker()
    assert not algorithm.is_server()
    assert (algorithm.worker_index(), algorithm.worker_num(), algorithm.server_num()) == (0, 1, 0)
    assert algorithm.worker_endpoints() == algorithm.server_endpoints() == []
    output = [0, 0]
    algorithm.all_reduce_worker([3, 4], output)
    assert output == [3, 4]
    algorithm.barrier_workers()
    algorithm.barrier_worker()


def test_what_the_role_maker_says():
    algorithm = algorithm_of(maker(Role.SERVER, 1))
    assert algorithm.is_server()
    assert not algorithm.is_first_worker()
    assert not algorithm._is_worker()
    assert (algorithm.server_index(), algorithm.server_num(), algorithm.worker_num()) == (1, 2, 2)
    assert algorithm.server_endpoints() == SERVERS
    assert algorithm.server_endpoints(to_string=True) == ",".join(SERVERS)
    workers = UserDefinedCollectiveRoleMaker(1, SERVERS)
    assert algorithm_of(workers, GPUDistributedAlgorithm).worker_endpoints(True) == ",".join(SERVERS)


@pytest.mark.parametrize(("index", "mine"), [(0, ["a", "b", "c"]), (1, ["d", "e"])])
def test_files_are_split_in_blocks(index, mine):
    assert algorithm_of(maker(index=index)).split_files(["a", "b", "c", "d", "e"]) == mine


def test_fewer_files_than_workers_and_servers():
    assert algorithm_of(maker(index=1)).split_files(["a"]) == []
    assert algorithm_of(maker(Role.SERVER)).split_files(["a"]) == []
    with pytest.raises(ConfigError, match="files is a str: write a list"):
        algorithm_of().split_files("a")


@pytest.mark.parametrize("flag", [0, 1])
def test_a_whole_life_and_another_one(flag):
    for role_maker in (None, PaddleCloudRoleMaker(is_collective=bool(flag)), AutoRoleMaker()):
        algorithm = KSDistributedFactory.instantiation(flag)
        algorithm.init(role_maker)
        model = nn.Linear(2, 1)
        optimizer = algorithm.distributed_optimizer(optimizer_of(model))
        algorithm.init_worker()
        algorithm.run_worker()
        optimizer.minimize(model(torch.ones(3, 2)).sum())
        algorithm.stop_worker()
        algorithm.stop_worker()
        assert algorithm.is_first_worker()
        with pytest.raises(ConfigError, match="stop_worker"):
            optimizer.minimize(model(torch.ones(3, 2)).sum())


def test_before_init():
    for ask in ("is_worker", "worker_num", "server_endpoints", "barrier_workers", "init_worker", "run_server"):
        with pytest.raises(ConfigError, match=r"write algorithm.init\(role_maker\) before"):
            getattr(CPUDistributedAlgorithm(), ask)()
    with pytest.raises(ConfigError, match=r"write algorithm.init\(role_maker\) before"):
        CPUDistributedAlgorithm().distributed_optimizer(optimizer_of(nn.Linear(1, 1)))


def test_init_twice():
    algorithm = algorithm_of()
    with pytest.raises(ConfigError, match="init.. was called before"):
        algorithm.init()


def test_a_role_maker_that_is_none():
    with pytest.raises(ConfigError, match="role_maker is a str: write PaddleCloudRoleMaker"):
        algorithm_of("worker")


def test_an_algorithm_for_another_kind_of_cluster():
    with pytest.raises(ConfigError, match=r"name 2: start none, or write KSDistributedFactory.instantiation\(0\)"):
        algorithm_of(maker(), GPUDistributedAlgorithm)
    with pytest.raises(ConfigError, match=r"no server: start some .*instantiation\(1\)"):
        algorithm_of(UserDefinedCollectiveRoleMaker(0, SERVERS), CPUDistributedAlgorithm)


@pytest.mark.parametrize("call", ["init_server", "run_server"])
def test_a_worker_is_no_server(call):
    with pytest.raises(ConfigError, match=rf"{call}\(\) is for a server, this is worker 0"):
        getattr(algorithm_of(), call)()


@pytest.mark.parametrize("call", ["init_worker", "run_worker", "stop_worker"])
def test_a_server_is_no_worker(call):
    name = "init_worker" if call == "run_worker" else call
    with pytest.raises(ConfigError, match=rf"{name}\(\) is for a worker, this is server 1"):
        getattr(algorithm_of(maker(Role.SERVER, 1)), call)()


def test_a_server_takes_no_steps_and_saves_nothing(tmp_path):
    algorithm, model = algorithm_of(maker(Role.SERVER, 1)), nn.Linear(2, 1)
    optimizer = algorithm.distributed_optimizer(optimizer_of(model))
    with pytest.raises(ConfigError, match=r"server 1, which takes no steps: write algorithm.run_server\(\)"):
        optimizer.minimize(model(torch.ones(3, 2)).sum())
    with pytest.raises(ConfigError, match="is for a worker"):
        algorithm.save_persistables(None, tmp_path)


def test_a_worker_that_has_not_met_the_servers():
    algorithm, model = algorithm_of(maker()), nn.Linear(2, 1)
    optimizer = algorithm.distributed_optimizer(optimizer_of(model))
    with pytest.raises(ConfigError, match=r"write algorithm.init_worker\(\) before the loop"):
        optimizer.minimize(model(torch.ones(3, 2)).sum())


def test_init_worker_without_an_optimizer():
    with pytest.raises(ConfigError, match=r"init_worker\(\) before distributed_optimizer\(\)"):
        algorithm_of().init_worker()


def test_two_optimizers():
    algorithm = algorithm_of()
    algorithm.distributed_optimizer(optimizer_of(nn.Linear(1, 1)))
    with pytest.raises(ConfigError, match="several parameter groups"):
        algorithm.distributed_optimizer(optimizer_of(nn.Linear(1, 1)))


def test_a_model_dir_that_is_none(tmp_path):
    algorithm = algorithm_of(maker(Role.SERVER))
    with pytest.raises(ConfigError, match="is no directory: name one that save_persistables wrote"):
        algorithm.init_server(tmp_path / "none")


def test_saving_without_an_optimizer(tmp_path):
    with pytest.raises(ConfigError, match=r"save_persistables\(\) before distributed_optimizer\(\)"):
        algorithm_of().save_persistables(None, tmp_path)


@pytest.mark.parametrize("call", ["save_persistables", "load_persistables"])
def test_a_main_program_that_is_none(call, tmp_path):
    algorithm = algorithm_of()
    algorithm.distributed_optimizer(optimizer_of(nn.Linear(1, 1)))
    with pytest.raises(ConfigError, match="main_program is a str: write the nn.Module"):
        getattr(algorithm, call)(None, tmp_path, "main")
