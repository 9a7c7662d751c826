"""Hooks that evaluate in the middle of `mox.run`; what an evaluation finds is written in the data of the inter mode."""

from __future__ import annotations

import logging
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import mox
from plait.data import TensorSource
from plait.data.parts import PartSource
from plait.engine.build import current_model
from plait.engine.strategy import Local
from plait.errors import ConfigError, FetchError, FunctionError
from plait.train import SessionRunArgs

TRAIN, EVAL = mox.ModeKeys.TRAIN, mox.ModeKeys.EVAL
SGD = mox.get_optimizer_fn("sgd", learning_rate=0.1)
ROWS = torch.linspace(-1, 1, 40).reshape(20, 2)
HOOKS = (mox.LogEvaluationMetricHook, mox.EarlyStoppingHook, mox.PlateauLREarlyStoppingHook)


@pytest.fixture(autouse=True)
def log(monkeypatch, caplog):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    caplog.set_level(logging.INFO, "plait")
    return caplog


def shown(log, word="["):
    return [record.getMessage() for record in log.records if record.getMessage().startswith(word)]


def run(hooks_of, *, scores=(0.0,), batch_size=4, rows=20, steps=1000, data=None, optimizer_fn=SGD, **settings):
    """Train; the n-th batch of an evaluation holds the n-th score. `hooks_of(score, mode)` makes the hooks."""
    found = [(torch.zeros(2), torch.tensor(float(score))) for score in scores for _ in range(batch_size)]
    samples = {TRAIN: [(ROWS[i % 20], torch.tensor(1.0)) for i in range(rows)], EVAL: found, **(data or {})}

    def model_fn(inputs, mode):
        x, score = inputs
        drop = plait.layer("drop", nn.Dropout, 0.5)
        loss = F.mse_loss(plait.layer("fc", nn.Linear, 2, 1)(drop(x)).squeeze(1), score)
        return mox.ModelSpec(loss=loss, log_info={"loss": loss}, hooks=hooks_of(score.mean(), mode))

    settings = {"inter_mode": EVAL, "max_number_of_steps": steps, **settings}
    torch.manual_seed(4)  # for the dropout
    mox.run(
        input_fn=samples.get,
        model_fn=model_fn,
        optimizer_fn=optimizer_fn,
        batch_size=batch_size,
        run_mode=TRAIN,
        **settings,
    )
    return current_model()


def one(kind=mox.EarlyStoppingHook, **settings):
    """Makes one hook, in both modes, that evaluates one batch after each pass."""
    defaults = {"batch_size": 4, "samples_in_train": 20, "samples_in_eval": 4}
    watching = {} if kind is mox.LogEvaluationMetricHook else {"monitor": "accuracy"}
    name = settings.get("monitor", "accuracy")
    return lambda score, mode: [kind(monitor_info={name: score}, **{**defaults, **watching, **settings})]


def stopped_at(scores, **settings):
    """The evaluation, counted from 1, after which training stopped."""
    return run(one(**settings), scores=scores, steps=5 * (len(scores) + 3)).global_step.value // 5


def test_the_metrics_of_an_evaluation_start_anew_each_time():
    def model_fn(inputs, mode):
        x, score = inputs
        loss = plait.layer("fc", nn.Linear, 2, 1)(x).mean()
        hooks = one(mox.LogEvaluationMetricHook)(score.mean(), mode)
        return mox.ModelSpec(loss=loss, log_info={"loss": loss, "mean": plait.efl.metrics.mean(score)}, hooks=hooks)

    scores = {TRAIN: [0.0] * 20, EVAL: [1.0] * 4 + [3.0] * 4}
    mox.run(
        input_fn=lambda mode: [(torch.ones(2), torch.tensor(score)) for score in scores[mode]],
        model_fn=model_fn,
        optimizer_fn=SGD,
        batch_size=4,
        run_mode=TRAIN,
        inter_mode=EVAL,
        max_number_of_steps=10,
    )
    assert current_model().metric_values(plait.efl.MODE.EVAL)["mean"] == 3.0  # not 2, the mean of both evaluations


