"""Data sets of folders: each documented argument, over small pictures whose colour says which they are."""

from __future__ import annotations

import gc
import inspect
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.data.datasets import column_source
from plait.data.folder_sets import ImageClassificationRawDataset, MultilabelClassificationRawDataset
from plait.data.folders import ImageClassificationRawMetadata, MultilabelClassificationRawMetadata
from plait.data.pictures import encode_jpeg, encode_png
from plait.data.raw import ForkedReader, ParallelReader, read_file
from plait.data.stream import Stream
from plait.errors import ConfigError, DataError, FunctionError, PlaitError
from plait.rng import rng_state

CLASSES = ("cat", "dog", "eel")
NAMES = [f"{CLASSES[number % 3]}/{number:02}.png" for number in range(12)]
IN_ORDER = sorted(NAMES)


def write_picture(path, colour, size=(5, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(np.full((*size, 3), colour, np.uint8)))


@pytest.fixture
def base(tmp_path):
    """Twelve pictures in three classes; picture 7 is `dog/07.png`, and its pixels are 7."""
    for number, name in enumerate(NAMES):
        write_picture(tmp_path / "set" / name, number)
    return tmp_path / "set"


def make(base, **settings):
    return ImageClassificationRawDataset(ImageClassificationRawMetadata(base), **{"num_readers": 3, **settings})


def batches(dataset, *names, epoch=0, start=0, batch_size=None):
    source = column_source(dataset.get(names))
    return list((source.batched(batch_size) if batch_size else source).batches(epoch, start))


def names_of(dataset, **settings):
    return [name for (name,) in batches(dataset, "image_name", **settings)]


def test_the_documented_signatures():
    def parameters(thing):
        found = inspect.signature(thing).parameters.values()
        return {each.name: each.default for each in found if each.kind is each.POSITIONAL_OR_KEYWORD}

    common = {
        "metadata": inspect.Parameter.empty,
        "batch_size": None,
        "num_readers": 8,
        "num_epochs": None,
        "shuffle": True,
        "shuffle_buffer_size": 16,
        "capacity": 256,
        "cache_dir": None,
        "preprocess_fn": None,
        "preprocess_threads": 12,
        "image_size": None,
        "remove_cache_on_finish": True,
        "private_num_threads": 0,
        "reader_class": None,
        "reader_kwargs": None,
        "drop_remainder": False,
    }
    one, many = parameters(ImageClassificationRawDataset), parameters(MultilabelClassificationRawDataset)
    assert one == {**common, "augmentation_fn": None, "label_one_hot": False}
    assert many == {**common, "label_sep": "\n", "skip_label_not_found": False, "augmentation_fn": None}
    assert list(one) == [*common, "augmentation_fn", "label_one_hot"]  # scripts may give them by place
    assert list(many) == [*common, "label_sep", "skip_label_not_found", "augmentation_fn"]


class TestFolders:
    def test_every_field(self, base):
        dataset = make(base, shuffle=False)
        rows = batches(dataset, "image", "label", "label_desc", "image_name", "image_buf")
        assert [row[3] for row in rows] == IN_ORDER
        for image, label, word, name, data in rows:
            number = NAMES.index(name)
            assert torch.equal(image, torch.full((5, 6, 3), number, dtype=torch.uint8))
            assert (int(label), word) == (number % 3, CLASSES[number % 3])
            assert label.dtype == torch.int64
            assert data == (base / name).read_bytes()
        assert dataset.rows == dataset.metadata.total_num_samples == 12

    def test_all_fields_come_in_batches_by_name(self, base):
        (found,) = list(make(base, shuffle=False).batched(12).batches(0, 0))
        assert found["image"].shape == (12, 5, 6, 3)
        assert list(found["label_desc"]) == [name.partition("/")[0] for name in IN_ORDER]

    def test_numbers_of_labels_txt(self, base):
        (base / "labels.txt").write_text("0: eel\n1: cat\n2: dog\n")
        rows = batches(make(base), "label", "label_desc")
        assert {(int(label), word) for label, word in rows} == {(0, "eel"), (1, "cat"), (2, "dog")}

    @pytest.mark.parametrize("batch_size", [None, 5])
    def test_one_hot_labels(self, base, batch_size):
        dataset = make(base, batch_size=batch_size, image_size=4, label_one_hot=True, shuffle=False)
        labels = torch.cat([label.reshape(-1, 3) for (label,) in batches(dataset, "label")])
        assert labels.dtype == torch.float32
        assert torch.equal(labels, torch.eye(3).repeat_interleave(4, 0))

    def test_a_redirect_is_where_pictures_are_read(self, base, tmp_path):
        for name in NAMES:
            write_picture(tmp_path / "fast" / name, 99)
        metadata = ImageClassificationRawMetadata(base, redirect_dir=tmp_path / "fast")
        found = batches(ImageClassificationRawDataset(metadata, shuffle=False), "image", "image_name")
        assert [name for _, name in found] == IN_ORDER
        assert all(int(image.max()) == 99 for image, _ in found)

    def test_gray_pictures(self, base):
        assert all(image.shape == (5, 6, 1) for (image,) in batches(make(base, channels=1), "image"))

    def test_kinds_of_pictures_may_be_mixed(self, base):
        (base / "cat" / "x.jpg").write_bytes(encode_jpeg(np.full((9, 9, 3), 128, np.uint8)))
        found = dict(batches(make(base), "image_name", "image"))
        assert found["cat/x.jpg"].shape == (9, 9, 3)
        assert len(found) == 13

    def test_pictures_of_different_sizes_say_what_to_give(self, base):
        write_picture(base / "cat" / "y.png", 3, size=(2, 2))
        with pytest.raises(DataError, match=r"\[2, 2, 3\].*do not make a batch: give image_size="):
            batches(make(base), "image", batch_size=13)

    def test_a_field_that_is_not_there(self, base):
        with pytest.raises(DataError, match="no field 'images'; there are image, image_name"):
            make(base).get(["images"])


class TestOrder:
    def test_without_shuffling_it_is_that_of_names(self, base):
        dataset = make(base, shuffle=False)
        assert [names_of(dataset, epoch=epoch) for epoch in range(2)] == [IN_ORDER] * 2

    def test_passes_differ_and_are_the_same_again(self, base):
        passes = [names_of(make(base), epoch=epoch) for epoch in range(4)]
        assert all(sorted(found) == IN_ORDER for found in passes)
        assert len({tuple(found) for found in [IN_ORDER, *passes]}) == 5
        assert passes == [names_of(make(base, num_readers=1, capacity=1), epoch=epoch) for epoch in range(4)]
        assert names_of(make(base, seed=1)) != passes[0]

    def test_the_buffer_changes_nothing(self, base):
        assert names_of(make(base, shuffle_buffer_size=1)) == names_of(make(base, shuffle_buffer_size=1000))

    @pytest.mark.parametrize("settings", [{}, {"batch_size": 5, "image_size": 4}])
    def test_seeking_is_skipping(self, base, settings):
        dataset = make(base, augmentation_fn=lambda image, rng: image.float() + rng.normal(), **settings)
        whole = batches(dataset, "image", "label", epoch=2)
        for start in range(len(whole) + 1):
            found = batches(dataset, "image", "label", epoch=2, start=start)
            assert len(found) == len(whole) - start
            for one, other in zip(found, whole[start:], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    def test_a_seek_reads_nothing_that_lies_before(self, base):
        dataset = make(base, reader_class=Noting)
        Noting.asked.clear()
        found = batches(dataset, "image", "image_name", start=9)
        assert sorted(Path(url).name for url in Noting.asked) == sorted(name.partition("/")[2] for _, name in found)
        assert len(found) == 3

    @pytest.mark.parametrize("readers", [1, 8])
    def test_draws_do_not_depend_on_the_readers(self, base, readers):
        def drawn(**settings):
            dataset = make(base, augmentation_fn=lambda image, rng: image + rng.integers(0, 2**30), **settings)
            return [int(image.max()) for (image,) in batches(dataset, "image", epoch=1)]

        assert drawn(num_readers=readers, capacity=3) == drawn()

    def test_no_global_random_state_is_touched(self, base):
        before = repr(rng_state())
        dataset = make(base, augmentation_fn=lambda image, rng: image + rng.normal())
        batches(dataset, "image")
        assert repr(rng_state()) == before


class TestPasses:
    def test_so_many_and_no_more(self, base):
        stream = Stream(column_source(make(base, num_epochs=2).get(["label"])))
        count = 0
        while not stream.spent:
            try:
                stream.read()
                stream.commit()
                count += 1
            except PlaitError:
                continue
        stream.close()
        assert count == 24

    def test_batches_do_not_reach_over_the_end_of_a_pass(self, base):
        assert [len(label) for (label,) in batches(make(base, batch_size=5, image_size=4), "label")] == [5, 5, 2]
        dropped = make(base, batch_size=5, image_size=4, drop_remainder=True)
        assert [len(label) for (label,) in batches(dropped, "label")] == [5, 5]

    @pytest.mark.parametrize(
        ("setting", "said"),
        [
            ({"num_epochs": 0}, "num_epochs=0: write a whole number from 1 on, or None"),
            ({"batch_size": 0, "image_size": 4}, "batch_size=0: write a whole number from 1 on, or None"),
            ({"capacity": 0}, "capacity=0: write a whole number from 1 on"),
            ({"num_readers": 0}, "readers=0: write a whole number from 1 on"),
        ],
    )
    def test_numbers_that_cannot_be(self, base, setting, said):
        with pytest.raises(ConfigError, match=said):
            make(base, **setting)


class Noting(ParallelReader):
    """Notes what it is asked for, how it was made and closed, and in how many threads."""

    asked: list = []
    made: list = []
    closed: list = []
    threads: set = set()

    def __init__(self, num_readers, **settings):
        self.made.append((num_readers, settings))

    def read(self, url):
        self.asked.append(url)
        self.threads.add(threading.get_ident())
        time.sleep(0.001)
        return read_file(url)

    def close(self):
        self.closed.append(True)


@pytest.fixture(autouse=True)
def nothing_noted():
    for notes in (Noting.asked, Noting.made, Noting.closed, Noting.threads):
        notes.clear()


class TestReaders:
    def test_a_class_of_ones_own(self, base):
        dataset = make(base, reader_class=Noting, reader_kwargs={"bucket": "b"}, shuffle=False)
        assert Noting.made == [(3, {"bucket": "b"})]
        batches(dataset, "image")
        assert sorted(Noting.asked) == [str(base / name) for name in IN_ORDER]
        del dataset
        gc.collect()
        assert Noting.closed == [True]

    def test_the_default_by_name(self, base):
        assert names_of(make(base, reader_class=ParallelReader)) == names_of(make(base))

    @pytest.mark.parametrize(
        ("settings", "readers"),
        [
            ({"num_readers": 2}, 2),
            ({"num_readers": 2, "preprocess_threads": 5}, 2),
            ({"num_readers": 2, "preprocess_threads": 5, "reader_class": Noting}, 5),
            ({"num_readers": 6, "preprocess_threads": 5, "reader_class": Noting}, 6),
            ({"num_readers": 6, "private_num_threads": 3}, 3),
            ({"num_readers": 6, "private_num_threads": 3, "reader_class": Noting}, 3),
        ],
    )
    def test_how_many_threads_read(self, base, settings, readers):
        assert make(base, **settings).readers == readers

    def test_so_many_threads_and_no_more(self, base):
        batches(make(base, reader_class=Noting, private_num_threads=3), "image")
        assert 1 <= len(Noting.threads) <= 3
        assert threading.get_ident() not in Noting.threads

    def test_capacity_bounds_what_is_read_ahead(self, base):
        iterator = column_source(make(base, reader_class=Noting, capacity=4).get(["image"])).batches(0, 0)
        next(iterator)
        time.sleep(0.1)
        assert 1 <= len(Noting.asked) <= 6
        iterator.close()

    @pytest.mark.parametrize(
        ("reader_class", "kwargs", "said"),
        [
            (ParallelReader, {"retries": 3}, "cannot be made with .*retries"),
            (5, None, "reader_class=5 cannot be made"),
            (lambda num_readers: object(), None, r"makes no reader: give it read\(url\) and close\(\)"),
        ],
    )
    def test_a_class_that_is_none(self, base, reader_class, kwargs, said):
        with pytest.raises(ConfigError, match=said):
            make(base, reader_class=reader_class, reader_kwargs=kwargs)

    def test_a_reader_that_fails(self, base):
        class Failing(Noting):
            def read(self, url):
                raise ConnectionError("the network is down")

        with pytest.raises(
            FunctionError, match="'image_buf'.*failed for sample .*ConnectionError: the network is down"
        ):
            batches(make(base, reader_class=Failing), "image")

    def test_a_file_that_went_in_between_is_named(self, base):
        dataset = make(base)
        (base / NAMES[7]).unlink()
        with pytest.raises(DataError, match=r"dog/07\.png' cannot be read"):
            batches(dataset, "image")


class TestCache:
    def read_twice(self, base, dataset, cache):
        """A pass, then another one without the originals."""
        first = batches(dataset, "image", "image_name")
        assert len(list(cache.iterdir())) == 12
        assert not [path for path in cache.iterdir() if path.name.startswith(".")]
        for name in NAMES:
            (base / name).unlink()
        again = batches(dataset, "image", "image_name")
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))

    @pytest.mark.parametrize("reader_class", [None, Noting])
    def test_the_second_pass_reads_no_original(self, base, tmp_path, reader_class):
        dataset = make(base, cache_dir=str(tmp_path / "cache"), reader_class=reader_class)
        self.read_twice(base, dataset, tmp_path / "cache")
        assert len(Noting.asked) == (12 if reader_class else 0)
        del dataset
        gc.collect()
        assert list((tmp_path / "cache").iterdir()) == []

    def test_copies_that_stay_serve_another_data_set(self, base, tmp_path):
        dataset = make(base, cache_dir=str(tmp_path / "cache"), remove_cache_on_finish=False)
        metadata = dataset.metadata
        self.read_twice(base, dataset, tmp_path / "cache")
        del dataset
        gc.collect()
        other = ImageClassificationRawDataset(metadata, cache_dir=str(tmp_path / "cache"))
        assert len(batches(other, "image")) == 12
        del other
        gc.collect()
        assert len(list((tmp_path / "cache").iterdir())) == 12  # fetched by the first

    def test_the_directory_of_the_environment(self, base, tmp_path, monkeypatch):
        monkeypatch.setenv("DLS_LOCAL_CACHE_PATH", str(tmp_path / "cache"))
        self.read_twice(base, make(base, cache_dir="ENV"), tmp_path / "cache")

    def test_no_directory_in_the_environment(self, base, monkeypatch):
        monkeypatch.delenv("DLS_LOCAL_CACHE_PATH", raising=False)
        with pytest.raises(ConfigError, match="DLS_LOCAL_CACHE_PATH"):
            make(base, cache_dir="ENV")

    def test_a_broken_pass_leaves_whole_copies(self, base, tmp_path):
        dataset = make(base, cache_dir=str(tmp_path / "cache"), remove_cache_on_finish=False)
        wholes = {(base / name).read_bytes() for name in NAMES}
        (base / NAMES[4]).unlink()
        with pytest.raises(DataError, match=r"dog/04\.png"):
            batches(dataset, "image")
        found = [path.read_bytes() for path in (tmp_path / "cache").iterdir()]
        assert len(found) <= 11
        assert set(found) <= wholes


