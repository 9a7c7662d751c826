"""Which strategy a role gets; nothing connects here."""

from __future__ import annotations

import atexit
import sys

import pytest

from plait.cluster import collective, connect, roles
from plait.cluster.alone import Alone
from plait.cluster.connect import connected, control_of, from_environment, strategy_of
from plait.cluster.ps import strategy as served
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.errors import ClusterError, ConfigError

WORKER = Role(index=1, workers=2, master="127.0.0.1:1", source="torchrun's variables")
SERVED = Role(index=1, workers=2, servers=1, server_endpoints=("127.0.0.1:1",), source="Paddle's variables")


class Fake:
    def __init__(self, role, settings):
        self.role, self.settings = role, settings
        self.closed = 0

    def gather(self, value):
        return [value, "other"]

    def close(self):
        self.closed += 1


class FakeCollective(Fake):
    pass


class FakeServed(Fake):
    pass


@pytest.fixture(autouse=True)
def leaving(monkeypatch):
    """Classes that connect to nothing; what is to be done at the end of the process is kept here."""
    monkeypatch.setattr(collective, "Collective", FakeCollective)
    monkeypatch.setattr(served, "Served", FakeServed)
    for name, fresh in (("_open", {}), ("_controls", {}), ("_ends", [])):
        monkeypatch.setattr(connect, name, fresh)
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    return registered


@pytest.fixture
def role(monkeypatch):
    """Lets the environment give a role."""
    return lambda role: monkeypatch.setattr(connect, "find_role", lambda: role)


def test_one_process_is_alone_in_every_mode(leaving):
    for mode in ("auto", "collective", "sync", "geo"):
        made = strategy_of(Role(), Distributed(mode=mode, gradient_merge=3))
        assert isinstance(made, Alone)
        assert made.gradient_merge == 3
    assert leaving == []


@pytest.mark.parametrize("mode", ["auto", "collective"])
def test_workers_without_servers(mode):
    settings = Distributed(mode=mode)
    made = strategy_of(WORKER, settings)
    assert isinstance(made, FakeCollective)
    assert (made.role, made.settings) == (WORKER, settings)


@pytest.mark.parametrize("mode", ["auto", "sync", "half_async", "async", "geo"])
@pytest.mark.parametrize("kind", ["worker", "server"])
def test_workers_with_servers_and_the_servers(mode, kind):
    role = Role(kind=kind, workers=2, servers=1, server_endpoints=("127.0.0.1:1",))
    assert isinstance(strategy_of(role, Distributed(mode=mode)), FakeServed)


def test_one_worker_with_a_server_is_not_alone():
    role = Role(servers=1, server_endpoints=("127.0.0.1:1",))
    assert isinstance(strategy_of(role, Distributed()), FakeServed)


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_modes_that_need_servers(mode):
    words = f"mode='{mode}' needs servers, and there are none"
    with pytest.raises(ConfigError, match=words):
        strategy_of(WORKER, Distributed(mode=mode))


def test_collective_workers_have_no_servers():
    words = r"mode='collective', but there are 1 servers \(Paddle's variables\): start none"
    with pytest.raises(ConfigError, match=words):
        strategy_of(SERVED, Distributed(mode="collective"))


def test_workers_without_servers_may_train_several_models():
    settings = Distributed()
    made = strategy_of(WORKER, settings)
    assert strategy_of(WORKER, settings) is made


def test_with_other_settings_they_join_anew():
    first = strategy_of(WORKER, Distributed())
    second = strategy_of(WORKER, Distributed(gradient_merge=2))
    assert (first.closed, second.closed) == (1, 0)
    assert strategy_of(WORKER, Distributed(gradient_merge=2)) is second


def test_servers_hold_one_model():
    strategy_of(SERVED, Distributed())
    with pytest.raises(ConfigError, match="this process has a model on the servers already"):
        strategy_of(SERVED, Distributed())


def test_one_that_could_not_join_is_not_kept(monkeypatch):
    def fail(role, settings):
        raise ClusterError("worker 0 did not come")

    monkeypatch.setattr(collective, "Collective", fail)
    with pytest.raises(ClusterError, match="worker 0 did not come"):
        strategy_of(WORKER, Distributed())
    monkeypatch.setattr(collective, "Collective", FakeCollective)
    assert isinstance(strategy_of(WORKER, Distributed()), FakeCollective)


class TestEnvironment:
    def test_none_is_one_process(self, role):
        role(Role())
        assert isinstance(from_environment(5), Alone)

    def test_the_number_of_gradients_of_a_step_is_passed_on(self, role):
        role(SERVED)
        assert from_environment(1).settings == Distributed(mode="sync", replicas_to_aggregate=1)

    def test_settings_are_passed_on(self, role):
        role(WORKER)
        assert connected(Distributed(local_sgd=4)).settings.local_sgd == 4

    def test_settings_connect(self, role):
        role(SERVED)
        assert Distributed(mode="sync").connect(1).settings.replicas_to_aggregate == 1

    def test_it_is_the_one_that_roles_find(self):
        assert connect.find_role is roles.find_role


class TestEnd:
    def test_a_process_that_ends_well_says_goodbye_once(self, leaving):
        made = [strategy_of(one, Distributed()) for one in (WORKER, SERVED)]
        (leave,) = leaving
        leave()
        assert [one.closed for one in made] == [1, 1]

    def test_one_that_fails_is_missed(self, leaving):
        made = strategy_of(WORKER, Distributed())
        sys.excepthook(ValueError, ValueError("mine"), None)
        leaving[0]()
        assert made.closed == 0

    def test_the_error_is_still_shown(self, leaving, monkeypatch):
        shown = []
        monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error))
        strategy_of(WORKER, Distributed())
        sys.excepthook(ValueError, "error", None)
        assert shown == [(ValueError, "error", None)]


class TestControl:
    def test_workers_without_servers_talk_through_their_strategy(self):
        control = control_of(WORKER)
        assert control.gather("start", 1, everyone=True) == [1, "other"]
        control.close()
        assert connect._open[WORKER][1].closed == 1

    def test_there_is_one_for_a_process(self):
        assert control_of(WORKER) is control_of(WORKER)

    def test_it_is_made_anew_with_the_strategy(self):
        first = control_of(WORKER)
        strategy_of(WORKER, Distributed(gradient_merge=2))
        assert control_of(WORKER) is not first

    def test_it_leaves_the_strategy_of_a_model_as_it_is(self):
        made = strategy_of(WORKER, Distributed(local_sgd=4))
        control_of(WORKER).gather("start", 1)
        assert made.closed == 0


def test_what_is_for_workers_without_servers_is_refused_with_them():
    with pytest.raises(ConfigError, match="local_sgd is for workers without servers"):
        strategy_of(SERVED, Distributed(local_sgd=4))
