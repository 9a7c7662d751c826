"""Role makers: where each finds its role, and the four methods that talk, over a control of threads."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster import roles
from plait.errors import ClusterError, ConfigError
from plait.openks.role_maker import (
    AutoRoleMaker,
    PaddleCloudRoleMaker,
    Role,
    RoleMakerBase,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)

SERVERS = ["127.0.0.1:6001", "127.0.0.1:6002"]
VARIABLES = re.compile(
    r"(PLAIT|PADDLE|SLURM|OMPI|TORCHELASTIC|MASTER|LOCAL)_|TF_CONFIG$|RANK$|WORLD_SIZE$|TRAINING_ROLE$"
)
PADDLE_SERVED = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:6001,127.0.0.1:6002", "PADDLE_TRAINERS_NUM": "2",
    "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1",
}  # fmt: skip
PADDLE_SERVER = PADDLE_SERVED | {"TRAINING_ROLE": "PSERVER", "POD_IP": "127.0.0.1", "PADDLE_PORT": "6002"}
PADDLE_COLLECTIVE = {"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1", "PADDLE_TRAINER_ID": "1"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
PLAIT = {
    "PLAIT_ROLE": "server", "PLAIT_INDEX": "0", "PLAIT_WORKERS": "2", "PLAIT_SERVERS": "1",
    "PLAIT_SERVER_ENDPOINTS": "a:5",
}  # fmt: skip


@pytest.fixture
def environ(monkeypatch):
    """Gives this process these variables, and no other that could name a cluster."""

    def give(variables):
        for name in [name for name in os.environ if VARIABLES.match(name)]:
            monkeypatch.delenv(name)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    give({})
    return give


DOCUMENTED = [
    (RoleMakerBase, []),
    *[
        (getattr(RoleMakerBase, name), ["self"])
        for name in (
            "is_worker", "is_server", "is_first_worker", "worker_num", "worker_index", "server_index", "server_num",
            "get_trainer_endpoints", "get_pserver_endpoints", "to_string", "barrier_worker", "barrier_all",
            "generate_role",
        )
    ],
    (RoleMakerBase.all_gather, ["self", "input"]),
    (RoleMakerBase.all_reduce_worker, ["self", "input", "output", ("mode", "sum")]),
    (PaddleCloudRoleMaker, [("is_collective", False)]),
    (
        UserDefinedRoleMaker,
        [("current_id", 0), ("role", Role.WORKER), ("worker_num", 0), ("server_endpoints", None)],
    ),
    (UserDefinedCollectiveRoleMaker, [("current_id", 0), ("worker_endpoints", None)]),
    (AutoRoleMaker, []),
]  # fmt: skip


@pytest.mark.parametrize(("function", "parameters"), DOCUMENTED, ids=lambda value: getattr(value, "__name__", ""))
def test_signatures(function, parameters):
    found = [
        parameter.name if parameter.default is parameter.empty else (parameter.name, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]
    assert found == parameters


def test_the_numbers_of_paddles_roles():
    assert (Role.WORKER, Role.SERVER) == (1, 2)


class TestBase:
    @pytest.mark.parametrize(
        "name", ["generate_role", "is_worker", "worker_num", "server_index", "to_string", "barrier_all"]
    )
    def test_it_has_no_role_of_its_own(self, name):
        with pytest.raises(NotImplementedError, match=r"RoleMakerBase does not know .*: write AutoRoleMaker\(\)"):
            getattr(RoleMakerBase(), name)()

    def test_a_maker_of_the_users_own(self):
        class Mine(RoleMakerBase):
            def generate_role(self):
                self._role = roles.Role(index=1, workers=2)

        assert Mine().worker_index() == 1
        assert Mine().role.workers == 2

    def test_one_that_forgets_the_role(self):
        class Mine(RoleMakerBase):
            def generate_role(self):
                pass

        with pytest.raises(NotImplementedError, match=r"Mine.generate_role has set no role: let it set self._role"):
            Mine().is_worker()


def facts(maker):
    return (
        maker.is_worker(), maker.is_server(), maker.is_first_worker(), maker.worker_num(), maker.server_num(),
        maker.worker_index(), maker.server_index(), maker.get_trainer_endpoints(), maker.get_pserver_endpoints(),
    )  # fmt: skip


class TestPaddleCloud:
    def test_no_variables_one_process(self, environ):
        for collective in (False, True):
            maker = PaddleCloudRoleMaker(is_collective=collective)
            assert facts(maker) == (True, False, True, 1, 0, 0, 0, [], [])
            assert maker.role == roles.Role()

    def test_a_trainer(self, environ):
        environ(PADDLE_SERVED)
        assert facts(PaddleCloudRoleMaker()) == (True, False, False, 2, 2, 1, 1, [], SERVERS)

    def test_a_server(self, environ):
        environ(PADDLE_SERVER)
        assert facts(PaddleCloudRoleMaker()) == (False, True, False, 2, 2, 1, 1, [], SERVERS)

    def test_a_trainer_without_servers_is_a_worker(self, environ):
        environ(PADDLE_COLLECTIVE)
        assert facts(PaddleCloudRoleMaker(True)) == (True, False, False, 2, 0, 1, 1, ["a:1", "b:1"], [])

    def test_the_role_is_found_once(self, environ):
        environ(PADDLE_SERVED)
        maker = PaddleCloudRoleMaker()
        maker.generate_role()
        before = maker.role
        environ({})
        maker.generate_role()
        assert maker.role is before

    def test_a_variable_is_read_when_it_is_asked_for(self, environ):
        maker = PaddleCloudRoleMaker()
        environ(PADDLE_SERVED | {"PADDLE_TRAINER_ID": "x"})
        with pytest.raises(ConfigError, match="PADDLE_TRAINER_ID='x'"):
            maker.worker_index()

    def test_other_launchers_are_understood(self, environ):
        environ(TORCHRUN)
        assert PaddleCloudRoleMaker(is_collective=True).role.source == "torchrun's variables"
        environ(PADDLE_SERVED | PLAIT)
        assert PaddleCloudRoleMaker().role.source == "plait launch's variables"

    @pytest.mark.parametrize(
        ("variables", "collective", "text"),
        [
            (TORCHRUN, False, "torchrun's variables name 2 workers and 0 servers: write is_collective=True"),
            (PLAIT, True, "plait launch's variables name 2 workers and 1 servers: write is_collective=False"),
            (PADDLE_COLLECTIVE, False, "PADDLE_PSERVERS_IP_PORT_LIST is not: set it, or write is_collective=True"),
            (PADDLE_SERVED, True, "PADDLE_TRAINER_ENDPOINTS is not: set it, or write is_collective=False"),
        ],
    )
    def test_the_other_kind_is_refused(self, environ, variables, collective, text):
        environ(variables)
        with pytest.raises(ConfigError, match=re.escape(text)):
            PaddleCloudRoleMaker(is_collective=collective).generate_role()


@pytest.mark.parametrize("variables", [{}, TORCHRUN, PLAIT, PADDLE_SERVED, PADDLE_COLLECTIVE])
def test_auto_finds_what_the_environment_says(environ, variables):
    environ(variables)
    assert AutoRoleMaker().role == roles.find_role(variables)


class TestUserDefined:
    def test_a_worker(self):
        maker = UserDefinedRoleMaker(current_id=1, role=Role.WORKER, worker_num=3, server_endpoints=SERVERS)
        assert facts(maker) == (True, False, False, 3, 2, 1, 1, [], SERVERS)

    def test_a_server(self):
        maker = UserDefinedRoleMaker(1, Role.SERVER, 1, SERVERS)
        assert facts(maker) == (False, True, False, 1, 2, 1, 1, [], SERVERS)

    def test_workers_without_servers(self):
        maker = UserDefinedCollectiveRoleMaker(0, ["a:1", "b:1"])
        assert facts(maker) == (True, False, True, 2, 0, 0, 0, ["a:1", "b:1"], [])
        assert maker.role.master == "a:1"

    def test_on_one_line(self):
        maker = UserDefinedRoleMaker(1, Role.SERVER, 1, SERVERS)
        assert maker.to_string() == (
            "role: SERVER, current_id: 1, worker_endpoints: [], server_endpoints: ['127.0.0.1:6001', '127.0.0.1:6002']"
        )
        assert UserDefinedCollectiveRoleMaker(0, ["a:1"]).to_string() == (
            "role: WORKER, current_id: 0, worker_endpoints: ['a:1'], server_endpoints: []"
        )

    def test_what_is_given_back_is_a_copy(self):
        maker = UserDefinedRoleMaker(0, Role.WORKER, 1, SERVERS)
        maker.get_pserver_endpoints().clear()
        assert maker.get_pserver_endpoints() == SERVERS

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ((0, Role.WORKER, 0, SERVERS), "worker_num=0: write a whole number from 1 on"),
            ((0, Role.WORKER, 1.5, SERVERS), "worker_num=1.5"),
            ((2, Role.WORKER, 2, SERVERS), "current_id=2 with 2 workers: write a number from 0 on, below 2"),
            ((2, Role.SERVER, 9, SERVERS), "current_id=2 with 2 servers: write"),
            ((-1, Role.WORKER, 2, SERVERS), "current_id=-1: write a whole number from 0 on"),
            (("0", Role.WORKER, 2, SERVERS), "current_id='0'"),
            ((0, "worker", 2, SERVERS), "role='worker': write Role.WORKER or Role.SERVER"),
            ((0, 3, 2, SERVERS), "role=3"),
            ((0, Role.WORKER, 2, None), "server_endpoints=None: write a list of 'host:port'"),
            ((0, Role.WORKER, 2, []), "server_endpoints=[]"),
            ((0, Role.WORKER, 2, "a:1"), "server_endpoints='a:1': write a list"),
            ((0, Role.WORKER, 2, ["a"]), "server_endpoints: 'a' is no endpoint"),
            ((0, Role.WORKER, 2, ["a:1", "a:1"]), "a:1 stands there twice"),
        ],
    )
    def test_what_is_wrong_is_named(self, arguments, text):
        with pytest.raises(ConfigError, match=re.escape(text)):
            UserDefinedRoleMaker(*arguments)

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ((), "worker_endpoints=None: write a list of 'host:port'"),
            ((1, ["a:1"]), "current_id=1 with 1 workers: write"),
            ((0, ["a:1", "a:1"]), "a:1 stands there twice"),
            ((0, ["a:b"]), "worker_endpoints: 'a:b' is no endpoint"),
        ],
    )
    def test_what_is_wrong_is_named_without_servers(self, arguments, text):
        with pytest.raises(ConfigError, match=re.escape(text)):
            UserDefinedCollectiveRoleMaker(*arguments)


class Meeting:
    """Where the threads that play a cluster's processes exchange values, group by group."""

    def __init__(self, workers, servers, timeout=5.0):
        self.workers, self.servers, self.timeout = workers, servers, timeout
        self.lock = threading.Lock()
        self.rounds = {False: {}, True: {}}
        self.barriers = {False: threading.Barrier(workers), True: threading.Barrier(workers + servers)}
        self.calls = []

    def exchange(self, name, place, value, everyone):
        with self.lock:
            self.calls.append((name, place))
            self.rounds[everyone][place] = value
        try:
            self.barriers[everyone].wait(self.timeout)
            values = [self.rounds[everyone][number] for number in sorted(self.rounds[everyone])]
            self.barriers[everyone].wait(self.timeout)
        except threading.BrokenBarrierError:
            raise ClusterError(f"{name}: somebody did not come") from None
        return values


