"""`mox.run`, argument by argument."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import plait
from plait import mox
from plait.data import Sample, TensorSource
from plait.engine.build import current_model
from plait.errors import ConfigError, DataError, FunctionError, NanLossError
from plait.variables.checkpoint import CheckpointDir

SPEC = importlib.util.spec_from_file_location("mox_runs", Path(__file__).with_name("runs.py"))
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)

TRAIN, EVAL, PREDICT = mox.ModeKeys.TRAIN, mox.ModeKeys.EVAL, mox.ModeKeys.PREDICT
BATCHES, SAMPLES, SGD, X, Y = runs.BATCHES, runs.SAMPLES, runs.SGD, runs.X, runs.Y
by_hand, fresh, lines, model_fn, run, same, weights = (
    runs.by_hand,
    runs.fresh,
    runs.lines,
    runs.model_fn,
    runs.run,
    runs.same,
    runs.weights,
)


def batches_seen(data, mode=TRAIN, **settings):
    """What the model_fn was given, without the call of the build."""
    seen = []

    def spying(inputs, mode):
        seen.append(inputs)
        x = inputs[0]
        loss = plait.layer("fc", nn.Linear, 2, 1)(x.float().reshape(-1, 2)).mean()
        return mox.ModelSpec(loss=loss, log_info={"loss": loss}, output_info={"x": x})

    run(mode, data, spying, **settings)
    return seen[1:]


class TestTrain:
    def test_is_a_hand_written_loop_bit_for_bit(self):
        assert same(weights(run(max_number_of_steps=13)), by_hand(13))

    def test_goes_round_the_data_until_the_last_step(self):
        assert run(max_number_of_steps=13).global_step.value == 13

    def test_without_a_limit_it_ends_with_the_data(self):
        assert run().global_step.value == 5

    def test_without_a_limit_all_passes_that_the_source_has_are_read(self):
        data = TensorSource((X, Y), 4, num_epochs=3)
        assert run(data=data).global_step.value == 15

    def test_data_that_ends_first_ends_the_training(self):
        assert run(data=iter(SAMPLES), max_number_of_steps=1000).global_step.value == 5

    def test_needs_no_log_dir(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run(max_number_of_steps=2)
        assert list(tmp_path.iterdir()) == []

    def test_a_loss_that_is_not_a_number_stops_it_though_the_log_does_not_show_it(self, tmp_path):
        def bad(inputs, mode):
            loss = plait.layer("fc", nn.Linear, 2, 1)(inputs[0]).mean() * float("nan")
            return mox.ModelSpec(loss=loss, log_info={"other": inputs[1].mean()})

        with pytest.raises(NanLossError, match="the loss of .* is nan, noticed at global step"):
            run(model_fn=bad, max_number_of_steps=3, log_dir=str(tmp_path))


class TestInput:
    @pytest.mark.parametrize("kind", ["list", "generator", "iterator", "dataset", "stream", "sized stream"])
    def test_samples_are_batched(self, kind):
        class Rows(Dataset):
            def __len__(self):
                return 20

            def __getitem__(self, index):
                if index >= 20:
                    raise IndexError
                return SAMPLES[index]

        class RowStream(IterableDataset):
            def __iter__(self):
                return iter(SAMPLES)

        class SizedStream(RowStream):
            def __len__(self):
                return 20

        made = {
            "list": SAMPLES,
            "generator": (sample for sample in SAMPLES),
            "iterator": iter(SAMPLES),
            "dataset": Rows(),
            "stream": RowStream(),
            "sized stream": SizedStream(),
        }[kind]
        seen = batches_seen(made)
        assert len(seen) == 5
        for (x, y), (want_x, want_y) in zip(seen, BATCHES, strict=True):
            assert torch.equal(x, want_x)
            assert torch.equal(y, want_y)

    def test_the_last_batch_may_be_shorter(self):
        assert [len(x) for x, _ in batches_seen(SAMPLES, batch_size=8)] == [8, 8, 4]

    @pytest.mark.parametrize("auto_batch", [True, False])
    @pytest.mark.parametrize(
        "make",
        [
            lambda: TensorSource((X, Y), 4),
            lambda: DataLoader(list(SAMPLES), batch_size=4),
            lambda: Sample(TensorSource((X, Y), 4)),
        ],
        ids=["source", "loader", "sample"],
    )
    def test_what_has_batches_already_stays_as_it_is(self, make, auto_batch):
        seen = batches_seen(make(), auto_batch=auto_batch)
        assert [list(x.shape) for x, _ in seen] == [[4, 2]] * 5

    def test_without_auto_batch_a_list_is_one_of_batches(self):
        seen = batches_seen(BATCHES, auto_batch=False, batch_size=None)
        assert [list(x.shape) for x, _ in seen] == [[4, 2]] * 5

    def test_a_loader_of_samples_is_batched(self):
        seen = batches_seen(DataLoader(list(SAMPLES), batch_size=None))
        assert [list(x.shape) for x, _ in seen] == [[4, 2]] * 5

    def test_inputs_are_a_list_even_of_one(self):
        seen = batches_seen(list(X))
        assert [type(inputs) for inputs in seen] == [list] * 5
        assert [[list(x.shape) for x in inputs] for inputs in seen] == [[[4, 2]]] * 5

    def test_samples_with_names_arrive_with_their_names(self):
        shapes = []

        def named(inputs, mode):
            shapes.append((type(inputs), list(inputs["x"].shape), list(inputs.y.shape)))
            return model_fn([inputs.x, inputs.y], mode)

        run(data=[{"x": x, "y": y} for x, y in SAMPLES], model_fn=named)
        assert shapes == [(Sample, [4, 2], [4])] * 6

    def test_numpy_samples_become_tensors(self):
        seen = batches_seen([(x.numpy(), float(y)) for x, y in SAMPLES])
        assert all(torch.equal(x, want) for (x, _), (want, _) in zip(seen, BATCHES, strict=True))

    def test_samples_of_different_shapes_say_so(self):
        with pytest.raises(DataError, match="2 samples do not stack .* or ready batches and auto_batch=False"):
            run(data=[(torch.zeros(2), 1.0), (torch.zeros(3), 1.0)])

    def test_an_input_fn_is_called_once_a_mode_before_the_model_fn(self):
        calls = []

        def input_fn(mode, **kwargs):
            calls.append(("input", mode, kwargs))
            return SAMPLES

        def noting(inputs, mode):
            calls.append(("model", mode))
            return model_fn(inputs, mode)

        def optimizer_fn():
            calls.append(("optimizer",))
            return SGD()

        run(input_fn=input_fn, model_fn=noting, optimizer_fn=optimizer_fn, inter_mode=EVAL, max_number_of_steps=1)
        expected = [("input", TRAIN, {}), ("model", TRAIN), ("input", EVAL, {}), ("model", EVAL), ("optimizer",)]
        assert calls == [*expected, ("model", TRAIN)]


class TestSpelling:
    def spelled_mode(inputs, mode, **kwargs):
        return model_fn(inputs, mode)

    def spelled_run_mode(inputs, run_mode):
        return model_fn(inputs, run_mode)

    @pytest.mark.parametrize("model_fn", [spelled_mode, spelled_run_mode])
    @pytest.mark.parametrize("input_fn", [lambda mode, **kwargs: SAMPLES, lambda run_mode: SAMPLES])
    def test_user_functions_name_their_arguments_as_they_like(self, input_fn, model_fn):
        assert run(input_fn=input_fn, model_fn=model_fn).global_step.value == 5

    @pytest.mark.parametrize("kind", ["plain", "with kwargs"])
    def test_output_fn_with_and_without_kwargs(self, kind):
        got = []

        def plain(outputs):
            got.extend(outputs)

        def with_kwargs(outputs, **kwargs):
            got.extend(outputs)

        run(output_fn=plain if kind == "plain" else with_kwargs)
        assert len(got) == 5

    def test_a_model_fn_that_returns_something_else(self):
        with pytest.raises(FunctionError, match=r"TRAIN mode the model_fn returned Tensor: return mox.ModelSpec\("):
            run(model_fn=lambda inputs, mode: inputs[0].mean())

    def test_a_model_fn_without_a_loss(self):
        with pytest.raises(FunctionError, match="in TRAIN mode the model_fn's ModelSpec needs loss: add it"):
            run(model_fn=lambda inputs, mode: mox.ModelSpec(log_info={"a": inputs[0].mean()}))


class TestLog:
    def test_the_line_is_the_documented_one(self, caplog):
        run(max_number_of_steps=21)
        number = r"-?\d+\.\d{3}"
        for line, step in zip(lines(caplog), (0, 10, 20), strict=True):
            pattern = rf"step: {step}\(global step: {step}\)\tsample/sec: {number}\tloss: {number}\tbias: {number}"
            assert re.fullmatch(pattern, line), line

    def test_log_every_n_steps(self, caplog):
        run(max_number_of_steps=7, log_every_n_steps=3)
        assert [line.split("(")[0] for line in lines(caplog)] == ["step: 0", "step: 3", "step: 6"]

    def test_only_log_info_is_shown(self, caplog):
        def quiet(inputs, mode):
            spec = model_fn(inputs, mode)
            return mox.ModelSpec(loss=spec.loss, log_info={"bias": spec.log_info["bias"]})

        run(model_fn=quiet, max_number_of_steps=1)
        assert [field.split(":")[0] for field in lines(caplog)[0].split("\t")] == ["step", "sample/sec", "bias"]

    def test_the_values_are_those_of_the_step(self, caplog):
        run(max_number_of_steps=1)
        first = F.mse_loss(F.linear(BATCHES[0][0], fresh()["fc/weight"], fresh()["fc/bias"]).squeeze(1), BATCHES[0][1])
        assert f"\tloss: {float(first):.3f}\t" in lines(caplog)[0]

    def test_an_evaluation_shows_the_step_of_its_checkpoint(self, caplog, trained):
        caplog.clear()
        run(EVAL, checkpoint_path=trained[0], log_every_n_steps=2)
        assert [line.split("\t")[0] for line in lines(caplog)] == [
            f"step: {step}(global step: 10)" for step in (0, 2, 4)
        ]

    def test_evaluations_in_the_middle_write_no_line_of_their_own(self, caplog):
        run(model_fn=watched(LogHook), inter_mode=EVAL, max_number_of_steps=10, log_every_n_steps=5)
        shown = [record.getMessage().split("\t")[0] for record in caplog.records][:-1]
        assert [line.split(" accuracy")[0] for line in shown] == [
            "step: 0(global step: 0)",
            "[Evaluation] step: 4",
            "step: 5(global step: 5)",
            "[Evaluation] step: 9",
        ]

    def test_a_step_is_logged_before_it_is_evaluated(self, caplog):
        run(model_fn=watched(LogHook), inter_mode=EVAL, max_number_of_steps=5, log_every_n_steps=4)
        shown = [record.getMessage().split("\t")[0] for record in caplog.records][:-1]
        assert [line.split(" accuracy")[0] for line in shown][1:] == ["step: 4(global step: 4)", "[Evaluation] step: 4"]


class LogHook(mox.LogEvaluationMetricHook):
    """Evaluates 8 samples after each pass."""

    def __init__(self, value):
        super().__init__({"accuracy": value}, batch_size=4, samples_in_train=20, samples_in_eval=8)


def watched(hook):
    def made(inputs, mode):
        spec = model_fn(inputs, mode)
        return mox.ModelSpec(loss=spec.loss, log_info=spec.log_info, hooks=[hook(spec.log_info["bias"])])

    return made


class TestInterMode:
    @pytest.mark.parametrize("inter_mode", [TRAIN, EVAL, PREDICT])
    def test_the_functions_are_called_in_it(self, inter_mode):
        asked, modes = [], []

        def noting(inputs, mode):
            modes.append(mode)
            spec = model_fn(inputs, mode)
            hooks = [LogHook(spec.log_info["bias"])]
            return mox.ModelSpec(loss=spec.loss, log_info=spec.log_info, output_info=spec.output_info, hooks=hooks)

        def input_fn(mode):
            asked.append(mode)
            return SAMPLES

        run(input_fn=input_fn, model_fn=noting, inter_mode=inter_mode, max_number_of_steps=5)
        assert asked == [TRAIN, inter_mode]
        assert modes[2:] == [TRAIN] * 5 + [inter_mode] * 2

    def test_output_fn_sees_the_training_only(self):
        got = []

        def noting(inputs, mode):
            spec = watched(LogHook)(inputs, mode)
            output = {"train": torch.tensor(mode == TRAIN)}
            return mox.ModelSpec(loss=spec.loss, log_info=spec.log_info, output_info=output, hooks=spec.hooks)

        run(model_fn=noting, inter_mode=EVAL, output_fn=got.extend, max_number_of_steps=6)
        assert [bool(step["train"]) for step in got] == [True] * 6

    @pytest.mark.parametrize(
        ("run_mode", "inter_mode"), [(EVAL, EVAL), (PREDICT, TRAIN), (TRAIN, "EXPORT"), (TRAIN, "eval"), (TRAIN, 3)]
    )
    def test_it_belongs_to_training_and_is_a_mode(self, run_mode, inter_mode):
        words = f"inter_mode={inter_mode!r} with run_mode='{run_mode}': it is for TRAIN"
        with pytest.raises(ConfigError, match=words):
            run(run_mode, inter_mode=inter_mode)


class TestEval:
    def test_averages_what_log_info_says_over_all_samples(self, trained):
        directory, variables = trained
        found = run(EVAL, checkpoint_path=directory, batch_size=8, optimizer_fn=None).metric_values(plait.efl.MODE.EVAL)
        out = F.linear(X, variables["fc/weight"], variables["fc/bias"]).squeeze(1)
        assert found["loss"] == pytest.approx(float(F.mse_loss(out, Y)), rel=1e-6)
        assert found["bias"] == pytest.approx(float(out.mean()), rel=1e-5)

    def test_changes_no_variable_and_writes_no_checkpoint(self, trained, tmp_path):
        directory, variables = trained
        model = run(EVAL, checkpoint_path=directory, log_dir=str(tmp_path / "evaluation"))
        assert same(weights(model), variables)
        assert CheckpointDir(tmp_path / "evaluation").list() == []

    def test_ends_after_max_number_of_steps(self, trained):
        got = []
        run(EVAL, checkpoint_path=trained[0], max_number_of_steps=3, output_fn=got.extend)
        assert len(got) == 3

    def test_needs_log_info(self, trained):
        def bare(inputs, mode):
            return mox.ModelSpec(output_info=model_fn(inputs, mode).output_info)

        with pytest.raises(FunctionError, match="in EVAL mode the model_fn's ModelSpec needs log_info"):
            run(EVAL, model_fn=bare, checkpoint_path=trained[0])

    def test_the_hook_of_an_early_stop_is_idle_in_it(self, trained):
        model = run(EVAL, model_fn=watched(LogHook), checkpoint_path=trained[0])
        (hook,) = [hook for hooks in model.hooks.values() for hook in hooks]
        assert hook.state_dict() == {"done": 0}
        assert hook._collected is None


class TestPredict:
    def test_gives_what_the_model_says(self, trained):
        directory, variables = trained
        got = []
        run(PREDICT, checkpoint_path=directory, output_fn=got.extend, optimizer_fn=None)
        out = np.concatenate([step["out"] for step in got])
        wanted = F.linear(X, variables["fc/weight"], variables["fc/bias"]).squeeze(1)
        np.testing.assert_allclose(out, wanted.numpy(), rtol=1e-6)

    def test_needs_output_fn(self, trained):
        with pytest.raises(ConfigError, match="PREDICT hands what it finds to output_fn: pass output_fn="):
            run(PREDICT, checkpoint_path=trained[0])

    def test_needs_output_info(self, trained):
        def bare(inputs, mode):
            return mox.ModelSpec(log_info=model_fn(inputs, mode).log_info)

        with pytest.raises(FunctionError, match="in PREDICT mode the model_fn's ModelSpec needs output_info"):
            run(PREDICT, model_fn=bare, output_fn=print, checkpoint_path=trained[0])


class TestOutput:
    @pytest.mark.parametrize(
        ("every", "sizes"), [(0, [10]), (1, [1] * 10), (3, [3, 3, 3, 1]), (5, [5, 5]), (10, [10]), (99, [10])]
    )
    def test_every_so_many_steps_and_the_rest_at_the_end(self, every, sizes):
        got = []
        run(output_fn=got.append, output_every_n_steps=every, max_number_of_steps=10)
        assert [len(outputs) for outputs in got] == sizes

    def test_is_a_list_of_arrays_by_name(self):
        got = []
        run(output_fn=got.extend, max_number_of_steps=2)
        assert [list(step) for step in got] == [["out", "y"]] * 2
        assert all(isinstance(value, np.ndarray) and value.shape == (4,) for step in got for value in step.values())
        np.testing.assert_array_equal(got[1]["y"], BATCHES[1][1].numpy())

    def test_a_variable_is_handed_over_as_it_was_at_its_step(self):
        def telling(inputs, mode):
            spec = model_fn(inputs, mode)
            weight = plait.get_variable("extra", [1], initializer=0.0)
            return mox.ModelSpec(loss=spec.loss + weight.sum(), output_info={"weight": weight})

        got = []
        run(model_fn=telling, output_fn=got.extend, max_number_of_steps=3)
        np.testing.assert_allclose([step["weight"][0] for step in got], [-0.1, -0.2, -0.3], rtol=1e-6)

    def test_numbers_become_arrays_and_words_are_refused(self):
        def telling(value, inputs, mode):
            return mox.ModelSpec(loss=model_fn(inputs, mode).loss, output_info={"value": value})

        got = []
        run(model_fn=functools.partial(telling, 3), output_fn=got.extend, max_number_of_steps=1)
        assert got[0]["value"] == np.array(3)
        with pytest.raises(FunctionError, match=r"output_info\['value'\] is a str: give a tensor"):
            run(model_fn=functools.partial(telling, "three"), output_fn=got.extend, max_number_of_steps=1)

    def test_without_output_info_it_says_so(self):
        def silent(inputs, mode):
            return mox.ModelSpec(loss=model_fn(inputs, mode).loss)

        with pytest.raises(FunctionError, match="output_fn is given, but the ModelSpec has no output_info: add it"):
            run(model_fn=silent, output_fn=print)

    def test_an_output_fn_may_join_a_training_that_had_none(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=3)
        got = []
        run(log_dir=str(tmp_path), max_number_of_steps=5, output_fn=got.extend)
        assert len(got) == 2
        run(log_dir=str(tmp_path), max_number_of_steps=7)

    def test_what_was_collected_and_not_handed_over_survives_a_death(self, tmp_path):
        class Death(Exception):
            pass

        def dying(inputs, mode):
            if current_model() is not None and current_model().global_step.value == 5 and not got:
                raise Death
            return model_fn(inputs, mode)

        got = []
        settings = {"log_dir": str(tmp_path), "max_number_of_steps": 8, "save_model_steps": 1}
        with pytest.raises(Death):
            run(model_fn=dying, output_fn=got.append, **settings)
        assert got == []
        run(output_fn=got.append, **settings)
        expected = []
        run(output_fn=expected.append, max_number_of_steps=8)
        assert [len(outputs) for outputs in got] == [8]
        for one, other in zip(got[0], expected[0], strict=True):
            np.testing.assert_array_equal(one["out"], other["out"])


class TestWrongArguments:
    @pytest.mark.parametrize("mode", ["invalid", "EXPORT", "train", None, 3])
    def test_a_run_mode_that_is_none_is_a_value_error(self, mode):
        with pytest.raises(ValueError, match=f"run_mode={mode!r}: write mox.ModeKeys.TRAIN, EVAL or PREDICT") as error:
            run(mode)
        assert isinstance(error.value, ConfigError)

    def test_run_mode_has_to_be_given(self):
        with pytest.raises(ValueError, match="run_mode='invalid'"):
            mox.run(input_fn=lambda mode: SAMPLES, model_fn=model_fn)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"input_fn": None}, "input_fn is None: give a function"),
            ({"input_fn": SAMPLES[:1]}, "input_fn is .*: give a function"),
            ({"model_fn": None}, "model_fn is None: give a function"),
            ({"fetch_strategy_fn": print}, "fetch_strategy_fn is not supported: leave it out"),
            ({"batch_size": 0}, "batch_size=0: write a whole number from 1 on"),
            ({"batch_size": "4"}, "batch_size='4': write a whole number from 1 on"),
            ({"max_number_of_steps": -1}, "max_number_of_steps=-1: write a whole number from 0 on"),
            ({"max_number_of_steps": 1.5}, "max_number_of_steps=1.5: write a whole number"),
            ({"log_every_n_steps": 0}, "log_every_n_steps=0: write a whole number from 1 on"),
            ({"output_every_n_steps": -3}, "output_every_n_steps=-3: write a whole number from 0 on"),
        ],
    )
    def test_other_arguments(self, given, words):
        with pytest.raises(ConfigError, match=words):
            run(**given)

    def test_a_hook_of_another_kind(self):
        def hooked(inputs, mode):
            return mox.ModelSpec(loss=model_fn(inputs, mode).loss, hooks=[plait.train.SessionRunHook()])

        with pytest.raises(FunctionError, match="hook SessionRunHook: derive it from mox.AggregativeSessionRunHook"):
            run(model_fn=hooked)


def test_outputs_of_captured_training_steps_are_refused():
    mox.set_flag("capture_steps", True)
    with pytest.raises(ConfigError, match="output_fn in TRAIN with capture_steps"):
        mox.run(lambda mode: [], print, lambda inputs, mode: None, run_mode=mox.ModeKeys.TRAIN)
