"""Steps of two parties: the same samples, passes, procedures, and ends."""

from __future__ import annotations

import pytest
import torch

import plait
from plait import efl
from plait.errors import DataError

from .pair import (
    BATCHES,
    LEFT,
    RIGHT,
    ROWS,
    WHOLE,
    both,
    follower,
    follower_eval,
    follower_loss,
    leader,
    leader_eval,
    leader_loss,
    make,
    refused,
    trained,
    whole_eval,
    whole_loss,
)

TRAIN = efl.procedure_fn.train


class TestData:
    def test_the_same_ids(self):
        settings = {"model": {"sample_id": "id"}}
        parts = both(leader(TRAIN(), **settings), follower(TRAIN(), **settings))
        assert [part.step for part in parts] == [BATCHES, BATCHES]

    @pytest.mark.parametrize("ids", [LEFT["id"] + 1, LEFT["id"].flip(0)], ids=["others", "another order"])
    def test_other_ids_end_both_and_are_not_shown(self, ids):
        settings = {"model": {"sample_id": "id"}, "shuffle": False}
        found = refused(leader(TRAIN(), **settings), follower(TRAIN(), fields={**RIGHT, "id": ids}, **settings))
        assert isinstance(found[1], DataError)
        for error in found:
            assert "batch 0 of pass 0 is of other samples" in str(error)
            assert not any(str(one) in str(error) for one in [7_000_000, 7_000_001, int(ids[0])])

    def test_another_shuffling_is_found_by_ids(self):
        settings = {"model": {"sample_id": "id"}}
        found = refused(leader(TRAIN(), seed=1, **settings), follower(TRAIN(), seed=2, **settings))
        assert isinstance(found[1], DataError)

    def test_a_field_of_ids_that_is_not_there(self):
        settings = {"model": {"sample_id": "number"}}
        found = [str(error) for error in refused(leader(TRAIN(), **settings), follower(TRAIN(), **settings))]
        assert any("no field 'number' for sample_id" in text for text in found)

    @pytest.mark.parametrize("rows", [320, 300], ids=["a batch less", "a shorter batch"])
    def test_a_follower_with_fewer_rows(self, rows):
        fields = {name: value[:rows] for name, value in RIGHT.items()}
        settings = {"shuffle": False}
        found = refused(leader(TRAIN(), **settings), follower(TRAIN(), fields=fields, **settings))
        assert isinstance(found[1], DataError)
        for error in found:
            assert "batch" in str(error)
            assert "follower" in str(error)

    def test_a_follower_with_more_rows_leaves_them_out(self):
        fields = {name: value[:320] for name, value in LEFT.items()}
        procedure = efl.procedure_fn.train_and_eval(max_iter=2)
        settings = {"shuffle": False}
        with pytest.warns(UserWarning, match="the leader's pass is over after 10 batches, the follower has more"):
            parts = both(
                leader(procedure, evaluate=leader_eval, fields=fields, **settings),
                follower(procedure, evaluate=follower_eval, **settings),
            )
        assert [part.step for part in parts] == [20, 20]

    def test_no_more_passes_at_the_follower(self):
        found = refused(leader(TRAIN(30), num_epochs=3), follower(TRAIN(30), num_epochs=2))
        assert isinstance(found[1], DataError)
        for error in found:
            assert "pass 2 is over after 0 batches" in str(error)


