"""`mox.run`, argument by argument."""

from __future__ import annotations

import functools
import logging
import re
import sys

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
from plait.errors import (
    ConfigError,
    DataError,
    FunctionError,
    MismatchError,
    NanLossError,
    PlaitError,
    TaskError,
    VariableError,
)
from plait.mox.flags import reset_flags
from plait.variables.checkpoint import CheckpointDir

TRAIN, EVAL, PREDICT, EXPORT = (getattr(mox.ModeKeys, name) for name in ("TRAIN", "EVAL", "PREDICT", "EXPORT"))
X = torch.linspace(-1, 1, 40).reshape(20, 2)
Y = (torch.arange(20) % 3).float()
SAMPLES = [(X[i], Y[i]) for i in range(20)]
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)]
SGD = mox.get_optimizer_fn("sgd", learning_rate=0.1)


@pytest.fixture(autouse=True)
def fresh_flags(monkeypatch, caplog):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    caplog.set_level(logging.INFO, "plait")
    yield
    reset_flags()


def model_fn(inputs, mode, **kwargs):
    x, y = inputs
    out = plait.layer("fc", nn.Linear, 2, 1)(x).squeeze(1)
    loss = F.mse_loss(out, y)
    return mox.ModelSpec(loss=loss, log_info={"loss": loss, "bias": out.mean()}, output_info={"out": out, "y": y})


def run(mode=TRAIN, data=SAMPLES, model_fn=model_fn, **settings):
    """`mox.run` with the usual settings; returns the model."""
    settings = {"input_fn": lambda mode: data, "batch_size": 4, "optimizer_fn": SGD, **settings}
    mox.run(model_fn=model_fn, run_mode=mode, **settings)
    return current_model()


def weights(model):
    return {name: value.detach().clone() for name, value in model.variables().items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


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


@pytest.fixture
def trained(tmp_path):
    """A directory with a training of ten steps, and its variables."""
    model = run(log_dir=str(tmp_path / "trained"), max_number_of_steps=10)
    return str(tmp_path / "trained"), weights(model)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("step: ")]


