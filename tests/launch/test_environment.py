from __future__ import annotations

import socket

import pytest

from plait.cluster.roles import find_role, paddle_role
from plait.launch import environment
from plait.launch.environment import Layout, cores, free_ports

GROUP = Layout(workers=("127.0.0.1:4001", "127.0.0.1:4002"))
SERVED = Layout(
    workers=("127.0.0.1:4001", "127.0.0.1:4002"), servers=("127.0.0.1:5001", "127.0.0.1:5002"), sockets="/somewhere"
)


def test_a_worker_of_a_group():
    found = GROUP.environment("worker", 1, {}, restart=2)
    del found["OMP_NUM_THREADS"]
    assert found == {
        "PYTHONUNBUFFERED": "1",
        "PLAIT_ROLE": "worker",
        "PLAIT_INDEX": "1",
        "PLAIT_WORKERS": "2",
        "PLAIT_SERVERS": "0",
        "PLAIT_WORKER_ENDPOINTS": "127.0.0.1:4001,127.0.0.1:4002",
        "PLAIT_RESTART": "2",
        "PLAIT_MASTER": "127.0.0.1:4001",
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:4001,127.0.0.1:4002",
        "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:4002",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": "4002",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4001",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }


def test_a_server():
    found = SERVED.environment("server", 1, {})
    del found["OMP_NUM_THREADS"]
    assert found == {
        "PYTHONUNBUFFERED": "1",
        "PLAIT_ROLE": "server",
        "PLAIT_INDEX": "1",
        "PLAIT_WORKERS": "2",
        "PLAIT_SERVERS": "2",
        "PLAIT_WORKER_ENDPOINTS": "127.0.0.1:4001,127.0.0.1:4002",
        "PLAIT_SERVER_ENDPOINTS": "127.0.0.1:5001,127.0.0.1:5002",
        "PLAIT_RESTART": "0",
        "PLAIT_SOCKETS": "/somewhere",
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:5001,127.0.0.1:5002",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": "5002",
    }


@pytest.mark.parametrize(("layout", "kind"), [(GROUP, "worker"), (SERVED, "worker"), (SERVED, "server")])
@pytest.mark.parametrize("index", [0, 1])
def test_the_roles_that_plait_and_paddles_role_maker_find_are_these(layout, kind, index):
    found = layout.environment(kind, index, {}, restart=1)
    role = find_role(found)
    assert (role.kind, role.index, role.workers, role.servers) == (kind, index, 2, len(layout.servers))
    assert (role.server_endpoints, role.worker_endpoints) == (layout.servers, layout.workers)
    assert (role.master, role.restart) == (None if layout.servers else layout.workers[0], 1)
    theirs = paddle_role(found)
    assert (theirs.kind, theirs.index, theirs.workers, theirs.servers) == (kind, index, 2, len(layout.servers))
    assert (theirs.server_endpoints, theirs.master) == (role.server_endpoints, role.master)


def test_torchruns_variables_alone_give_the_same_role():
    found = GROUP.environment("worker", 1, {})
    kept = {name: value for name, value in found.items() if not name.startswith(("PLAIT_", "PADDLE_", "TRAINING_"))}
    role = find_role(kept)
    assert role.source == "torchrun's variables"
    assert (role.index, role.workers, role.master, role.local_index) == (1, 2, "127.0.0.1:4001", 1)


def test_what_another_launcher_has_set_is_not_passed_on():
    foreign = dict.fromkeys(
        ["PET_NNODES", "RANK", "TF_CONFIG", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID"], "7"
    )
    foreign |= dict.fromkeys(["PLAIT_MASTER", "PLAIT_SOCKETS", "PADDLE_TRAINER_ENDPOINTS", "MASTER_PORT"], "7")
    found = SERVED.environment("worker", 0, {**foreign, "PLAIT_SECRET": "s", "PLAIT_CONFIG": "c", "PATH": "p"})
    assert "7" not in found.values()
    assert (found["PLAIT_SECRET"], found["PLAIT_CONFIG"], found["PATH"]) == ("s", "c", "p")


def test_the_cores_are_shared_out_unless_somebody_has_said_otherwise(monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: 9)
    assert SERVED.environment("worker", 0, {})["OMP_NUM_THREADS"] == "2"
    assert GROUP.environment("worker", 0, {})["OMP_NUM_THREADS"] == "4"
    assert GROUP.environment("worker", 0, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(environment, "cores", lambda: 1)
    assert GROUP.environment("worker", 0, {})["OMP_NUM_THREADS"] == "1"


def test_places_on_several_machines():
    layout = Layout(workers=("a:1", "b:1", "a:2", "b:2", "b:3"))
    found = [layout.environment("worker", index, {}) for index in range(5)]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1", "1", "2"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "3", "2", "3", "3"]
    assert {one["MASTER_ADDR"] for one in found} == {"a"}
    assert [find_role(one).local_index for one in found] == [0, 0, 1, 1, 2]


def test_free_ports_are_free_and_each_is_another():
    ports = free_ports(20, "127.0.0.1")
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_there_are_cores():
    assert cores() >= 1