class TestBroken:
    def test_the_file_is_named(self, base):
        (base / "dog" / "04.png").write_bytes(b"no picture")
        with pytest.raises(DataError, match=r"dog/04\.png is no picture of a known kind"):
            batches(make(base), "image")

    def test_it_is_left_out(self, base, caplog):
        (base / "dog" / "04.png").write_bytes(b"")
        dataset = make(base, batch_size=6, image_size=4, skip_broken=True, shuffle=False)
        assert [len(image) for (image,) in batches(dataset, "image")] == [5, 6]
        assert dataset.skipped == 1
        (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
        assert "1 so far: dog/04.png is empty" in line


class TestFingerprint:
    def facts(self, base, **settings):
        return column_source(make(base, **settings).get(["image", "label"])).fingerprint()

    def test_the_same_data_has_the_same(self, base):
        assert self.facts(base) == self.facts(base, num_readers=1, capacity=3, cache_dir=str(base.parent / "cache"))

    @pytest.mark.parametrize("change", ["more", "less", "renamed", "moved", "labels", "seed", "order", "batch"])
    def test_a_checkpoint_of_other_data_is_refused(self, base, change):
        def stream(**settings):
            return Stream(column_source(make(base, **settings).get(["image"])), name="train")

        before = stream()
        before.read()
        before.commit()
        state = before.state_dict()
        before.close()
        stream().load_state_dict(state)
        settings = {"seed": {"seed": 1}, "order": {"shuffle": False}, "batch": {"batch_size": 2, "image_size": 4}}
        if change == "more":
            write_picture(base / "dog" / "new.png", 1)
        elif change == "less":
            (base / NAMES[3]).unlink()
        elif change == "renamed":
            (base / NAMES[3]).rename(base / "cat" / "renamed.png")
        elif change == "moved":
            (base / NAMES[3]).rename(base / "dog" / "03.png")
        elif change == "labels":
            (base / "labels.txt").write_text("0: eel\n1: cat\n2: dog\n")
        with pytest.raises(DataError, match="input 'train' is not the one that the checkpoint was made with"):
            stream(**settings.get(change, {})).load_state_dict(state)


LABELS = {"0": "cat", "1": "dog cat", "3": "", "4": "eel\ncat", "5": "dog"}


@pytest.fixture
def many(tmp_path):
    """Five pictures with label files, and number 2 without."""
    for number in range(6):
        write_picture(tmp_path / "many" / "images" / f"{number}.png", number)
    (tmp_path / "many" / "labels").mkdir()
    for number, text in LABELS.items():
        (tmp_path / "many" / "labels" / f"{number}.png.txt").write_text(text)
    return tmp_path / "many"


def make_many(base, metadata=None, **settings):
    metadata = metadata or MultilabelClassificationRawMetadata(base)
    settings = {"num_readers": 2, "shuffle": False, "skip_label_not_found": True, **settings}
    return MultilabelClassificationRawDataset(metadata, **settings)


class TestMultilabel:
    def test_labels_are_rows_of_zeros_and_ones(self, many):
        rows = batches(make_many(many), "image_name", "label", "label_desc", "image")
        assert [row[0] for row in rows] == [f"images/{number}.png" for number in LABELS]
        expected = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0]]
        assert [row[1].tolist() for row in rows] == expected
        assert [row[2] for row in rows] == ["cat", "dog,cat", "", "eel,cat", "dog"]
        assert [int(row[3].max()) for row in rows] == [0, 1, 3, 4, 5]

    def test_batches(self, many):
        found = batches(make_many(many, batch_size=2, image_size=4), "label", "image")
        assert [tuple(label.shape) for label, _ in found] == [(2, 3), (2, 3), (1, 3)]
        assert found[0][1].shape == (2, 4, 4, 3)

    def test_numbers_of_labels_txt(self, many):
        (many / "labels.txt").write_text("0: eel 1: dog 2: cat 3: fox")
        assert [label.tolist() for (label,) in batches(make_many(many), "label")][:2] == [[0, 0, 1, 0], [0, 1, 1, 0]]

    def test_what_stands_between_labels(self, many):
        for number, text in zip(LABELS, ["big cat|dog", "dog", "", "big cat", "dog|big cat"], strict=True):
            (many / "labels" / f"{number}.png.txt").write_text(text)
        metadata = MultilabelClassificationRawMetadata(many, label_sep="|")
        assert metadata.labels_list == ["big cat", "dog"]
        found = batches(make_many(many, metadata, label_sep="|"), "label_desc")
        assert [word for (word,) in found] == ["big cat,dog", "dog", "", "big cat", "dog,big cat"]
        with pytest.raises(DataError, match=r"0\.png\.txt' has the label 'big cat\|dog'.*label_sep"):
            batches(make_many(many, metadata), "label")

    def test_a_picture_without_a_label_file(self, many):
        dataset = make_many(many, skip_label_not_found=False)
        with pytest.raises(DataError, match=r"images/2\.png' has no label file .*skip_label_not_found=True"):
            batches(dataset, "label")
        assert dataset.rows == 6
        assert make_many(many).rows == 5

    def test_no_picture_with_a_label_file(self, many):
        metadata = MultilabelClassificationRawMetadata(many)
        metadata.labelled[:] = False
        with pytest.raises(DataError, match="no samples"):
            make_many(many, metadata)

    def test_shuffled_labels_belong_to_their_pictures(self, many):
        dataset = make_many(many, shuffle=True, augmentation_fn=lambda image: image.float().mean())
        found = {int(mean): word for mean, word in batches(dataset, "image", "label_desc", epoch=3)}
        assert found == {0: "cat", 1: "dog,cat", 3: "", 4: "eel,cat", 5: "dog"}

    def test_preprocess_fn_gets_rows_of_labels(self, many):
        def preprocess_fn(image_name, image_buf, label, label_desc):
            assert label.shape == (5, 3)
            return image_name, label.sum(1), label, label_desc

        (found,) = batches(make_many(many, batch_size=5, preprocess_fn=preprocess_fn), "image")
        assert found[0].tolist() == [1, 2, 0, 2, 1]

    def test_a_cache_keeps_pictures(self, many, tmp_path):
        dataset = make_many(many, cache_dir=str(tmp_path / "cache"))
        first = batches(dataset, "image")
        for path in (many / "images").iterdir():
            path.unlink()
        assert all(torch.equal(a, b) for (a,), (b,) in zip(first, batches(dataset, "image"), strict=True))

    def test_a_broken_picture_is_named(self, many):
        (many / "images" / "3.png").write_bytes(b"no picture")
        with pytest.raises(DataError, match=r"images/3\.png is no picture"):
            batches(make_many(many), "image")

    def test_other_pictures_are_other_data(self, many):
        def facts(**settings):
            return column_source(make_many(many, **settings).get(["image"])).fingerprint()

        assert facts() == facts()
        assert facts() != facts(skip_label_not_found=False)
        before = facts()
        (many / "labels" / "2.png.txt").write_text("cat")
        assert facts() != before