def by_hand(steps, *, change=lambda parameters: None, scale=1.0, lr=0.1):
    """The same training without plait; starts from the same variables."""
    net = nn.Linear(2, 1)
    net.load_state_dict({name.removeprefix("fc/"): value for name, value in fresh().items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(steps):
        x, y = BATCHES[step % 5]
        optimizer.zero_grad()
        loss = F.mse_loss(net(x).squeeze(1), y)
        (loss * scale).backward()
        for parameter in net.parameters():
            parameter.grad /= scale
        change(list(net.parameters()))
        optimizer.step()
    return {f"fc/{name}": value.detach() for name, value in net.named_parameters()}


def fresh():
    """The variables before the first step."""
    model = plait.Model()
    with model.scope():
        plait.layer("fc", nn.Linear, 2, 1)
    return weights(model)


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

        with pytest.raises(NanLossError, match="the loss of .* is nan at global step"):
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
        assert set(shapes) == {(Sample, (4, 2), (4,))} if False else shapes[0] == (Sample, [4, 2], [4])

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

        run(
            input_fn=input_fn, model_fn=noting, optimizer_fn=optimizer_fn, inter_mode=EVAL, max_number_of_steps=1
        )
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
        found = run(EVAL, checkpoint_path=directory, batch_size=8, optimizer_fn=None).metric_values(
            plait.efl.MODE.EVAL
        )
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

    def test_needs_output_info(self, trained):
        def bare(inputs, mode):
            return mox.ModelSpec(log_info=model_fn(inputs, mode).log_info)

        with pytest.raises(FunctionError, match="in PREDICT mode the model_fn's ModelSpec needs output_info"):
            run(PREDICT, model_fn=bare, checkpoint_path=trained[0])


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


class TestCheckpoints:
    def test_one_at_the_start_and_one_at_the_end(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=7)
        assert [info.step for info in CheckpointDir(tmp_path).list()] == [0, 7]

    def test_save_model_steps(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=7, save_model_steps=3)
        assert [info.step for info in CheckpointDir(tmp_path).list()] == [0, 3, 6, 7]

    def test_save_model_secs(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=4, save_model_secs=1e-9)
        assert [info.step for info in CheckpointDir(tmp_path).list()] == [0, 1, 2, 3, 4]

    def test_seconds_win_over_steps(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=7, save_model_secs=3600, save_model_steps=1)
        assert [info.step for info in CheckpointDir(tmp_path).list()] == [0, 7]

    def test_none_is_not_given(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=2, save_model_secs=None, save_model_steps=1)
        assert [info.step for info in CheckpointDir(tmp_path).list()] == [0, 1, 2]

    @pytest.mark.parametrize("setting", [{"save_model_steps": 0}, {"save_model_secs": -1}])
    def test_bad_intervals(self, tmp_path, setting):
        with pytest.raises(ConfigError, match="write a (whole )?number above 0"):
            run(log_dir=str(tmp_path), **setting)

    def test_a_raised_limit_goes_on_to_the_same_bits(self, tmp_path):
        for steps in (3, 7, 13):
            model = run(log_dir=str(tmp_path), max_number_of_steps=steps)
            assert model.global_step.value == steps
        assert same(weights(model), by_hand(13))

    @pytest.mark.parametrize("steps", [5, 3])
    def test_at_its_last_step_or_beyond_it_says_so(self, tmp_path, caplog, steps):
        before = weights(run(log_dir=str(tmp_path), max_number_of_steps=5))
        assert "nothing was trained" not in caplog.text
        model = run(log_dir=str(tmp_path), max_number_of_steps=steps)
        assert same(weights(model), before)
        words = rf"{re.escape(str(tmp_path))} has ended, at step 5 .*max_number_of_steps={steps}: nothing was trained"
        (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert re.search(words + ".*Raise max_number_of_steps, or choose another log_dir", said.getMessage())

    def test_a_lower_limit_than_an_interrupted_run_has_reached_says_so(self, tmp_path, caplog):
        def dying(inputs, mode):
            if current_model() is not None and current_model().global_step.value == 5:
                raise KeyboardInterrupt
            return model_fn(inputs, mode)

        with pytest.raises(KeyboardInterrupt):
            run(model_fn=dying, log_dir=str(tmp_path), max_number_of_steps=9, save_model_steps=1)
        caplog.clear()
        build_model = run(log_dir=str(tmp_path), max_number_of_steps=2)
        assert build_model.global_step.value == 5
        assert "has ended, at step 5 with max_number_of_steps=2: nothing was trained" in caplog.text

    def test_log_dir_comes_before_checkpoint_path(self, tmp_path, trained):
        log_dir = str(tmp_path / "log")
        run(log_dir=log_dir, max_number_of_steps=3)
        model = run(log_dir=log_dir, max_number_of_steps=4, checkpoint_path=trained[0])
        assert same(weights(model), by_hand(4))

    def test_without_a_checkpoint_in_log_dir_variables_come_from_checkpoint_path(self, tmp_path, trained):
        directory, variables = trained
        log_dir = str(tmp_path / "log")
        still = mox.get_optimizer_fn("sgd", learning_rate=0.0)
        model = run(log_dir=log_dir, max_number_of_steps=2, checkpoint_path=directory, optimizer_fn=still)
        assert same(weights(model), variables)
        assert model.global_step.value == 2

    @pytest.mark.parametrize("mode", [EVAL, PREDICT])
    def test_the_other_modes_need_checkpoint_path(self, mode, trained):
        with pytest.raises(ConfigError, match=f"{mode} needs checkpoint_path=, the directory of a run or a file"):
            run(mode, log_dir=trained[0])

    def test_a_model_without_variables_needs_none(self):
        def bare(inputs, mode):
            return mox.ModelSpec(log_info={"mean": inputs[1].mean()})

        assert run(EVAL, model_fn=bare).metric_values(plait.efl.MODE.EVAL)["mean"] == pytest.approx(float(Y.mean()))

    @pytest.mark.parametrize("mode", [TRAIN, EVAL])
    def test_a_checkpoint_path_that_is_not_there(self, tmp_path, mode):
        with pytest.raises(PlaitError, match="nowhere"):
            run(mode, checkpoint_path=str(tmp_path / "nowhere"))

    def test_a_checkpoint_of_another_model(self, trained):
        def other(inputs, mode):
            loss = plait.layer("other", nn.Linear, 2, 1)(inputs[0]).mean()
            return mox.ModelSpec(loss=loss, log_info={"loss": loss})

        for mode in (TRAIN, EVAL):
            with pytest.raises(MismatchError, match="nothing in .* is wanted by the model: it has other/weight"):
                run(mode, model_fn=other, checkpoint_path=trained[0])

    def test_an_evaluation_needs_every_variable_a_training_does_not(self, trained):
        def wider(inputs, mode):
            loss = model_fn(inputs, mode).loss + plait.get_variable("more", [1]).sum()
            return mox.ModelSpec(loss=loss, log_info={"loss": loss})

        with pytest.raises(MismatchError, match="lacks variable 'more'"):
            run(EVAL, model_fn=wider, checkpoint_path=trained[0])
        still = mox.get_optimizer_fn("sgd", learning_rate=0.0)
        model = run(model_fn=wider, checkpoint_path=trained[0], optimizer_fn=still)
        assert torch.equal(model.variables()["fc/weight"], trained[1]["fc/weight"])


class TestSummaries:
    def scalars(self, directory):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(directory))
        events.Reload()
        return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def test_are_written_every_so_many_steps(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=10, save_summary_steps=4)
        assert self.scalars(tmp_path) == {"train/loss": [1, 5, 9], "train/bias": [1, 5, 9]}

    def test_zero_writes_none(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=10, save_summary_steps=0)
        assert list(tmp_path.glob("events*")) == []

    def test_an_evaluation_writes_none(self, tmp_path, trained):
        run(EVAL, log_dir=str(tmp_path / "log"), checkpoint_path=trained[0])
        assert not (tmp_path / "log").exists()


class TestOptimizers:
    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            (None, ConfigError, "optimizer_fn is NoneType: give a function that returns an optimizer"),
            (0.1, ConfigError, "optimizer_fn is float: give a function"),
            (torch.optim.SGD([torch.zeros(1)], lr=0.1), ConfigError, "optimizer_fn is SGD: give a function"),
            (functools.partial(torch.optim.SGD, lr=0.1), ConfigError, r"needs arguments: .*mox.get_optimizer_fn"),
            (lambda: 3, TaskError, "an optimizer was expected, got int"),
            ([SGD, SGD], ConfigError, "1 losses, but 2 optimizers: give one for each loss, or one for all"),
        ],
    )
    def test_wrong_ones(self, given, error, words):
        with pytest.raises(error, match=words):
            run(optimizer_fn=given)

    def test_a_function_may_return_any_factory(self):
        model = run(optimizer_fn=lambda: functools.partial(torch.optim.SGD, lr=0.1), max_number_of_steps=13)
        assert same(weights(model), by_hand(13))

    def test_a_list_of_one_for_one_loss(self):
        assert same(weights(run(optimizer_fn=[SGD], max_number_of_steps=6)), by_hand(6))

    def test_a_list_of_one_loss_is_a_loss(self):
        def listed(inputs, mode):
            return mox.ModelSpec(loss=[model_fn(inputs, mode).loss])

        assert same(weights(run(model_fn=listed, max_number_of_steps=6)), by_hand(6))

    def test_a_factory_for_a_scope_moves_only_that(self):
        def two(inputs, mode):
            spec = model_fn(inputs, mode)
            return mox.ModelSpec(loss=spec.loss + plait.layer("other", nn.Linear, 2, 1)(inputs[0]).mean())

        model = run(model_fn=two, optimizer_fn=mox.get_optimizer_fn("sgd", 0.1, scope="fc"), max_number_of_steps=6)
        assert same({name: value for name, value in weights(model).items() if "fc" in name}, by_hand(6))

    def test_a_model_without_variables_cannot_be_trained(self):
        with pytest.raises(PlaitError, match="variable"):
            run(model_fn=lambda inputs, mode: mox.ModelSpec(loss=inputs[0].mean().requires_grad_()))


