"""Stages are run once: also across restarts, which these tests make by fitting anew from a checkpoint directory."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.efl.framework import StageManager
from plait.engine.settings import RunConfig
from plait.engine.stage import train_loop
from plait.errors import CheckpointError, StageError
from plait.train import MonitoredSession

SETTER = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1))


def small():
    model = efl.Model()
    model.input_fn(lambda model, mode: [{"x": torch.ones(1, 2)}] * 3)
    model.loss_fn(lambda model, sample: plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean())
    return model.optimizer_fn(SETTER).compile()


def manager(**kwargs):
    made = StageManager(**kwargs)
    made.init_arg(MonitoredSession())
    return made


@pytest.fixture
def run(tmp_path):
    """Fit a procedure in the same checkpoint directory each time, with a fresh model."""

    def fit(procedure, **kwargs):
        model = small()
        model.fit(procedure, checkpoint_dir=tmp_path / "checkpoints", **kwargs)
        return model

    return fit


class Cut(Exception):
    """Stands for a process that dies."""


class TestFunctions:
    @pytest.mark.parametrize(
        ("function", "args", "expected"),
        [
            (lambda sess: type(sess).__name__, (), "MonitoredSession"),
            (lambda sess, ctx: ctx.worker_num, (), 1),
            (lambda sess, c: c.worker_num, (), 1),
            (lambda sess, ctx, n: (ctx.worker_id, n), (5,), [0, 5]),
            (lambda sess, ctx=None, n=1: (ctx.worker_id, n), (5,), [0, 5]),
            (lambda sess, n: n, (5,), 5),
            (lambda sess, n=2: n, (), 2),
            (lambda sess, n, more=3: (n, more), (5,), [5, 3]),
            (lambda sess, *rest: rest, (5, 6), [5, 6]),
        ],
    )
    def test_are_called_with_the_session_and_what_they_take(self, function, args, expected):
        assert manager().stage("a", function, 1.0, *args) == expected

    def test_keywords_pass_through(self):
        assert manager().stage("a", lambda sess, ctx, *, width: width, 1.0, width=3) == 3

    def test_a_class_with_run_and_arguments(self):
        class Mine(efl.Stage):
            def run(self, one, two=2):
                return type(self.sess).__name__, one, two

        assert manager().stage("a", Mine(), 1.0, 7) == ["MonitoredSession", 7, 2]

    def test_what_cannot_be_run_is_refused(self):
        with pytest.raises(StageError, match="stage 'a' is a int: give a function or an efl.Stage"):
            manager().stage("a", 3, 1.0)


class TestContext:
    def test_who_and_what(self):
        config = RunConfig(values={"model": {"width": 8}})
        ctx = manager(config=config).stage("a", lambda sess, ctx: ctx, 1.0)
        assert (ctx.worker_id, ctx.worker_num, ctx.is_chief()) == (0, 1, True)
        assert ctx.get("model", "width") == ctx.get("model.width") == 8
        assert ctx.get("model", "depth", default=2) == 2

    @pytest.mark.parametrize("how", ["sum", "mean", "min", "max"])
    def test_alone_a_value_is_its_own_combination(self, how):
        assert manager().stage("a", lambda sess, ctx: getattr(ctx, how)(2.5), 1.0) == 2.5

    def test_concat_gives_a_list(self):
        assert manager().stage("a", lambda sess, ctx: ctx.concat(2.5), 1.0) == [2.5]

    def test_combinations_are_the_strategys(self):
        asked = []

        class Two(plait.engine.strategy.Local):
            worker_id, worker_num = 1, 2

            def reduce(self, value, how):
                asked.append((value, how))
                return "both"

        made = manager(strategy=Two())
        ctx = made.stage("a", lambda sess, ctx: ctx, 1.0)
        assert ctx.is_chief() is False
        assert [getattr(ctx, how)(how) for how in ("sum", "mean", "min", "max", "concat")] == ["both"] * 5
        assert asked == [(how, how) for how in ("sum", "mean", "min", "max", "concat")]

    def test_a_stage_ends_when_variables_are_those_of_all_and_everybody_is_there(self):
        order = []

        class Two(plait.engine.strategy.Local):
            def settle(self, model):
                order.append("settle")

            def barrier(self, name, interval):
                order.append((name, interval))

        made = manager(strategy=Two(), model=small())
        made.after_stage = lambda: order.append("saved")
        made.stage("a", lambda sess: order.append("run"), 2.5)
        assert order == ["run", "settle", ("a", 2.5), "saved"]

    def test_scope_finds_the_models_variables(self):
        model = small()

        def look(sess, ctx):
            with ctx.scope():
                return float(plait.layer("fc", nn.Linear, 2, 1).weight.detach()[0, 0])

        found = []
        model.fit(lambda model: found.append(model.run_stage("a", look)))
        assert found == [model.variables()["fc/weight"][0, 0].item()]

    def test_scope_without_a_model_says_what_it_needs(self):
        with pytest.raises(StageError, match=r"ctx.scope\(\) needs a model: run this stage with model.run_stage"):
            manager().stage("a", lambda sess, ctx: ctx.scope(), 1.0)


class TestOrder:
    def test_the_end_of_the_data_ends_a_function_and_nothing_else(self):
        made = manager()
        assert made.stage("a", lambda sess: next(iter([])), 1.0) is None
        assert made.stage("b", lambda sess: 1, 1.0) == 1

    def test_stages_may_not_nest(self):
        made = manager()
        with pytest.raises(StageError, match="stage 'inner' starts inside stage 'outer': stages follow each other"):
            made.stage("outer", lambda sess: made.stage("inner", lambda sess: None, 1.0), 1.0)

    def test_a_stage_that_failed_is_over(self):
        made = manager()
        with pytest.raises(Cut):
            made.stage("a", lambda sess: (_ for _ in ()).throw(Cut()), 1.0)
        assert made.stage("b", lambda sess: 1, 1.0) == 1

    def test_the_same_name_may_come_again(self):
        made = manager()
        assert [made.stage("a", lambda sess, i: i, 1.0, number) for number in range(3)] == [0, 1, 2]

    def test_the_interval_goes_to_the_wait_for_others(self):
        waited = []

        class Slow(plait.engine.strategy.Local):
            def barrier(self, name, interval):
                waited.append((name, interval))

        manager(strategy=Slow()).stage("a", lambda sess: None, 2.5)
        assert waited == [("a", 2.5)]

    def test_the_documented_arguments_are_taken(self):
        made = StageManager("root", "cpu", 0, 1, "project", "name")
        assert (made.worker_id, made.worker_num, made.project_name, made.name) == (0, 1, "project", "name")

    def test_set_monitored_sess_gives_later_stages_their_session(self):
        made, session = manager(), MonitoredSession()
        made.set_monitored_sess(session)
        assert made.stage("a", lambda sess: sess is session, 1.0)


class TestRestart:
    @pytest.mark.parametrize("result", [None, 3, 0.5, "text", [1, [2]], {"a": [1.5, None, True]}])
    def test_what_is_done_is_skipped_and_gives_its_result_again(self, run, result):
        ran, found = [], []

        def work(sess):
            ran.append(1)
            return result

        for _ in range(2):
            run(lambda model: found.append(model.run_stage("work", work)))
        assert (len(ran), found) == (1, [result, result])

    def test_tuples_are_lists_at_once_as_they_will_be_after_a_restart(self, run):
        found = []
        for _ in range(2):
            run(lambda model: found.append(model.run_stage("work", lambda sess: {"a": (1, (2,))})))
        assert found == [{"a": [1, [2]]}] * 2

    def test_tensors_come_again_bit_for_bit(self, run):
        results = [torch.rand(3), torch.rand(3)]
        found = []
        for _ in range(2):
            run(lambda model: found.append(model.run_stage("work", lambda sess: {"t": results.pop()})))
        assert len(results) == 1
        assert torch.equal(found[0]["t"], found[1]["t"])

    def test_a_result_that_cannot_be_kept_is_an_error(self, run):
        with pytest.raises(CheckpointError, match="object"):
            run(lambda model: model.run_stage("work", lambda sess: object()))

    def test_a_stage_that_was_cut_runs_again_as_a_whole(self, run):
        ran = []

        def procedure(model, cut):
            model.run_stage("first", lambda sess: ran.append("first"))
            model.run_stage("train", efl.stage.LoopStage(model.train_op(), step=1))
            model.run_stage("second", lambda sess: ran.append("second"))
            if cut:
                raise Cut

        with pytest.raises(Cut):
            run(functools.partial(procedure, cut=True), save_steps=1)
        run(functools.partial(procedure, cut=False))
        assert ran == ["first", "second", "second"]

    def test_another_name_in_the_same_place_is_an_error_that_shows_both(self, run):
        run(lambda model: model.run_stage("first", lambda sess: None))
        with pytest.raises(
            StageError, match="stage 0 of project 'default_prj' is 'first' in the checkpoint and 'other'"
        ):
            run(lambda model: model.run_stage("other", lambda sess: None))

    def test_another_name_than_that_of_the_stage_that_was_cut_is_an_error_too(self, run):
        class Cutting(efl.Stage):
            def run(self):
                self.sess.run(self.sess.session.model.train_op())
                self.boundary()
                raise Cut

        with pytest.raises(Cut):
            run(lambda model: model.run_stage("cut", Cutting()), save_steps=1)
        with pytest.raises(StageError, match="stage 0 of project 'default_prj' is 'cut' in the checkpoint and 'other'"):
            run(lambda model: model.run_stage("other", Cutting()))

    def test_a_stage_keeps_its_state_in_the_checkpoint(self, run):
        started = []

        class Counting(efl.Stage):
            count = 0

            def run(self, cut):
                started.append(self.count)
                while self.count < 3:
                    self.sess.run(model_of(self).train_op())
                    self.count += 1
                    self.boundary()
                    if cut and self.count == 2:
                        raise Cut
                return self.count

            def state_dict(self):
                return {"count": self.count}

            def load_state_dict(self, state):
                self.count = state["count"]

        model_of = lambda stage: stage.sess.session.model
        found = []
        with pytest.raises(Cut):
            run(lambda model: model.run_stage("count", Counting(), True), save_steps=1)
        model = run(lambda model: found.append(model.run_stage("count", Counting(), False)), save_steps=1)
        assert (started, found) == ([0, 2], [3])
        assert int(model.global_step) == 3

    def test_the_journal_of_another_project_is_not_taken(self):
        made = manager(project_name="new")
        made.load_state_dict({"project": "old", "done": [["a", 1, {}]], "running": None})
        assert (made.done, made.resumed) == ([], 0)

    def test_the_journal_says_what_is_done_and_where_the_running_stage_is(self):
        made = manager()
        made.stage("a", lambda sess: 5, 1.0)
        seen = made.stage("b", lambda sess: made.state_dict(), 1.0)
        assert seen == {
            "project": "default_prj",
            "done": [["a", 5, {}]],
            "running": {"name": "b", "state": {}},
            "stopped": False,
        }


class TestHigherLimit:
    """A loop that had ended at its last step, and is given more of them."""

    def steps(self, run, *limits, then=()):
        def procedure(model):
            for number, limit in enumerate(limits):
                stage = train_loop(model, None, step=limit, across_passes=True)
                ended.append(model.run_stage(f"loop {number}", stage) or stage.lstep)
            for name in then:
                model.run_stage(name, lambda sess: None)

        ended = []
        return int(run(procedure).global_step), ended

    def test_the_last_stage_goes_on_where_it_was(self, run):
        assert self.steps(run, 2) == (2, [2])
        assert self.steps(run, 7) == (7, [7])
        assert self.steps(run, 8) == (8, [8])

    @pytest.mark.parametrize("limit", [1, 2])
    def test_the_same_or_a_lower_one_changes_nothing(self, run, limit):
        self.steps(run, 2)
        assert self.steps(run, limit) == (2, [2])

    def test_only_the_last_stage_goes_on(self, run):
        self.steps(run, 2, 3)
        assert self.steps(run, 4, 3) == (5, [2, 3])
        assert self.steps(run, 2, 6) == (8, [2, 6])

    def test_stages_after_it_are_run_then(self, run):
        self.steps(run, 2)
        assert self.steps(run, 3, 4) == (7, [3, 4])

    def test_another_name_is_an_error_as_ever(self, run):
        self.steps(run, 2)
        with pytest.raises(StageError, match="stage 0 .* is 'loop 0' in the checkpoint and 'other'"):
            run(lambda model: model.run_stage("other", train_loop(model, None, step=4)))

    def test_the_bits_are_those_of_one_run(self, run):
        self.steps(run, 2)
        model = run(lambda model: model.run_stage("loop 0", train_loop(model, None, step=7, across_passes=True)))
        whole = small()
        whole.fit(lambda model: model.run_stage("loop 0", train_loop(model, None, step=7, across_passes=True)))
        assert all(torch.equal(model.variables()[name], value) for name, value in whole.variables().items())