class TestWhen:
    def test_the_documented_lines_in_their_order(self, log):
        hook = one(
            batch_size=32,
            samples_in_train=640,
            samples_in_eval=32,
            evaluate_every_n_epochs=1,
            min_delta=0.01,
            patience=3,
            prefix="[EarlyStopping]",
        )
        model = run(hook, batch_size=32, rows=640, steps=10000)
        assert model.global_step.value == 80
        lines = [record.getMessage().split("\t")[0] for record in log.records][:-1]
        assert lines == [
            "step: 0(global step: 0)",
            "step: 10(global step: 10)",
            "[EarlyStopping] step: 19 accuracy: 0.000",
            "step: 20(global step: 20)",
            "step: 30(global step: 30)",
            "[EarlyStopping] step: 39 accuracy: 0.000",
            "step: 40(global step: 40)",
            "step: 50(global step: 50)",
            "[EarlyStopping] step: 59 accuracy: 0.000",
            "step: 60(global step: 60)",
            "step: 70(global step: 70)",
            "[EarlyStopping] step: 79 accuracy: 0.000",
            "[EarlyStopping] stopping after step 79: accuracy has not got better than 0 in 3 evaluations",
        ]

    @pytest.mark.parametrize(
        ("samples", "epochs", "steps"),
        [
            (1000, 1, [31, 63, 95]),
            (640, 1, [19, 39, 59, 79, 99]),
            (640, 2, [39, 79]),
            (640, 0.5, [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]),
            (1, 0.001, list(range(100))),
        ],
    )
    def test_evaluations_follow_the_last_step_of_a_pass(self, log, samples, epochs, steps):
        settings = {"batch_size": 32, "samples_in_train": samples, "evaluate_every_n_epochs": epochs}
        run(one(mox.LogEvaluationMetricHook, **settings), batch_size=32, rows=samples, steps=100)
        assert [int(re.search(r"step: (\d+)", line)[1]) for line in shown(log)] == steps

    @pytest.mark.parametrize(("samples", "batches"), [(1, 1), (4, 1), (5, 2), (12, 3)])
    def test_an_evaluation_is_as_long_as_its_samples(self, samples, batches):
        calls = []

        def hooks(score, mode):
            calls.append(mode)
            return one(mox.LogEvaluationMetricHook, samples_in_eval=samples)(score, mode)

        run(hooks, scores=range(5), steps=5)
        assert calls.count(EVAL) == 1 + batches

    def test_evaluations_go_round_their_data(self, log):
        run(one(mox.LogEvaluationMetricHook, samples_in_eval=8), scores=[1, 2, 6], steps=15)
        assert [line.split(": ")[2] for line in shown(log)] == ["1.500", "3.500", "4.000"]

    def test_data_that_has_no_pass_left_is_said_and_never_stops_training(self, log):
        spent = TensorSource((torch.zeros(4, 2), torch.ones(4)), 4, num_epochs=1)
        model = run(one(patience=1), steps=20, data={EVAL: spent})
        assert model.global_step.value == 20
        words = "no data is left to evaluate on"
        assert [words in line for line in shown(log)] == [False, True, True, True]