class FakeControl:
    def __init__(self, meeting, place):
        self.meeting, self.place = meeting, place

    def gather(self, name, value, *, everyone=False):
        return self.meeting.exchange(name, self.place, value, everyone)

    def close(self):
        pass


def on_all(play, workers=2, servers=0, timeout=5.0):
    """What `play(maker)` gives in every process of a cluster, workers first; and what they said to each other."""
    meeting = Meeting(workers, servers, timeout)
    makers = []
    for place in range(workers + servers):
        kind, index = (Role.WORKER, place) if place < workers else (Role.SERVER, place - workers)
        if servers:
            maker = UserDefinedRoleMaker(index, kind, workers, [f"s:{port + 1}" for port in range(servers)])
        else:
            maker = UserDefinedCollectiveRoleMaker(index, [f"w:{port + 1}" for port in range(workers)])
        maker._joined = FakeControl(meeting, place)
        makers.append(maker)
    with ThreadPoolExecutor(len(makers)) as pool:
        return list(pool.map(play, makers)), meeting


class TestAllGather:
    def test_workers_first_then_servers(self):
        found, _ = on_all(lambda maker: maker.all_gather(maker.worker_index() + maker.is_server() * 10.5), 3, 2)
        assert found == [[0.0, 1.0, 2.0, 10.5, 11.5]] * 5

    def test_whole_numbers_stay_whole(self):
        found, _ = on_all(lambda maker: maker.all_gather(np.int32(maker.worker_index() + 7)))
        assert found == [[7, 8]] * 2
        assert all(type(value) is int for value in found[0])

    @pytest.mark.parametrize("value", ["1", None, [1], 1j, np.zeros(1), torch.zeros(1)])
    def test_what_is_no_number(self, value):
        with pytest.raises(ConfigError, match=r"all_gather got a \w+: write an int or a float"):
            AutoRoleMaker().all_gather(value)


