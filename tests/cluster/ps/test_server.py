"""What a parameter server does with each message; requests are made by hand, and nothing is sent."""

from __future__ import annotations

import time

import pytest
import torch

from plait.cluster.ps import server as server_module
from plait.cluster.ps.server import Server
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, TableSpec, VariableSpec
from plait.cluster.roles import Role

DENSE = torch.tensor([1.0, 2.0, 3.0])
ROWS = torch.arange(8.0).view(4, 2)
SPEC = ModelSpec(
    optimizers=(OptimizerSpec(kind="SGD", options={"momentum": 0.0}),),
    variables=(VariableSpec(name="w", shape=(3,), dtype="float32", optimizer=0),),
    tables=(TableSpec(name="t", dim=2, dtype="float32", rows=4, optimizer=0),),
)
NO_IDS, NO_ROWS = torch.empty(0, dtype=torch.int64), torch.empty(0, 2)


class Asked:
    """A request that keeps its answer."""

    def __init__(self, kind, tensors=(), **head):
        self.kind, self.head, self.tensors = kind, head, list(tensors)
        self.answered = False
        self.reply_head = self.text = self.code = None

    def reply(self, head=None, tensors=()):
        assert not self.answered, "answered twice"
        self.answered, self.reply_head, self.replied = True, head or {}, list(tensors)

    def refuse(self, text, code="refused"):
        assert not self.answered, "answered twice"
        self.answered, self.text, self.code = True, text, code


def ask(server, kind, tensors=(), **head):
    asked = Asked(kind, tensors, **head)
    server.handle(asked)
    return asked


def told(server, kind, tensors=(), **head):
    """The answer's head, of a request that is not refused."""
    asked = ask(server, kind, tensors, **head)
    assert asked.answered, f"{kind} is not answered"
    assert asked.text is None, asked.text
    return asked.reply_head


def begin(server, mode, generation=1, replicas=None, version=0, spec=SPEC, dense=DENSE):
    replicas = server.workers if replicas is None else replicas
    head = {"g": generation, "mode": mode, "replicas": replicas, "version": version, "spec": spec.to_json()}
    return ask(server, "begin", [dense.clone()], **head)


def made(mode="sync", workers=2, **settings):
    """A server that is ready to train."""
    endpoints = ("127.0.0.1:1",)
    server = Server(Role(kind="server", workers=workers, servers=1, server_endpoints=endpoints), timeout=9.0)
    assert begin(server, mode, **settings).text is None
    told(server, "rows", [torch.arange(4), ROWS], g=server.generation, table=0)
    told(server, "ready", g=server.generation)
    return server


def push(server, worker, step, gradient=(0.0, 0.0, 0.0), ids=(), rows=(), rate=0.1, **head):
    """Gradients of the variable, and of rows of the table."""
    tensors = [torch.tensor(gradient), torch.tensor(ids, dtype=torch.int64), torch.tensor(rows).view(len(ids), 2)]
    head = {"g": server.generation, "w": worker, "s": step, "p": [0], "r": [rate], "t": [0], **head}
    return ask(server, "push", tensors, **head)


def pull(server, ids, version=0, **head):
    return ask(server, "pull", [torch.tensor(ids)], **{"g": server.generation, "t": 0, "v": version, **head})


def dense(server):
    return server.shard.dense()[0]