class TestLogEvaluationMetric:
    def test_logs_every_number_with_three_decimals_after_the_prefix(self, log):
        def hooks(score, mode):
            numbers = {"accuracy": score, "twice": 2 * score}
            return [mox.LogEvaluationMetricHook(numbers, 4, 20, 4, prefix="[Mine]")]

        run(hooks, scores=[0.25], steps=5)
        assert shown(log) == ["[Mine] step: 4 accuracy: 0.250 twice: 0.500"]

    def test_a_short_batch_counts_for_less(self, log):
        rows = [(torch.zeros(2), torch.tensor(value)) for value in (0.0, 0.0, 0.0, 0.0, 1.0)]
        run(one(mox.LogEvaluationMetricHook, samples_in_eval=5), data={EVAL: rows}, steps=5)
        assert shown(log) == ["[Evaluation] step: 4 accuracy: 0.200"]

    def test_plain_numbers_are_watched_too(self, log):
        run(lambda score, mode: one(mox.LogEvaluationMetricHook)(float(score), mode), scores=[1, 2], steps=10)
        assert [line.split(": ")[2] for line in shown(log)] == ["1.000", "2.000"]

    def test_two_hooks_evaluate_one_after_the_other(self, log):
        def hooks(score, mode):
            first = one(mox.LogEvaluationMetricHook, prefix="[one]")(score, mode)
            second = one(mox.LogEvaluationMetricHook, prefix="[two]", evaluate_every_n_epochs=2)(-score, mode)
            return [*first, *second]

        run(hooks, scores=[1, 2, 3], steps=10)
        assert shown(log) == [
            "[one] step: 4 accuracy: 1.000",
            "[one] step: 9 accuracy: 2.000",
            "[two] step: 9 accuracy: -3.000",
        ]

    def test_hooks_of_two_kinds(self, log):
        def hooks(score, mode):
            return [*one(prefix="[stop]", patience=9)(score, mode), *one(mox.LogEvaluationMetricHook)(-score, mode)]

        run(hooks, scores=[1, 2], steps=5)
        assert shown(log) == ["[stop] step: 4 accuracy: 1.000", "[Evaluation] step: 4 accuracy: -2.000"]

    @pytest.mark.parametrize("kind", HOOKS)
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"batch_size": 0}, r"\(batch_size=0\): write a number above 0"),
            ({"samples_in_train": -1}, r"\(samples_in_train=-1\): write a number above 0"),
            ({"samples_in_eval": 0}, r"\(samples_in_eval=0\): write a number above 0"),
            ({"evaluate_every_n_epochs": 0}, r"\(evaluate_every_n_epochs=0\): write a number above 0"),
        ],
    )
    def test_bad_settings(self, kind, settings, words):
        with pytest.raises(ConfigError, match=kind.__name__ + words):
            one(kind, **settings)(torch.tensor(1.0), TRAIN)

    def test_bad_numbers(self):
        with pytest.raises(ConfigError, match="LogEvaluationMetricHook: monitor_info is empty; write {'accuracy'"):
            mox.LogEvaluationMetricHook({}, 4, 20, 4)
        with pytest.raises(ConfigError, match=r"monitor_info\['a'\] has shape \[3\]: watch numbers, such as x.mean"):
            mox.LogEvaluationMetricHook({"a": torch.zeros(3)}, 4, 20, 4)

    def test_without_an_inter_mode_it_says_so_before_the_first_step(self):
        with pytest.raises(ConfigError, match="EarlyStoppingHook evaluates .*: pass inter_mode=mox.ModeKeys.EVAL"):
            run(one(), inter_mode=None)
        assert current_model().global_step.value == 0

    def test_made_in_training_only_it_says_so_before_the_first_step(self):
        with pytest.raises(
            ConfigError, match="makes a EarlyStoppingHook in TRAIN but not in the inter mode: make both"
        ):
            run(lambda score, mode: one()(score, mode) if mode == TRAIN else [])
        assert current_model().global_step.value == 0


