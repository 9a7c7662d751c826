from __future__ import annotations

import math
import threading
import time

import pytest
import torch

from plait.cluster.control import Control
from plait.cluster.ps import coordinator as coordinator_module
from plait.cluster.ps.client import Connection, Refused
from plait.cluster.ps.coordinator import Coordinator, ServedControl
from plait.cluster.ps.service import Service
from plait.cluster.ps.wire import WireError
from plait.errors import ClusterError, UnavailableError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Asked:
    """A request that keeps its answer."""

    def __init__(self, member, *, name="start", group="workers", count=0, timeout=60.0, value=None, tensors=(), **more):
        self.head = {"name": name, "group": group, "member": member, "round": count, "timeout": timeout, "value": value}
        self.head.update(more)
        self.tensors = list(tensors)
        self.answer = None
        self.code = None

    def reply(self, head=None, tensors=()):
        assert self.answer is None, "answered twice"
        self.answer = (head, list(tensors))

    def refuse(self, text, code="refused"):
        assert self.answer is None, "answered twice"
        self.answer, self.code = text, code


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def two(clock):
    return Coordinator(2, 1, clock=clock)


def ask(coordinator, member, **settings):
    asked = Asked(member, **settings)
    coordinator.gather(asked)
    return asked


# ---- gathers


def test_all_are_answered_when_the_last_has_come_in_the_order_of_members(two):
    late = ask(two, 1, value="one", tensors=[torch.ones(1), torch.ones(2)])
    assert late.answer is None
    first = ask(two, 0, value={"a": 0}, tensors=[torch.zeros(3)])
    for asked in (first, late):
        head, tensors = asked.answer
        assert head == {"values": [{"a": 0}, "one"], "counts": [1, 2]}
        assert [tensor.numel() for tensor in tensors] == [3, 1, 2]


def test_everyone_means_the_servers_too_and_groups_do_not_disturb_each_other(two):
    everyone = [ask(two, member, group="all", name="save", value=member) for member in (2, 0)]
    workers = [ask(two, member, value=-member) for member in (1, 0)]
    assert workers[0].answer[0]["values"] == [0, -1]
    assert everyone[0].answer is None
    everyone.append(ask(two, 1, group="all", name="save", value=1))
    assert [asked.answer[0]["values"] for asked in everyone] == [[0, 1, 2]] * 3


def test_one_gather_follows_another(two):
    for count in range(3):
        name = f"step {count}"
        pair = [ask(two, member, name=name, count=count, value=[count, member]) for member in (0, 1)]
        assert [asked.answer[0]["values"] for asked in pair] == [[[count, 0], [count, 1]]] * 2


def test_a_member_that_asks_again_takes_the_place_of_its_first_request(two):
    first, second = ask(two, 0, value="old"), ask(two, 0, value="new")
    other = ask(two, 1)
    assert first.answer is None
    assert second.answer[0]["values"] == other.answer[0]["values"] == ["new", None]


def test_a_member_whose_answer_was_lost_gets_it_again(two):
    ask(two, 0, value=0), ask(two, 1, value=1)
    again = ask(two, 1, value=1)
    assert again.answer[0]["values"] == [0, 1]
    ahead = ask(two, 0, count=1, name="next")
    assert ask(two, 1, value=1).answer[0]["values"] == [0, 1]
    assert ahead.answer is None
    ask(two, 1, count=1, name="next")
    old = ask(two, 0)
    assert old.code == "old"


def test_a_member_that_was_started_again_joins_by_the_name_whatever_its_count(two):
    for count in range(3):
        ask(two, 0, count=count, incarnation="a"), ask(two, 1, count=count, incarnation="b")
    waiting = ask(two, 0, count=3, incarnation="a", name="end")
    new = ask(two, 1, count=0, incarnation="c", name="end")
    assert waiting.answer[0] == new.answer[0]


def test_different_names_at_the_same_place_are_refused_to_all(two):
    first, second = ask(two, 0, name="save"), ask(two, 1, name="evaluate")
    assert first.code == second.code == "mismatch"
    assert first.answer == second.answer
    assert first.answer == "worker 1 is at 'evaluate', worker 0 at 'save': all must gather in the same order"
    again = [ask(two, member, name="both", count=1) for member in (0, 1)]
    assert all(asked.answer[0]["values"] == [None, None] for asked in again)


def test_a_newcomer_at_another_place_does_not_disturb_those_who_wait(two):
    waiting = ask(two, 0, name="end", count=5)
    new = ask(two, 1, name="start", count=0, incarnation="new")
    assert new.code == "mismatch"
    assert waiting.answer is None
    ask(two, 1, name="end", count=1, incarnation="new")
    assert waiting.answer[0]["values"] == [None, None]


