"""`Model.fit`: settings, the log, projects, recovery, checkpoints."""

from __future__ import annotations

import functools
import logging
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import plait
from plait import efl
from plait.engine.fit import FitSettings
from plait.engine.strategy import Local
from plait.errors import AbortedError, ConfigError, MismatchError, TaskError, UnavailableError
from plait.variables.checkpoint import CheckpointDir

from .pair import together, workers

SETTER = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.Adam, lr=0.1))
X = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))


def small(fail=None, eval_fn=None, strategy=None, **source):
    """A model with 6 batches of 4 rows; `fail()` is called at the start of each training step."""
    model = efl.Model()

    def loss_fn(model, sample):
        if fail is not None:
            fail(model)
        return plait.layer("fc", nn.Linear, 2, 1)(sample.x).square().mean()

    model.input_fn(lambda model, mode: plait.data.TensorSource({"x": X}, 4, shuffle=True, **source))
    model.loss_fn(loss_fn).eval_fn(eval_fn or (lambda model, sample: None)).optimizer_fn(SETTER)
    return model.compile(strategy=strategy)


def weights(model):
    return {name: value.detach().clone() for name, value in model.variables().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "plait"]


@pytest.fixture(autouse=True)
def shown(caplog):
    caplog.set_level(logging.INFO, "plait")


