"""Every convention of the environment, right and wrong."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.roles import Role, find_role, paddle_role, split_files
from plait.errors import ConfigError, UsageError

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
PYTORCH_JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
KUBEFLOW_2 = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}
SLURM = {
    "SLURM_JOB_ID": "200505", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gnode[10,20,25,37]", "SLURM_STEP_NODELIST": "gnode[20,25,37]",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "MASTER_ADDR": "fe80::1", "MASTER_PORT": "29500",
}  # fmt: skip
PADDLE_SERVERS = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:6170,10.0.0.2:6170", "PADDLE_TRAINERS_NUM": "3",
    "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "2",
}  # fmt: skip
PADDLE_SERVER = PADDLE_SERVERS | {"TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "6170"}
PADDLE_COLLECTIVE = {
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170,10.0.0.2:6171",
    "PADDLE_TRAINER_ID": "3", "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6171", "PADDLE_TRAINERS_NUM": "4",
}  # fmt: skip
TRAINERS = tuple(PADDLE_COLLECTIVE["PADDLE_TRAINER_ENDPOINTS"].split(","))
PLAIT = {
    "PLAIT_ROLE": "worker", "PLAIT_INDEX": "1", "PLAIT_WORKERS": "2", "PLAIT_SERVERS": "2",
    "PLAIT_SERVER_ENDPOINTS": "127.0.0.1:5001,127.0.0.1:5002", "PLAIT_RESTART": "3",
}  # fmt: skip
PLAIT_ENDPOINTS = ("127.0.0.1:5001", "127.0.0.1:5002")
PLAIT_COLLECTIVE = {
    "PLAIT_ROLE": "worker", "PLAIT_INDEX": "1", "PLAIT_WORKERS": "2", "PLAIT_MASTER": "127.0.0.1:5000",
    "PLAIT_WORKER_ENDPOINTS": "a:1, b:1",
}  # fmt: skip


CHIEF, WORKERS, SERVERS = ["c:2222"], ["w0:2222", "w1:2222"], ["p0:2222", "p1:2222"]
FULL = {"chief": CHIEF, "worker": WORKERS, "ps": SERVERS, "evaluator": ["e:2222"]}


def without(environ, *names):
    return {name: text for name, text in environ.items() if name not in names}


def tf(cluster, kind, index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


FOUND = {
    "nothing": ({}, Role()),
    "only a launcher's input": (KUBEFLOW_2, Role()),
    "empty variables": ({"RANK": "", "WORLD_SIZE": " ", "TF_CONFIG": "", "PLAIT_ROLE": ""}, Role()),
    "only a place to meet": ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, Role()),
    "restarted alone": ({"TORCHELASTIC_RESTART_COUNT": "4"}, Role(restart=4)),
    "torchrun": (
        TORCHRUN,
        Role(index=3, workers=4, master="node-0:29500", local_index=1, restart=2, source="torchrun's variables"),
    ),
    "PyTorchJob": (PYTORCH_JOB, Role(workers=2, master="job-master-0:23456", source="torchrun's variables")),
    "torchrun with one": ({"RANK": "0", "WORLD_SIZE": "1"}, Role(source="torchrun's variables")),
    "Slurm": (
        SLURM | {"MASTER_PORT": "12345"},
        Role(index=5, workers=8, local_index=1, master="gnode20:12345", source="Slurm's variables"),
    ),
    "Slurm, the job's hosts": (
        {"SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "a,b", "MASTER_PORT": "9"},
        Role(workers=2, master="a:9", source="Slurm's variables"),
    ),
    "Slurm, batch script": (without(SLURM, *(name for name in SLURM if "STEP" in name)), Role()),
    "Slurm, shell of salloc": (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Role()),
    "Open MPI": (
        MPI, Role(index=1, workers=2, local_index=1, master="[fe80::1]:29500", source="Open MPI's variables"),
    ),
    "Open MPI with one": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, Role(source="Open MPI's variables"),
    ),
    "Paddle's trainer": (
        PADDLE_SERVERS,
        Role(
            index=2, workers=3, servers=2, server_endpoints=("10.0.0.1:6170", "10.0.0.2:6170"),
            source="Paddle's variables",
        ),
    ),
    "Paddle's trainer with endpoints": (
        PADDLE_SERVERS | {"PADDLE_TRAINER_ENDPOINTS": "t:1,t:2,t:3"},
        Role(
            index=2, workers=3, servers=2, server_endpoints=("10.0.0.1:6170", "10.0.0.2:6170"),
            worker_endpoints=("t:1", "t:2", "t:3"), local_index=2, source="Paddle's variables",
        ),
    ),
    "Paddle's server": (
        PADDLE_SERVER,
        Role(
            kind="server", index=1, workers=3, servers=2, server_endpoints=("10.0.0.1:6170", "10.0.0.2:6170"),
            source="Paddle's variables",
        ),
    ),
    "Paddle's collective": (
        PADDLE_COLLECTIVE,
        Role(
            index=3, workers=4, worker_endpoints=TRAINERS, master=TRAINERS[0], local_index=1,
            source="Paddle's variables",
        ),
    ),
    "Paddle's role without a list": ({"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINERS_NUM": "1"}, Role()),
    "plait's worker": (
        PLAIT,
        Role(
            index=1, workers=2, servers=2, server_endpoints=PLAIT_ENDPOINTS, local_index=1, restart=3,
            source="plait launch's variables",
        ),
    ),
    "plait's server": (
        PLAIT | {"PLAIT_ROLE": "server"},
        Role(
            kind="server", index=1, workers=2, servers=2, server_endpoints=PLAIT_ENDPOINTS, restart=3,
            source="plait launch's variables",
        ),
    ),
    "plait's collective": (
        PLAIT_COLLECTIVE,
        Role(
            index=1, workers=2, master="127.0.0.1:5000", worker_endpoints=("a:1", "b:1"),
            source="plait launch's variables",
        ),
    ),
    "TF_CONFIG, workers": (
        tf({"worker": ["h:1", "g:1", "h:2"]}, "worker", 2),
        Role(
            index=2, workers=3, worker_endpoints=("h:1", "g:1", "h:2"), master="h:1", local_index=1, source="TF_CONFIG"
        ),
    ),
    "TF_CONFIG without a cluster": ({"TF_CONFIG": '{"environment": "cloud"}'}, Role()),
    "TF_CONFIG with an empty one": ({"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker"}}'}, Role()),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name):
    environ, role = FOUND[name]
    assert find_role(environ) == role


@pytest.mark.parametrize(
    ("kind", "index", "found"),
    [
        ("chief", 0, ("worker", 0)),
        ("master", 0, ("worker", 0)),
        ("worker", 0, ("worker", 1)),
        ("worker", "1", ("worker", 2)),
        ("ps", 1, ("server", 1)),
    ],
)
@pytest.mark.parametrize("word", ["chief", "master"])
def test_the_chief_of_tf_config_is_worker_0(kind, index, found, word):
    cluster = {word: CHIEF, **{name: FULL[name] for name in ("worker", "ps", "evaluator")}}
    role = find_role(tf(cluster, kind, index))
    assert (role.kind, role.index) == found
    assert role.worker_endpoints == (*CHIEF, *WORKERS)
    assert role.server_endpoints == tuple(SERVERS)
    assert (role.workers, role.servers, role.master, role.source) == (3, 2, None, "TF_CONFIG")


def test_the_order_of_conventions():
    everything = {}
    for source, environ in [
        ("one process", {}),
        ("Open MPI's variables", MPI),
        ("Slurm's variables", SLURM),
        ("torchrun's variables", TORCHRUN),
        ("Paddle's variables", PADDLE_COLLECTIVE),
        ("TF_CONFIG", tf(FULL, "worker")),
        ("plait launch's variables", PLAIT),
    ]:
        everything |= environ
        assert find_role(everything).source == source


def test_the_environment_of_this_process_is_what_is_read(monkeypatch):
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    assert find_role() == find_role(TORCHRUN)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "a:1")
    assert paddle_role().worker_endpoints == ("a:1",)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("localhost", "localhost"),
        ("gpu[01-04,7],big2", "gpu01"),
        ("big2,gpu[01-04]", "big2"),
        ("gnode[10,20]", "gnode10"),
        ("rack[3-4]n[008-011]", "rack3n008"),
        ("a-b[5]-ib.site,c", "a-b5-ib.site"),
    ],
)
def test_the_first_host_of_slurm(hosts, first):
    assert find_role(SLURM | {"SLURM_STEP_NODELIST": hosts, "MASTER_PORT": "1"}).master == f"{first}:1"
    assert find_role(SLURM | {"SLURM_STEP_NODELIST": hosts, "MASTER_ADDR": "m", "MASTER_PORT": "1"}).master == "m:1"


def test_the_port_of_slurm_comes_from_the_job_and_the_step():
    ports = [
        int(find_role(SLURM | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master.rpartition(":")[2])
        for job in ("1", "2", "4294967295")
        for step in ("0", "1", "2")
    ]
    assert len(set(ports)) == 9
    assert all(10_000 <= port < 30_000 for port in ports)
    everyone = {find_role(SLURM | {"SLURM_PROCID": str(rank)}).master for rank in range(8)}
    assert len(everyone) == 1


@pytest.mark.parametrize(
    ("more", "local"),
    [
        ({}, 1),
        ({"PADDLE_RANK_IN_NODE": "3"}, 3),
        ({"FLAGS_selected_gpus": "5", "PADDLE_RANK_IN_NODE": "3"}, 5),
        ({"FLAGS_selected_gpus": "4,5"}, 1),
    ],
)
def test_the_gpu_of_paddles_trainer(more, local):
    assert find_role(PADDLE_COLLECTIVE | more).local_index == local


@pytest.mark.parametrize("left_out", ["PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT"])
def test_paddles_trainer_is_known_by_its_number_or_its_endpoint(left_out):
    assert find_role(without(PADDLE_COLLECTIVE, left_out)).index == 3


def test_the_only_trainer_needs_no_number():
    assert find_role({"PADDLE_TRAINER_ENDPOINTS": "a:1"}).index == 0


class TestPaddlesTwoKinds:
    def test_which_is_meant_can_be_said(self):
        both = PADDLE_SERVERS | {"PADDLE_TRAINER_ENDPOINTS": "t:1,t:2,t:3"}
        assert paddle_role(both).servers == paddle_role(both, collective=False).servers == 2
        assert paddle_role(both, collective=True).servers == 0

    def test_one_trainer_without_servers_is_one_process(self):
        assert paddle_role({"PADDLE_TRAINER_ENDPOINTS": "a:1"}, collective=False) is None

    @pytest.mark.parametrize("collective", [None, True, False])
    def test_no_variables_no_role(self, collective):
        assert paddle_role({}, collective=collective) is None

    @pytest.mark.parametrize(
        ("environ", "collective", "text"),
        [
            (PADDLE_SERVERS, True, "PADDLE_TRAINER_ENDPOINTS is not: set it, or write is_collective=False"),
            (PADDLE_COLLECTIVE, False, "PADDLE_PSERVERS_IP_PORT_LIST is not: set it, or write is_collective=True"),
        ],
    )
    def test_the_other_kind_is_refused(self, environ, collective, text):
        with pytest.raises(ConfigError, match=re.escape(text)):
            paddle_role(environ, collective=collective)


WRONG = [
    (TORCHRUN | {"RANK": "4"}, "RANK=4 with WORLD_SIZE=4: write a number from 0 to 3"),
    ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 with WORLD_SIZE=1: write 0"),
    (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set: write how many workers there are"),
    (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
    (without(TORCHRUN, "RANK"), "RANK is not set: write this worker's number"),
    (TORCHRUN | {"RANK": "-1"}, "RANK='-1': write a whole number from 0 on"),
    (TORCHRUN | {"RANK": "1.0"}, "RANK='1.0': write a whole number"),
    (TORCHRUN | {"RANK": "9" * 5000}, "write a whole number"),
    (TORCHRUN | {"RANK": "\u0661"}, "write a whole number"),
    (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0': write a whole number from 1 on"),
    (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK='x': write a whole number"),
    (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x'"),
    (TORCHRUN | {"PLAIT_RESTART": "x"}, "PLAIT_RESTART='x'"),
    (without(TORCHRUN, "MASTER_ADDR"), "WORLD_SIZE=4, but MASTER_ADDR is not set: write MASTER_ADDR and MASTER_PORT"),
    (without(TORCHRUN, "MASTER_PORT"), "WORLD_SIZE=4, but MASTER_PORT is not set"),
    (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_ADDR:MASTER_PORT: 'node-0:70000' is no endpoint: write host:port"),
    (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT='x': write a whole number"),
    (without(SLURM, "SLURM_PROCID"), "SLURM_PROCID is not set: write this worker's number"),
    (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 with SLURM_STEP_NUM_TASKS=8"),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "", "SLURM_PROCID": "8"}, "SLURM_PROCID=8 with SLURM_NTASKS=8"),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS='many': write a whole number"),
    (without(SLURM, "SLURM_NODELIST", "SLURM_STEP_NODELIST"), "SLURM_NODELIST is not set: write the step's hosts"),
    (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST='n[1-' is not a list of hosts: write it as in"),
    (SLURM | {"SLURM_STEP_NODELIST": ",a"}, "SLURM_STEP_NODELIST=',a' is not a list of hosts"),
    (without(SLURM, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set: write the job's number, or a MASTER_PORT"),
    (without(MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
    (MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2 with OMPI_COMM_WORLD_SIZE=2"),
    (without(MPI, "MASTER_ADDR"), "OMPI_COMM_WORLD_SIZE=2, but MASTER_ADDR is not set"),
    (without(PADDLE_SERVERS, "TRAINING_ROLE"), "TRAINING_ROLE is not set: write TRAINER or PSERVER"),
    (PADDLE_SERVERS | {"TRAINING_ROLE": "HETER_TRAINER"}, "TRAINING_ROLE='HETER_TRAINER': write TRAINER or PSERVER"),
    (without(PADDLE_SERVERS, "PADDLE_TRAINERS_NUM"), "PADDLE_TRAINERS_NUM is not set: write how many trainers"),
    (without(PADDLE_SERVERS, "PADDLE_TRAINER_ID"), "PADDLE_TRAINER_ID is not set: write this trainer's number"),
    (PADDLE_SERVERS | {"PADDLE_TRAINER_ID": "two"}, "PADDLE_TRAINER_ID='two': write a whole number from 0 on"),
    (PADDLE_SERVERS | {"PADDLE_TRAINER_ID": "3"}, "PADDLE_TRAINER_ID=3 with PADDLE_TRAINERS_NUM=3"),
    (PADDLE_SERVERS | {"PADDLE_TRAINER_ENDPOINTS": "a:1"}, "PADDLE_TRAINER_ENDPOINTS has 1 endpoints, PADDLE_TRAINERS"),
    (PADDLE_SERVERS | {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,"}, "PADDLE_PSERVERS_IP_PORT_LIST: '' is no endpoint"),
    (
        PADDLE_SERVERS | {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,a:1"},
        "PADDLE_PSERVERS_IP_PORT_LIST: a:1 stands there twi",
    ),
    (without(PADDLE_SERVER, "POD_IP"), "POD_IP is not set: write this server's address"),
    (without(PADDLE_SERVER, "PADDLE_PORT"), "PADDLE_PORT is not set: write the port of this server"),
    (
        PADDLE_SERVER | {"PADDLE_PORT": "6171"},
        "POD_IP:PADDLE_PORT=10.0.0.2:6171 is not in PADDLE_PSERVERS_IP_PORT_LIST=10.0.0.1:6170,10.0.0.2:6170: write",
    ),
    ({"TRAINING_ROLE": "PSERVER"}, "TRAINING_ROLE=PSERVER, but PADDLE_PSERVERS_IP_PORT_LIST is not set: write"),
    (
        {"PADDLE_TRAINERS_NUM": "2"},
        "PADDLE_TRAINERS_NUM=2, but neither PADDLE_PSERVERS_IP_PORT_LIST nor PADDLE_TRAINER_",
    ),
    (
        PADDLE_COLLECTIVE | {"PADDLE_TRAINER_ID": "4"},
        "PADDLE_TRAINER_ID=4 with the length of PADDLE_TRAINER_ENDPOINTS=4",
    ),
    (
        PADDLE_COLLECTIVE | {"PADDLE_TRAINER_ID": "0"},
        "PADDLE_TRAINER_ID=0 is 10.0.0.1:6170 in PADDLE_TRAINER_ENDPOINTS",
    ),
    (
        PADDLE_COLLECTIVE | {"PADDLE_CURRENT_ENDPOINT": "b:1"},
        "PADDLE_CURRENT_ENDPOINT='b:1' is not in PADDLE_TRAINER_EN",
    ),
    (
        without(PADDLE_COLLECTIVE, "PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT"),
        "PADDLE_TRAINER_ID is not set: write this trainer's number",
    ),
    (
        PADDLE_COLLECTIVE | {"TRAINING_ROLE": "PSERVER"},
        "TRAINING_ROLE='PSERVER' without servers: write TRAINER, or set",
    ),
    (PADDLE_COLLECTIVE | {"PADDLE_TRAINING_ROLE": "x"}, "PADDLE_TRAINING_ROLE='x' without servers"),
    (PADDLE_COLLECTIVE | {"FLAGS_selected_gpus": "x"}, "FLAGS_selected_gpus='x'"),
    (PLAIT | {"PLAIT_ROLE": "ps"}, "PLAIT_ROLE='ps': write worker or server"),
    (without(PLAIT, "PLAIT_INDEX"), "PLAIT_INDEX is not set: write this worker's number"),
    (without(PLAIT, "PLAIT_WORKERS"), "PLAIT_WORKERS is not set: write how many workers there are"),
    (PLAIT | {"PLAIT_INDEX": "2"}, "PLAIT_INDEX=2 with PLAIT_WORKERS=2"),
    (
        PLAIT_COLLECTIVE | {"PLAIT_ROLE": "server"},
        "PLAIT_INDEX=1 with PLAIT_SERVERS=0: write how many there are in PLAIT",
    ),
    (PLAIT | {"PLAIT_SERVERS": "3"}, "PLAIT_SERVER_ENDPOINTS has 2 endpoints, PLAIT_SERVERS=3: write one for each"),
    (PLAIT | {"PLAIT_SERVERS": ""}, "PLAIT_SERVER_ENDPOINTS has 2 endpoints, PLAIT_SERVERS=0: write one for each"),
    (PLAIT_COLLECTIVE | {"PLAIT_WORKERS": "3"}, "PLAIT_WORKER_ENDPOINTS has 2 endpoints, PLAIT_WORKERS=3"),
    (without(PLAIT_COLLECTIVE, "PLAIT_MASTER"), "PLAIT_MASTER is not set: write host:port, where the workers meet"),
    (PLAIT_COLLECTIVE | {"PLAIT_MASTER": "here"}, "PLAIT_MASTER: 'here' is no endpoint: write host:port"),
    ({"TF_CONFIG": "{"}, "TF_CONFIG='{' is not JSON"),
    ({"TF_CONFIG": "[" * 100_000}, "is not JSON"),
    ({"TF_CONFIG": "[]"}, "TF_CONFIG='[]' does not describe a cluster: write {"),
    ({"TF_CONFIG": '{"cluster": ["a:1"]}'}, "does not describe a cluster"),
    (
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
        "TF_CONFIG's task is None: write {'type': 'worker', 'index': 0}",
    ),
    (
        tf(FULL, "evaluator"),
        "TF_CONFIG's task is an evaluator, plait has none: evaluate inside training, or run one pro",
    ),
    (tf(FULL, "tpu"), "TF_CONFIG's task has type='tpu': write 'chief', 'worker' or 'ps'"),
    (tf(FULL, ["ps"]), "TF_CONFIG's task has type=['ps']"),
    (
        tf(FULL, "worker", 2),
        "TF_CONFIG's task index=2 with the length of its worker list=2: write a number from 0 to 1",
    ),
    (tf(FULL, "worker", -1), "TF_CONFIG's task has index=-1: write a whole number from 0 on"),
    (tf(FULL, "worker", True), "TF_CONFIG's task has index=True"),
    (tf({"worker": WORKERS}, "ps"), "TF_CONFIG's task is a ps, its cluster has none: write its 'host:port' under 'ps'"),
    (tf({"ps": SERVERS}, "ps"), "TF_CONFIG's cluster has no worker: write at least one"),
    (tf({"worker": "a:1"}, "worker"), "TF_CONFIG's cluster has worker='a:1': write a list of 'host:port'"),
    (tf({"worker": {"0": "a:1"}}, "worker"), "TF_CONFIG's cluster has worker={'0': 'a:1'}: write a list"),
    (tf({"worker": [7]}, "worker"), "TF_CONFIG's worker: 7 is no endpoint"),
    (tf({"worker": ["a"]}, "worker"), "TF_CONFIG's worker: 'a' is no endpoint: write host:port"),
    (tf({"worker": ["a:1"], "ps": ["a:1"]}, "ps"), "TF_CONFIG's cluster: a:1 stands there twice"),
    (tf({"gpus": ["a:1"]}, "worker"), "TF_CONFIG's cluster has 'gpus': plait knows chief, master, worker, ps"),
    (tf({"chief": ["a:1", "b:1"]}, "chief"), "TF_CONFIG's cluster has the chiefs a:1, b:1: write one"),
    (tf({"chief": ["a:1"], "master": ["b:1"]}, "chief"), "TF_CONFIG's cluster has the chiefs a:1, b:1"),
]


@pytest.mark.parametrize(("environ", "text"), WRONG, ids=[f"{i}-{text[:40]}" for i, (_, text) in enumerate(WRONG)])
def test_what_is_wrong_is_named(environ, text):
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        find_role(environ)
    assert len(str(caught.value)) < 400


NAMES = sorted({*PLAIT, *PLAIT_COLLECTIVE, *PADDLE_SERVER, *PADDLE_COLLECTIVE, *TORCHRUN, *SLURM, *MPI})
TEXTS = ["", "0", "1", "2", "worker", "server", "TRAINER", "PSERVER", "a:1", "a:1,b:1", "b:1", "n[1-2]"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.sampled_from(["worker", "ps", "chief", "a:1", "b:1"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["worker", "ps", "type", "index"]), inner)
    ),
    max_leaves=6,
)


def complaint(environ):
    """What is wrong with the environment, if no role comes out."""
    try:
        assert isinstance(find_role(environ), Role)
    except ConfigError as error:
        return str(error)
    return None


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TEXTS) | st.text(max_size=5)))
def test_any_environment_gives_a_role_or_says_what_is_wrong(environ):
    text = complaint(environ)
    assert text is None or ": " in text


@given(JSON, JSON)
def test_any_tf_config_gives_a_role_or_says_what_is_wrong(cluster, task):
    text = complaint({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    assert text is None or text.startswith("TF_CONFIG")


class TestRole:
    def test_one_process(self):
        role = Role()
        assert (role.is_worker, role.is_server, role.is_chief, role.is_collective, role.alone) == (
            True, False, True, True, True,
        )  # fmt: skip

    def test_a_server_is_no_chief(self):
        role = Role(kind="server", servers=1, server_endpoints=("a:1",))
        assert (role.is_worker, role.is_server, role.is_chief, role.is_collective, role.alone) == (
            False, True, False, False, False,
        )  # fmt: skip

    def test_a_second_worker(self):
        role = Role(index=1, workers=2)
        assert (role.is_chief, role.is_collective, role.alone) == (False, True, False)

    def test_it_cannot_be_changed_and_can_be_a_key(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            Role().index = 1
        assert len({Role(), Role(), Role(restart=1)}) == 2

    @pytest.mark.parametrize(
        "endpoint", ["a:1", "10.0.0.1:65535", "[::1]:80", "[fe80::1%eth0]:80", "x-y.svc.local:2222"]
    )
    def test_endpoints(self, endpoint):
        assert Role(master=endpoint).master == endpoint

    @pytest.mark.parametrize(
        "endpoint",
        ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:+1", "::1:80", "http://a:1", "a b:1", "a:1 ", None, 5],
    )
    def test_what_is_none(self, endpoint):
        with pytest.raises(ConfigError, match=r"^worker_endpoints: .* is no endpoint: write host:port"):
            Role(worker_endpoints=(endpoint,))

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"kind": "ps"}, "kind='ps': write 'worker' or 'server'"),
            ({"index": -1}, "index=-1: write a whole number from 0 on"),
            ({"index": 1}, "index=1 with workers=1: write 0"),
            ({"index": True}, "index=True: write a whole number"),
            ({"workers": 0}, "workers=0: write a whole number from 1 on"),
            ({"workers": 2.0}, "workers=2.0: write a whole number"),
            ({"servers": -1}, "servers=-1: write a whole number from 0 on"),
            ({"local_index": -1}, "local_index=-1"),
            ({"restart": "1"}, "restart='1'"),
            ({"kind": "server"}, "index=0 with servers=0: write how many there are in servers"),
            ({"servers": 1}, "server_endpoints has 0 endpoints, servers=1: write one for each"),
            ({"worker_endpoints": ("a:1", "b:1")}, "worker_endpoints has 2 endpoints, workers=1"),
            ({"worker_endpoints": ["a:1"]}, "worker_endpoints=['a:1']: write a tuple of 'host:port'"),
            ({"workers": 2, "worker_endpoints": ("a:1", "a:1")}, "a:1 stands there twice: write another port"),
            ({"servers": 1, "worker_endpoints": ("a:1",), "server_endpoints": ("a:1",)}, "a:1 stands there twice"),
            ({"master": "a"}, "master: 'a' is no endpoint"),
        ],
    )
    def test_what_is_wrong_is_named(self, fields, text):
        with pytest.raises(ConfigError, match=re.escape(text)):
            Role(**fields)


class TestSplitFiles:
    @pytest.mark.parametrize(("files", "sizes"), [(5, [3, 2]), (2, [1, 1, 0]), (0, [0, 0]), (4, [4]), (7, [3, 2, 2])])
    def test_the_first_get_one_more(self, files, sizes):
        names = [str(number) for number in range(files)]
        assert [len(split_files(names, index, len(sizes))) for index in range(len(sizes))] == sizes

    @given(st.lists(st.text()), st.integers(1, 50))
    def test_it_is_a_partition_in_order(self, files, count):
        blocks = [split_files(files, index, count) for index in range(count)]
        assert [name for block in blocks for name in block] == files
        sizes = [len(block) for block in blocks]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("a", 0, 1), "files is a str: write a list of names"),
            ((("a",), 0, 1), "files is a tuple"),
            ((None, 0, 1), "files is a NoneType"),
            ((["a"], 2, 2), "index=2 with count=2: write a number from 0 to 1"),
            ((["a"], -1, 2), "index=-1 with count=2"),
            ((["a"], 0, 0), "count=0: write how many workers there are"),
        ],
    )
    def test_what_is_wrong_is_named(self, arguments, text):
        with pytest.raises(UsageError, match=re.escape(text)):
            split_files(*arguments)