# A generator and a discriminator, with two losses from one forward pass.

NOISE = 3


def pictures():
    return torch.randn(40, 2, generator=torch.Generator().manual_seed(1))


def noise_of(x):
    return x.repeat(1, NOISE)[:, :NOISE].sin()


def gan_model_fn(inputs, mode, scopes=(("discriminator",), ("generator",))):
    real = inputs[0]

    def generator(x, reuse=None):
        with plait.variable_scope("generator", reuse=reuse):
            return plait.layer("out", nn.Linear, 8, 2)(plait.layer("in", nn.Linear, NOISE, 8)(x).tanh())

    def discriminator(x, reuse=None):
        with plait.variable_scope("discriminator", reuse=reuse):
            return plait.layer("out", nn.Linear, 8, 1)(plait.layer("in", nn.Linear, 2, 8)(x).tanh())

    on_real, on_fake = discriminator(real), discriminator(generator(noise_of(real)), reuse=True)
    d_loss, g_loss = _gan_losses(on_real, on_fake)
    return mox.ModelSpec(
        loss=[d_loss, g_loss],
        var_scopes=None if scopes is None else [list(some) for some in scopes],
        log_info={"D_loss": d_loss, "G_loss": g_loss},
    )


def _gan_losses(on_real, on_fake):
    ones, zeros = torch.ones_like(on_real), torch.zeros_like(on_real)
    judged = F.binary_cross_entropy_with_logits
    return judged(on_real, ones) + judged(on_fake, zeros), judged(on_fake, ones)