class TestLog:
    def test_lines_come_at_step_0_and_every_log_step_in_the_documented_format(self, caplog):
        small().fit(efl.procedure_fn.train(), log_step=2)
        lines = [message for message in messages(caplog) if message.startswith("step:")]
        form = re.compile(r"step: (\d+)\(global step: (\d+)\)\tsample/sec: \d+\.\d{3}\tloss: \d+\.\d{3}")
        found = [form.fullmatch(line) for line in lines]
        assert all(found), lines
        assert [(hit[1], hit[2]) for hit in found] == [("0", "0"), ("2", "2"), ("4", "4")]

    def test_by_default_every_hundredth(self, caplog):
        small(num_epochs=20).fit(efl.procedure_fn.train())
        lines = [message.split("(")[0] for message in messages(caplog) if message.startswith("step:")]
        assert lines == ["step: 0", "step: 100"]

    def test_evaluations_are_marked_and_show_their_metrics(self, caplog):
        model = small(eval_fn=lambda model, sample: model.add_metric("rows", float(len(sample.x))))
        model.fit(efl.procedure_fn.train_and_eval(max_iter=1), log_step=5)
        lines = [message for message in messages(caplog) if message.startswith("[eval]")]
        assert [line.split("\t")[0] for line in lines] == [
            "[eval] step: 0(global step: 6)",
            "[eval] step: 5(global step: 6)",
            "[eval] global step 6, 6 batches: rows 4.0000",
        ]
        assert lines[0].endswith("rows: 4.000")

    def test_a_table_ends_it(self, caplog):
        small().fit(efl.procedure_fn.train())
        table = messages(caplog)[-1]
        assert "global step 6: 6 steps in" in table
        assert re.search(r"train .* loss \d", table)

    def test_the_table_counts_the_steps_of_this_process(self, tmp_path, caplog):
        for step in (4, 6):
            small().fit(efl.procedure_fn.train(step), checkpoint_dir=str(tmp_path))
        assert "global step 6: 2 steps in" in messages(caplog)[-1]

    def test_without_metrics_there_is_no_table(self, caplog):
        model = efl.Model()
        model.input_fn(lambda model, mode: [{"x": X}]).eval_fn(lambda model, sample: None)
        model.compile().fit(efl.procedure_fn.eval())
        assert messages(caplog)[-2:] == [
            "[eval] global step 0, 1 batches: no metrics",
            "finished at global step 0: 0 steps",
        ]

    def test_a_second_fit_adds_no_second_log_line(self, caplog):
        model = small()
        for _ in range(2):
            caplog.clear()
            model.fit(efl.procedure_fn.train(), log_step=100)
        assert len([message for message in messages(caplog) if message.startswith("step:")]) == 1


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "value"),
        [("log_step", 0), ("log_step", "10"), ("save_steps", -1), ("save_steps", 1.5), ("save_secs", 0), ("keep", 0)],
    )
    def test_numbers_are_checked(self, name, value):
        with pytest.raises(ConfigError, match=f"{name}={value!r}: write a (whole )?number above 0"):
            FitSettings(**{name: value})

    def test_what_is_no_procedure_is_refused(self):
        with pytest.raises(TaskError, match=r"fit\(\) got a str: give a procedure, such as procedure_fn.train\(\)"):
            small().fit("train")

    @pytest.mark.parametrize("saving", [False, True])
    def test_what_makes_a_procedure_is_not_one(self, tmp_path, saving):
        settings = {"checkpoint_dir": str(tmp_path)} if saving else {}
        with pytest.raises(TaskError, match=r"returned a function: call it first, as in fit\(efl.procedure_fn.train"):
            small().fit(efl.procedure_fn.train, **settings)

    def test_a_model_that_is_not_compiled_is_compiled(self):
        model = efl.Model()
        model.input_fn(lambda model, mode: [{"x": X}])
        model.loss_fn(lambda model, sample: plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()).optimizer_fn(SETTER)
        model.fit(efl.procedure_fn.train())
        assert int(model.global_step) == 1

    @pytest.mark.parametrize("suffix", ["toml", "json"])
    def test_a_configuration_file_sets_what_it_names(self, tmp_path, caplog, suffix):
        path, runs = tmp_path / f"run.{suffix}", tmp_path / "runs"
        path.write_text(
            f"[checkpoint]\ndir = '{runs}'\nsave_steps = 2\nkeep = 2\n[fit]\nlog_step = 3\n"
            if suffix == "toml"
            else f'{{"checkpoint": {{"dir": "{runs}", "save_steps": 2, "keep": 2}}, "fit": {{"log_step": 3}}}}'
        )
        small().fit(efl.procedure_fn.train(), log_step=1, keep=5, config=path)
        lines = [message for message in messages(caplog) if message.startswith("step:")]
        assert len(lines) == 2
        assert len(CheckpointDir(runs).list()) == 2

    def test_the_environment_may_name_the_file(self, tmp_path, monkeypatch, caplog):
        (tmp_path / "run.toml").write_text("[fit]\nlog_step = 6")
        monkeypatch.setenv("PLAIT_CONFIG", str(tmp_path / "run.toml"))
        small().fit(efl.procedure_fn.train(), log_step=1)
        assert len([message for message in messages(caplog) if message.startswith("step:")]) == 1

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[checkpoint]\nkeep = 'all'", "keep='all': write a whole number above 0"),
            ("[fit]\nlog_step = 0", "log_step=0: write a whole number above 0"),
            ("[cluster]\nworker_num = 2", "worker_num=2, but this process is one of 1: .* `plait launch --workers 2 "),
            ("[checkpoint]\ndirectory = 'a'", "unknown keys directory: it takes dir"),
        ],
    )
    def test_a_bad_configuration_stops_before_anything_runs(self, tmp_path, text, words):
        (tmp_path / "run.toml").write_text(text)
        model = small()
        with pytest.raises(ConfigError, match=words):
            model.fit(efl.procedure_fn.train(), config=tmp_path / "run.toml")
        assert int(model.global_step) == 0

    def test_stages_see_the_users_own_tables(self, tmp_path):
        (tmp_path / "run.toml").write_text("[mine]\nwidth = 3")
        found = []
        small().fit(
            lambda model: found.append(model.run_stage("a", lambda sess, ctx: ctx.get("mine", "width"))),
            config=tmp_path / "run.toml",
        )
        assert found == [3]

    def test_summaries_are_written_every_log_step(self, tmp_path):
        small().fit(efl.procedure_fn.train(), log_step=2, summary_dir=tmp_path / "summaries")
        events = EventAccumulator(str(tmp_path / "summaries")).Reload()
        (tag,) = (tag for tag in events.Tags()["scalars"] if tag.endswith("loss"))
        steps = [event.step for event in events.Scalars(tag)]
        assert len(steps) == 3
        assert [later - earlier for earlier, later in zip(steps, steps[1:])] == [2, 2]

    def test_hooks_see_every_run(self):
        seen = []

        class Note(plait.train.SessionRunHook):
            def after_run(self, run_context, run_values):
                seen.append(1)

        small().fit(efl.procedure_fn.train_and_eval(max_iter=1), hooks=[Note()])
        assert len(seen) == 12


class TestCheckpoints:
    def steps(self, path):
        return [info.step for info in CheckpointDir(path).list()]

    def test_every_save_steps_and_at_the_end(self, tmp_path):
        small().fit(efl.procedure_fn.train(5), checkpoint_dir=tmp_path, save_steps=2, keep=None)
        assert self.steps(tmp_path)[-3:] == [2, 4, 5]

    def test_the_newest_keep_stay(self, tmp_path):
        small().fit(efl.procedure_fn.train(5), checkpoint_dir=tmp_path, save_steps=1, keep=2)
        assert len(self.steps(tmp_path)) == 2
        assert self.steps(tmp_path)[-1] == 5

    def test_after_save_secs(self, tmp_path, monkeypatch):
        model = small()
        # each step takes 100 seconds
        monkeypatch.setattr("plait.engine.checkpoints.time.monotonic", lambda: 100.0 * int(model.global_step))
        model.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path, save_secs=300, keep=None)
        assert {3, 6} <= set(self.steps(tmp_path)) <= {0, 3, 6}

    def test_the_first_is_from_before_the_first_step(self, tmp_path):
        small().fit(efl.procedure_fn.train(1), checkpoint_dir=tmp_path)
        assert self.steps(tmp_path)[0] == 0

    def test_saving_does_not_change_the_run(self, tmp_path):
        saved, bare = small(), small()
        saved.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path, save_steps=1)
        bare.fit(efl.procedure_fn.train())
        assert equal(weights(saved), weights(bare))