def broken(data, rng):
    """A picture file, cut, flipped or with something else in it."""
    way, place = rng.randrange(4), rng.randrange(len(data))
    if way == 0:
        return data[:place]
    if way == 1:
        return data[:place] + rng.randbytes(rng.randrange(1, 60)) + data[place:]
    if way == 2:
        return rng.randbytes(rng.randrange(60))
    flipped = bytearray(data)
    for _ in range(rng.choice([1, 2, 20])):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def check_broken_folders(tmp_path, count, seed):
    """Folders with one broken picture each: it is decoded, or an error names it; or it is left out, and counted."""
    rng, pixels = random.Random(seed), np.random.default_rng(seed).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    wholes = {".png": encode_png(pixels), ".jpg": encode_jpeg(pixels, 70)}
    failed = 0
    for number in range(count):
        suffix = rng.choice(list(wholes))
        base, victim = tmp_path / str(number), f"b/{rng.randrange(4)}{suffix}"
        for name in (f"{folder}/{place}{suffix}" for folder in "ab" for place in range(4)):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_bytes(broken(wholes[suffix], rng) if name == victim else wholes[suffix])
        skip = rng.random() < 0.5
        dataset = make(base, batch_size=4, image_size=8, skip_broken=skip, num_readers=2)
        try:
            found, said = sum(len(image) for (image,) in batches(dataset, "image")), ""
        except DataError as error:
            found, said = 0, str(error)
        assert victim in said if said else found == 8 - dataset.skipped
        assert not (said and skip)
        failed += found < 8
    assert 0.4 * count < failed < count  # else it is not much of a test


