"""What is counted: every release once, before it happens, whatever is killed and when."""

from __future__ import annotations

import base64
import itertools
import json
import math
import tempfile
import timeit
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import CheckpointError, ConfigError
from plait.privacy import ledger as module
from plait.privacy.accountant import Event, epsilon, gaussian_epsilon, most_rounds, most_steps, together
from plait.privacy.ledger import FILE, Ledger

DELTA = 1e-5
EVENT = Event(1.0, 0.01)
OTHER = Event(2.0, 0.01)
WHOLE = Event(4.0)


def released(steps, ledger=None, event=EVENT, first=1, epoch=50, **more):
    ledger = ledger or Ledger(DELTA)
    for step in range(first, first + steps):
        ledger.release(event, step=step, uses=(step - 1) // epoch + 1, **more)
    return ledger


def kept(folder, **settings):
    ledger = Ledger(DELTA, **settings)
    ledger.keep(folder)
    return ledger


def counts(ledger):
    return ledger._counts()


def kind(event):
    return module._Kind(event, None, "", "")


def exact(steps, event=EVENT):
    return epsilon([(event, steps)], DELTA)


class TestCounting:
    def test_a_new_one_has_nothing(self):
        ledger = Ledger(DELTA)
        assert (ledger.epsilon(), ledger.epsilon(exact=True), ledger.peer_epsilon()) == (0, 0, 0)
        assert not ledger.exhausted

    def test_each_release_counts(self):
        assert released(300).epsilon(exact=True) == exact(300)

    def test_a_release_that_is_repeated_does_not(self):
        ledger = released(30)
        released(30, ledger)
        ledger.release(EVENT, step=7, uses=1)
        assert counts(ledger) == {EVENT: 30}

    def test_kinds_of_releases_add_up(self):
        ledger = released(40)
        released(30, ledger, OTHER, first=41)
        released(5, ledger, EVENT, first=71)
        assert counts(ledger) == {EVENT: 45, OTHER: 30}
        assert ledger.epsilon(exact=True) == pytest.approx(epsilon([(EVENT, 45), (OTHER, 30)], DELTA))
        assert ledger.epsilon() >= ledger.epsilon(exact=True)

    def test_the_same_step_with_other_noise_is_another_release(self):
        ledger = released(40)
        released(20, ledger, OTHER, first=31)
        assert counts(ledger) == {EVENT: 40, OTHER: 20}
        released(5, ledger, OTHER, first=46)
        assert counts(ledger) == {EVENT: 40, OTHER: 20}

    def test_steps_that_others_made_count(self):
        ledger = released(10)
        ledger.release(EVENT, step=15, uses=1)
        assert counts(ledger) == {EVENT: 15}

    def test_without_noise_there_is_no_bound(self):
        ledger = released(3, event=Event(0.0, 0.01))
        assert ledger.epsilon() == ledger.epsilon(exact=True) == ledger.peer_epsilon() == math.inf

    @settings(max_examples=12)
    @given(st.integers(1, 20_000))
    def test_the_quick_epsilon_is_an_upper_bound(self, steps):
        ledger = Ledger(DELTA, method="rdp")
        ledger.release(EVENT, step=steps, uses=1)
        assert ledger.epsilon(exact=True) <= ledger.epsilon() <= 1.1 * ledger.epsilon(exact=True)

    @pytest.mark.parametrize("steps", [1, 17, 999])
    def test_the_quick_epsilon_is_an_upper_bound_of_the_tight_one(self, steps):
        ledger = Ledger(DELTA)
        ledger.release(EVENT, step=steps, uses=1)
        assert ledger.epsilon(exact=True) <= ledger.epsilon() <= 1.1 * ledger.epsilon(exact=True)

    def test_the_quick_epsilon_never_falls_and_is_computed_rarely(self, monkeypatch):
        asked = []

        def noted(events, delta, method):
            asked.append(events)
            return epsilon(events, delta, method)

        monkeypatch.setattr(module, "rough_epsilon", noted)
        ledger, found = Ledger(DELTA, method="rdp"), []
        for step in range(1, 501):
            ledger.release(EVENT, step=step, uses=1)
            found.append(ledger.epsilon())
        assert found == sorted(found)
        assert len(asked) < 64

    @pytest.mark.alone
    def test_it_costs_microseconds(self):
        ledger, steps = released(1), itertools.count(2)
        best = min(timeit.repeat(lambda: ledger.release(EVENT, step=next(steps), uses=1), number=2000, repeat=5))
        assert best / 2000 < 5e-6


class TestPeer:
    def test_sampling_hides_nothing_from_a_peer(self):
        assert released(1000, epoch=50).peer_epsilon() == gaussian_epsilon(20, DELTA)
        assert released(1000, epoch=50).peer_epsilon() == pytest.approx(28.4, rel=0.005)

    def test_a_row_was_not_in_more_batches_than_there_were(self):
        ledger = Ledger(DELTA)
        ledger.release(EVENT, step=1, uses=9)
        assert ledger.peer_epsilon() == gaussian_epsilon(1, DELTA)

    def test_what_goes_back_adds_to_it(self):
        with_noise = released(100, epoch=50, returned=2.0)
        assert with_noise.peer_epsilon() == pytest.approx(gaussian_epsilon(2 * (1 + 1 / 4), DELTA))
        assert with_noise.epsilon() == released(100, epoch=50).epsilon()

    def test_what_goes_back_bare_tells_all(self):
        ledger = released(100)
        ledger.release(EVENT, step=101, uses=3, returned=0.0)
        assert ledger.peer_epsilon() == math.inf
        assert ledger.epsilon() < math.inf

    def test_with_two_kinds_the_worse_one_counts_for_all_uses(self):
        ledger = released(100, epoch=50)
        released(100, ledger, OTHER, first=101, epoch=50)
        assert ledger.peer_epsilon() == gaussian_epsilon(4, DELTA)

    def test_empty_batches_tell_nothing(self):
        ledger = Ledger(DELTA)
        ledger.release(EVENT, step=1, uses=0)
        assert ledger.peer_epsilon() == 0


class TestKnownBatches:
    """With a rate of 1 the batches are known to all: what counts is how often a row is used."""

    def test_an_outsider_knows_what_a_peer_does(self):
        ledger = released(1000, event=WHOLE, epoch=50, returned=3.0)
        assert ledger.epsilon() == ledger.epsilon(exact=True) == pytest.approx(gaussian_epsilon(20 / 16, DELTA))
        assert ledger.peer_epsilon() > ledger.epsilon()

    def test_every_step_counts_if_a_row_is_in_all(self):
        assert released(9, event=WHOLE, epoch=1).epsilon() == pytest.approx(gaussian_epsilon(9 / 16, DELTA))

    def test_a_budget_counts_uses(self):
        budget = gaussian_epsilon(3.5 / 16, DELTA)
        ledger = released(150, Ledger(DELTA, budget=budget), WHOLE)
        assert not ledger.affords(WHOLE, step=151, uses=4)
        assert ledger.affords(WHOLE, step=151, uses=3)
        assert ledger.exhausted
        with pytest.raises(ConfigError, match="does not allow private step 151"):
            ledger.release(WHOLE, step=151, uses=4)

    def test_after_a_run_with_sampling(self, tmp_path):
        released(100, kept(tmp_path)).close()
        ledger = released(50, kept(tmp_path), WHOLE)
        assert ledger.epsilon(exact=True) == pytest.approx(epsilon([(EVENT, 100), (WHOLE, 1)], DELTA))


class TestTurns:
    """Tasks whose steps come in turn, each with its noise."""

    def turns(self, ledger, steps, first=1):
        for step in range(first, first + steps):
            event, task = (EVENT, "a") if step % 2 else (OTHER, "b")
            ledger.release(event, step=step, uses=1, task=task)
        return ledger

    def test_each_counts_with_its_own(self):
        ledger = self.turns(Ledger(DELTA), 100)
        assert counts(ledger) == {EVENT: 50, OTHER: 50}
        self.turns(ledger, 60, first=41)
        assert counts(ledger) == {EVENT: 50, OTHER: 50}

    def test_they_are_written_as_rarely_as_others(self, tmp_path, monkeypatch):
        written = []
        monkeypatch.setattr(module, "write_atomic", lambda path, data: written.append(len(data)))
        self.turns(kept(tmp_path), 20_000)
        assert len(written) < 300
        assert max(written) < 1500

    @pytest.mark.alone
    def test_they_cost_microseconds(self):
        ledger, steps = self.turns(Ledger(DELTA), 2), itertools.count(3)
        best = min(timeit.repeat(lambda: self.turns(ledger, 1, first=next(steps)), number=2000, repeat=5))
        assert best / 2000 < 8e-6

    @pytest.mark.parametrize("method", [pytest.param("rdp", marks=pytest.mark.slow), "pld"])
    def test_a_budget_is_asked_for_rarely_and_nearly_used_up(self, monkeypatch, method):
        asked = []

        def noted(*args, **more):
            asked.append(most_rounds(*args, **more))
            return asked[-1]

        monkeypatch.setattr(module, "most_rounds", noted)
        ledger, step = Ledger(DELTA, budget=2.0, method=method), 0
        while not ledger.exhausted:
            step += 1
            self.turns(ledger, 1, first=step)
        assert 1.9 < ledger.epsilon(exact=True) <= 2.0
        assert step > 1000
        assert len(asked) < 40

    @pytest.mark.parametrize("first", [1, 2])
    def test_a_killed_run_that_goes_on_counts_nothing_twice_and_forgets_nothing(self, tmp_path, first):
        ledger = self.turns(kept(tmp_path), 90)
        state = json.loads(json.dumps(ledger.state_dict()))
        self.turns(ledger, 7, first=91)  # and is killed
        again = kept(tmp_path)
        again.load_state_dict(state)
        assert again._run.name == ledger._run.name
        self.turns(again, 110, first=91)
        found = counts(again)
        assert again._run.name == ledger._run.name
        for event in (EVENT, OTHER):
            assert 100 <= found[event] <= 100 + module._BLOCK

    def test_another_order_after_a_kill_is_another_run(self):
        ledger = self.turns(Ledger(DELTA), 40)
        ledger.release(OTHER, step=31, uses=1, task="b")  # it was task a's
        assert counts(ledger) == {EVENT: 20, OTHER: 21}

    def test_another_task_is_another_release_though_its_noise_is_the_same(self):
        ledger = Ledger(DELTA)
        for step in range(1, 11):
            ledger.release(EVENT, step=step, uses=1, task="a")
        ledger.release(EVENT, step=10, uses=1, task="b")
        assert counts(ledger) == {EVENT: 11}

    def test_many_kinds(self, tmp_path):
        ledger = Ledger(DELTA)
        for step in range(1, 301):
            ledger.release(Event(1.0, step / 1000), step=step, uses=1)
        ledger.keep(tmp_path)
        ledger.close()
        assert counts(kept(tmp_path)) == counts(ledger) == {Event(1.0, step / 1000): 1 for step in range(1, 301)}


class TestSameDraws:
    """Who draws the same rows twice tells more of them than who draws anew."""

    def test_two_runs_of_one_seed(self, tmp_path):
        released(100, kept(tmp_path), draws="seed").close()
        again = released(60, kept(tmp_path), draws="seed")
        assert counts(again) == {Event(together(1.0, 1.0), 0.01): 60, EVENT: 40}
        assert again.epsilon(exact=True) > exact(160)
        assert again.epsilon() >= again.epsilon(exact=True)

    def test_other_seeds_draw_by_themselves(self, tmp_path):
        released(100, kept(tmp_path), draws="seed").close()
        assert counts(released(60, kept(tmp_path), draws="another")) == {EVENT: 160}

    def test_two_tasks_of_one_seed_in_one_run(self):
        ledger = Ledger(DELTA)
        for step in range(1, 41):
            ledger.release(EVENT if step % 2 else OTHER, step=step, uses=1, task=str(step % 2), draws="seed")
        assert counts(ledger) == {Event(together(1.0, 2.0), 0.01): 20}

    def test_a_step_that_is_made_again_with_other_noise_has_the_same_rows(self):
        ledger = released(40, draws="seed")
        released(10, ledger, OTHER, first=31, draws="seed")
        assert counts(ledger) == {Event(together(1.0, 2.0), 0.01): 10, EVENT: 30}

    def test_dear_steps_meet_dear_steps(self):
        ledger = released(30, draws="seed")
        released(10, ledger, OTHER, first=31, draws="seed")
        ledger.load_state_dict({**ledger.state_dict(), "run": "another"})
        released(35, ledger, OTHER, first=41, draws="seed")
        both = Event(together(1.0, 2.0), 0.01)
        assert counts(ledger) == {both: 30, Event(together(2.0, 2.0), 0.01): 5, OTHER: 5}

    def test_a_budget_counts_them(self, tmp_path):
        released(500, kept(tmp_path), draws="seed").close()
        ledger, step = kept(tmp_path, budget=2.0), 0
        while not ledger.exhausted and step < 5000:
            step += 1
            ledger.release(EVENT, step=step, uses=1, draws="seed")
        assert 1.9 < ledger.epsilon(exact=True) <= 2.0


def test_a_branch_is_told():
    told = []
    ledger = released(40, Ledger(DELTA, branched=lambda: told.append("now")))
    released(40, ledger)
    assert not told
    released(10, ledger, OTHER, first=31)
    assert told == ["now"]


class TestBudget:
    @pytest.mark.parametrize(("method", "budget"), [("pld", 0.5), ("rdp", 1.5)])
    def test_it_stops_before_the_budget_is_passed(self, method, budget):
        ledger, steps = Ledger(DELTA, budget=budget, method=method), 0
        while not ledger.exhausted:
            steps += 1
            ledger.release(EVENT, step=steps, uses=1)
        assert steps == most_steps(EVENT, DELTA, budget, method=method)
        assert ledger.epsilon(exact=True) <= budget < epsilon([(EVENT, steps + steps // 1000 + 1)], DELTA, method)
        with pytest.raises(ConfigError, match=rf"epsilon_budget={budget} at delta=1e-05 does not allow private step"):
            ledger.release(EVENT, step=steps + 1, uses=1)
        assert counts(ledger) == {EVENT: steps}
        released(steps, ledger)  # what was released may be made again

    def test_how_far_it_goes_is_asked_once_for_each_kind(self, monkeypatch):
        asked = []

        def noted(name, function):
            def call(*args, **more):
                asked.append(name)
                return function(*args, **more)

            monkeypatch.setattr(module, name, call)

        noted("most_steps", most_steps)
        noted("most_rounds", most_rounds)
        ledger = Ledger(DELTA, budget=1.0)
        for step in range(1, 101):
            ledger.release(EVENT if step <= 60 else OTHER, step=step, uses=1)
            assert not ledger.exhausted
        assert asked == ["most_steps", "most_rounds"]

    def test_a_budget_that_goes_far_is_looked_at_again_when_it_is_near(self):
        event = Event(8.0, 0.001)
        ledger = Ledger(DELTA, budget=0.2, method="rdp")
        ledger.release(event, step=1, uses=1)
        limit = ledger._limit_of(kind(event), 1)
        assert not limit.final
        assert ledger.affords(event, step=int(limit.step) + 1, uses=1)
        assert not ledger.affords(event, step=most_steps(event, DELTA, 0.2, method="rdp") + 100_000, uses=1)

    def test_a_budget_that_allows_no_step_says_so_at_the_first(self):
        ledger = Ledger(DELTA, budget=0.001)
        assert not ledger.affords(EVENT, step=1, uses=1)
        with pytest.raises(ConfigError, match="does not allow private step 1 with noise 1 and sampling rate 0.01"):
            ledger.release(EVENT, step=1, uses=1)
        with pytest.raises(ConfigError, match="noise 0 and"):
            ledger.release(Event(0.0), step=1, uses=1)
        assert ledger.epsilon() == 0

    def test_what_other_runs_released_counts(self, tmp_path):
        released(500, kept(tmp_path)).close()
        alone, after = Ledger(DELTA, budget=2.0), kept(tmp_path, budget=2.0)
        assert after.affords(EVENT, step=1, uses=1)
        limits = [ledger._limit_of(kind(EVENT), 1).step for ledger in (alone, after)]
        assert limits[0] - limits[1] == pytest.approx(500, abs=5)
        assert kept(tmp_path, budget=0.1).exhausted
        assert not kept(tmp_path, budget=5.0).exhausted


class TestState:
    def test_it_comes_back(self):
        ledger = released(60, returned=2.0)
        state = json.loads(json.dumps(ledger.state_dict()))
        again = Ledger(DELTA)
        again.load_state_dict(state)
        assert counts(again) == {EVENT: 60}
        assert again.peer_epsilon() == ledger.peer_epsilon()
        released(40, ledger, first=61, returned=2.0)
        released(50, again, first=51, returned=2.0)
        assert again.epsilon(exact=True) == ledger.epsilon(exact=True)

    def test_going_back_takes_nothing_back(self):
        ledger = released(20)
        state = ledger.state_dict()
        released(30, ledger, first=21)
        ledger.load_state_dict(state)
        assert counts(ledger) == {EVENT: 50}
        released(40, ledger, first=21)
        assert counts(ledger) == {EVENT: 60}

    def test_the_state_of_another_run_is_counted_beside_this_one(self):
        ledger = released(20)
        ledger.load_state_dict(released(30).state_dict())
        assert counts(ledger) == {EVENT: 50}
        released(31, ledger)
        assert counts(ledger) == {EVENT: 51}

    def test_a_run_under_a_new_name_begins_after_the_state(self):
        again = Ledger(DELTA)
        again.load_state_dict({**released(30).state_dict(), "run": "another"})
        again.release(EVENT, step=31, uses=1)
        assert counts(again) == {EVENT: 31}

    def test_steps_that_cannot_be_repeated_count_again(self):
        ledger = Ledger(DELTA, repeatable=False)
        released(20, ledger)
        state = ledger.state_dict()
        released(10, ledger, first=21)
        for again in (ledger, Ledger(DELTA, repeatable=False)):
            again.load_state_dict(state)
            before = counts(again)[EVENT]
            released(10, again, first=21)
            assert counts(again) == {EVENT: before + 10}

    def test_another_delta_is_refused(self):
        with pytest.raises(ConfigError, match=r"kept for delta=1e-05, and this run has delta=1e-06; write delta=1e-05"):
            Ledger(1e-6).load_state_dict(released(3).state_dict())


def broken(**changes):
    run = {"name": "a", "uses": 1, "kinds": [[1, 0.1, None, "", "", 2]], "first": 1, "order": ORDER, **changes}
    return json.dumps({"version": 1, "delta": 1e-05, "runs": [run]})


ORDER = base64.b64encode(zlib.compress(bytes(2))).decode()


class TestFile:
    def test_the_file_that_others_are_broken_versions_of_is_read(self, tmp_path):
        (tmp_path / FILE).write_text(broken())
        assert counts(kept(tmp_path)) == {Event(1.0, 0.1): 2}

    def test_a_release_is_on_disk_before_it_happens(self, tmp_path):
        ledger = kept(tmp_path)
        for step in range(1, 200):
            ledger.release(EVENT, step=step, uses=step)
            assert counts(kept(tmp_path))[EVENT] >= step
            assert kept(tmp_path).peer_epsilon() >= ledger.peer_epsilon()

    def test_it_is_written_rarely(self, tmp_path, monkeypatch):
        written = []
        monkeypatch.setattr(module, "write_atomic", lambda path, data: written.append(path))
        released(20_000, kept(tmp_path), epoch=500)
        assert len(written) < 300

    def test_a_run_that_ends_in_order_leaves_what_it_released(self, tmp_path):
        ledger = released(100, kept(tmp_path))
        assert counts(kept(tmp_path))[EVENT] > 100
        ledger.close()
        assert counts(kept(tmp_path)) == {EVENT: 100}
        ledger.release(EVENT, step=101, uses=3)
        assert counts(kept(tmp_path))[EVENT] >= 101

    def test_a_run_that_begins_anew_is_counted_beside_it(self, tmp_path):
        released(100, kept(tmp_path)).close()
        ledger = released(50, kept(tmp_path), epoch=50)
        assert counts(ledger) == {EVENT: 150}
        assert ledger.epsilon(exact=True) == exact(150)
        assert ledger.peer_epsilon() == gaussian_epsilon(3, DELTA)

    @pytest.mark.parametrize("state_first", [True, False])
    def test_a_run_that_goes_on_from_its_checkpoint_is_not_counted_twice(self, tmp_path, state_first):
        ledger = kept(tmp_path)
        released(90, ledger)
        state = ledger.state_dict()
        released(7, ledger, first=91)  # and is killed
        again = Ledger(DELTA)
        if state_first:
            again.load_state_dict(state)
        again.keep(tmp_path)
        if not state_first:
            again.load_state_dict(state)
        assert counts(again)[EVENT] >= 97
        released(110, again, first=91)
        assert counts(again) == {EVENT: 200}
        again.close()
        assert counts(kept(tmp_path)) == {EVENT: 200}

    def test_what_was_written_ahead_is_within_the_budget(self, tmp_path):
        steps = most_steps(EVENT, DELTA, 0.5)
        released(steps, kept(tmp_path, budget=0.5))
        assert counts(kept(tmp_path)) == {EVENT: steps}

    @settings(max_examples=40)
    @given(st.data())
    def test_no_kill_makes_epsilon_smaller(self, data):
        """Runs that begin anew or go on from a checkpoint, killed anywhere: what is counted is never too little."""
        truth, states, shown, forks = {}, [], 0, itertools.count()
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(data.draw(st.integers(1, 5))):
                ledger = kept(folder)
                assert sum(counts(ledger).values()) >= len(truth)
                assert ledger.peer_epsilon() >= shown
                step, run = 0, next(forks)
                if states and data.draw(st.booleans()):
                    state, step, run = data.draw(st.sampled_from(states))
                    ledger.load_state_dict(state)
                for _ in range(data.draw(st.integers(0, 40))):
                    step += 1
                    event = EVENT if step < 20 else OTHER
                    ledger.release(event, step=step, uses=step // 3 + 1)
                    truth[run, step] = event
                    if data.draw(st.integers(0, 9)) == 0:
                        states.append((json.loads(json.dumps(ledger.state_dict())), step, run))
                assert sum(counts(ledger).values()) >= len(truth)
                assert all(
                    counts(ledger).get(event, 0) >= list(truth.values()).count(event) for event in counts(ledger)
                )
                shown = ledger.peer_epsilon()
                if data.draw(st.booleans()):
                    ledger.close()

    def test_keeping_twice_in_one_place_is_keeping_once(self, tmp_path):
        ledger = released(20, kept(tmp_path))
        ledger.keep(tmp_path)
        assert counts(ledger) == {EVENT: 20}

    def test_a_ledger_of_another_delta_is_refused(self, tmp_path):
        released(3, kept(tmp_path))
        with pytest.raises(ConfigError, match=rf"{FILE} is kept for delta=1e-05, and this run has delta=0.001"):
            Ledger(1e-3).keep(tmp_path)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            "{}",
            '{"version": 1, "delta": 1e-05}',
            '{"version": 1, "delta": 1e-05, "runs": [{"name": "a", "uses": 1, "first": 1, "order": ""}]}',
            broken(kinds=[[1, 0.1, None, 5]]),
            broken(kinds=[[-1, 0.1, None, "", "", 2]]),
            broken(kinds=[[1, 1.1, None, "", "", 2]]),
            broken(kinds=[[1, 0.1, None, "", "", 0]]),
            broken(first=0),
            broken(order="AAAA"),
            broken(order="not of base64"),
            broken(order=base64.b64encode(zlib.compress(bytes([0, 1]))).decode()),
        ],
    )
    def test_a_broken_one_is_refused_and_left_alone(self, tmp_path, text):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(CheckpointError, match="so what was released before is not known; bring it back"):
            kept(tmp_path)
        assert (tmp_path / FILE).read_text() == text

    def test_a_newer_one_is_refused(self, tmp_path):
        (tmp_path / FILE).write_text('{"version": 2, "delta": 1e-05, "runs": []}')
        with pytest.raises(CheckpointError, match="is of version 2; this plait reads version 1"):
            kept(tmp_path)

    def test_a_write_that_fails_lets_nothing_out(self, tmp_path, monkeypatch):
        def full(path, data):
            raise OSError("no space left")

        ledger = released(16, kept(tmp_path))
        before = (tmp_path / FILE).read_text()
        monkeypatch.setattr(module, "write_atomic", full)
        for _ in range(2):
            with pytest.raises(OSError, match="no space left"):
                ledger.release(EVENT, step=17, uses=1)
        assert (tmp_path / FILE).read_text() == before


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: Ledger(0.0), "delta=0.0: write a probability"),
        (lambda: Ledger(2.0), "delta=2.0"),
        (lambda: Ledger(DELTA, budget=0.0), "epsilon_budget=0.0: write a number above 0"),
        (lambda: Ledger(DELTA, budget=math.nan), "epsilon_budget=nan"),
        (lambda: Ledger(DELTA, method="gdp"), "accountant='gdp': there are 'pld' and 'rdp'"),
        (lambda: Ledger(DELTA).release(EVENT, step=0, uses=1), "private step 0: steps are counted from 1"),
    ],
)
def test_mistakes(call, what):
    with pytest.raises(ConfigError, match=what):
        call()