class TestEarlyStopping:
    @pytest.mark.parametrize(
        ("scores", "patience", "expected"),
        [
            ([0, 0, 0, 0], 3, 4),  # the first evaluation can never count
            ([0, 1, 1, 1, 1], 3, 5),
            ([3, 2, 1], 2, 3),
            ([0, 1, 0, 2, 0, 0], 2, 6),
            ([1, 0], 1, 2),
            ([1, 0], 0, 2),
        ],
    )
    def test_patience(self, scores, patience, expected):
        assert stopped_at(scores, patience=patience) == expected

    def test_a_gain_has_to_be_larger_than_min_delta(self):
        assert stopped_at([0, 0.5, 1, 1.5, 1.5], patience=2, min_delta=0.5) == 5
        assert stopped_at([0, 0.4, 0.8, 0.8, 0.8], patience=2, min_delta=0.5) == 5
        assert stopped_at([0, 0.5, 0.5], patience=2, min_delta=-0.5) == 3

    @pytest.mark.parametrize(
        ("monitor", "direction", "up"),
        [
            ("accuracy", "auto", True),
            ("val_acc", "auto", True),
            ("AUC", "auto", True),
            ("top_5", "auto", True),
            ("loss", "auto", False),
            ("error_rate", "auto", False),
            ("MSE", "auto", False),
            ("loss", "max", True),
            ("accuracy", "min", False),
            ("something", "min", False),
            ("something", "max", True),
        ],
    )
    def test_direction_from_the_name_or_given(self, monitor, direction, up):
        rising = stopped_at([1, 2, 3, 4, 0, 0], monitor=monitor, direction=direction, patience=2)
        assert rising == (6 if up else 3)

    @pytest.mark.parametrize(
        ("monitor", "direction"),
        [("something", "auto"), ("loss_of_accuracy", "auto"), ("accuracy", "up"), ("accuracy", None)],
    )
    def test_an_unknown_direction_is_asked_for(self, monitor, direction):
        words = f"is a higher or a lower {monitor!r} better. Pass direction='max' or direction='min'"
        with pytest.raises(ConfigError, match=words):
            one(monitor=monitor, direction=direction)(torch.tensor(1.0), TRAIN)

    def test_what_is_monitored_has_to_be_there(self):
        with pytest.raises(ConfigError, match="monitor='loss' is not in monitor_info, which has accuracy"):
            mox.EarlyStoppingHook({"accuracy": torch.tensor(1.0)}, "loss", 4, 20, 4)

    def test_a_number_that_is_none_is_no_gain(self):
        nan = float("nan")
        assert stopped_at([nan, nan], patience=2) == 2
        assert stopped_at([nan, 1, 2, 2, 2], patience=2) == 5

    @pytest.mark.parametrize("cut", [3, 7, 12, 17])
    def test_killed_between_evaluations_it_stops_where_it_would_have(self, tmp_path, log, cut):
        scores = [0.1, 0.2, 0.2, 0.2, 0.2]
        whole = run(one(patience=3), scores=scores).global_step.value
        lines = shown(log)
        log.clear()

        class Cut(Exception):
            pass

        def dying(score, mode):
            if current_model() is not None and current_model().global_step.value == cut and mode == TRAIN:
                raise Cut
            return one(patience=3)(score, mode)

        settings = {"scores": scores, "log_dir": str(tmp_path), "save_model_steps": 1}
        with pytest.raises(Cut):
            run(dying, **settings)
        model = run(one(patience=3), **settings)
        assert model.global_step.value == whole == 25
        assert shown(log) == lines

    def test_says_why_it_stops(self, log):
        run(one(patience=2, prefix="[ES]"), scores=[0.25, 0.5, 0.5, 0.5])
        words = "[ES] stopping after step 19: accuracy has not got better than 0.5 in 2 evaluations"
        assert [line for line in shown(log) if "stopping" in line] == [words]

    def test_once_stopped_it_stays_so(self, tmp_path, log):
        settings = {"scores": [1, 0], "log_dir": str(tmp_path)}
        assert run(one(patience=1), **settings).global_step.value == 10
        assert run(one(patience=1), **settings, steps=2000).global_step.value == 10
        assert "at step 10 with max_number_of_steps=2000: a hook stopped it. Choose another log_dir" in log.text
        assert "nothing was trained" not in log.text