def test_broken_folders(tmp_path):
    check_broken_folders(tmp_path, 100, 1)


@pytest.mark.slow
def test_many_broken_folders(tmp_path):
    check_broken_folders(tmp_path, 2000, 2)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 5, "image_size": 6}, {"image_size": 100}])
def test_forked_readers_give_what_threads_give(base, settings):
    size = None if "batch_size" in settings else 5
    names = ("image", "label", "label_desc", "image_name")
    found, expected = (
        batches(make(base, reader_class=kind, seed=3, **settings), *names, batch_size=size)
        for kind in (ForkedReader, None)
    )
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        assert one[2:] == other[2:]


def test_forked_readers_leave_broken_pictures_out(base):
    (base / IN_ORDER[7]).write_bytes(b"\x89PNG\r\n\x1a\n broken")
    dataset = make(base, reader_class=ForkedReader, shuffle=False, skip_broken=True)
    assert [len(labels) for _, labels in batches(dataset, "image", "label", batch_size=4)] == [4, 3, 4]
    assert dataset.skipped == 1
    with pytest.raises(DataError, match=IN_ORDER[7]):
        batches(make(base, reader_class=ForkedReader, shuffle=False), "image", batch_size=4)


def test_forked_readers_are_for_files_of_this_machine(base, tmp_path):
    with pytest.raises(ConfigError, match=r"ForkedReader is for files of this machine without a cache_dir.*AsyncRaw"):
        make(base, reader_class=ForkedReader, cache_dir=str(tmp_path / "cache"))
