from __future__ import annotations

import functools
import itertools
import logging

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.data.parts import OwnPart
from plait.efl.stage import LoopStage, ModelBank
from plait.engine.stage import CotrainStage, EvalStage, eval_loop, train_loop
from plait.engine.strategy import Local
from plait.errors import ConfigError, MismatchError, OutOfRangeError, StageError
from plait.train import MonitoredSession, SessionRunHook

from .pair import together, workers

SETTER = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1))
BATCHES = [{"x": torch.tensor([[float(i), 1.0]])} for i in range(3)]


def small(*layers, out=1, tasks=(None,), **source):
    """A model with the named layers, each used by each task."""
    model = efl.Model()

    def loss_fn(model, sample):
        with plait.variable_scope("net", reuse=plait.AUTO_REUSE):
            return sum(plait.layer(name, nn.Linear, 2, out)(sample.x).mean() for name in layers or ("fc",))

    for task in tasks:
        model.input_fn(lambda model, mode: plait.data.SequenceSource(BATCHES, **source), task=task)
        model.loss_fn(loss_fn, task=task).eval_fn(loss_fn, task=task).optimizer_fn(SETTER, task=task)
    return model.compile()


def placed(stage, session=None):
    stage.sess = session or MonitoredSession()
    stage.start()
    return stage


def counted(limit):
    """An Op that counts its runs, and ends the data after `limit` of them."""
    counter = itertools.count()

    def step():
        if (number := next(counter)) == limit:
            raise OutOfRangeError("over")
        return number

    return plait.op(step)


class TestStage:
    def test_calling_it_runs_it_with_its_arguments(self):
        class Mine(efl.Stage):
            def run(self, one, *, two):
                return one + two

        assert Mine()(1, two=2) == 3

    def test_without_run_it_says_what_to_write(self):
        class Mine(efl.Stage):
            pass

        with pytest.raises(NotImplementedError, match=r"Mine has no run\(\): write one"):
            Mine()()

    def test_it_has_a_session_when_it_runs_and_no_state_unless_it_says_so(self):
        stage = efl.Stage()
        assert stage.sess is None
        assert stage.state_dict() == {}

    def test_once_ended_it_has_nothing_more_to_do(self):
        assert efl.Stage().goes_on({}) is False