def test_a_deadline_names_those_who_did_not_come(clock):
    coordinator = Coordinator(3, 1, clock=clock)
    quick = ask(coordinator, 1, group="all", timeout=10)
    patient = ask(coordinator, 0, group="all", timeout=30)
    clock.now += 10
    coordinator.tick(clock.now)
    assert quick.answer is None
    clock.now += 1
    coordinator.tick(clock.now)
    assert quick.answer == "'start': worker 2, server 0 did not come within 10 s"
    assert quick.code == "timeout"
    assert patient.answer is None
    clock.now += 20
    coordinator.tick(clock.now)
    assert patient.answer == "'start': worker 1, worker 2, server 0 did not come within 30 s"
    fresh = [ask(coordinator, member, group="all", name="other") for member in range(4)]
    assert fresh[0].answer[0]["values"] == [None] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "a name"),
        ({"group": "some"}, "group"),
        ({"group": ["all"]}, "group"),
        ({"member": 2}, "member 2 of 'workers', which has 2"),
        ({"member": -1}, "member -1"),
        ({"member": True}, "member True"),
        ({"member": "0"}, "member '0'"),
        ({"round": None}, "round None"),
        ({"timeout": -1}, "timeout -1"),
        ({"timeout": "1"}, "timeout '1'"),
        ({"incarnation": 4}, "a name"),
    ],
)
def test_a_wrong_head_is_an_error_and_leaves_no_trace(two, change, words):
    asked = Asked(0)
    asked.head.update(change)
    with pytest.raises(ClusterError, match=words):
        two.gather(asked)
    assert not two._open


def test_values_that_do_not_fit_a_message_are_refused_to_all(two):
    class Small(Asked):
        def reply(self, head=None, tensors=()):
            raise WireError("4097 tensors in one 'reply'")

    pair = [Small(0), Small(1)]
    for asked in pair:
        two.gather(asked)
    assert [asked.answer for asked in pair] == ["'start': 4097 tensors in one 'reply'"] * 2


# ---- who lives


def test_a_worker_is_dead_when_it_came_and_is_silent(two, clock):
    assert two.dead() == []
    two.beat(0, "a")
    two.beat(1, "b")
    clock.now += 4
    two.beat(0, "a")
    clock.now += 2
    assert two.dead() == [1]
    two.beat(1, "b")
    assert two.dead() == []


def test_who_has_finished_is_not_dead(two, clock):
    for worker in (0, 1):
        two.beat(worker, "a")
    two.finish(1)
    clock.now += 60
    assert two.dead() == [0]
    assert not two.finished()
    two.finish(0)
    assert two.finished()


def test_a_finished_worker_that_is_started_again_counts_again(two):
    two.beat(1, "a")
    two.finish(0), two.finish(1)
    two.beat(1, "a")
    assert two.finished()
    two.beat(1, "b")
    assert not two.finished()


def test_those_who_wait_for_a_dead_member_are_told(two, clock):
    two.beat(1, "b")
    two.beat(0, "a")
    waiting = ask(two, 0)
    clock.now += 4
    two.beat(0, "a")
    two.tick(clock.now)
    assert waiting.answer is None
    clock.now += 2
    two.tick(clock.now)
    assert waiting.answer == "'start': worker 1 is lost: silent for more than 5 s"
    assert waiting.code == "dead"
    assert ask(two, 0, count=1).code == "dead"


def test_those_who_wait_for_one_that_has_left_are_told(two):
    waiting = ask(two, 0, name="end")
    two.finish(1)
    assert waiting.answer == "'end': worker 1 has finished"
    assert ask(two, 0, name="end", count=1).code == "finished"


def test_what_a_member_asked_in_an_earlier_life_is_forgotten(two):
    two.beat(1, "old")
    ask(two, 1, value="stale", incarnation="old")
    two.beat(1, "new")
    waiting = ask(two, 0)
    assert waiting.answer is None
    ask(two, 1, value="fresh", incarnation="new")
    assert waiting.answer[0]["values"] == [None, "fresh"]


def test_whether_all_others_have_finished(two):
    two.finish(0)
    assert two.finished(besides=1)
    assert not two.finished(besides=0)
    assert not Coordinator(1, 1).finished(besides=0)


def test_all_who_wait_can_be_refused(two):
    waiting = [ask(two, 0), ask(two, 2, group="all")]
    two.refuse("worker 1 was started again", "stale")
    assert [(asked.answer, asked.code) for asked in waiting] == [("worker 1 was started again", "stale")] * 2
    assert not two._open


@pytest.mark.parametrize("member", [-1, 3, True, "0", None])
def test_strangers_are_refused(two, member):
    for call in (lambda: two.beat(member, "a"), lambda: two.finish(member)):
        with pytest.raises(ClusterError, match="2 workers and 1 servers"):
            call()


# ---- the control that the others hold