def gan_by_hand(start, steps, make_d, make_g):
    """Both losses from the same forward pass; each moves its own half."""
    halves = {
        name: nn.ModuleDict({"in": nn.Linear(width, 8), "out": nn.Linear(8, out)})
        for name, width, out in (("discriminator", 2, 1), ("generator", NOISE, 2))
    }
    for name, half in halves.items():
        half.load_state_dict(
            {key.partition("/")[2].replace("/", "."): v for key, v in start.items() if key.startswith(name)}
        )
    d, g = halves["discriminator"], halves["generator"]
    optimizers = [make_d(list(d.parameters())), make_g(list(g.parameters()))]
    data = pictures()
    for step in range(steps):
        real = data[step % 10 * 4 :][:4]
        judge = lambda x: d["out"](d["in"](x).tanh())
        d_loss, g_loss = _gan_losses(judge(real), judge(g["out"](g["in"](noise_of(real)).tanh())))
        of_d = torch.autograd.grad(d_loss, list(d.parameters()), retain_graph=True)
        of_g = torch.autograd.grad(g_loss, list(g.parameters()))
        for half, gradients in ((d, of_d), (g, of_g)):
            for variable, gradient in zip(half.parameters(), gradients, strict=True):
                variable.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    named = {name: dict(half.named_parameters()) for name, half in halves.items()}
    return {f"{name}/{k.replace('.', '/')}": v.detach() for name, some in named.items() for k, v in some.items()}


def gan(optimizer_fn, steps=50, **settings):
    made = functools.partial(gan_model_fn, **settings)
    return run(data=list(pictures()), model_fn=made, optimizer_fn=optimizer_fn, max_number_of_steps=steps)