class TestPlateau:
    def rates(self, optimizer_fn, scores, **settings):
        """The learning rate of every step, and the model."""
        rates = []

        class Watch(mox.FeedSessionRunHook):
            def after_run(self, run_context, run_values):
                (optimizer,) = run_context.session.model.optimizers()
                rates.append(optimizer.param_groups[0]["lr"])

        def hooks(score, mode):
            return [Watch({}), *one(mox.PlateauLREarlyStoppingHook, patience=1, **settings)(score, mode)]

        return rates, run(hooks, scores=scores, optimizer_fn=optimizer_fn)

    def test_lowers_the_rate_at_each_plateau_and_stops_at_the_last(self, log):
        rates, model = self.rates(SGD, [1, 0, 0, 2, 0], factor=0.5, max_plateaus=3)
        assert model.global_step.value == 25
        assert rates == pytest.approx([0.1] * 10 + [0.05] * 5 + [0.025] * 10)
        said = [line for line in shown(log) if "plateau" in line]
        assert said == [
            "[PlateauLREarlyStopping] plateau 1: learning rate times 0.5",
            "[PlateauLREarlyStopping] plateau 2: learning rate times 0.5",
        ]

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_a_schedule_is_followed_at_the_lowered_rate(self, wrapped):
        scheduled = mox.get_optimizer_fn("momentum", learning_rate=lambda step: 1.0 / (1 + step), momentum=0.9)
        around = mox.get_optimizer_wrapper_fn("lars", scheduled())
        rates, _ = self.rates(around if wrapped else scheduled, [1, 0, 0], factor=0.5, max_plateaus=2)
        assert rates == pytest.approx([(1.0 if step < 10 else 0.5) / (1 + step) for step in range(15)])

    def test_takes_up_its_count_and_its_rate_after_a_restart(self, tmp_path):
        def hooks(score, mode):
            return one(mox.PlateauLREarlyStoppingHook, patience=1, factor=0.5, max_plateaus=3)(score, mode)

        schedule = mox.get_optimizer_fn("sgd", learning_rate=lambda step: 0.1 / (1 + step))
        for optimizer_fn in (SGD, schedule):
            settings = {"scores": [1, 0, 0, 2, 0], "optimizer_fn": optimizer_fn}
            whole = run(hooks, **settings)
            log_dir = str(tmp_path / str(optimizer_fn is SGD))
            run(hooks, **settings, steps=12, log_dir=log_dir)
            model = run(hooks, **settings, log_dir=log_dir)
            assert model.global_step.value == whole.global_step.value == 25
            rates = [made.optimizers()[0].param_groups[0]["lr"] for made in (model, whole)]
            assert rates[0] == rates[1]
            assert all(torch.equal(model.variables()[name], value) for name, value in whole.variables().items())

    @pytest.mark.parametrize("settings", [{"factor": 1.0}, {"factor": 0.0}, {"max_plateaus": 0}])
    def test_bad_settings(self, settings):
        with pytest.raises(ConfigError, match="write 0 < factor < 1 and 1 or more"):
            one(mox.PlateauLREarlyStoppingHook, **settings)(torch.tensor(1.0), TRAIN)


class Answering(mox.AggregativeSessionRunHook):
    """Notes all that happens to it, and answers the questions as told."""

    def __init__(self, events, mode, inter):
        self._events, self._mode, self._inter = events, mode, inter

    def begin(self):
        self._events.append((self._mode, "begin"))

    def after_create_session(self, session, coord):
        self._events.append((self._mode, "create"))

    def before_run(self, run_context):
        self._events.append((self._mode, "before"))

    def after_run(self, run_context, run_values):
        self._events.append((self._mode, "after"))

    def end(self, session):
        self._events.append((self._mode, "end"))

    def support_aggregation(self):
        return False

    def support_sync_workers(self):
        return False

    def run_inter_mode(self):
        return self._inter


