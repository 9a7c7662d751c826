from __future__ import annotations

import pytest

from plait.engine.strategy import Local
from plait.errors import ConfigError
from plait.mox import hosts
from plait.mox.flags import reset_flags, set_flag
from plait.mox.spec import ModeKeys

WORKERS, SERVERS = "10.0.0.1:70,10.0.0.2:70", "10.0.0.3:71"


@pytest.fixture(autouse=True)
def no_flags():
    yield
    reset_flags()


def flags(**values):
    for name, value in values.items():
        set_flag(name, value)


def test_without_hosts_the_environment_decides():
    assert hosts.role_of_flags() is None
    assert hosts.strategy_for(ModeKeys.TRAIN).worker_num == 1


def test_a_worker_of_a_group_meets_at_the_first():
    flags(worker_hosts=WORKERS, task_index=1)
    role = hosts.role_of_flags()
    assert (role.kind, role.index, role.workers, role.servers, role.master) == ("worker", 1, 2, 0, "10.0.0.1:70")


def test_a_server():
    flags(worker_hosts=WORKERS, ps_hosts=SERVERS, job_name="ps")
    role = hosts.role_of_flags()
    assert (role.kind, role.index, role.server_endpoints) == ("server", 0, ("10.0.0.3:71",))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"worker_hosts": WORKERS, "job_name": "chief"}, "job_name='chief': write 'worker' or 'ps'"),
        ({"worker_hosts": WORKERS, "task_index": 2}, "task_index=2: there are 2 of job 'worker'"),
        ({"ps_hosts": SERVERS}, "ps_hosts without worker_hosts"),
    ],
)
def test_flags_that_do_not_fit(given, words):
    flags(**given)
    with pytest.raises(ConfigError, match=words):
        hosts.role_of_flags()


def test_workers_that_do_not_wait_for_each_other_need_servers():
    flags(worker_hosts=WORKERS, sync_replicas=False)
    with pytest.raises(ConfigError, match="sync_replicas=false needs servers"):
        hosts.strategy_for(ModeKeys.TRAIN)


@pytest.mark.parametrize(("synchronous", "mode"), [(True, "sync"), (False, "async")])
def test_sync_replicas_chooses_the_mode(synchronous, mode, monkeypatch):
    flags(worker_hosts=WORKERS, ps_hosts=SERVERS, sync_replicas=synchronous)
    monkeypatch.setattr(hosts, "strategy_of", lambda role, settings: settings.mode)
    assert hosts.strategy_for(ModeKeys.TRAIN) == mode


def test_with_servers_the_first_worker_evaluates_alone():
    flags(worker_hosts=WORKERS, ps_hosts=SERVERS)
    assert isinstance(hosts.strategy_for(ModeKeys.EVAL), Local)
    flags(task_index=1)
    assert hosts.strategy_for(ModeKeys.EVAL) is None
