"""Columns as inputs of `mox.run` and of `efl.Model`: batches, ends, errors, and going on from a checkpoint."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import efl, mox
from plait.data.columns import SkippedSample
from plait.data.datasets import Dataset, shuffled
from plait.data.folder_sets import ImageClassificationRawDataset
from plait.data.folders import ImageClassificationRawMetadata
from plait.data.pictures import encode_jpeg, opencv
from plait.engine.build import current_model
from plait.errors import DataError, FunctionError
from plait.rng import rng_state

from .runs import BATCHES, EVAL, PREDICT, TRAIN, X, Y, by_hand, model_fn, run, same, weights

ROWS, STEPS = len(X), 23
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def make(**settings):
    return Dataset("rows", ROWS, {"x": X.__getitem__, "y": Y.__getitem__, "name": str}, **settings)


def augmented(readers=4, capacity=16, shuffle=True, **settings):
    """Shuffled rows with noise from NumPy and from torch."""
    order = shuffled(ROWS, 7) if shuffle else None
    x, y = make(order=order, seed=7, readers=readers, capacity=capacity, **settings).get(["x", "y"])
    noisy = x.map(lambda value, rng: value + torch.from_numpy(rng.normal(size=2)).float())
    return noisy * (1 + 0.1 * torch.randn_like(x)), y


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("plait-reader")]


def dying_at(step):
    def dying(inputs, mode):
        if current_model() is not None and current_model().global_step.value == step:
            raise KeyboardInterrupt
        return model_fn(inputs, mode)

    return dying


class TestMox:
    @pytest.mark.parametrize("form", [list, tuple, "data set"])
    def test_columns_train_as_tensors_do(self, form):
        def named(inputs, mode):
            return model_fn((inputs["x"], inputs["y"]), mode)

        dataset = make()
        if form == "data set":
            model = run(input_fn=lambda mode: dataset, model_fn=named, max_number_of_steps=13)
        else:
            model = run(input_fn=lambda mode: form(dataset.get(["x", "y"])), max_number_of_steps=13)
        assert same(weights(model), by_hand(13))

    def test_a_dict_of_columns_has_names(self):
        def named(inputs, mode):
            return model_fn((inputs["x"], inputs["y"]), mode)

        x, y = make().get(["x", "y"])
        model = run(input_fn=lambda mode: {"x": x, "y": y}, model_fn=named, max_number_of_steps=7)
        assert same(weights(model), by_hand(7))

    def test_a_data_set_with_batches_of_its_own_keeps_them(self):
        sizes = []

        def watched(inputs, mode):
            sizes.append(len(inputs[1]))
            return model_fn(inputs, mode)

        run(input_fn=lambda mode: make(batch_size=8).get(["x", "y"]), model_fn=watched, max_number_of_steps=3)
        assert sizes[-3:] == [8, 8, 4]

    def test_batches_are_made_in_the_readers(self):
        threads = set()

        def seen(value):
            threads.add(threading.current_thread().name.rpartition("_")[0])
            return value

        x, y = make().get(["x", "y"])
        run(input_fn=lambda mode: (x.map(seen), y), max_number_of_steps=2)
        assert threads == {"plait-reader"}

    def test_training_ends_with_the_passes(self):
        x, y = make(num_epochs=2).get(["x", "y"])
        model = run(input_fn=lambda mode: (x, y), max_number_of_steps=1000)
        assert model.global_step.value == 2 * len(BATCHES)
        assert readers() == []

    def test_evaluations_beside_a_training_have_their_own_columns(self):
        train, other = make(), make(num_epochs=1)
        rows = []

        def watched(inputs, mode):
            rows.extend([len(inputs[1])] * (mode == EVAL))
            spec = model_fn(inputs, mode)
            hook = mox.LogEvaluationMetricHook(spec.log_info, 4, samples_in_train=16, samples_in_eval=8)
            return mox.ModelSpec(loss=spec.loss, log_info=spec.log_info, hooks=[hook])

        def input_fn(mode):
            return (train if mode == TRAIN else other).get(["x", "y"])

        model = run(input_fn=input_fn, model_fn=watched, inter_mode=EVAL, max_number_of_steps=8)
        assert same(weights(model), by_hand(8))
        assert len(rows) > 2

    def test_predictions_see_every_row_once(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=1)
        seen = []
        columns = make(num_epochs=1).get(["x", "y"])
        run(PREDICT, input_fn=lambda mode: columns, checkpoint_path=str(tmp_path), output_fn=seen.append)
        assert torch.equal(torch.cat([torch.as_tensor(output["y"]) for step in seen for output in step]), Y)

    def test_replicas_share_batches_of_columns(self):
        mox.set_flag("num_gpus", 2)
        x, y = make().get(["x", "y"])
        together = weights(run(input_fn=lambda mode: (x, y), max_number_of_steps=5))
        alone = weights(run(max_number_of_steps=5))
        assert same(together, alone)

    def test_strings_stay_lists(self):
        names = []

        def watched(inputs, mode):
            names.append(inputs[2])
            return model_fn(inputs[:2], mode)

        run(input_fn=lambda mode: make().get(["x", "y", "name"]), model_fn=watched, max_number_of_steps=1)
        assert names[-1] == ["0", "1", "2", "3"]

    def test_labels_may_be_shifted_as_scripts_do(self):
        def input_fn(mode):
            x, y = make().get(["x", "y"])
            y += 1
            y -= 1
            return x, y

        assert same(weights(run(input_fn=input_fn, max_number_of_steps=5)), by_hand(5))

    def test_samples_may_be_left_out(self):
        def no_seven(value):
            if torch.equal(value, X[7]):
                raise SkippedSample("seven")
            return value

        sizes = []

        def watched(inputs, mode):
            sizes.append(len(inputs[1]))
            return model_fn(inputs, mode)

        x, y = make().get(["x", "y"])
        run(input_fn=lambda mode: (x.map(no_seven), y), model_fn=watched, max_number_of_steps=3)
        assert sizes[-3:] == [4, 3, 4]

    def test_random_states_are_those_of_a_training_without_columns(self):
        states = []
        for columns in (augmented(), make().get(["x", "y"])):
            with torch.random.fork_rng():
                torch.manual_seed(3)
                run(input_fn=lambda mode, columns=columns: columns, max_number_of_steps=9)
                states.append(rng_state()["torch"])
        assert torch.equal(*states)


class TestErrors:
    def test_an_error_comes_at_its_step_and_ends_the_readers(self):
        def fails(value):
            if torch.equal(value, X[9]):
                raise KeyError("nine")
            return value

        x, y = make(readers=4).get(["x", "y"])
        words = "'fails', applied to a column of rows, failed for sample 9: KeyError: 'nine'"
        with pytest.raises(FunctionError, match=words):
            run(input_fn=lambda mode: (x.map(fails), y), max_number_of_steps=10)
        assert current_model().global_step.value == 2
        assert readers() == []

    def test_columns_of_two_data_sets(self):
        with pytest.raises(DataError, match="columns of different data sets"):
            run(input_fn=lambda mode: (*make().get(["x"]), *make().get(["y"])))

    def test_other_data_than_the_checkpoints(self, tmp_path):
        run(input_fn=lambda mode: augmented(), log_dir=str(tmp_path), max_number_of_steps=3)
        with pytest.raises(DataError, match="not the one that the checkpoint was made with:(.|\n)*batch_size"):
            run(input_fn=lambda mode: augmented(), log_dir=str(tmp_path), max_number_of_steps=5, batch_size=5)


class TestResume:
    @pytest.fixture
    def whole(self):
        return weights(run(input_fn=lambda mode: augmented(), max_number_of_steps=STEPS))

    def test_the_noise_matters(self, whole):
        def still(mode):
            return augmented(shuffle=False)

        assert not same(weights(run(input_fn=still, max_number_of_steps=STEPS)), whole)

    @pytest.mark.parametrize("stop", [1, 4, 5, 8, 13, 20])
    @pytest.mark.parametrize("others", [{}, {"readers": 1, "capacity": 1}], ids=["same readers", "other readers"])
    def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(self, tmp_path, whole, stop, others):
        settings = {"log_dir": str(tmp_path), "max_number_of_steps": STEPS}
        with pytest.raises(KeyboardInterrupt):
            run(input_fn=lambda mode: augmented(), model_fn=dying_at(stop), save_model_steps=1, **settings)
        assert readers() == []
        assert same(weights(run(input_fn=lambda mode: augmented(**others), **settings)), whole)

    def test_many_small_runs_come_to_the_same_bits(self, tmp_path, whole):
        for steps in (2, 5, 6, 12, STEPS):
            model = run(input_fn=lambda mode: augmented(), log_dir=str(tmp_path), max_number_of_steps=steps)
        assert same(weights(model), whole)

    def test_batches_of_a_data_sets_own(self, tmp_path):
        def input_fn(mode):
            return augmented(batch_size=3)

        expected = weights(run(input_fn=input_fn, max_number_of_steps=12))
        settings = {"input_fn": input_fn, "log_dir": str(tmp_path), "max_number_of_steps": 12}
        with pytest.raises(KeyboardInterrupt):
            run(model_fn=dying_at(9), save_model_steps=1, **settings)
        assert same(weights(run(**settings)), expected)


class TestEfl:
    def model(self, data, loss_fn=None):
        def loss(model, sample):
            return F.mse_loss(plait.layer("fc", nn.Linear, 2, 1)(sample.x).squeeze(1), sample.y)

        model = efl.Model()
        model.input_fn(lambda model, mode: data())
        model.loss_fn(loss_fn or loss)
        model.eval_fn(lambda model, sample: model.add_metric("mean", sample.y.mean()))
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD))
        return model.compile()

    @staticmethod
    def columns(**settings):
        return dict(zip("xy", augmented(batch_size=4, **settings), strict=True))

    def test_columns_train_as_tensors_do(self):
        model = self.model(lambda: make(batch_size=4))
        model.fit(efl.procedure_fn.train(max_step=5))
        assert same(weights(model), by_hand(5))
        assert readers() == []

    def test_a_sample_of_columns(self):
        def data():
            dataset = make(batch_size=4, num_epochs=1)
            return efl.Sample(dict(zip("xy", dataset.get(["x", "y"]), strict=True)))

        model = self.model(data)
        model.fit(efl.procedure_fn.train())
        assert same(weights(model), by_hand(5))

    def test_single_samples_are_steps_of_their_own(self):
        seen = []

        def loss(model, sample):
            seen.append(float(sample.y))
            return plait.layer("fc", nn.Linear, 2, 1)(sample.x).square().mean()

        model = self.model(lambda: make(num_epochs=1), loss)
        model.fit(efl.procedure_fn.train())
        assert seen[-ROWS:] == Y.tolist()

    def test_training_and_evaluation_go_on_to_the_same_bits(self, tmp_path):
        procedure = efl.procedure_fn.train_and_eval(train_step=3, eval_step=2, max_iter=5)
        expected = self.model(self.columns)
        expected.fit(procedure)

        class Stopped(Exception):
            pass

        def stopping(model, sample):
            if model.global_step.value == 8:
                raise Stopped
            return F.mse_loss(plait.layer("fc", nn.Linear, 2, 1)(sample.x).squeeze(1), sample.y)

        with pytest.raises(Stopped):
            self.model(self.columns, stopping).fit(procedure, checkpoint_dir=tmp_path, save_steps=1)
        assert readers() == []
        resumed = self.model(functools.partial(self.columns, readers=2))
        resumed.fit(procedure, checkpoint_dir=tmp_path)
        assert same(weights(resumed), weights(expected))
        assert resumed.history == expected.history


class TestPictures:
    """The same with files, as scripts have it."""

    @pytest.fixture
    def folder(self, tmp_path):
        opencv()  # imported here, not by several readers at once
        chance = np.random.default_rng(0)
        for label in ("cat", "dog"):
            (tmp_path / "set" / label).mkdir(parents=True)
            for number in range(6):
                pixels = chance.integers(256, size=(20, 24, 3), dtype=np.uint8)
                (tmp_path / "set" / label / f"{number}.jpg").write_bytes(encode_jpeg(pixels))
        (tmp_path / "set" / "dog" / "3.jpg").write_bytes(b"\xff\xd8\xff no picture")
        return tmp_path / "set"

    def pictures(self, folder, **settings):
        augmentation_fn = mox.get_data_augmentation_fn("cifarnet", TRAIN, 8, 8)
        metadata = ImageClassificationRawMetadata(folder)
        return ImageClassificationRawDataset(metadata, augmentation_fn=augmentation_fn, num_readers=4, **settings)

    @staticmethod
    def model_fn(inputs, mode):
        image, label = inputs
        logits = plait.layer("fc", nn.Linear, 3 * 8 * 8, 2)(image.float().flatten(1) / 255)
        loss = F.cross_entropy(logits, label)
        return mox.ModelSpec(loss=loss, log_info={"loss": loss})

    def run(self, dataset, **settings):
        columns = dataset.get(["image", "label"])
        return run(input_fn=lambda mode: columns, model_fn=self.model_fn, **settings)

    @pytest.mark.parametrize("own", [True, False], ids=["its own batches", "batched"])
    def test_a_broken_picture_is_left_out(self, folder, own):
        dataset = self.pictures(folder, skip_broken=True, num_epochs=2, batch_size=4 if own else None)
        model = self.run(dataset, max_number_of_steps=100)
        assert model.global_step.value == 6
        assert dataset.skipped >= 2
        assert readers() == []

    def test_or_an_error_that_names_it(self, folder):
        with pytest.raises(DataError, match=r"dog.3\.jpg"):
            self.run(self.pictures(folder), max_number_of_steps=100)
        assert readers() == []

    def test_augmented_pictures_go_on_to_the_same_bits(self, tmp_path, folder):
        log_dir = str(tmp_path / "log")
        expected = weights(self.run(self.pictures(folder, skip_broken=True), max_number_of_steps=8))
        for steps in (1, 5, 8):
            dataset = self.pictures(folder, skip_broken=True)
            model = self.run(dataset, log_dir=log_dir, max_number_of_steps=steps)
        assert same(weights(model), expected)

    def test_forked_readers_train_to_the_same_bits_from_anywhere(self, tmp_path, folder):
        expected = weights(self.run(self.pictures(folder, skip_broken=True), max_number_of_steps=8))
        for steps in (3, 8):
            dataset = self.pictures(folder, skip_broken=True, reader_class=mox.ForkedReader)
            model = self.run(dataset, log_dir=str(tmp_path / "log"), max_number_of_steps=steps)
        assert same(weights(model), expected)


def test_an_error_before_the_first_step_leaves_no_reader():
    """Though somebody keeps the error, and with it the model."""
    (x,) = Dataset("rows", 400, {"x": torch.tensor}, readers=4).get(["x"])

    def broken(inputs, mode):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        mox.run(
            input_fn=lambda mode: x,
            model_fn=broken,
            optimizer_fn=mox.get_optimizer_fn("sgd", learning_rate=0.1),
            run_mode="TRAIN",
            batch_size=2,
        )
    assert kept
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("plait-reader")] == []