ADAM = mox.get_optimizer_fn("adam", learning_rate=0.01)


class TestTwoLosses:
    @pytest.fixture
    def start(self):
        return weights(gan(mox.get_optimizer_fn("sgd", 0.0), steps=1))

    def test_an_optimizer_for_each_loss_equals_a_hand_written_loop_bit_for_bit(self, start):
        model = gan([ADAM, SGD])
        assert same(weights(model), gan_by_hand(start, 50, ADAM(), SGD()))
        assert not same(weights(model), start)

    def test_one_optimizer_for_both_equals_a_hand_written_loop_bit_for_bit(self, start):
        model = gan(ADAM)
        assert len(model.optimizers()) == 2
        assert same(weights(model), gan_by_hand(start, 50, ADAM(), ADAM()))

    def test_a_resumed_one_ends_with_the_same_bits(self, tmp_path):
        whole = weights(gan([ADAM, SGD], 20))
        for steps in (7, 20):
            model = run(
                data=list(pictures()),
                model_fn=gan_model_fn,
                optimizer_fn=[ADAM, SGD],
                max_number_of_steps=steps,
                log_dir=str(tmp_path),
            )
        assert same(weights(model), whole)

    def test_both_losses_are_logged_and_their_sum_is_watched(self, caplog):
        model = gan([ADAM, SGD], steps=1)
        assert [field.split(":")[0] for field in lines(caplog)[0].split("\t")][2:] == ["D_loss", "G_loss"]
        values = model.metric_values(plait.efl.MODE.TRAIN)
        assert float(model.loss_metrics[None].result()) == pytest.approx(sum(values.values()))

    def test_without_scopes_each_loss_moves_everything(self, start):
        moved = weights(gan([mox.get_optimizer_fn("sgd", 0.0), SGD], steps=1, scopes=None))
        assert not any(torch.equal(moved[name], start[name]) for name in start)

    def test_a_scope_of_both_losses_is_moved_by_both(self, start):
        """By each with its own gradient, one after the other, all from the same forward pass."""
        both = gan([SGD, SGD], steps=1, scopes=(("discriminator",), ("discriminator", "generator")))
        only = {
            which: weights(gan([SGD, SGD], steps=1, scopes=scopes))
            for which, scopes in {
                0: (("discriminator",), ("generator",)),
                1: (("generator",), ("discriminator",)),
            }.items()
        }
        for name, value in weights(both).items():
            if name.startswith("discriminator"):
                moves = (only[0][name] - start[name]) + (only[1][name] - start[name])
                torch.testing.assert_close(value - start[name], moves)

    def test_a_scope_without_variables_is_named(self):
        with pytest.raises(
            VariableError, match="no trainable variable is in scope 'judge': the model has discriminator, generator"
        ):
            gan(ADAM, scopes=(("judge",), ("generator",)))

    def test_as_many_scopes_as_losses(self):
        with pytest.raises(FunctionError, match="2 losses, but var_scopes has 1: write a list for each loss"):
            gan(ADAM, scopes=(("generator",),))

    def test_as_many_optimizers_as_losses(self):
        with pytest.raises(ConfigError, match="2 losses, but 3 optimizers: give one for each loss, or one for all"):
            gan([ADAM] * 3)

    @pytest.mark.parametrize("scopes", [["generator"], "generator", ["generator/in", "generator/out"]])
    def test_a_single_loss_moves_only_its_scopes(self, start, scopes):
        def single(inputs, mode):
            spec = gan_model_fn(inputs, mode)
            return mox.ModelSpec(loss=spec.loss[1], var_scopes=scopes)

        moved = weights(run(data=list(pictures()), model_fn=single, max_number_of_steps=3))
        assert {name.partition("/")[0] for name in start if not torch.equal(moved[name], start[name])} == {"generator"}