@pytest.fixture
def cluster():
    """A service with a coordinator, and a way to make controls."""
    coordinator = Coordinator(2, 1)
    calls = {
        "gather": coordinator.gather,
        "bye": lambda request: (coordinator.finish(request.head["worker"]), request.reply()),
    }
    service = Service("127.0.0.1:0", lambda request: calls[request.kind](request), tick=coordinator.tick)
    service.start()
    made = []

    def control(member, **settings) -> Control:
        connection = Connection(service.endpoint, name="server 0", own=f"member {member}", timeout=10)
        made.append(ServedControl(connection, member, 2, **{"timeout": 10, **settings}))
        return made[-1]

    control.coordinator, control.service = coordinator, service
    yield control
    for one in made:
        one.close()
    service.stop()


def together(*calls):
    """What the calls return, each made in a thread of its own."""
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_trees_arrive_as_they_were(cluster):
    zero, one = cluster(0), cluster(1)
    tree = {
        "loss": 0.1,
        "steps": 2**70,
        "names": ["a", None, True, "ü\ud800"],
        "$dollar": {"$tensor": 0},
        "weights": [torch.arange(3), {"inner": torch.eye(2, dtype=torch.bfloat16)}],
        "empty": {},
        "": [],
    }
    odd = [math.inf, -math.inf, (1, 2)]
    first, second = together(lambda: zero.gather("x", tree), lambda: one.gather("x", odd))
    for got in (first, second):
        assert got[1] == [math.inf, -math.inf, [1, 2]]
        assert {key: got[0][key] for key in tree if key != "weights"} == {k: tree[k] for k in tree if k != "weights"}
        assert torch.equal(got[0]["weights"][0], torch.arange(3))
        assert torch.equal(got[0]["weights"][1]["inner"], torch.eye(2, dtype=torch.bfloat16))
    first[0]["weights"][0].add_(1)  # its own memory


def test_not_a_number_can_be_gathered(cluster):
    zero, one = cluster(0), cluster(1)
    got, _ = together(lambda: zero.gather("x", math.nan), lambda: one.gather("x", torch.tensor(math.nan)))
    assert math.isnan(got[0])
    assert got[1].isnan()


def test_many_gathers_in_a_row_and_with_everyone(cluster):
    zero, one, server = cluster(0), cluster(1), cluster(2)

    def worker(control, index):
        return [control.gather("a", [index, i]) for i in range(20)] + [control.gather("all", index, everyone=True)]

    results = together(
        lambda: worker(zero, 0), lambda: worker(one, 1), lambda: server.gather("all", "server", everyone=True)
    )
    expected = [[[0, i], [1, i]] for i in range(20)] + [[0, 1, "server"]]
    assert results == [expected, expected, [0, 1, "server"]]


def test_who_does_not_come_is_named_after_the_deadline(cluster):
    with pytest.raises(Refused, match=r"'end of stage': worker 1 did not come within 0.3 s") as error:
        cluster(0, timeout=0.3).gather("end of stage", None)
    assert error.value.code == "timeout"


def test_check_ends_the_wait(cluster):
    def check():
        raise UnavailableError("server 1 is gone")

    with pytest.raises(UnavailableError, match="server 1"):
        cluster(0, check=check).gather("a", None)


def test_a_gather_survives_a_new_server(cluster, monkeypatch):
    """The request is lost with the old server; the member says again that it waits."""
    monkeypatch.setattr(coordinator_module, "RESEND", 0.2)
    zero, one = cluster(0), cluster(1)
    coordinator = cluster.coordinator
    arrived = threading.Event()

    def lose():
        while not coordinator._open:
            arrived.wait(0.01)
        coordinator._open.clear()
        return one.gather("a", 1)

    assert together(lambda: zero.gather("a", 0), lose) == [[0, 1], [0, 1]]


def test_a_server_cannot_gather_among_workers(cluster):
    with pytest.raises(ClusterError, match="everyone=True"):
        cluster(2).gather("a", None)


@pytest.mark.parametrize("value", [{1: 2}, {1, 2}, b"bytes", object(), 1j], ids=lambda value: type(value).__name__)
def test_what_cannot_be_gathered_is_said(cluster, value):
    with pytest.raises(ClusterError, match=f"gather 'a': a {type(value).__name__} cannot be sent"):
        cluster(0).gather("a", [value])


def test_a_value_too_deep_is_said(cluster):
    value = []
    for _ in range(30):
        value = [value]
    with pytest.raises(ClusterError, match="more than 16 deep"):
        cluster(0).gather("a", value)


def test_close_says_goodbye_once(cluster):
    zero, one, server = cluster(0), cluster(1), cluster(2)
    zero.close()
    zero.close()
    server.close()
    assert not cluster.coordinator.finished()
    one.close()
    assert cluster.coordinator.finished()


def test_close_does_not_wait_for_a_server_that_is_gone(cluster, monkeypatch):
    monkeypatch.setattr(coordinator_module, "GOODBYE", 0.2)
    control = cluster(0)
    cluster.service.stop()
    begun = time.monotonic()
    control.close()
    assert time.monotonic() - begun < 5.0