class TestQuestions:
    @pytest.mark.parametrize("question", ["support_aggregation", "support_sync_workers", "run_inter_mode"])
    def test_one_without_an_answer_is_found_before_training(self, question):
        unanswered = getattr(mox.AggregativeSessionRunHook, question)
        Silent = type("Silent", (Answering,), {question: unanswered})
        words = rf"Silent does not answer {question}\(\): write `def {question}\(self\): return False`, or True"
        with pytest.raises(NotImplementedError, match=words):
            run(lambda score, mode: [Silent([], mode, inter=False)], steps=1)

    @pytest.mark.parametrize("inter", [True, False])
    def test_only_those_that_say_so_run_around_the_steps_of_the_inter_mode(self, inter):
        events = []

        def hooks(score, mode):
            return [Answering(events, mode, inter), *one(mox.LogEvaluationMetricHook, samples_in_eval=8)(score, mode)]

        run(hooks, scores=[1, 2], steps=5)
        in_eval = [event for mode, event in events if mode == EVAL]
        assert in_eval == ["begin", "create", *(["before", "after"] * 2 if inter else []), "end"]
        in_train = [event for mode, event in events if mode == TRAIN]
        assert in_train == ["begin", "create", *["before", "after"] * 5, "end"]

    @pytest.mark.parametrize("kind", HOOKS)
    def test_the_answers_of_evaluating_hooks(self, kind):
        (hook,) = one(kind)(torch.tensor(1.0), TRAIN)
        assert [hook.support_aggregation(), hook.support_sync_workers(), hook.run_inter_mode()] == [True] * 3

    def test_the_answers_of_a_feeding_hook(self):
        hook = mox.FeedSessionRunHook({})
        assert [hook.support_aggregation(), hook.support_sync_workers(), hook.run_inter_mode()] == [False] * 3


class FeedsInInterMode(mox.FeedSessionRunHook):
    def run_inter_mode(self):
        return True


class TestFeed:
    def run(self, mode, feed, inter=False, **settings):
        """Train or evaluate with a placeholder; returns what it held at each step, by mode."""
        held = []

        def model_fn(inputs, mode):
            x = mox.placeholder(torch.float32, [])
            held.append((mode, float(x)))
            out = plait.layer("fc", nn.Linear, 2, 1)(inputs[0]).mean() * x
            hooks = [feed({x: len(held)})]
            if inter:
                hooks.append(mox.LogEvaluationMetricHook({"x": x}, 4, 20, 4))
            return mox.ModelSpec(loss=out, log_info={"out": out}, hooks=hooks)

        settings = {"inter_mode": EVAL} if inter else settings
        data = {"input_fn": lambda mode: list(ROWS), "batch_size": 4, "optimizer_fn": SGD}
        mox.run(model_fn=model_fn, run_mode=mode, max_number_of_steps=5, **data, **settings)
        return held

    def test_in_training(self):
        assert self.run(TRAIN, mox.FeedSessionRunHook) == [(TRAIN, float(i)) for i in (0, 1, 2, 3, 4, 5)]

    def test_in_an_evaluation(self, tmp_path):
        self.run(TRAIN, mox.FeedSessionRunHook, log_dir=str(tmp_path))
        held = self.run(EVAL, mox.FeedSessionRunHook, checkpoint_path=str(tmp_path))
        assert held == [(EVAL, float(i)) for i in (0, 1, 2, 3, 4, 5)]

    def test_in_both_modes_where_it_says_so(self, log):
        held = self.run(TRAIN, FeedsInInterMode, inter=True)
        assert [mode for mode, _ in held] == [TRAIN, EVAL, *[TRAIN] * 5, EVAL]
        assert held[-1] == (EVAL, 2.0)  # what the hook of the build was given, and nothing has brought a new value
        assert shown(log) == ["[Evaluation] step: 4 x: 2.000"]

    def test_a_placeholder_that_only_training_feeds_is_missed_in_the_inter_mode(self):
        words = "makes placeholders in the inter mode, but no hook feeds them there: .* run_inter_mode.* with True"
        with pytest.raises(ConfigError, match=words):
            self.run(TRAIN, mox.FeedSessionRunHook, inter=True)

    def test_the_documents_hook_with_a_class_in_the_model_fn(self):
        def model_fn(inputs, run_mode, **kwargs):
            del inputs
            x = mox.placeholder(dtype=torch.float32, shape=())

            class FeedRunHook(mox.AggregativeSessionRunHook):
                def before_run(self, run_context):
                    return SessionRunArgs(fetches=None, feed_dict={x: 1.5})

                def support_aggregation(self):
                    return False

                def support_sync_workers(self):
                    return False

                def run_inter_mode(self):
                    return False

            return mox.ModelSpec(log_info={"x": x}, hooks=[FeedRunHook()])

        mox.run(input_fn=lambda mode: list(ROWS), model_fn=model_fn, run_mode=EVAL, batch_size=4)
        assert current_model().metric_values(plait.efl.MODE.EVAL) == {"x": 1.5}

    def test_a_placeholder_that_nothing_feeds(self):
        def model_fn(inputs, mode):
            return mox.ModelSpec(log_info={"x": mox.placeholder(torch.float32, [])}, hooks=[mox.FeedSessionRunHook({})])

        with pytest.raises(FetchError, match="was not fed"):
            mox.run(input_fn=lambda mode: list(ROWS), model_fn=model_fn, run_mode=EVAL, batch_size=4)

    def test_hooks_that_come_and_go_are_refused(self):
        calls = []

        def hooks(score, mode):
            calls.append(mode)
            return [mox.FeedSessionRunHook({})] if len(calls) < 4 else []

        with pytest.raises(FunctionError, match=r"made the hooks \[\] in this step but \['FeedSessionRunHook'\]"):
            run(hooks, steps=5)