class TestProcedures:
    @pytest.mark.parametrize(("passes", "steps"), [(2, None), (3, 20), (2, 100)])
    def test_passes_and_steps(self, passes, steps, caplog):
        parts = both(leader(TRAIN(steps), num_epochs=passes), follower(TRAIN(steps), num_epochs=passes))
        wanted = min(passes * BATCHES, steps or ROWS)
        assert [part.step for part in parts] == [wanted, wanted]

    def test_an_interval_is_by_the_leaders_clock(self):
        procedure = efl.procedure_fn.train_and_eval(train_interval=0.2, max_iter=2)
        settings = {"num_epochs": 10_000}
        lead, follow = both(
            leader(procedure, evaluate=leader_eval, **settings),
            follower(procedure, evaluate=follower_eval, **settings),
        )
        assert lead.step == follow.step > 0
        assert len(lead.found) == 2

    def test_functions_that_run_steps_by_themselves(self):
        def by_hand(model):
            def steps(sess, count):
                for _ in range(count):
                    sess.run(model.train_op())
                return count

            def evaluate(sess):
                while True:
                    sess.run(model.eval_op())

            assert model.run_stage("first", steps, 5) == 5
            model.run_stage("test", evaluate)
            model.run_stage("second", steps, 8)  # the pass ends in it, after six
            model.run_stage("third", steps, 3)

        parts = both(leader(by_hand, evaluate=leader_eval), follower(by_hand, evaluate=follower_eval))
        alone = trained(_whole(), by_hand)
        assert {part.step for part in parts} == {alone.step}
        joined = {**parts[0].variables, **parts[1].variables}
        assert all(torch.equal(joined[name], value) for name, value in alone.variables.items())

    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize(
        ("stages", "word"),
        [
            ([("train", 3), ("train", 3)], "the end of its procedure"),
            ([("train", 4)], "steps"),
            ([("other", 3)], "other"),
            ([("hand", 3)], "the beginning of a stage"),
        ],
        ids=["one more", "more steps", "another name", "a function"],
    )
    def test_procedures_of_ones_own_that_differ(self, stages, word, place):
        found = refused(*self._with_stages([("train", 3)], stages, place))
        assert [error for error in found if word not in str(error)] == []

    @pytest.mark.parametrize("place", [0, 1])
    def test_functions_that_run_different_numbers_of_steps(self, place):
        for error in refused(*self._with_stages([("hand", 3)], [("hand", 4)], place)):
            assert "makes a step of 'TRAIN:'" in str(error)
            assert "the end of its procedure" in str(error)

    @staticmethod
    def _with_stages(one, other, place):
        def of(stages):
            def procedure(model):
                def by_hand(sess, count):
                    for _ in range(count):
                        sess.run(model.train_op())

                for name, count in stages:
                    if name == "hand":
                        model.run_stage(name, by_hand, count)
                    else:
                        model.run_stage(name, efl.stage.LoopStage(model.train_op(), step=count, model=model))

            return procedure

        order = (one, other)[:: 1 if place else -1]
        return leader(of(order[0])), follower(of(order[1]))

    def test_two_fits(self):
        def twice(fields, loss):
            def run(joined):
                model = make(fields, loss, joined=joined, num_epochs=9)
                trained(model, TRAIN(5))
                model.fit(TRAIN(4))
                return int(model.global_step)

            return run

        assert both(twice(LEFT, leader_loss), twice(RIGHT, follower_loss)) == [9, 9]


def _whole():
    return make(WHOLE, whole_loss, whole_eval)


class StopAt(plait.train.SessionRunHook):
    def __init__(self, run):
        self.left = run

    def after_run(self, run_context, run_values):
        self.left -= 1
        if self.left == 0:
            run_context.request_stop()


class TestStops:
    def test_a_hook_of_the_leader_stops_both(self):
        procedure = efl.procedure_fn.train_and_eval(max_iter=5)
        lead, follow = both(
            leader(procedure, evaluate=leader_eval, fit={"hooks": [StopAt(7)]}),
            follower(procedure, evaluate=follower_eval),
        )
        assert [lead.step, follow.step] == [7, 7]
        assert lead.found == []

    def test_a_hook_of_the_follower_stops_both_a_little_later(self):
        procedure = efl.procedure_fn.train_and_eval(max_iter=50)
        lead, follow = both(
            leader(procedure, evaluate=leader_eval),
            follower(procedure, evaluate=follower_eval, fit={"hooks": [StopAt(7)]}),
        )
        assert lead.step == follow.step
        assert 7 <= lead.step <= 10

    def test_a_stop_during_cotrain(self):
        procedure = efl.procedure_fn.cotrain(train_step=50, max_iter=5)
        settings = {"tasks": ["buy", "click"], "num_epochs": 20}
        lead, follow = both(leader(procedure, **settings), follower(procedure, fit={"hooks": [StopAt(7)]}, **settings))
        assert lead.step == follow.step
        assert 7 <= lead.step <= 10

    def test_a_stop_that_comes_too_late_does_not_stop_the_next_fit(self):
        def twice(fields, loss, hooks):
            def run(joined):
                model = make(fields, loss, joined=joined, num_epochs=20)
                trained(model, TRAIN(5), hooks=hooks)
                model.fit(TRAIN(40))
                return int(model.global_step)

            return run

        steps = both(twice(LEFT, leader_loss, []), twice(RIGHT, follower_loss, [StopAt(5)]))
        assert steps == [45, 45]