class TestFlags:
    @pytest.mark.parametrize("scale", [2.0, 1024.0])
    def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(self, scale):
        mox.set_flag("loss_scale", scale)
        model = run(max_number_of_steps=13)
        assert model.gradient.loss_scale == scale
        assert same(weights(model), by_hand(13, scale=scale))
        assert same(weights(model), by_hand(13))

    def test_the_logged_loss_is_not_scaled(self, caplog):
        run(max_number_of_steps=1)
        mox.set_flag("loss_scale", 64.0)
        run(max_number_of_steps=1)
        one, other = lines(caplog)
        assert one.split("\t")[2:] == other.split("\t")[2:]

    def test_gradients_are_clipped_by_their_norm(self):
        mox.set_flag("gradient_clip", 0.01)
        clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.01)
        found = weights(run(max_number_of_steps=13))
        assert same(found, by_hand(13, change=clip))
        assert not same(found, by_hand(13))

    def test_gradients_are_clipped_by_value(self):
        mox.set_flag("gradient_clip", 0.01)
        mox.set_flag("gradient_clip_type", "value")
        clip = functools.partial(nn.utils.clip_grad_value_, clip_value=0.01)
        assert same(weights(run(max_number_of_steps=13)), by_hand(13, change=clip))

    def test_gradients_are_clipped_after_the_scale_is_taken_out(self):
        mox.set_flag("gradient_clip", 0.01)
        mox.set_flag("loss_scale", 256.0)
        clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.01)
        assert same(weights(run(max_number_of_steps=13)), by_hand(13, change=clip, scale=256.0))

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("loss_scale", 0.0, "loss_scale=0.0, clip=None: write numbers above 0"),
            ("gradient_clip", -1.0, "clip=-1.0: write numbers above 0"),
            ("gradient_clip_type", "size", "clip_type='size': write 'norm' or 'value'"),
            ("num_gpus", 2, "num_gpus above 1"),
            ("worker_hosts", "a:1,b:2", "several worker_hosts"),
            ("ps_hosts", "a:1", "ps_hosts need the cluster"),
            ("trainable_include_patterns", "(", r"patterns '\(': .*; write regular expressions, separated by commas"),
            ("trainable_exclude_patterns", "fc", "no variable to train"),
        ],
    )
    def test_values_that_cannot_work(self, name, value, words):
        mox.set_flag(name, value)
        with pytest.raises(PlaitError, match=words):
            run()

    @pytest.mark.parametrize(
        ("flag", "patterns", "moved"),
        [
            ("trainable_include_patterns", "fc/weight", {"fc/weight"}),
            ("trainable_include_patterns", "weight, none", {"fc/weight"}),
            ("trainable_exclude_patterns", "bias", {"fc/weight"}),
            ("trainable_exclude_patterns", "^fc/w.*t$", {"fc/bias"}),
            ("trainable_exclude_patterns", "", {"fc/weight", "fc/bias"}),
        ],
    )
    def test_trainable_patterns(self, flag, patterns, moved):
        mox.set_flag(flag, patterns)
        found = weights(run(max_number_of_steps=3))
        assert {name for name, value in fresh().items() if not torch.equal(found[name], value)} == moved

    @pytest.mark.parametrize(
        ("flag", "patterns", "loaded"),
        [
            ("checkpoint_include_patterns", "weight", {"fc/weight"}),
            ("checkpoint_exclude_patterns", "global_step,fc/weight", {"fc/bias"}),
            ("checkpoint_exclude_patterns", "logits", {"fc/weight", "fc/bias"}),
        ],
    )
    def test_checkpoint_patterns(self, trained, flag, patterns, loaded):
        mox.set_flag(flag, patterns)
        still = mox.get_optimizer_fn("sgd", learning_rate=0.0)
        found = weights(run(checkpoint_path=trained[0], optimizer_fn=still, max_number_of_steps=1))
        first = fresh()
        assert {name for name in first if torch.equal(found[name], trained[1][name])} == loaded
        assert all(torch.equal(found[name], first[name]) for name in first if name not in loaded)

    def test_patterns_that_leave_nothing_to_load(self, trained):
        mox.set_flag("checkpoint_exclude_patterns", "fc")
        with pytest.raises(MismatchError, match="nothing in .* is wanted"):
            run(checkpoint_path=trained[0])

    def test_use_fp16_computes_in_half_precision(self):
        kinds = []

        def half(inputs, mode):
            out = plait.layer("fc", nn.Linear, 2, 1)(inputs[0]).squeeze(1)
            kinds.append(out.dtype)
            return mox.ModelSpec(loss=F.mse_loss(out, inputs[1]))

        mox.set_flag("use_fp16", True)
        mox.set_flag("loss_scale", 128.0)
        found = weights(run(model_fn=half, max_number_of_steps=5))
        assert set(kinds) == {torch.float16}
        assert all(value.dtype == torch.float32 for value in found.values())
        for name, value in by_hand(5).items():
            torch.testing.assert_close(found[name], value, rtol=0.01, atol=0.01)

    def test_flags_on_the_command_line(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["script.py", "--own", "1", "--loss_scale", "2", "--gradient_clip=0.5"])
        gradient = run(max_number_of_steps=1).gradient
        assert (gradient.loss_scale, gradient.clip, gradient.clip_type) == (2.0, 0.5, "norm")


