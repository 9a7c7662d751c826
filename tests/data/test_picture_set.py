"""What all data sets of pictures share, over rows that are made here."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from plait.data import picture_set
from plait.data.augmentation import FAMILIES, augment
from plait.data.columns import ColumnFunction, root
from plait.data.datasets import column_source
from plait.data.picture_set import Options, PictureDataset, digest, many_hot
from plait.data.pictures import decode, encode_jpeg, encode_png, resize
from plait.errors import ConfigError, DataError, FunctionError

ROWS = 7
DEFAULTS = {
    "batch_size": None,
    "num_epochs": None,
    "preprocess_fn": None,
    "image_size": None,
    "drop_remainder": False,
    "augmentation_fn": None,
    "channels": 3,
    "skip_broken": False,
    "seed": 0,
}


def pixels(number):
    """Pictures of different sizes."""
    return np.random.default_rng(number).integers(0, 256, (8 + number, 10, 3), dtype=np.uint8)


def make(files=None, extra=None, **settings):
    """Seven pictures, unless `files` are given."""
    files = files or [encode_png(pixels(number)) for number in range(ROWS)]

    def raw(origin):
        return {
            "image_name": root(origin, "image_name", lambda number: f"{number}.png"),
            "image_buf": root(origin, "image_buf", lambda number: files[number]),
            "label": root(origin, "label", lambda number: torch.tensor(number % 3)),
            "label_desc": root(origin, "label_desc", lambda number: "abc"[number % 3]),
            **({"extra": root(origin, "extra", extra)} if extra else {}),
        }

    options = Options(**{**DEFAULTS, **settings})
    return PictureDataset("pictures", len(files), raw, options, facts={}, order=None, readers=3)


def batches(dataset, *names, epoch=0, start=0, batch_size=None):
    source = column_source(dataset.get(names or list(dataset.columns)))
    return list((source.batched(batch_size) if batch_size else source).batches(epoch, start))


class TestSamples:
    def test_the_fields(self):
        dataset = make()
        assert list(dataset.columns) == ["image", "image_name", "image_buf", "label", "label_desc"]
        for number, (image, name, data, label, word) in enumerate(batches(dataset)):
            assert image.dtype == torch.uint8
            assert torch.equal(image, torch.from_numpy(pixels(number)))
            assert (name, data, int(label), word) == (
                f"{number}.png",
                encode_png(pixels(number)),
                number % 3,
                "abc"[number % 3],
            )

    @pytest.mark.parametrize(("size", "expected"), [(5, (5, 5)), ([6, 4], (6, 4)), ((12, 30), (12, 30))])
    def test_image_size_takes_the_nearest_pixels(self, size, expected):
        for number, (image,) in enumerate(batches(make(image_size=size), "image")):
            assert torch.equal(image, torch.from_numpy(resize(pixels(number), *expected, method="nearest")))

    @pytest.mark.parametrize("size", [0, -1, [3], [3, 0], [3, 4, 5], "224", [2.0, 3]])
    def test_a_size_that_is_none(self, size):
        with pytest.raises(ConfigError, match=r"image_size=.*: write a number, or \[height, width\]"):
            make(image_size=size)

    def test_one_channel(self):
        ((image,), *_) = batches(make(channels=1), "image")
        assert image.shape == (8, 10, 1)
        gray = pixels(0) @ [0.299, 0.587, 0.114]
        assert (image[..., 0] - torch.from_numpy(gray)).abs().max() <= 1

    @pytest.mark.parametrize("channels", [0, 2, 4, "3"])
    def test_other_numbers_of_channels(self, channels):
        with pytest.raises(ConfigError, match=r"channels=.*: write 3 for RGB or 1 for gray"):
            make(channels=channels)

    def test_an_augmentation_function(self):
        found = batches(make(augmentation_fn=lambda image: image.flip(1)), "image", "label")
        assert torch.equal(found[3][0], torch.from_numpy(pixels(3)).flip(1))

    def test_an_augmentation_function_comes_after_the_size(self):
        found = batches(make(image_size=4, augmentation_fn=lambda image: image[:2]), "image", batch_size=7)
        assert found[0][0].shape == (7, 2, 4, 3)

    def test_draws_are_the_same_for_a_pass_and_others_in_another(self):
        dataset = make(image_size=4, augmentation_fn=lambda image, rng: image + rng.normal())
        one, again, other = (batches(dataset, "image", epoch=epoch) for epoch in (0, 0, 1))
        assert all(torch.equal(a, b) for (a,), (b,) in zip(one, again, strict=True))
        assert not any(torch.equal(a, b) for (a,), (b,) in zip(one, other, strict=True))
        assert torch.equal(batches(dataset, "image", start=5)[0][0], one[5][0])

    def test_preprocess_fn_gets_one_sample(self):
        asked = {}

        def preprocess_fn(image_name, image_buf, label, label_desc):
            asked[image_name] = (image_buf, int(label), label_desc)
            return image_name.upper(), torch.tensor([len(image_buf)]), label + 10, label_desc * 2

        found = batches(make(preprocess_fn=preprocess_fn), "image_name", "image", "label", "label_desc", "image_buf")
        data = encode_png(pixels(4))
        assert asked["4.png"] == (data, 1, "b")
        assert found[4][0] == "4.PNG"
        assert [int(value) for value in found[4][1:3]] == [len(data), 11]
        assert found[4][3:] == ("bb", data)

    def test_preprocess_fn_then_an_augmentation_function(self):
        dataset = make(
            preprocess_fn=lambda *four: (four[0], torch.ones(2, 2, 3), *four[2:]),
            augmentation_fn=lambda image: image * 5,
        )
        assert all(torch.equal(image, torch.full((2, 2, 3), 5.0)) for (image,) in batches(dataset, "image"))


class TestBatches:
    def test_one_size_is_needed(self):
        with pytest.raises(ConfigError, match="batch_size=4 needs pictures of one size: give image_size="):
            make(batch_size=4)

    def test_pictures_of_one_size(self):
        dataset = make(batch_size=3, image_size=4)
        found = batches(dataset)
        assert list(dataset.columns) == ["image", "image_name", "label", "label_desc"]  # no files: they are large
        assert [len(batch[1]) for batch in found] == [3, 3, 1]
        image, name, label, word = found[1]
        assert image.shape == (3, 4, 4, 3)
        assert (list(name), label.tolist(), list(word)) == (["3.png", "4.png", "5.png"], [0, 1, 2], ["a", "b", "c"])

    def test_the_remainder_is_dropped(self):
        assert [len(batch[0]) for batch in batches(make(batch_size=3, image_size=4, drop_remainder=True))] == [3, 3]
        found = batches(make(image_size=4, drop_remainder=True), batch_size=2)  # as mox.run(batch_size=2) does
        assert [len(batch[0]) for batch in found] == [2, 2, 2]
        assert len(batches(make(drop_remainder=True))) == ROWS  # samples are no batches

    def test_an_augmentation_function_gets_single_pictures(self):
        shapes = set()

        def augmentation_fn(image):
            shapes.add(tuple(image.shape))
            return image[:8, :8]

        found = batches(make(batch_size=3, augmentation_fn=augmentation_fn), "image")
        assert [tuple(image.shape) for (image,) in found] == [(3, 8, 8, 3), (3, 8, 8, 3), (1, 8, 8, 3)]
        assert shapes == {(8 + number, 10, 3) for number in range(ROWS)}

    def test_columns_are_of_batches(self):
        dataset = make(batch_size=3, image_size=4)
        image, label = dataset.get(["image", "label"])
        means = image.float().mean(dim=(1, 2, 3))
        found = list(column_source([means, label - 1]).batches(0, 1))
        assert [tuple(mean.shape) for mean, _ in found] == [(3,), (1,)]
        assert found[0][1].tolist() == [-1, 0, 1]

    def test_preprocess_fn_gets_lists_and_a_tensor(self):
        asked = []

        def preprocess_fn(image_name, image_buf, label, label_desc):
            asked.append((image_name, image_buf, label, label_desc))
            return image_name, torch.tensor([len(data) for data in image_buf]), label * 2, label_desc

        dataset = make(batch_size=3, preprocess_fn=preprocess_fn)
        assert list(dataset.columns) == ["image_name", "image", "label", "label_desc"]
        name, image, label, word = batches(dataset)[1]
        (got,) = [four for four in asked if four[0][0] == "3.png"]
        assert got[0] == ["3.png", "4.png", "5.png"]
        assert got[1] == [encode_png(pixels(number)) for number in (3, 4, 5)]
        assert torch.equal(got[2], torch.tensor([0, 1, 2]))
        assert got[3] == ["a", "b", "c"]
        assert image.tolist() == [len(data) for data in got[1]]
        assert (list(name), label.tolist(), list(word)) == (got[0], [0, 2, 4], got[3])

    def test_preprocess_fn_leaves_other_fields(self):
        dataset = make(extra=float, batch_size=4, preprocess_fn=lambda *four: four)
        assert [batch[0].tolist() for batch in batches(dataset, "extra")] == [[0, 1, 2, 3], [4, 5, 6]]

    @pytest.mark.parametrize(
        ("value", "said"),
        [(None, "a NoneType"), ((1, 2, 3), "3 values"), ([1, 2, 3, 4, 5], "5 values"), ("four", "a str")],
    )
    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_preprocess_fn_that_gives_something_else(self, value, said, batch_size):
        dataset = make(batch_size=batch_size, preprocess_fn=lambda *four: value)
        with pytest.raises(FunctionError, match=f"preprocess_fn gave {said}: return image_name, image, label, label_"):
            batches(dataset, "image")

    @pytest.mark.parametrize(("batch_size", "said"), [(None, "sample 0"), (2, "the batch that begins with sample 0")])
    def test_preprocess_fn_that_fails(self, batch_size, said):
        dataset = make(batch_size=batch_size, preprocess_fn=lambda *four: 1 / 0)
        with pytest.raises(FunctionError, match=f"pictures.*{said}.*ZeroDivisionError"):
            batches(dataset, "image")

    def test_preprocess_fn_then_an_augmentation_function_for_each_picture(self):
        shapes = []

        def augmentation_fn(image, rng):
            shapes.append(tuple(image.shape))
            return image + rng.integers(1, 2**40)

        dataset = make(
            batch_size=3,
            preprocess_fn=lambda *four: (four[0], torch.zeros(len(four[0]), 2, 2, 3, dtype=torch.int64), *four[2:]),
            augmentation_fn=augmentation_fn,
        )
        one, again, later = (batches(dataset, "image", epoch=epoch) for epoch in (0, 0, 1))
        assert set(shapes) == {(2, 2, 3)}
        assert all(torch.equal(a, b) for (a,), (b,) in zip(one, again, strict=True))
        drawn = [int(image[place].max()) for (image,) in one + later for place in range(len(image))]
        assert len(set(drawn)) == 2 * ROWS
        assert torch.equal(batches(dataset, "image", start=2)[0][0], one[2][0])

    def test_a_ready_recipe_after_preprocess_fn(self):
        recipe = ColumnFunction(augment("lenet_preprocessing", True, 5, 5), "lenet")
        dataset = make(
            batch_size=3,
            preprocess_fn=lambda *four: (four[0], [pixels(0)] * len(four[0]), *four[2:]),
            augmentation_fn=recipe,
        )
        assert [tuple(image.shape) for (image,) in batches(dataset, "image")] == [
            (3, 5, 5, 3),
            (3, 5, 5, 3),
            (1, 5, 5, 3),
        ]


class TestBroken:
    FILES = [encode_png(pixels(0)), b"nothing", encode_png(pixels(2))[:-40], encode_png(pixels(3))]

    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_a_picture_that_cannot_be_decoded_is_named(self, batch_size):
        with pytest.raises(DataError, match=r"1\.png is no picture of a known kind"):
            batches(make(self.FILES, batch_size=batch_size, image_size=4), "image")

    @pytest.mark.parametrize("own", [True, False])
    def test_it_is_left_out_and_counted(self, caplog, own):
        caplog.set_level(logging.WARNING, "plait")
        files = [*self.FILES, *self.FILES[:1]]
        dataset = make(files, batch_size=3 if own else None, image_size=4, skip_broken=True)
        found = batches(dataset, "image", "image_name", batch_size=None if own else 3)
        assert [(len(image), list(name)) for image, name in found] == [(1, ["0.png"]), (2, ["3.png", "4.png"])]
        assert dataset.skipped == 2
        lines = sorted(record.getMessage() for record in caplog.records)
        assert [line for line in lines if "pictures: left out, 1 so far" in line]
        assert [line for line in lines if "1.png is no picture" in line]
        assert [line for line in lines if "2.png begins like a PNG but cannot be decoded" in line]

    def test_a_batch_of_nothing_else_is_an_error(self):
        with pytest.raises(DataError, match="all 2 samples of a batch had to be left out"):
            batches(make([b"1", b"2"], batch_size=2, image_size=4, skip_broken=True), "image")

    def test_only_batches_can_be_shorter(self):
        with pytest.raises(DataError, match="a sample had to be left out, which only batches can: give a batch_size"):
            batches(make(self.FILES, skip_broken=True), "image")

    def test_what_does_not_need_the_picture_does_not_look_at_it(self):
        assert len(batches(make(self.FILES), "label", "image_name")) == 4


def photographs(count=4):
    """JPEGs of different sizes."""
    found = []
    for number in range(count):
        rows, columns, channels = np.mgrid[: 120 + 10 * number, :100, :3]
        found.append(encode_jpeg((128 + 90 * np.sin(rows / 9 + channels) * np.cos(columns / 11)).astype(np.uint8)))
    return found


class TestOnlyWhatIsCutOut:
    """Is decoded, after the first pass."""

    @pytest.fixture
    def decoded(self, monkeypatch):
        """How many rows were asked for, of each picture."""
        asked = []

        def noted(data, name, *, channels, rows=None):
            asked.append((name, rows))
            return decode(data, name, channels=channels, rows=rows)

        monkeypatch.setattr(picture_set, "decode", noted)
        return asked

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_it_makes_no_difference(self, monkeypatch, decoded, family, training):
        recipe = ColumnFunction(augment(family, training, 32, 32), family)
        dataset = make(photographs(), augmentation_fn=recipe, batch_size=2)
        for epoch in range(1, 4):
            decoded.clear()
            found = batches(dataset, "image", epoch=epoch)
            assert [name for name, _ in sorted(decoded)] == [f"{number}.png" for number in range(4)]
            assert all(rows is not None and 0 < rows <= 150 for _, rows in decoded)
            with monkeypatch.context() as patch:
                patch.setattr(picture_set, "this_pass", lambda: 0)
                whole = batches(dataset, "image", epoch=epoch)
            assert [rows for _, rows in decoded[4:]] == [None] * 4
            assert all(torch.equal(one, other) for (one,), (other,) in zip(found, whole, strict=True))

    def test_less_is_decoded_in_training(self, decoded):
        recipe = ColumnFunction(augment("vgg_preprocessing", True, 32, 32, resize_side_min=40), "vgg")
        for epoch in range(1, 21):
            batches(make(photographs(), augmentation_fn=recipe), "image", epoch=epoch)
        assert sum(rows for _, rows in decoded) < 0.7 * 135 * len(decoded)

    def test_all_of_it_in_the_first_pass(self, decoded):
        recipe = ColumnFunction(augment("lenet_preprocessing", True, 20, 20), "lenet")
        dataset = make(photographs(), augmentation_fn=recipe)
        batches(dataset, "image", epoch=0)
        assert sorted(decoded) == [(f"{number}.png", None) for number in range(4)]
        decoded.clear()
        batches(dataset, "image", epoch=1)
        assert sorted(decoded) == [(f"{number}.png", 50 + 5 * number + 20) for number in range(4)]

    def test_functions_get_all_of_it(self, decoded):
        found = batches(make(photographs()), "image", epoch=1)
        assert [tuple(image.shape) for (image,) in found] == [(120 + 10 * number, 100, 3) for number in range(4)]
        dataset = make(photographs(), augmentation_fn=lambda image: image.float().mean())
        assert [image.shape for (image,) in batches(dataset, "image", epoch=1)] == [torch.Size([])] * 4
        assert sorted(decoded) == sorted((f"{n}.png", 120 + 10 * n) for n in range(4) for _ in range(2))

    def test_beside_the_whole_picture(self):
        dataset = make(photographs())
        image, name = dataset.get(["image", "image_name"])
        recipe = ColumnFunction(augment("lenet_preprocessing", True, 20, 20), "lenet")
        for cut, sums, all_of_it, at in column_source([recipe(image), image.sum(), image, name]).batches(1, 0):
            there = decode(photographs()[int(at[0])], "x")
            assert np.array_equal(all_of_it.numpy(), there)
            assert int(sums) == there.sum()
            assert np.array_equal(cut.numpy(), there[(len(there) - 20) // 2 :, 40:60][:20])

    @pytest.mark.parametrize("skip", [True, False])
    def test_damage_is_seen_in_the_first_pass_or_in_all(self, decoded, skip):
        files = photographs()
        files[1] = files[1][: len(files[1]) // 2] + files[1][-2:]
        recipe = ColumnFunction(augment("lenet_preprocessing", True, 20, 20), "lenet")
        dataset = make(files, augmentation_fn=recipe, batch_size=4, skip_broken=skip)
        for epoch in range(2):
            if skip:
                ((names,),) = batches(dataset, "image_name", epoch=epoch)
                assert list(names) == ["0.png", "2.png", "3.png"]
                assert dataset.skipped == epoch + 1
            else:
                lower = ColumnFunction(augment("lenet_preprocessing", True, 20 + 80 * epoch, 20), "lenet")
                with pytest.raises(DataError, match=r"pictures: 1\.png begins like a JPEG but cannot be decoded"):
                    batches(make(files, augmentation_fn=lower, batch_size=4), "image", epoch=epoch)
        assert not skip or all(rows is None for _, rows in decoded)

    def test_a_size_for_all_and_gray_need_all(self, decoded):
        batches(make(photographs(), image_size=8), "image", epoch=1)
        recipe = ColumnFunction(augment("lenet_preprocessing", True, 20, 20), "lenet")
        batches(make(photographs(), channels=1, augmentation_fn=recipe), "image", epoch=1)
        assert sorted(decoded) == sorted((f"{number}.png", None) for number in range(4) for _ in range(2))


def test_digest_tells_data_apart():
    names, labels = ["a/1.png", "b/2.png"], np.array([0, 1])
    assert digest(names, labels) == digest(list(names), labels.copy())
    others = [
        (["a/1.png", "b/3.png"], labels),
        (names, labels + 1),
        (names[::-1], labels),
        (["a/1.pngb/2.png"], labels),
    ]
    assert len({digest(*parts) for parts in [(names, labels), *others]}) == 5
    assert digest(["caf\udce9.jpg"]) != digest(["caf\udce8.jpg"])  # names that are no text


def test_many_hot():
    assert many_hot([0, 3], 4).tolist() == [1, 0, 0, 1]
    assert many_hot([], 2).tolist() == [0, 0]