class TestAllReduce:
    @pytest.mark.parametrize(("mode", "expected"), [("sum", [6, 3.0, 0]), ("min", [1, -1.5, -7]), ("max", [3, 3.5, 7])])
    @pytest.mark.parametrize("kind", [list, np.array])
    def test_the_modes(self, mode, expected, kind):
        given = [[1, -1.5, 0], [2, 1.0, 7], [3, 3.5, -7]]

        def play(maker):
            output = kind([0.0] * 3)
            assert maker.all_reduce_worker(kind(given[maker.worker_index()]), output, mode) is None
            return list(output)

        found, _ = on_all(play, workers=3)
        assert found == [expected] * 3

    def test_sum_is_what_is_done_if_nothing_is_said_and_output_may_be_input(self):
        def play(maker):
            values = [1, 2]
            maker.all_reduce_worker(values, values)
            return values

        assert on_all(play)[0] == [[2, 4]] * 2

    def test_whole_numbers_are_exact(self):
        large = 2**60 + 1

        def play(maker):
            output = np.zeros(1, np.int64)
            maker.all_reduce_worker(np.array([large], np.int64), output)
            return int(output[0])

        assert on_all(play, workers=3)[0] == [3 * large] * 3

    @given(st.lists(st.lists(st.floats(allow_nan=False, width=32), min_size=2, max_size=2), min_size=1, max_size=4))
    def test_fractions_are_added_in_the_order_of_workers(self, rows):
        output = [0.0, 0.0]
        maker = UserDefinedCollectiveRoleMaker(0, [f"w:{port + 1}" for port in range(len(rows))])
        maker._gather = lambda name, value, everyone=False: rows
        maker.all_reduce_worker(rows[0], output)
        expected = [0.0, 0.0]
        for row in rows:
            expected = [a + b for a, b in zip(expected, row, strict=True)]
        np.testing.assert_array_equal(output, expected)

    @pytest.mark.parametrize("mode", ["min", "max", "sum"])
    def test_what_is_not_a_number_is_not_hidden(self, mode):
        def play(maker):
            output = [0.0, 0.0]
            maker.all_reduce_worker([1.0, math.nan] if maker.worker_index() else [math.nan, 1.0], output, mode)
            return output

        assert all(math.isnan(value) for output in on_all(play)[0] for value in output)

    def test_numbers_larger_than_any_fraction(self):
        output = [0]
        UserDefinedCollectiveRoleMaker(0, ["a:1"]).all_reduce_worker([10**400], output, "max")
        assert output == [10**400]

    def test_a_server_does_nothing(self):
        def play(maker):
            output = [0]
            maker.all_reduce_worker([maker.worker_index() + 1], output)
            return output

        found, meeting = on_all(play, workers=2, servers=2)
        assert found == [[3], [3], [0], [0]]
        assert sorted(place for _, place in meeting.calls) == [0, 1]

    def test_nothing_to_add(self):
        found, _ = on_all(lambda maker: maker.all_reduce_worker([], []))
        assert found == [None, None]

    def test_workers_that_disagree(self):
        def play(maker):
            count = maker.worker_index() + 1
            with pytest.raises(ConfigError, match=r"lists of lengths \[1, 2\] from the workers: write equal ones"):
                maker.all_reduce_worker([0] * count, [0] * count)

        on_all(play)

    @pytest.mark.parametrize(
        ("values", "output", "mode", "text"),
        [
            ([1], [0], "mean", "all_reduce_worker got mode='mean': write one of sum, min, max"),
            ([1], [0], None, "mode=None"),
            ([1, 2], [0], "sum", "all_reduce_worker got 2 numbers and an output of 1: write equal lengths"),
            ([[1]], [0], "sum", "all_reduce_worker's input got a list: write an int or a float"),
            (np.zeros((1, 1)), [0], "sum", "as input an array of shape (1, 1) and type float64: write one of one dim"),
            (np.zeros(()), [0], "sum", "as input an array of shape ()"),
            (np.array(["a"]), [0], "sum", "as input an array of shape (1,) and type <U1"),
            ([1], np.zeros((1, 1)), "sum", "as output an array of shape (1, 1)"),
            (7, [0], "sum", "as input a int: write a list or a numpy array of one dimension"),
            (torch.zeros(1), [0], "sum", "as input a Tensor"),
            ([1], (0,), "sum", "as output a tuple"),
            ([1], None, "sum", "as output a NoneType"),
            ([0.5], np.zeros(1, np.int64), "sum", "an output of int64, which cannot hold the result: write an output"),
            ([300], np.zeros(1, np.uint8), "sum", "an output of uint8, which cannot hold the result"),
            ([-1], np.zeros(1, np.uint64), "sum", "an output of uint64, which cannot hold the result"),
        ],
    )
    def test_what_is_wrong_is_named(self, values, output, mode, text):
        with pytest.raises(ConfigError, match=re.escape(text)):
            UserDefinedCollectiveRoleMaker(0, ["a:1"]).all_reduce_worker(values, output, mode)

    def test_an_output_that_cannot_be_written(self):
        output = np.zeros(1)
        output.flags.writeable = False
        with pytest.raises(ConfigError, match="may not be written to"):
            UserDefinedCollectiveRoleMaker(0, ["a:1"]).all_reduce_worker([1], output)

    def test_a_wrong_call_says_nothing_to_the_others(self):
        def play(maker):
            with pytest.raises(ConfigError):
                maker.all_reduce_worker([1], [0, 0])

        assert on_all(play)[1].calls == []