class TestProjects:
    def test_a_finished_project_says_so_and_trains_nothing(self, tmp_path, caplog):
        first, second = small(), small()
        first.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path)
        caplog.clear()
        second.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path)
        assert equal(weights(first), weights(second))
        said = [message for message in messages(caplog) if "had already ended" in message]
        assert len(said) == 1
        assert str(tmp_path) in said[0]
        assert "nothing was run. Another project_name" in said[0]

    def test_a_first_run_does_not_say_so(self, tmp_path, caplog):
        small().fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path)
        assert not any("already ended" in message for message in messages(caplog))

    def test_another_project_starts_its_stages_anew_from_the_weights(self, tmp_path, caplog):
        seen = []
        first = small()
        first.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path)
        second = small(fail=lambda model: seen.append(weights(model)) if model.compiled else None)
        second.fit(efl.procedure_fn.train(4), project_name="second", checkpoint_dir=tmp_path)
        assert equal(seen[0], weights(first))
        assert int(second.global_step) == 10
        assert any("starting project 'second' with the weights at global step 6" in m for m in messages(caplog))

    def test_it_goes_on_as_the_same_optimizer_would(self, tmp_path):
        whole, split = small(), small()
        whole.fit(efl.procedure_fn.train())
        whole.fit(efl.procedure_fn.train())
        split.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path)
        other = small()
        stream = other.streams[efl.TaskScope(efl.MODE.TRAIN)]
        stream.load_state_dict({**stream.state_dict(), "epoch": 1})  # where the second fit of `whole` begins
        other.fit(efl.procedure_fn.train(), project_name="second", checkpoint_dir=tmp_path)
        assert equal(weights(whole), weights(other))


class TestRecovery:
    @pytest.mark.parametrize("error", [AbortedError, UnavailableError])
    @pytest.mark.parametrize("at", [1, 3, 6])
    @pytest.mark.parametrize(
        "saving", [{}, {"save_steps": 2}, {"save_steps": 100}], ids=["none", "often", "first only"]
    )
    def test_it_ends_with_the_weights_of_an_undisturbed_run(self, tmp_path, error, at, saving):
        failed = []

        def fail(model):
            if model.compiled and int(model.global_step) == at - 1 and not failed:
                failed.append(at)
                raise error("gone for a moment")

        disturbed, calm = small(fail), small()
        kwargs = {"checkpoint_dir": tmp_path, **saving} if saving else {}
        procedure = efl.procedure_fn.train_and_eval(train_step=4, max_iter=2)
        disturbed.fit(procedure, **kwargs)
        calm.fit(procedure)
        assert failed
        assert equal(weights(disturbed), weights(calm))
        assert disturbed.history == calm.history

    def test_with_a_checkpoint_random_draws_are_repeated_too(self, tmp_path):
        def disturb(model):
            torch.rand(3)
            if model.compiled and int(model.global_step) == 3 and not failed:
                failed.append(1)
                raise AbortedError("cut")

        ended = []
        for failed in ([], [1]):
            torch.manual_seed(5)
            model = small(functools.partial(disturb))
            model.fit(efl.procedure_fn.train(), checkpoint_dir=tmp_path / str(len(failed)), save_steps=2)
            ended.append((weights(model), torch.get_rng_state()))
        assert equal(ended[0][0], ended[1][0])
        assert torch.equal(ended[0][1], ended[1][1])

    @pytest.mark.parametrize("saving", [False, True])
    def test_what_never_gets_better_ends_with_that_error(self, tmp_path, saving):
        calls = []

        def fail(model):
            if model.compiled and int(model.global_step) == 2:
                calls.append(1)
                raise UnavailableError("gone for good")

        with pytest.raises(UnavailableError, match="gone for good"):
            small(fail).fit(efl.procedure_fn.train(), **({"checkpoint_dir": tmp_path} if saving else {}))
        assert len(calls) == 11

    def test_other_errors_are_not_recovered_from(self):
        calls = []

        def fail(model):
            calls.append(1)
            if model.compiled:
                raise RuntimeError("mine")

        model = small(fail)
        with pytest.raises(RuntimeError, match="mine"):
            model.fit(efl.procedure_fn.train())
        assert len(calls) == 2

    def test_the_log_says_that_it_recovers(self, caplog):
        failed = []

        def fail(model):
            if model.compiled and not failed:
                failed.append(1)
                raise AbortedError("cut")

        small(fail).fit(efl.procedure_fn.train())
        assert any(message.startswith("AbortedError: cut; making the session anew") for message in messages(caplog))