class TestExport:
    def exporting(self, calls, version=1):
        def made(inputs, mode):
            calls.append((mode, torch.is_grad_enabled(), current_model() is not None))
            spec = model_fn(inputs, mode)
            inputs_dict, outputs_dict = {"x": inputs[0]}, {"out": spec.output_info["out"]}
            export = mox.ExportSpec(inputs_dict, outputs_dict, version) if mode == EXPORT else None
            return mox.ModelSpec(loss=spec.loss, log_info=spec.log_info, export_spec=export)

        return made

    def test_is_checked_before_training_and_recorded(self, caplog):
        calls = []
        model = run(model_fn=self.exporting(calls), export_model=mox.ExportKeys.TF_SERVING, max_number_of_steps=2)
        assert [mode for mode, *_ in calls] == [TRAIN, EXPORT, TRAIN, TRAIN]
        assert model.get_extra_data("export_spec").version == 1
        assert "export_model=TF_SERVING: the ExportSpec was checked" in caplog.text

    def test_the_check_changes_nothing_of_the_training(self):
        def noisy(inputs, mode):
            spec = self.exporting([])(inputs, mode)
            noise = torch.rand(()) * plait.get_variable("extra", [1]).sum()
            return mox.ModelSpec(loss=spec.loss + noise, export_spec=spec.export_spec)

        torch.manual_seed(3)
        plain = weights(run(model_fn=noisy, max_number_of_steps=4))
        torch.manual_seed(3)
        checked = weights(run(model_fn=noisy, max_number_of_steps=4, export_model=mox.ExportKeys.TORCH))
        assert same(plain, checked)

    def test_without_a_spec_nothing_is_trained(self):
        calls = []

        def bare(inputs, mode):
            calls.append(mode)
            return model_fn(inputs, mode)

        with pytest.raises(FunctionError, match="in EXPORT mode the model_fn's ModelSpec needs export_spec: add it"):
            run(model_fn=bare, export_model=mox.ExportKeys.TORCH)
        assert calls == [TRAIN, EXPORT]

    def test_an_unknown_kind(self):
        with pytest.raises(ConfigError, match="export_model=True: write one of mox.ExportKeys, TF_SERVING, ONNX"):
            run(export_model=True)

    def test_what_the_model_fn_returns_is_checked(self):
        def other(inputs, mode):
            return None if mode == EXPORT else model_fn(inputs, mode)

        with pytest.raises(FunctionError, match="returned NoneType in EXPORT mode: return mox.ModelSpec"):
            run(model_fn=other, export_model=mox.ExportKeys.TORCH)


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