def state(server):
    """All that a wrong message must not change."""
    held = [server._held, server._cut, dict(server._pushes), list(server._pulls), dict(server._joining), server._left]
    shard = None if server.shard is None else (dense(server).tolist(), server.shard.tables[0].pull(torch.arange(4)))
    facts = [server.mode, server.generation, server.broken, server.dropped, dict(server.last), server._ready]
    version = None if server.shard is None else server.shard.version
    return [*held, *facts, version, server._replicas, None if shard is None else (shard[0], shard[1].tolist())]


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still until it is set."""

    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    made_clock = Clock()
    monkeypatch.setattr(server_module.time, "monotonic", made_clock)
    return made_clock


class TestSync:
    def test_a_step_is_the_mean_of_all_when_the_last_has_come(self):
        server = made()
        first = push(server, 1, 0, (2.0, 0.0, 0.0), [1], [[1.0, 0.0]])
        assert not first.answered
        second = push(server, 0, 0, (0.0, 4.0, 0.0), [1, 3], [[1.0, 1.0], [0.0, 2.0]])
        expected = DENSE - 0.1 * torch.tensor([1.0, 2.0, 0.0])
        torch.testing.assert_close(dense(server), expected)
        for asked in (first, second):
            assert asked.reply_head == {"v": 1}
            torch.testing.assert_close(asked.replied[0], expected)
        moved = torch.tensor([[0.0, 0.0], [1.0, 0.5], [0.0, 0.0], [0.0, 1.0]])
        torch.testing.assert_close(pull(server, [0, 1, 2, 3], 1).replied[0], ROWS - 0.1 * moved)

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    def test_gradients_are_added_in_the_order_of_workers(self, order):
        values = [1e8, 1.0, -1e8]  # another order gives another sum
        server = made(workers=3, dense=torch.zeros(3))
        for worker in order:
            push(server, worker, 0, (values[worker],) * 3, rate=3.0)
        expected = -3.0 * (torch.tensor(1e8) + 1.0 - 1e8) / 3
        assert dense(server)[0] == expected

    def test_the_learning_rate_is_that_of_the_first_worker(self):
        server = made()
        push(server, 1, 0, (1.0, 1.0, 1.0), rate=9.0)
        push(server, 0, 0, (1.0, 1.0, 1.0), rate=0.5)
        torch.testing.assert_close(dense(server), DENSE - 0.5)

    def test_a_push_that_is_repeated_counts_once(self):
        server = made()
        push(server, 0, 0, (9.0, 9.0, 9.0))
        push(server, 0, 0, (2.0, 2.0, 2.0))
        push(server, 1, 0)
        torch.testing.assert_close(dense(server), DENSE - 0.1)

    def test_a_step_ahead_of_the_servers_is_refused(self):
        asked = push(made(), 1, 1)
        assert asked.text == "worker 1 pushes step 1, the servers are at 0"

    def test_pulls_wait_for_their_step(self):
        server = made()
        ahead = pull(server, [1], 1)
        further = pull(server, [1], 2)
        push(server, 0, 0)
        assert not ahead.answered
        push(server, 1, 0, ids=[1], rows=[[20.0, 20.0]])
        assert (ahead.reply_head, ahead.replied[0].tolist()) == ({"v": 1}, [[1.0, 2.0]])
        assert not further.answered

    def test_pulls_of_what_is_there_do_not_wait(self):
        assert pull(made(version=3), [2], 3).replied[0].tolist() == [[4.0, 5.0]]

    def test_a_wrong_pull_that_waited_harms_only_itself(self):
        server = made()
        wrong, right = pull(server, [7], 1), pull(server, [3], 1)
        push(server, 0, 0)
        assert push(server, 1, 0).reply_head == {"v": 1}
        assert wrong.text.startswith("id 7 is not in table 't'")
        assert right.reply_head == {"v": 1}


class TestBackupWorkers:
    def test_the_first_so_many_make_a_step_and_late_ones_are_dropped_and_counted(self):
        server = made(workers=3, replicas=2)
        push(server, 2, 0, (1.0, 0.0, 0.0))
        push(server, 0, 0, (1.0, 0.0, 0.0))
        torch.testing.assert_close(dense(server), DENSE - torch.tensor([0.1, 0.0, 0.0]))
        late = push(server, 1, 0, (50.0, 50.0, 50.0))
        assert late.reply_head == {"v": 1, "late": True}
        torch.testing.assert_close(late.replied[0], dense(server))
        assert (server.shard.version, told(server, "status")["dropped"]) == (1, 1)

    def test_who_was_late_takes_part_in_the_next_step(self):
        server = made(workers=3, replicas=2)
        for worker in (0, 1, 2):
            push(server, worker, 0)
        push(server, 2, 1)
        assert push(server, 0, 1).reply_head == {"v": 2}


class TestLeaving:
    @pytest.mark.parametrize(("stop", "code"), [(True, "stop"), (False, "left")])
    def test_who_waits_is_told(self, stop, code):
        server = made()
        waiting, ahead = push(server, 0, 0), pull(server, [1], 1)
        told(server, "leave", g=1, w=1, stop=stop)
        assert [(one.text, one.code) for one in (waiting, ahead)] == [("another worker has left the loop", code)] * 2

    @pytest.mark.parametrize(("stop", "code"), [(True, "stop"), (False, "left")])
    def test_who_comes_later_is_told_then(self, stop, code):
        server = made()
        told(server, "leave", g=1, w=1, stop=stop)
        assert push(server, 0, 0).code == code

    def test_the_next_loop_begins_when_all_know(self):
        server = made(workers=3)
        push(server, 0, 0)
        told(server, "leave", g=1, w=1, stop=False)
        assert push(server, 2, 0).code == "left"
        for worker in (2, 1, 0):
            last = push(server, worker, 0)
        assert last.reply_head == {"v": 1}

    def test_all_may_leave_by_themselves(self):
        server = made()
        for worker in (0, 1):
            told(server, "leave", g=1, w=worker, stop=False)
        push(server, 0, 0)
        assert push(server, 1, 0).reply_head == {"v": 1}

    def test_one_who_was_told_to_stop_stops_all(self):
        server = made(workers=3)
        told(server, "leave", g=1, w=0, stop=True)
        told(server, "leave", g=1, w=1, stop=False)
        assert push(server, 2, 0).code == "stop"

    def test_nothing_of_it_is_left_in_a_new_generation(self):
        server = made()
        told(server, "leave", g=1, w=1, stop=True)
        begin(server, "sync", generation=2)
        told(server, "ready", g=2)
        assert not push(server, 0, 0).answered


class TestJoining:
    def join(self, server, worker, **head):
        return ask(server, "join", **{"worker": worker, "incarnation": "a", "generation": 0, "mode": "sync", **head})

    def test_a_generation_begins_when_all_are_there(self):
        server = Server(Role(kind="server", workers=2, servers=1, server_endpoints=("127.0.0.1:1",)))
        first = self.join(server, 1)
        assert not first.answered
        assert self.join(server, 0).reply_head == first.reply_head == {"generation": 1}
        assert told(server, "status")["ready"] is False

    def test_the_number_is_above_what_any_member_knows(self):
        server = Server(Role(kind="server", workers=2, servers=1, server_endpoints=("127.0.0.1:1",)))
        self.join(server, 1, generation=6)
        assert self.join(server, 0, generation=2).reply_head == {"generation": 7}

    @pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
    def test_apart_a_worker_goes_on_as_it_is(self, mode):
        server = made(mode)
        assert self.join(server, 1, mode=mode).reply_head == {"generation": 1}
        assert server.broken is None

    def test_a_worker_that_comes_again_breaks_the_generation_for_all_who_wait(self):
        server = made()
        waiting, ahead = push(server, 0, 0), pull(server, [0], 1)
        gathering = ask(server, "gather", name="a", group="workers", member=0, round=0, timeout=5.0, value=None)
        self.join(server, 1)
        assert {(one.text, one.code) for one in (waiting, ahead, gathering)} == {
            ("worker 1 was started again", "stale")
        }
        assert push(server, 0, 0).code == "stale"
        assert told(server, "beat", worker=0, incarnation="b")["notice"] == {
            "generation": 1,
            "broken": "worker 1 was started again",
            "ready": True,
        }

    def test_what_is_of_an_old_generation_is_refused_for_ever(self):
        server = made()
        for worker in (0, 1):
            self.join(server, worker, generation=1)
        begin(server, "sync", generation=2)
        told(server, "ready", g=2)
        old = push(server, 0, 0, g=1)
        assert (old.code, old.text) == ("stale", "generation 1 is not this server's, 2")
        assert server._pushes == {}

    def test_a_silent_worker_breaks_the_generation(self, clock):
        server = made()
        server.coordinator._clock = clock
        for worker in (0, 1):
            told(server, "beat", worker=worker, incarnation="a")
        waiting = push(server, 0, 0)
        clock.now += 4.0
        told(server, "beat", worker=0, incarnation="a")
        clock.now += 2.0
        server.tick(clock.now)
        assert (waiting.text, waiting.code) == ("worker 1 is silent for more than 5 s", "stale")

    def test_apart_it_does_not(self, clock):
        server = made("async")
        server.coordinator._clock = clock
        told(server, "beat", worker=1, incarnation="a")
        clock.now += 60.0
        server.tick(clock.now)
        assert push(server, 0, 0).text is None

    def test_who_waits_to_join_is_told_who_did_not_come(self, clock):
        server = made(workers=3)
        waiting = self.join(server, 1)
        clock.now += 9.1
        server.tick(clock.now)
        assert (waiting.text, waiting.code) == ("worker 0, worker 2 did not join in time", "timeout")

    def test_when_all_others_have_finished_there_is_nothing_to_join(self):
        server = made()
        told(server, "bye", worker=0)
        asked = self.join(server, 1)
        assert (asked.text, asked.code) == ("all other workers have finished", "finished")

    def test_a_begin_of_an_old_generation_is_refused(self):
        server = made(generation=4)
        asked = begin(server, "sync", generation=3)
        assert (asked.text, asked.code) == ("generation 3 is over: it is 4 now", "stale")

    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_a_new_begin_refuses_all_who_wait(self, mode):
        server = made(mode)
        waiting = []
        if mode == "async":
            told(server, "hold", g=1)
            waiting.append(ask(server, "save", g=1, path="/nowhere", upto={"1": 5}))
        waiting.append(push(server, 0, 0))
        assert not any(one.answered for one in waiting)
        begin(server, mode, generation=2)
        assert {one.code for one in waiting} == {"stale"}

    def test_nothing_is_trained_before_the_chief_has_made_it_ready(self):
        server = made()
        begin(server, "sync", generation=2)
        assert push(server, 0, 0).text == "the chief has not made this server ready"


class TestApart:
    @pytest.mark.parametrize("mode", ["async", "half_async"])
    def test_each_push_is_a_step(self, mode):
        server = made(mode)
        assert push(server, 1, 0, (1.0, 0.0, 0.0)).reply_head == {"v": 1}
        answer = push(server, 0, 0, (0.0, 1.0, 0.0), rate=1.0)
        torch.testing.assert_close(answer.replied[0], DENSE - torch.tensor([0.1, 1.0, 0.0]))

    @pytest.mark.parametrize("mode", ["async", "geo"])
    def test_a_push_that_comes_twice_counts_once_and_is_answered_twice(self, mode):
        server = made(mode)
        first = push(server, 1, 3, (1.0, 0.0, 0.0))
        again = push(server, 1, 3, (1.0, 0.0, 0.0))
        assert torch.equal(first.replied[0], again.replied[0])
        assert (server.shard.version, server.last) == (1, {1: 3})
        assert push(server, 1, 2, (1.0, 0.0, 0.0)).reply_head == {"v": 1}

    def test_geo_adds_and_gives_back_the_rows_that_came(self):
        server = made("geo")
        answer = push(server, 0, 1, (1.0, 0.0, 0.0), [2, 0], [[1.0, 1.0], [2.0, 2.0]], r=[])
        values, rows = answer.replied
        assert values.tolist() == [2.0, 2.0, 3.0]
        assert rows.tolist() == [[5.0, 6.0], [2.0, 3.0]]

    def test_pulls_never_wait(self):
        assert pull(made("async"), [1], 99).reply_head == {"v": 0}


def saved(server, path):
    """Wait for a save to be written."""
    for _ in range(1000):
        head = told(server, "saved", path=str(path))
        if head["done"] or head["error"]:
            return head
        time.sleep(0.005)
    raise AssertionError("the save was not written")


def loaded(path, mode="async", workers=2):
    server = made(mode, workers)
    told(server, "load", g=1, path=str(path))
    return server


class TestSaving:
    def test_in_sync_a_save_is_what_is_there(self, tmp_path):
        server = made()
        push(server, 0, 0, (1.0, 1.0, 1.0))
        push(server, 1, 0, (1.0, 1.0, 1.0))
        assert told(server, "save", g=1, path=str(tmp_path / "a")) == {"v": 1}
        push(server, 0, 1, (9.0, 9.0, 9.0))
        assert saved(server, tmp_path / "a")["done"] is True
        again = loaded(tmp_path / "a", "sync")
        torch.testing.assert_close(dense(again), DENSE - 0.1)
        assert again.shard.version == 1

    def test_dropped_gradients_stay_counted(self, tmp_path):
        server = made(workers=2, replicas=1)
        push(server, 0, 0)
        push(server, 1, 0)
        told(server, "save", g=1, path=str(tmp_path / "a"))
        saved(server, tmp_path / "a")
        assert loaded(tmp_path / "a", "sync").dropped == 1

    def test_a_hold_says_how_far_each_worker_is_and_holds_pushes_back(self):
        server = made("async")
        push(server, 1, 4)
        assert told(server, "hold", g=1) == {"last": {"1": 4}}
        held = push(server, 0, 0, (1.0, 1.0, 1.0))
        assert not held.answered
        assert torch.equal(dense(server), DENSE)

    def test_a_save_has_what_other_servers_have_and_nothing_later(self, tmp_path):
        server = made("async")
        push(server, 0, 0, (1.0, 0.0, 0.0))
        told(server, "hold", g=1)
        due = push(server, 1, 7, (0.0, 1.0, 0.0))  # another server has applied it
        later = push(server, 0, 1, (0.0, 0.0, 1.0))
        save = ask(server, "save", g=1, path=str(tmp_path / "a"), upto={"0": 0, "1": 7})
        assert save.reply_head == {"v": 2}
        assert due.reply_head == {"v": 2}
        assert later.reply_head == {"v": 3}
        saved(server, tmp_path / "a")
        again = loaded(tmp_path / "a")
        torch.testing.assert_close(dense(again), DENSE - torch.tensor([0.1, 0.1, 0.0]))
        assert again.last == {0: 0, 1: 7}
        assert push(again, 1, 7, (5.0, 5.0, 5.0)).reply_head == {"v": 2}, "it is in the save"

    def test_a_save_waits_for_pushes_that_are_under_way(self, tmp_path):
        server = made("async")
        told(server, "hold", g=1)
        save = ask(server, "save", g=1, path=str(tmp_path / "a"), upto={"1": 1})
        push(server, 1, 0, (1.0, 0.0, 0.0))
        assert not save.answered
        push(server, 0, 0, (0.0, 0.0, 9.0))
        assert not save.answered
        push(server, 1, 1, (0.0, 1.0, 0.0))
        assert save.reply_head == {"v": 2}
        saved(server, tmp_path / "a")
        torch.testing.assert_close(dense(loaded(tmp_path / "a")), DENSE - torch.tensor([0.1, 0.1, 0.0]))
        torch.testing.assert_close(dense(server), DENSE - torch.tensor([0.1, 0.1, 0.9]))

    def test_but_not_for_ever(self, tmp_path, clock):
        server = made("async")
        told(server, "hold", g=1)
        save = ask(server, "save", g=1, path=str(tmp_path / "a"), upto={"1": 1})
        held = push(server, 0, 0)
        clock.now += 5.1
        server.tick(clock.now)
        assert (save.reply_head, held.reply_head) == ({"v": 0}, {"v": 1})
        saved(server, tmp_path / "a")

    def test_a_hold_without_a_save_ends(self, clock):
        server = made("async")
        told(server, "hold", g=1)
        held = push(server, 0, 0)
        clock.now += 5.1
        server.tick(clock.now)
        assert held.reply_head == {"v": 1}

    def test_a_save_needs_a_hold(self, tmp_path):
        asked = ask(made("async"), "save", g=1, path=str(tmp_path / "a"), upto={})
        assert (asked.text, asked.code) == ("a save has to follow a hold within 5 s", "stale")

    def test_a_second_save_takes_the_place_of_one_that_waits(self, tmp_path):
        server = made("async")
        told(server, "hold", g=1)
        first = ask(server, "save", g=1, path=str(tmp_path / "a"), upto={"1": 1})
        told(server, "hold", g=1)
        assert ask(server, "save", g=1, path=str(tmp_path / "b"), upto={}).reply_head == {"v": 0}
        assert (first.text, first.code) == ("another save was asked for", "stale")
        saved(server, tmp_path / "b")

    def test_a_wrong_push_during_a_hold_harms_only_itself(self, tmp_path):
        server = made("async")
        told(server, "hold", g=1)
        wrong = push(server, 0, "x")
        worse = push(server, 0, 0, r=[1.0, 2.0])
        right = push(server, 1, 0)
        ask(server, "save", g=1, path=str(tmp_path / "a"), upto={"0": 0})
        server.tick(time.monotonic() + 6.0)
        assert wrong.code == worse.code == "refused"
        assert right.reply_head == {"v": 1}
        saved(server, tmp_path / "a")

    def test_what_went_wrong_with_writing_is_said(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        server = made()
        told(server, "save", g=1, path=str(tmp_path / "file" / "a"))
        head = saved(server, tmp_path / "file" / "a")
        assert head["done"] is False
        assert "Error" in head["error"]

    def test_a_server_that_was_started_again_knows_of_no_save(self):
        assert told(made(), "saved", path="/a") == {"done": False, "lost": True, "error": None}

    def test_training_may_begin_with_a_save_of_others(self, tmp_path):
        server = made(version=5)
        told(server, "save", g=1, path=str(tmp_path / "a"))
        saved(server, tmp_path / "a")
        other = Server(Role(kind="server", workers=2, servers=1, server_endpoints=("127.0.0.1:1",)))
        other.model_dir = str(tmp_path / "a")
        begin(other, "sync", dense=torch.zeros(3))
        told(other, "ready", g=1)
        assert torch.equal(dense(other), DENSE)
        assert other.shard.version == 0


class TestEnd:
    def test_it_ends_when_all_have_said_goodbye_and_answers_are_out(self, clock):
        server = made()
        ended = []
        server.stop = lambda: ended.append(clock.now)
        for worker in (0, 1):
            server.tick(clock.now)
            told(server, "bye", worker=worker)
        server.tick(clock.now)
        clock.now += 0.9
        server.tick(clock.now)
        assert ended == []
        clock.now += 0.2
        server.tick(clock.now)
        assert len(ended) == 1

    def test_a_beat_is_answered_with_who_answers(self):
        server = made()
        assert told(server, "beat", worker=1, incarnation="a")["incarnation"] == server.incarnation

    def test_status(self):
        server = made(version=2)
        assert told(server, "status") == {
            "generation": 1,
            "ready": True,
            "version": 2,
            "dropped": 0,
            "mode": "sync",
            "incarnation": server.incarnation,
            "broken": None,
        }

    def test_dense(self):
        asked = ask(made(version=2), "dense", g=1)
        assert (asked.reply_head, asked.replied[0].tolist()) == ({"v": 2}, DENSE.tolist())


GOOD = {"g": 1, "w": 0, "s": 0, "p": [0], "r": [0.1], "t": [0]}
THREE = (DENSE, NO_IDS, NO_ROWS)
BEGIN = {"g": 2, "mode": "sync", "replicas": 2, "version": 0, "spec": SPEC.to_json()}
WRONG = {
    "unknown kind": ("dance", (), {}, "a server does not know 'dance'"),
    "beat of nobody": ("beat", (), {"worker": 9}, "'beat' has worker=9: send a whole number"),
    "beat without a worker": ("beat", (), {}, "'beat' has worker=None"),
    "bye of a server": ("bye", (), {"worker": 2}, "'bye' has worker=2"),
    "join as text": ("join", (), {"worker": "0", "mode": "sync", "generation": 0}, "'join' has worker='0'"),
    "join without a count": ("join", (), {"worker": 0, "mode": "sync"}, "'join' has generation=None"),
    "join of a strange age": ("join", (), {"worker": 0, "mode": "sync", "generation": "x"}, "has generation='x'"),
    "begin in no mode": ("begin", (DENSE,), {**BEGIN, "mode": "ring"}, "mode 'ring': a server trains in sync"),
    "begin without a spec": ("begin", (DENSE,), {**BEGIN, "spec": None}, "the description of a model is None"),
    "begin with other values": ("begin", (DENSE[:1],), BEGIN, "got the values as"),
    "begin without replicas": ("begin", (DENSE,), {**BEGIN, "replicas": None}, "'begin' has replicas=None"),
    "begin with no replica": ("begin", (DENSE,), {**BEGIN, "replicas": 0}, "a step takes the gradients of 1 to 2"),
    "begin with too many": ("begin", (DENSE,), {**BEGIN, "replicas": 3}, "'begin' has replicas=3"),
    "begin of no version": ("begin", (DENSE,), {**BEGIN, "version": -1}, "'begin' has version=-1"),
    "rows of no table": ("rows", (torch.arange(1), ROWS[:1]), {"g": 1, "table": 7}, "there is no table 7"),
    "rows without values": ("rows", (torch.arange(1),), {"g": 1, "table": 0}, "'rows' came with 1 tensors: send 2"),
    "rows of another age": ("rows", (torch.arange(1), ROWS[:1]), {"g": 9, "table": 0}, "generation 9 is not this"),
    "rows of a wrong shape": ("rows", (torch.arange(2), ROWS[:1]), {"g": 1, "table": 0}, "table 't' got"),
    "load from nowhere": ("load", (), {"g": 1}, "'load' has path=None: send an absolute one"),
    "load from a place": ("load", (), {"g": 1, "path": "here"}, "'load' has path='here'"),
    "load what is not there": ("load", (), {"g": 1, "path": "/not/there"}, "/not/there"),
    "ready too late": ("ready", (), {"g": 0}, "generation 0 is not this server's, 1"),
    "dense of another age": ("dense", (), {"g": None}, "generation None is not this server's, 1"),
    "pull of no table": ("pull", (torch.arange(1),), {"g": 1, "t": 3, "v": 0}, "there is no table 3"),
    "pull without a table": ("pull", (torch.arange(1),), {"g": 1, "v": 0}, "'pull' has t=None"),
    "pull without ids": ("pull", (), {"g": 1, "t": 0, "v": 0}, "'pull' came with 0 tensors: send 1"),
    "pull of no version": ("pull", (torch.arange(1),), {"g": 1, "t": 0}, "'pull' has v=None"),
    "pull of floats": ("pull", (torch.ones(1),), {"g": 1, "t": 0, "v": 0}, "send a list of int64"),
    "push of nobody": ("push", THREE, {**GOOD, "w": 2}, "'push' has w=2"),
    "push of no step": ("push", THREE, {**GOOD, "s": -1}, "'push' has s=-1"),
    "push of a true step": ("push", THREE, {**GOOD, "s": True}, "'push' has s=True"),
    "push of another age": ("push", THREE, {**GOOD, "g": 2}, "generation 2 is not this server's, 1"),
    "push without rates": ("push", THREE, {**GOOD, "r": None}, "a push has p and r"),
    "push with odd rates": ("push", THREE, {**GOOD, "r": ["x"]}, "a push has p and r"),
    "push with many rates": ("push", THREE, {**GOOD, "r": [1.0, 2.0]}, "2 learning rates came for 1 optimizers"),
    "push with a negative rate": ("push", THREE, {**GOOD, "r": [-1.0]}, "the learning rate of SGD is -1.0"),
    "push of odd variables": ("push", THREE, {**GOOD, "p": ["w"]}, "a push has p and r"),
    "push of odd tables": ("push", THREE, {**GOOD, "t": 0}, "a push has t: the numbers of tables"),
    "push of a table twice": ("push", (DENSE, *THREE[1:], *THREE[1:]), {**GOOD, "t": [0, 0]}, "cannot hold rows of 2"),
    "push of too few tensors": ("push", (DENSE,), GOOD, "a push of 1 tensors cannot hold rows of 1 tables"),
    "push of other shapes": ("push", (DENSE[:2], *THREE[1:]), GOOD, "got a push as"),
    "push of no such table": ("push", THREE, {**GOOD, "t": [5]}, "there is no table 5"),
    "push of wrong rows": ("push", (DENSE, torch.arange(2), NO_ROWS), GOOD, "table 't' got"),
    "leave of nobody": ("leave", (), {"g": 1, "stop": True}, "'leave' has w=None"),
    "leave of another age": ("leave", (), {"g": 5, "w": 0}, "generation 5 is not this"),
    "hold of another age": ("hold", (), {"g": 5}, "generation 5 is not this"),
    "save to nowhere": ("save", (), {"g": 1, "upto": {}}, "'save' has path=None: send an absolute one"),
    "gather without a name": ("gather", (), {"member": 0}, "a gather needs a name and a group"),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_refused_and_changes_nothing(name, mode):
    kind, tensors, head, words = WRONG[name]
    if mode == "async" and name == "pull of no version":
        return  # it has a meaning in sync only
    server = made(mode)
    waiting = push(server, 1, 0, (1.0, 1.0, 1.0)) if mode == "sync" else None
    before = state(server)
    asked = ask(server, kind, tensors, **head)
    assert asked.answered
    assert asked.text is not None, "it was taken"
    assert words in asked.text
    assert state(server) == before
    assert waiting is None or not waiting.answered


@pytest.mark.parametrize("upto", [None, [1], {"a": 1}, {"0": "x"}])
def test_a_save_up_to_nobody_knows_where_is_refused(upto, tmp_path):
    server = made("async")
    told(server, "hold", g=1)
    asked = ask(server, "save", g=1, path=str(tmp_path), upto=upto)
    assert "send a step for each worker" in asked.text


@pytest.mark.parametrize("kind", ["rows", "load", "ready", "dense", "pull", "push", "leave", "hold", "save"])
def test_before_it_begins_nothing_is_taken(kind):
    server = Server(Role(kind="server", workers=2, servers=1, server_endpoints=("127.0.0.1:1",)))
    tensors = (torch.arange(1), ROWS[:1]) if kind == "rows" else (torch.arange(1),) if kind == "pull" else ()
    asked = ask(server, kind, tensors, g=0, table=0, path="/a", w=0, s=0, v=0, t=0)
    assert asked.code == "stale"
