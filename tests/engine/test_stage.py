from __future__ import annotations

import functools
import itertools
import logging

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.efl.stage import LoopStage, ModelBank
from plait.engine.stage import CotrainStage, EvalStage, eval_loop, train_loop
from plait.errors import ConfigError, MismatchError, OutOfRangeError, StageError
from plait.train import MonitoredSession

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