class TestLoopStage:
    def test_finish_is_false_at_first_and_true_at_the_end_of_the_data(self):
        stage = placed(LoopStage(counted(3)))
        assert stage.finish is False
        assert stage.run() is None
        assert (stage.finish, stage.lstep) == (True, 3)

    def test_stop_iteration_is_the_end_of_the_data_too(self):
        stage = placed(LoopStage(plait.op(iter([1, 2]).__next__)))
        stage.run()
        assert (stage.finish, stage.lstep) == (True, 2)

    def test_it_suspends_after_its_steps_and_goes_on(self):
        stage = placed(LoopStage(counted(3), step=2))
        stage.run()
        assert (stage.finish, stage.lstep) == (False, 2)
        stage.start()
        stage.run()
        assert (stage.finish, stage.lstep) == (True, 3)

    def test_a_session_that_should_stop_ends_it(self):
        stage = placed(LoopStage(counted(3)))
        stage.sess.request_stop()
        stage.run()
        assert (stage.finish, stage.stopped, stage.lstep) == (True, True, 0)

    def test_feeds_reach_the_session(self):
        seen = []
        place = plait.placeholder(shape=[])
        stage = placed(LoopStage(plait.op(lambda value: seen.append(value.item()), place), step=2))
        stage.run(feed_dict={place: 3.0})
        assert seen == [3, 3]

    def test_the_boundary_is_called_between_steps(self):
        calls = []
        stage = LoopStage(counted(3))
        stage.boundary = lambda: calls.append(stage.lstep)
        placed(stage).run()
        assert calls == [1, 2, 3]

    def test_other_errors_pass_through(self):
        def fail():
            raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            placed(LoopStage(plait.op(fail))).run()

    @pytest.mark.parametrize(("name", "value"), [("step", 0), ("seconds", -1.0)])
    def test_limits_are_above_zero(self, name, value):
        with pytest.raises(StageError, match=rf"LoopStage\({name}={value}\): write a number above 0, or None"):
            LoopStage(counted(1), **{name: value})

    def test_its_place_can_be_kept_and_taken_up(self):
        first = placed(LoopStage(counted(9), step=2))
        first.run()
        second = LoopStage(counted(9), step=4)
        second.load_state_dict(first.state_dict())
        second.sess = MonitoredSession()
        second.run()
        assert second.lstep == 4

    @pytest.mark.parametrize(
        ("limit", "available", "raised", "expected"),
        [(2, 9, 3, True), (2, 9, 2, False), (2, 9, 1, False), (2, 9, None, False), (5, 2, 9, False)],
    )
    def test_with_a_higher_limit_it_goes_on_unless_the_data_had_ended(self, limit, available, raised, expected):
        stage = placed(LoopStage(counted(available), step=limit))
        stage.run()
        assert LoopStage(counted(9), step=raised).goes_on(stage.state_dict()) is expected

    def test_an_evaluation_returns_its_metrics_and_keeps_history(self):
        model = efl.Model().input_fn(lambda model, mode: BATCHES)
        model.eval_fn(lambda model, sample: model.add_metric("x", sample.x[0, 0])).compile()
        stage = eval_loop(model, None)
        assert isinstance(stage, EvalStage)
        found = []
        model.fit(lambda model: found.append(model.run_stage("eval", stage)))
        assert found == [{"x": 1.0}]
        assert model.history == [{"task": None, "global_step": 0, "metrics": {"x": 1.0}}]

    @pytest.mark.parametrize(("epochs", "across", "steps"), [(2, True, 6), (2, False, 3), (None, False, 3)])
    def test_passes(self, epochs, across, steps):
        model = small(num_epochs=epochs)
        stage = train_loop(model, None, across_passes=across)
        model.fit(lambda model: model.run_stage("train", stage))
        assert (stage.lstep, stage.spent) == (steps, across)


class TestCotrainStage:
    def stage(self, **ratio):
        return CotrainStage(small(tasks=("a", "b")), ratio or {"a": 1, "b": 1}, 50, 0)

    def test_draws_depend_on_their_number_only(self):
        one, other = self.stage(), self.stage()
        drawn = [one._draw() for _ in range(20)]
        other.load_state_dict({**one.state_dict(), "draws": 10})
        assert [other._draw() for _ in range(10)] == drawn[10:]
        assert set(drawn) == {"a", "b"}

    def test_an_ended_task_is_not_drawn(self):
        stage = self.stage(a=1000, b=1)
        stage._ended = ["a"]
        assert {stage._draw() for _ in range(20)} == {"b"}


