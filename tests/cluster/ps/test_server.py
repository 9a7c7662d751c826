"""What a parameter server does with each message; requests are made by hand, and nothing is sent."""

from __future__ import annotations

import time

import pytest
import torch

from plait.cluster.ps import server as server_module

from .asking import DENSE, ROWS, ask, bare, begin, dense, made, pull, push, told


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
        server = bare()
        first = self.join(server, 1)
        assert not first.answered
        assert self.join(server, 0).reply_head == first.reply_head == {"generation": 1}
        assert told(server, "status")["ready"] is False

    def test_the_number_is_above_what_any_member_knows(self):
        server = bare()
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
        other = bare()
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