class TestBarriers:
    def test_nobody_passes_before_all_have_come(self):
        come = []

        def play(maker):
            come.append(maker.worker_index())
            maker.barrier_all()
            seen = len(come)
            maker.barrier_all()
            return seen

        assert on_all(play, workers=2, servers=2)[0] == [4] * 4

    def test_workers_alone(self):
        def play(maker):
            maker.barrier_worker()

        _, meeting = on_all(play, workers=3, servers=1)
        assert sorted(meeting.calls) == [("barrier_worker", place) for place in range(3)]

    def test_somebody_who_does_not_come(self):
        def play(maker):
            if maker.is_first_worker():
                with pytest.raises(ClusterError, match="barrier_worker: somebody did not come"):
                    maker.barrier_worker()

        on_all(play, timeout=0.1)


class TestJoining:
    def test_one_process_joins_nothing(self, environ, monkeypatch):
        maker = AutoRoleMaker()
        monkeypatch.setattr(maker, "_control", lambda: pytest.fail("nobody is there"))
        output = [0, 0]
        maker.all_reduce_worker([1, 2], output)
        maker.barrier_worker()
        maker.barrier_all()
        assert (maker.all_gather(5), output) == ([5], [1, 2])

    def test_the_cluster_is_joined_once_with_the_role(self, monkeypatch):
        joined = []

        class Answers:
            def gather(self, name, value, *, everyone=False):
                return [value, value]

        def control_of(role):
            joined.append(role)
            return Answers()

        monkeypatch.setitem(sys.modules, "plait.cluster.connect", types.SimpleNamespace(control_of=control_of))
        maker = UserDefinedCollectiveRoleMaker(1, ["a:1", "b:1"])
        assert joined == []
        maker.barrier_worker()
        assert maker.all_gather(2) == [2, 2]
        assert joined == [maker.role]