class TestTrainingNoticesNothing:
    def outcome(self, model):
        (optimizer,) = model.optimizers()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*model.variables().values(), *states, torch.get_rng_state()]

    def trained(self, hooks_of, **settings):
        momentum = mox.get_optimizer_fn("momentum", learning_rate=0.05, momentum=0.9)
        return self.outcome(run(hooks_of, steps=23, optimizer_fn=momentum, **settings))

    def test_with_and_without_evaluations_every_bit_is_the_same(self):
        """There is a dropout in the model; the evaluation draws, too."""

        def drawing(score, mode):
            noise = torch.rand(()) if mode == EVAL else 0.0
            return one(mox.LogEvaluationMetricHook)(score + noise, mode)

        plain = self.trained(lambda score, mode: [], inter_mode=None)
        evaluated = self.trained(drawing, scores=[1, 2, 3])
        assert all(torch.equal(a, b) for a, b in zip(plain, evaluated, strict=True))

    def test_training_goes_on_in_its_mode(self):
        flags = []

        def hooks(score, mode):
            model = current_model()
            if model is not None:
                flags.append((mode, model.training_flag, torch.is_grad_enabled()))
            return one(mox.LogEvaluationMetricHook)(score, mode)

        run(hooks, steps=6)
        assert flags == [(TRAIN, True, True)] * 5 + [(EVAL, False, False)] + [(TRAIN, True, True)]


class OneOfTwo(Local):
    """A worker in step with one whose evaluations always find 9."""

    worker_num, in_step = 2, True

    def __init__(self, worker_id):
        super().__init__()
        self.worker_id = worker_id

    def part(self, source, *, training):
        return PartSource(source, self.worker_id, 2, together=training)

    def gather(self, value):
        evaluated = bool(value) and isinstance(value[0], list)
        return [value, [[4, {"score": torch.tensor(9.0)}]] if evaluated else value]


@pytest.mark.parametrize(("worker_id", "mean"), [(0, (1 + 3 + 9) / 3), (1, (5 + 9) / 2)])
def test_workers_in_step_evaluate_their_parts_once_and_see_what_all_have_found(log, monkeypatch, worker_id, mean):
    monkeypatch.setattr("plait.mox.hosts.strategy_for", lambda mode: OneOfTwo(worker_id))
    run(
        lambda score, mode: [mox.LogEvaluationMetricHook({"score": score}, 4, 20, 12, prefix="[Evaluation]")],
        scores=(1, 5, 3),
        steps=4,
    )
    assert shown(log, "[Evaluation]") == [f"[Evaluation] step: {step} score: {mean:.3f}" for step in (1, 3)]