class TestModelBank:
    @pytest.fixture
    def other(self, tmp_path):
        """The checkpoint directory of another run, and its variables."""
        model = small("left", "right")
        model.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path / "other")
        return tmp_path / "other", {name: value.detach().clone() for name, value in model.variables().items()}

    def load(self, model, config):
        model.fit(lambda model: model.run_stage("bank", ModelBank(True, config)))
        return model.variables()

    def test_everything_from_a_checkpoint_directory(self, other):
        path, expected = other
        found = self.load(small("left", "right"), {"any": {"load": ["*"], "exclude": [], "path": str(path)}})
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    def test_patterns_and_exclusions(self, other):
        path, expected = other
        model = small("left", "right")
        before = {name: value.detach().clone() for name, value in model.variables().items()}
        found = self.load(model, {"a": {"load": ["net/left/*"], "exclude": ["*/bias"], "path": path}})
        changed = {name for name in found if not torch.equal(found[name], before[name])}
        assert changed == {"net/left/weight"}
        assert torch.equal(found["net/left/weight"], expected["net/left/weight"])

    def test_renames(self, other):
        path, expected = other
        names = {f"net/left/{part}": f"net/mine/{part}" for part in ("weight", "bias")}
        found = self.load(small("mine"), [{"load": names, "exclude": [], "path": path}])
        assert torch.equal(found["net/mine/weight"], expected["net/left/weight"])

    def test_in_a_list_the_later_entry_wins(self, other, tmp_path):
        path, expected = other
        torch.save({"net.left.weight": torch.full((1, 2), 7.0)}, tmp_path / "later.pt")
        entries = [
            {"load": ["*"], "exclude": [], "path": path},
            {"load": ["*"], "exclude": [], "path": tmp_path / "later.pt"},
        ]
        found = self.load(small("left", "right"), entries)
        assert found["net/left/weight"].tolist() == [[7, 7]]
        assert torch.equal(found["net/right/weight"], expected["net/right/weight"])

    def test_a_table_says_what_was_loaded(self, other, caplog):
        with caplog.at_level(logging.INFO, "plait"):
            self.load(small("left", "mine"), {"a": {"load": ["net/left/*"], "exclude": [], "path": other[0]}})
        table = next(record.message for record in caplog.records if "net/mine/weight" in record.message)
        assert "matched" in table
        assert "missing" in table

    def test_what_matches_nothing_is_an_error(self, other):
        with pytest.raises(ConfigError, match="load has 'tower/.*', which matches no variable in .*Nearest"):
            self.load(small("left"), {"a": {"load": ["tower/*"], "exclude": [], "path": other[0]}})

    def test_another_shape_loads_nothing(self, other):
        model = small("left", "right", out=3)
        before = model.variables()["net/right/bias"].detach().clone()
        with pytest.raises(MismatchError, match="variables have another shape than in the file, nothing was loaded"):
            self.load(model, {"a": {"load": ["*"], "exclude": [], "path": other[0]}})
        assert torch.equal(model.variables()["net/right/bias"], before)

    @pytest.mark.parametrize(("is_chief", "config"), [(True, None), (False, {"a": "unread"})])
    def test_without_a_config_or_on_another_worker_nothing_is_read(self, is_chief, config):
        model = small()
        before = model.variables()["net/fc/weight"].detach().clone()
        model.fit(lambda model: model.run_stage("bank", ModelBank(is_chief, config)))
        assert torch.equal(model.variables()["net/fc/weight"], before)

    def test_without_a_model_it_says_what_it_needs(self):
        with pytest.raises(StageError, match="ModelBank needs a session of a compiled model: .*run_stage"):
            placed(ModelBank(True)).run()

    def test_a_second_run_skips_it(self, other, tmp_path):
        config = {"a": {"load": ["*"], "exclude": [], "path": other[0]}}

        def procedure(model):
            model.run_stage("bank", ModelBank(True, config))
            model.run_stage("train", train_loop(model, None))

        for _ in range(2):
            model = small("left", "right")
            model.fit(procedure, checkpoint_dir=tmp_path / "mine")
            after = {name: value.detach().clone() for name, value in model.variables().items()}
            config["a"]["path"] = tmp_path / "gone"
        assert not torch.equal(after["net/left/weight"], other[1]["net/left/weight"])


class StopAt(SessionRunHook):
    """Asks for a stop after so many runs."""

    def __init__(self, step):
        self.left = step

    def after_run(self, run_context, run_values):
        self.left -= 1
        if self.left == 0:
            run_context.request_stop()


def numbers(count):
    return [{"x": torch.tensor([[float(i), 1.0]]) / 4} for i in range(count)]


def one_worker(strategy, source, hook=None, tasks=(None,)):
    torch.manual_seed(0)
    model = efl.Model()
    for task in tasks:

        def loss_fn(model, sample, task=task):
            model.add_metric("x", efl.metrics.mean(sample.x[:, 0]))
            with plait.variable_scope("net", reuse=plait.AUTO_REUSE):
                return plait.layer(f"fc_{task}", nn.Linear, 2, 1)(sample.x).square().mean()

        model.input_fn(lambda model, mode: source, task=task)
        model.loss_fn(loss_fn, task=task).eval_fn(loss_fn, task=task).optimizer_fn(SETTER, task=task)
    model.compile(strategy=strategy)
    if hook is not None:
        model.add_hooks([hook], task=tasks[0])
    return model