def test_hooks_of_the_model_are_put_back_after_an_error():
    def fail(model):
        if model.compiled:
            raise RuntimeError

    model = small(fail)
    before = {scope: list(hooks) for scope, hooks in model.hooks.items()}
    with pytest.raises(RuntimeError):
        model.fit(efl.procedure_fn.train())
    assert model.hooks == before


class TestTwoWorkers:
    def pair(self, fails=(None, None), merge=1, **source):
        models = []
        for worker, fail in zip(workers(2, merge), fails, strict=True):
            torch.manual_seed(3)
            models.append(small(fail, strategy=worker, num_epochs=4, **source))
        return models

    def fitted(self, models, steps, where=None, **settings):
        together(models, lambda model: model.fit(efl.procedure_fn.train(steps), checkpoint_dir=where, **settings))
        return weights(models[0])

    @pytest.mark.parametrize("merge", [1, 4])
    def test_a_run_that_was_cut_off_goes_on_bit_for_bit(self, tmp_path, merge):
        def cut(model):
            if model.compiled and model.global_step.value == 7:
                raise RuntimeError("cut")

        whole = self.fitted(self.pair(merge=merge), 10)
        with pytest.raises(RuntimeError, match="cut"):
            self.fitted(self.pair((cut, cut), merge), 10, tmp_path, save_steps=3)
        again = self.pair(merge=merge)
        assert equal(self.fitted(again, 10, tmp_path, save_steps=3), whole)
        assert equal(weights(again[1]), whole)

    def test_what_can_be_recovered_from_is_by_all(self, tmp_path):
        failed = []

        def lost(model):
            if model.compiled and model.global_step.value == 5 and model.strategy.worker_id not in failed:
                failed.append(model.strategy.worker_id)
                raise AbortedError("worker 1 is lost")

        whole = self.fitted(self.pair(), 9)
        assert equal(self.fitted(self.pair((lost, lost)), 9, tmp_path, save_steps=2), whole)

    def test_only_the_chief_writes_checkpoints_and_summaries(self, tmp_path):
        models = self.pair()
        self.fitted(models, 4, tmp_path / "saved", save_steps=2, summary_dir=tmp_path / "shown")
        assert [info.step for info in CheckpointDir(tmp_path / "saved").list()] == [0, 2, 4, 4]
        assert len(list((tmp_path / "shown").iterdir())) == 1
        assert [len(model.strategy.durables) for model in models] == [4, 0]

    def test_a_checkpoint_of_one_worker_is_not_for_two(self, tmp_path):
        small(num_epochs=4).fit(efl.procedure_fn.train(2), checkpoint_dir=tmp_path)
        with pytest.raises(MismatchError, match=r"made by 1 worker\(s\), there are 2 now"):
            self.fitted(self.pair(), 4, tmp_path)

    def test_another_project_takes_the_weights_along(self, tmp_path):
        small(num_epochs=4).fit(efl.procedure_fn.train(2), checkpoint_dir=tmp_path)
        models = self.pair()
        self.fitted(models, 4, tmp_path, project_name="two")
        assert [model.global_step.value for model in models] == [6, 6]

    def test_workers_apart_keep_their_own_checkpoints(self, tmp_path):
        class Apart(Local):
            worker_id, worker_num = 1, 2

        small(strategy=Apart()).fit(efl.procedure_fn.train(2), checkpoint_dir=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["worker-1"]

    def test_a_restore_during_which_others_are_lost_is_tried_again(self, tmp_path):
        class Losing(Local):
            left = 2

            def rejoin(self):
                self.left -= 1
                if self.left >= 0:
                    raise UnavailableError("server 0 is not back")

        strategy = Losing()
        small(strategy=strategy).fit(efl.procedure_fn.train(1), checkpoint_dir=tmp_path)
        assert strategy.left == -1

    def test_but_not_for_ever(self, tmp_path):
        class Lost(Local):
            def rejoin(self):
                raise UnavailableError("server 0 is not back")

        with pytest.raises(UnavailableError, match="server 0 is not back"):
            small(strategy=Lost()).fit(efl.procedure_fn.train(1), checkpoint_dir=tmp_path)

    def test_the_configuration_may_say_how_many_there_are(self, tmp_path):
        (tmp_path / "run.toml").write_text("[cluster]\nworker_num = 2")
        together(self.pair(), lambda model: model.fit(efl.procedure_fn.train(1), config=tmp_path / "run.toml"))