def pair(*lengths, hooks=(None, None), merge=1, tasks=(None,), **source):
    """Two models in step. One length: both share that many batches; two: each has its own."""
    sources = [plait.data.SequenceSource(numbers(length), **source) for length in lengths]
    sources = sources * 2 if len(sources) == 1 else [OwnPart(one) for one in sources]
    return [
        one_worker(worker, source, hook, tasks)
        for worker, source, hook in zip(workers(2, merge), sources, hooks, strict=True)
    ]


def hook_of(who, step):
    return [StopAt(step) if number == who else None for number in (0, 1)]


def weights(model):
    return torch.cat([value.detach().reshape(-1) for value in model.variables().values()])


class TestTwoWorkers:
    """Workers in step begin, stop and end their loops together."""

    def ran(self, models, procedure):
        together(models, lambda model: model.fit(procedure))
        assert torch.equal(weights(models[0]), weights(models[1]))
        return [model.global_step.value for model in models]

    @pytest.mark.parametrize("lengths", [(2, 5), (5, 2)])
    def test_when_the_data_of_one_ends_early_both_end(self, lengths):
        assert self.ran(pair(*lengths), efl.procedure_fn.train()) == [2, 2]

    def test_the_step_that_was_dropped_is_made_in_the_next_run(self):
        models = pair(2, 3, num_epochs=2)
        assert self.ran(models, efl.procedure_fn.train_and_eval(max_iter=2)) == [3, 3]
        places = [model.streams[efl.TaskScope(efl.MODE.TRAIN)] for model in models]
        assert [(place.epoch, place.position) for place in places] == [(1, 1), (1, 0)]

    @pytest.mark.parametrize("merge", [1, 2])
    @pytest.mark.parametrize("who", [0, 1])
    def test_a_hook_of_one_stops_both_after_the_same_step(self, who, merge):
        models = pair(20, hooks=hook_of(who, 2), merge=merge)
        assert self.ran(models, efl.procedure_fn.train_and_eval(train_step=5, max_iter=2)) == [2, 2]
        assert [len(model.history) for model in models] == [0, 0]

    @pytest.mark.parametrize("who", [0, 1])
    @pytest.mark.parametrize("limit", [{"train_step": 3}, {}])
    def test_also_after_the_last_step_of_a_run(self, who, limit):
        models = pair(6, hooks=hook_of(who, 3), num_epochs=3)
        assert self.ran(models, efl.procedure_fn.train_and_eval(**limit)) == [3, 3]
        assert [len(model.history) for model in models] == [0, 0]

    def test_a_hook_of_an_evaluation_stops_both(self):
        models = pair(6)
        models[1].add_hooks([StopAt(2)], mode=efl.MODE.EVAL)
        assert self.ran(models, efl.procedure_fn.train_and_eval(train_step=1, max_iter=4)) == [1, 1]
        assert [len(model.history) for model in models] == [1, 1]

    def test_passes_are_spent_together(self):
        models = pair(2, 3, num_epochs=1)
        assert self.ran(models, efl.procedure_fn.train_and_eval()) == [2, 2]
        assert [len(model.history) for model in models] == [1, 1]

    def test_a_pass_that_ends_between_two_moves_leaves_its_gradients_to_the_next(self):
        models = pair(6, merge=2)
        assert self.ran(models, efl.procedure_fn.train_and_eval(max_iter=2)) == [6, 6]
        rows = [one["x"] for one in numbers(6)]
        joined = [{"x": torch.cat(rows[start : start + 2])} for start in (0, 2, 4)]
        alone = one_worker(Local(2), joined)
        alone.fit(efl.procedure_fn.train_and_eval(max_iter=2))
        assert torch.allclose(weights(models[0]), weights(alone))

    def test_metrics_of_an_evaluation_are_those_of_all_data(self):
        models = pair(5)
        together(models, lambda model: model.fit(efl.procedure_fn.eval()))
        assert [model.history[0]["metrics"]["x"] for model in models] == [0.5, 0.5]

    def test_tasks_are_stopped_together_also_where_a_pass_ends(self):
        for step in range(1, 9):
            models = pair(6, hooks=hook_of(step % 2, step), tasks=("a", "b"))
            assert len(set(self.ran(models, efl.procedure_fn.cotrain(max_iter=3)))) == 1
