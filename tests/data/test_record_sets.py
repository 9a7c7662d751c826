"""Data sets of TFRecord files and of known names: each documented argument, over files that are written here."""

from __future__ import annotations

import gc
import gzip
import inspect
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data import jpeg, pictures
from plait.data.datasets import column_source
from plait.data.example import make_example
from plait.data.folders import ImageClassificationTFRecordMetadata
from plait.data.pictures import encode_jpeg, encode_png
from plait.data.raw import ForkedReader, ParallelReader
from plait.data.record_sets import ImageClassificationTFRecordDataset, get_dataset, mixed
from plait.data.stream import Stream
from plait.data.tfrecord import TFRecordWriter, read_records
from plait.errors import ConfigError, DataError, PlaitError
from plait.mox import ModeKeys, get_data_augmentation_fn
from plait.rng import rng_state

FILES, EACH = 3, 6
ROWS = FILES * EACH


def fields(number, **others):
    """As TF-Slim writes them; the picture's colour is its number."""
    return {
        "image/encoded": encode_png(np.full((5, 6, 3), number, np.uint8)),
        "image/class/label": number % 4,
        "image/class/text": f"class {number % 4}",
        **others,
    }


def write(path, records, compression=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record if isinstance(record, bytes) else make_example(record))


def write_set(base, compression=None, **others):
    for file in range(FILES):
        records = [fields(number, **others) for number in range(file * EACH, (file + 1) * EACH)]
        write(base / f"train_{file}.tfrecord", records, compression)
    write(base / "eval_0.tfrecord", [fields(100)])


@pytest.fixture
def base(tmp_path):
    """18 pictures in three files for training, and one for evaluation."""
    write_set(tmp_path / "set")
    return tmp_path / "set"


def make(base, pattern="train*", metadata=None, **settings):
    metadata = metadata or ImageClassificationTFRecordMetadata(base, pattern, num_classes=4)
    return ImageClassificationTFRecordDataset(metadata, **{"num_parallel": 3, **settings})


def batches(dataset, *names, epoch=0, start=0, batch_size=None):
    source = column_source(dataset.get(names))
    return list((source.batched(batch_size) if batch_size else source).batches(epoch, start))


def numbers(dataset, **settings):
    return [int(image.max()) for (image,) in batches(dataset, "image", **settings)]


def test_the_documented_signature():
    found = inspect.signature(ImageClassificationTFRecordDataset).parameters.values()
    assert {each.name: each.default for each in found if each.kind is each.POSITIONAL_OR_KEYWORD} == {
        "metadata": None,  # or `meta`, as the example of the document has it
        "batch_size": None,
        "shuffle": True,
        "shuffle_buffer_size": 6400,
        "num_parallel": 8,
        "num_epochs": None,
        "cache_dir": None,
        "preprocess_fn": None,
        "image_size": None,
        "remove_cache_on_finish": True,
        "private_num_threads": 0,
        "custom_feature_keys": None,
        "custom_feature_values": None,
        "drop_remainder": False,
        "augmentation_fn": None,
        "label_one_hot": False,
    }


class TestRecords:
    def test_every_field(self, base):
        rows = batches(make(base, shuffle=False), "image", "label", "label_desc", "image_name", "image_buf")
        for number, (image, label, word, name, data) in enumerate(rows):
            assert torch.equal(image, torch.full((5, 6, 3), number, dtype=torch.uint8))
            assert (int(label), word) == (number % 4, f"class {number % 4}")
            assert label.dtype == torch.int64
            assert name == f"train_{number // EACH}.tfrecord, record {number % EACH}"
            assert data == fields(number)["image/encoded"]
        assert len(rows) == ROWS

    def test_both_spellings(self, base):
        metadata = ImageClassificationTFRecordMetadata(base, file_patterns="*train*.tfrecord")
        assert metadata.num_samples == ROWS
        dataset = ImageClassificationTFRecordDataset(meta=metadata, shuffle=False)
        assert numbers(dataset) == numbers(make(base, shuffle=False)) == list(range(ROWS))
        assert numbers(make(base, "eval*")) == [100]

    @pytest.mark.parametrize("given_", [None, "a path"])
    def test_no_metadata(self, given_):
        with pytest.raises(ConfigError, match="metadata is a .*: give an ImageClassificationTFRecordMetadata"):
            ImageClassificationTFRecordDataset(given_)

    def test_names_of_labels_txt_win(self, base):
        (base / "labels.txt").write_text("0: a\n1: b\n2: c\n3: d\n")
        words = [word for (word,) in batches(make(base, shuffle=False), "label_desc")]
        assert words[:5] == ["a", "b", "c", "d", "a"]

    def test_no_name_at_all(self, tmp_path):
        write(tmp_path / "x", [{**fields(1), "image/class/text": []}, {**fields(2), "image/class/text": b"caf\xe9"}])
        assert [word for (word,) in batches(make(tmp_path, "x", shuffle=False), "label_desc")] == ["", "caf\ufffd"]

    def test_one_hot_labels(self, base):
        (label,) = batches(make(base, shuffle=False, label_one_hot=True), "label", batch_size=ROWS)[0]
        assert torch.equal(label, torch.eye(4)[torch.arange(ROWS) % 4])

    @pytest.mark.parametrize("label", [-1, 4, 2**40])
    def test_one_hot_labels_out_of_range(self, tmp_path, label):
        write(tmp_path / "x", [fields(0), {**fields(1), "image/class/label": label}])
        dataset = make(tmp_path, "x", label_one_hot=True)
        with pytest.raises(DataError, match=f"x, record 1 has the label {label}, there are 4 classes"):
            batches(dataset, "label")
        assert {int(value) for (value,) in batches(make(tmp_path, "x"), "label")} == {0, label}

    def test_a_number_of_classes_is_needed(self, base):
        metadata = ImageClassificationTFRecordMetadata(base, "train*")
        with pytest.raises(DataError, match="give num_classes="):
            make(base, metadata=metadata, label_one_hot=True)

    def test_batches(self, base):
        dataset = make(base, batch_size=5, image_size=4, shuffle=False)
        found = batches(dataset, "image", "label", "label_desc")
        assert [tuple(image.shape) for image, _, _ in found] == [(5, 4, 4, 3)] * 3 + [(3, 4, 4, 3)]
        assert found[1][1].tolist() == [1, 2, 3, 0, 1]
        dropped = make(base, batch_size=5, image_size=4, drop_remainder=True)
        assert [len(image) for (image,) in batches(dropped, "image")] == [5, 5, 5]

    def test_preprocess_fn(self, base):
        def preprocess_fn(image_name, image_buf, label, label_desc):
            assert all(isinstance(data, bytes) for data in image_buf)
            return image_name, torch.tensor([len(data) for data in image_buf]), label + 1, label_desc

        dataset = make(base, batch_size=9, preprocess_fn=preprocess_fn, shuffle=False)
        image, label = batches(dataset, "image", "label")[1]
        assert image.tolist() == [len(fields(number)["image/encoded"]) for number in range(9, 18)]
        assert label.tolist() == [number % 4 + 1 for number in range(9, 18)]

    def test_augmentation_and_channels(self, base):
        dataset = make(base, augmentation_fn=lambda image: image[:2, :2], channels=1)
        assert all(image.shape == (2, 2, 1) for (image,) in batches(dataset, "image"))

    @pytest.mark.parametrize(("settings", "readers"), [({}, 3), ({"private_num_threads": 5}, 5)])
    def test_how_many_threads_read(self, base, settings, readers):
        assert make(base, **settings).readers == readers

    def test_nothing_but_an_empty_file(self, tmp_path):
        write(tmp_path / "x", [])
        with pytest.raises(DataError, match="no samples"):
            make(tmp_path, "x")

    def test_a_redirect_is_where_records_are_read(self, base, tmp_path):
        (tmp_path / "fast").mkdir()
        for file in base.glob("train*"):
            file.rename(tmp_path / "fast" / file.name)
            file.touch()
        metadata = ImageClassificationTFRecordMetadata(base, "train*", redirect_dir=tmp_path / "fast")
        assert numbers(make(base, metadata=metadata, shuffle=False)) == list(range(ROWS))


class TestCustomFeatures:
    def test_each_kind(self, tmp_path):
        others = {"one": 7, "many": [1, 2, 3], "part": 0.5, "parts": [0.5, 1.5], "word": "é", "words": ["a", "b"]}
        write_set(tmp_path, **others)
        dataset = make(tmp_path, custom_feature_keys=list(others), shuffle=False)
        (one, many, part, parts, word, words), *_ = batches(dataset, *others)
        assert (one.item(), one.dtype) == (7, torch.int64)
        assert (many.tolist(), part.item(), parts.tolist()) == ([1, 2, 3], 0.5, [0.5, 1.5])
        assert (word, list(words)) == ("é".encode(), [b"a", b"b"])
        one, many, word = batches(dataset, "one", "many", "word", batch_size=4)[0]
        assert (one.tolist(), many.shape, list(word)) == ([7] * 4, (4, 3), ["é".encode()] * 4)

    def test_values_may_be_changed_without_changing_the_file(self, tmp_path):
        write_set(tmp_path, many=[1, 2, 3])
        dataset = make(tmp_path, custom_feature_keys=["many"], shuffle=False)
        (many,) = dataset.get(["many"])
        for _ in range(2):
            assert [value.tolist() for (value,) in column_source(many.map(torch.Tensor.neg_)).batches(0, 0)] == [
                [-1, -2, -3]
            ] * ROWS

    def test_what_a_record_lacks(self, tmp_path):
        write(tmp_path / "x", [fields(0, weight=2.0), fields(1)])
        keys = ["weight", "missing"]
        dataset = make(tmp_path, "x", custom_feature_keys=keys, custom_feature_values=[1.0, b"-"], shuffle=False)
        assert [(weight.item(), word) for weight, word in batches(dataset, *keys)] == [(2.0, b"-"), (1.0, b"-")]
        dataset = make(tmp_path, "x", custom_feature_keys=["weight"], shuffle=False)
        with pytest.raises(DataError, match="x, record 1 has no feature 'weight'; it has image/class/label"):
            batches(dataset, "weight")

    def test_in_batches_behind_preprocess_fn(self, tmp_path):
        write_set(tmp_path, one=7)
        dataset = make(tmp_path, custom_feature_keys=["one"], batch_size=6, preprocess_fn=lambda *four: four)
        assert [one.tolist() for (one,) in batches(dataset, "one")] == [[7] * 6] * 3

    @pytest.mark.parametrize(
        ("keys", "values", "said"),
        [
            ("one", None, "give two lists of the same length"),
            (["one"], [1, 2], "give two lists of the same length"),
            (None, [1], "give two lists of the same length"),
            (["one", "label"], None, "'label', which is a field of every picture"),
        ],
    )
    def test_lists_that_do_not_fit(self, base, keys, values, said):
        with pytest.raises(ConfigError, match=said):
            make(base, custom_feature_keys=keys, custom_feature_values=values)


class TestOrder:
    def test_without_shuffling_it_is_that_of_the_files(self, base):
        dataset = make(base, shuffle=False)
        assert [numbers(dataset, epoch=epoch) for epoch in range(2)] == [list(range(ROWS))] * 2

    @pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
    @pytest.mark.parametrize("buffer", [1, 4, 6400])
    def test_a_pass_has_each_record_once(self, tmp_path, compression, buffer):
        write_set(tmp_path, compression)
        dataset = make(tmp_path, shuffle_buffer_size=buffer)
        passes = [numbers(dataset, epoch=epoch) for epoch in range(3)]
        assert all(sorted(found) == list(range(ROWS)) for found in passes)
        assert len({tuple(found) for found in passes}) == 3
        again = make(tmp_path, shuffle_buffer_size=buffer, num_parallel=1)
        assert numbers(again, epoch=2) == passes[2]

    @pytest.mark.parametrize("compression", [None, "GZIP"])
    def test_seeking_is_skipping(self, tmp_path, compression):
        write_set(tmp_path, compression)
        dataset = make(tmp_path, shuffle_buffer_size=8, augmentation_fn=lambda image, rng: image.float() + rng.normal())
        whole = batches(dataset, "image", epoch=1)
        for start in (1, 7, ROWS - 1, ROWS):
            found = batches(dataset, "image", epoch=1, start=start)
            assert all(torch.equal(a, b) for (a,), (b,) in zip(found, whole[start:], strict=True))

    def test_a_seek_reads_nothing_that_lies_before(self, base):
        dataset = make(base, shuffle=False)
        raw = bytearray((base / "train_0.tfrecord").read_bytes())
        raw[40] ^= 1  # in the first record
        with (base / "train_0.tfrecord").open("r+b") as file:
            file.write(raw)
        assert numbers(dataset, start=1) == list(range(1, ROWS))
        with pytest.raises(DataError, match=r"train_0\.tfrecord: record 0 .*CRC is wrong"):
            numbers(dataset)

    def test_compressed_files_that_are_left_early_are_read_again(self, tmp_path):
        write_set(tmp_path, "GZIP")
        dataset = make(tmp_path, shuffle_buffer_size=8)
        whole = numbers(dataset)
        for count in (1, 5, 17):
            iterator = column_source(dataset.get(["image"])).batches(0, 0)
            assert [int(next(iterator)[0].max()) for _ in range(count)] == whole[:count]
            iterator.close()
        assert numbers(dataset) == whole

    def test_no_global_random_state_is_touched(self, base):
        before = repr(rng_state())
        numbers(make(base, augmentation_fn=lambda image, rng: image + rng.normal()))
        assert repr(rng_state()) == before

    @given(
        sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8),
        buffer=st.integers(1, 60),
        seed=st.integers(0, 2**31),
        epoch=st.integers(0, 50),
    )
    def test_records_move_by_less_than_the_buffer(self, sizes, buffer, seed, epoch):
        order = mixed(np.array(sizes), buffer, seed)
        found = order(epoch)
        assert sorted(found.tolist()) == list(range(sum(sizes)))
        assert np.array_equal(found, mixed(np.array(sizes), buffer, seed)(epoch))
        in_files = mixed(np.array(sizes), 1, seed)(epoch)  # the same order of files, and nothing moves
        places = np.empty(sum(sizes), np.int64)
        places[in_files] = np.arange(sum(sizes))
        assert all(abs(places[number] - place) < buffer for place, number in enumerate(found.tolist()))

    def test_a_buffer_of_one_moves_files_only(self):
        order = mixed(np.array([3, 3, 3]), 1, 0)
        runs = {tuple(order(epoch).tolist()) for epoch in range(60)}
        assert len(runs) == 6
        assert all(run[at + 1] == run[at] + 1 for run in runs for at in range(8) if at % 3 != 2)

    def test_every_record_moves_sometime(self):
        order = mixed(np.array([50]), 10, 0)
        moved = np.array([order(epoch) != np.arange(50) for epoch in range(20)])
        assert moved.any(0).all()
        assert not np.array_equal(order(0), order(1))
        assert not np.array_equal(order(0), mixed(np.array([50]), 10, 1)(0))


class TestCache:
    @pytest.mark.parametrize("remove", [True, False])
    def test_originals_are_read_once(self, base, tmp_path, remove):
        cache = tmp_path / "cache"
        metadata = ImageClassificationTFRecordMetadata(base, "train*")
        dataset = make(base, metadata=metadata, cache_dir=str(cache), remove_cache_on_finish=remove, shuffle=False)
        for path in base.glob("train*"):
            path.unlink()
        assert numbers(dataset) == numbers(dataset) == list(range(ROWS))
        assert not [path for path in base.iterdir() if "index" in path.name]
        del dataset
        gc.collect()
        assert bool(list(cache.iterdir())) is not remove
        if not remove:
            again = make(base, metadata=metadata, cache_dir=str(cache), shuffle=False)
            assert numbers(again) == list(range(ROWS))

    def test_the_directory_of_the_environment(self, base, tmp_path, monkeypatch):
        monkeypatch.setenv("DLS_LOCAL_CACHE_PATH", str(tmp_path / "cache"))
        dataset = make(base, cache_dir="ENV")
        assert len([path for path in (tmp_path / "cache").iterdir() if path.name[0] != "."]) == FILES
        assert len(numbers(dataset)) == ROWS

    def test_a_file_that_went_is_named(self, base, tmp_path):
        metadata = ImageClassificationTFRecordMetadata(base, "train*")
        (base / "train_1.tfrecord").unlink()
        for cache in (None, str(tmp_path / "cache")):
            with pytest.raises(DataError, match=r"train_1\.tfrecord"):
                make(base, metadata=metadata, cache_dir=cache)

    def test_a_broken_copy_is_named_by_its_original(self, base, tmp_path):
        (base / "train_1.tfrecord").write_bytes(b"no record in here")
        with pytest.raises(DataError, match=r"train_1\.tfrecord: .*record 0 at byte 0 has a length whose CRC is wrong"):
            make(base, cache_dir=str(tmp_path / "cache"))


class TestBroken:
    @pytest.mark.parametrize(
        ("record", "said"),
        [
            (b"no example", "is no tf.train.Example"),
            (b"", "has no feature 'image/encoded'; it has none that is known"),
            ({"image/class/label": 3, "x": 1}, "has no feature 'image/encoded'; it has image/class/label"),
            ({**fields(1), "image/encoded": 5}, "has a int64 as 'image/encoded': write bytes there"),
            ({**fields(1), "image/encoded": b"no picture"}, "is no picture of a known kind"),
            ({**fields(1), "image/encoded": encode_png(np.zeros((9, 9, 3), np.uint8))[:45]}, "cannot be decoded"),
            ({**fields(1), "image/class/label": 2.5}, "has a float32 as 'image/class/label': write int64 there"),
            ({**fields(1), "image/class/label": "3"}, "has a bytes as 'image/class/label': write int64 there"),
            ({**fields(1), "image/class/text": 2**60}, "has a int64 as 'image/class/text': write bytes there"),
        ],
    )
    @pytest.mark.parametrize("batch_size", [None, 4])
    def test_file_and_record_are_named(self, base, record, said, batch_size):
        write(base / "train_1.tfrecord", [fields(0), fields(1), record, fields(3)])
        dataset = make(base, batch_size=batch_size, image_size=4)
        with pytest.raises(DataError, match=said) as caught:
            batches(dataset, "image", "label", "label_desc")
        assert "train_1.tfrecord, record 2" in str(caught.value)

    def test_a_picture_is_left_out(self, base, caplog):
        write(base / "train_1.tfrecord", [fields(0), {**fields(1), "image/encoded": b"no picture"}])
        dataset = make(base, batch_size=7, image_size=4, skip_broken=True, shuffle=False)
        assert [len(image) for (image,) in batches(dataset, "image")] == [7, 6]
        assert dataset.skipped == 1
        (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
        assert "train_1.tfrecord, record 1 is no picture" in line

    def test_a_file_that_is_no_tfrecord_file(self, base):
        (base / "train_2.tfrecord").write_text("hello, this is something else")
        with pytest.raises(DataError, match=r"train_2\.tfrecord"):
            make(base)


class TestFingerprint:
    @pytest.mark.parametrize(
        "change", ["a record more", "as many, but elsewhere", "a file more", "renamed", "seed", "order", "buffer"]
    )
    def test_a_checkpoint_of_other_data_is_refused(self, base, change):
        def stream(**settings):
            return Stream(column_source(make(base, **settings).get(["image"])), name="train")

        before = stream()
        before.read()
        before.commit()
        state = before.state_dict()
        before.close()
        stream(num_parallel=1).load_state_dict(state)
        settings = {"seed": {"seed": 1}, "order": {"shuffle": False}, "buffer": {"shuffle_buffer_size": 2}}
        if change == "a record more":
            write(base / "train_2.tfrecord", [fields(0)] * (EACH + 1))
        elif change == "as many, but elsewhere":
            write(base / "train_1.tfrecord", [fields(0)] * (EACH - 1))
            write(base / "train_2.tfrecord", [fields(0)] * (EACH + 1))
        elif change == "a file more":
            write(base / "train_3.tfrecord", [fields(0)])
        elif change == "renamed":
            (base / "train_2.tfrecord").rename(base / "train_9.tfrecord")
        with pytest.raises(DataError, match="input 'train' is not the one that the checkpoint was made with"):
            stream(**settings.get(change, {})).load_state_dict(state)


def write_mnist(base, count, packed=False, part="train"):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10
    for name, head, values in (
        (f"{part}-images-idx3-ubyte", struct.pack(">IIII", 0x803, count, 28, 28), images),
        (f"{part}-labels-idx1-ubyte", struct.pack(">II", 0x801, count), labels),
    ):
        data = head + values.tobytes()
        (base / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    return images, labels


class TestKnown:
    @pytest.mark.parametrize("packed", [True, False])
    def test_mnist(self, tmp_path, packed):
        images, labels = write_mnist(tmp_path, 25, packed)
        dataset = get_dataset("mnist", "train", tmp_path, shuffle=False)
        rows = batches(dataset, "image", "label", "label_desc")
        assert len(rows) == 25
        for number, (image, label, word) in enumerate(rows):
            assert torch.equal(image, torch.from_numpy(images[number, :, :, None]))
            assert int(label) == labels[number]
            assert word == ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"][number % 10]

    def test_cifar10(self, tmp_path):
        rows = np.random.default_rng(1).integers(0, 256, (8, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(8)
        for number in range(2):
            (tmp_path / f"data_batch_{number + 1}.bin").write_bytes(rows[number * 4 : number * 4 + 4].tobytes())
        (tmp_path / "test_batch.bin").write_bytes(rows[:2].tobytes())
        found = batches(get_dataset("cifar10", "train", tmp_path, shuffle=False), "image", "label", "label_desc")
        assert [int(label) for _, label, _ in found] == list(range(8))
        assert found[3][0][5, 7].tolist() == rows[3, 1:].reshape(3, 32, 32)[:, 5, 7].tolist()
        assert found[7][2] == "horse"
        assert len(batches(get_dataset("cifar10", "test", tmp_path), "label")) == 2

    def test_order_passes_and_seeking(self, tmp_path):
        write_mnist(tmp_path, 20)
        dataset = get_dataset("mnist", "train", tmp_path, capacity=4, num_epochs=2)
        passes = [[image.sum().item() for (image,) in batches(dataset, "image", epoch=epoch)] for epoch in range(2)]
        assert sorted(passes[0]) == sorted(passes[1])
        assert passes[0] != passes[1]
        assert [image.sum().item() for (image,) in batches(dataset, "image", epoch=1, start=15)] == passes[1][15:]
        assert (dataset.num_epochs, dataset.capacity) == (2, 4)

    def test_other_labels_are_other_data(self, tmp_path):
        write_mnist(tmp_path, 20)
        facts = [get_dataset("mnist", "train", tmp_path).fingerprint()]
        write_mnist(tmp_path, 21)
        facts.append(get_dataset("mnist", "train", tmp_path).fingerprint())
        assert facts[0] != facts[1]

    def test_flowers_as_records(self, tmp_path):
        for split, count in (("train", 2), ("validation", 1)):
            for number in range(count):
                record = {**fields(number), "image/class/label": number + 3, "image/class/text": "-"}
                write(tmp_path / f"flowers_{split}_{number:05}-of-{count:05}.tfrecord", [record])
        dataset = get_dataset("flowers", "train", tmp_path, shuffle=False)
        assert [word for (word,) in batches(dataset, "label_desc")] == ["sunflowers", "tulips"]
        assert len(batches(get_dataset("flowers", "eval", tmp_path), "image")) == 1

    def test_imagenet_as_folders(self, tmp_path):
        for split in ("train", "val"):
            for name in ("n01440764", "n01443537"):
                path = tmp_path / split / name / "x.JPEG"
                path.parent.mkdir(parents=True)
                path.write_bytes(encode_jpeg(np.full((8, 8, 3), 50, np.uint8)))
        for split in ("train", "eval"):
            dataset = get_dataset("imagenet", split, tmp_path, shuffle=False)
            rows = batches(dataset, "label", "label_desc", "image")
            assert [(int(label), word) for label, word, _ in rows] == [(1, "n01440764"), (2, "n01443537")]

    def test_an_unknown_name(self, tmp_path):
        with pytest.raises(ConfigError, match="'mnits' is unknown: write one of cifar10"):
            get_dataset("mnits", "train", tmp_path)


def broken_bytes(data, rng):
    way, place = rng.randrange(4), rng.randrange(len(data))
    if way == 0:
        return data[:place]
    if way == 1:
        return data[:place] + rng.randbytes(rng.randrange(1, 40)) + data[place:]
    if way == 2:
        return rng.randbytes(rng.randrange(80))
    flipped = bytearray(data)
    for _ in range(rng.choice([1, 2, 20])):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def check_broken_files(tmp_path, count, seed):
    """Three files each, one of which is broken, or has a broken record, or a record with a broken picture."""
    rng, failed = random.Random(seed), 0
    for number in range(count):
        base, compression = tmp_path / str(number), rng.choice([None, None, "GZIP"])
        write_set(base, compression)
        victim = base / f"train_{rng.randrange(FILES)}.tfrecord"
        where = rng.choice(["file", "record", "picture"])
        if where == "file":
            victim.write_bytes(broken_bytes(victim.read_bytes(), rng))
        else:
            records = [bytes(record) for record in read_records(victim)]
            place = rng.randrange(EACH)
            whole = fields(place)
            picture = {**whole, "image/encoded": broken_bytes(whole["image/encoded"], rng)}
            records[place] = broken_bytes(records[place], rng) if where == "record" else make_example(picture)
            write(victim, records, compression)
        try:
            dataset = make(base, batch_size=5, image_size=4, label_one_hot=True, shuffle=rng.random() < 0.5)
            found, said = sum(len(image) for image, _ in batches(dataset, "image", "label_desc")), ""
        except PlaitError as error:
            found, said = 0, str(error)
        assert victim.name in said if said else found <= ROWS  # a file may be cut between two records
        failed += bool(said)
    assert 0.4 * count < failed < count  # else it is not much of a test


def test_broken_files(tmp_path):
    check_broken_files(tmp_path, 100, 1)


@pytest.mark.slow
def test_many_broken_files(tmp_path):
    check_broken_files(tmp_path, 2000, 2)


@pytest.mark.parametrize("kind", [None, ForkedReader])
def test_later_passes_decode_what_is_cut_out_to_the_same_pixels(tmp_path, monkeypatch, kind):
    rows, columns, channels = np.mgrid[:120, :90, :3]
    files = [(128 + 90 * np.sin(rows / 9 + channels + number) * np.cos(columns / 11)) for number in range(6)]
    records = [fields(0, **{"image/encoded": encode_jpeg(file.astype(np.uint8))}) for file in files]
    write(tmp_path / "train_0.tfrecord", records)
    recipe = get_data_augmentation_fn("vgg_16", ModeKeys.TRAIN, 32, 32, resize_side_min=40)
    dataset = make(tmp_path, augmentation_fn=recipe, reader_class=kind)
    parts, whole = jpeg.decode_upper, []
    for epoch in range(3):
        found = batches(dataset, "image", epoch=epoch, batch_size=3)
        with monkeypatch.context() as patch:
            patch.setattr(pictures, "decode_upper", lambda *given: whole.append(parts(*given)))
            again = batches(dataset, "image", epoch=epoch, batch_size=3)
        assert len(found) == 2
        assert all(torch.equal(one, other) for (one,), (other,) in zip(found, again, strict=True))
        assert kind is not None or len(whole) == 6 * epoch  # processes count for themselves


class TestForkedReader:
    def test_it_gives_what_threads_give(self, base):
        names = ("image", "label", "label_desc")
        found, expected = (
            batches(make(base, reader_class=kind, seed=2), *names, batch_size=5) for kind in (ForkedReader, None)
        )
        assert len(found) == 4
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
            assert one[2] == other[2]

    def test_compressed_files_are_for_threads(self, tmp_path):
        write_set(tmp_path, "GZIP")
        with pytest.raises(ConfigError, match=r"train_0.tfrecord' is compressed.*leave reader_class out"):
            make(tmp_path, reader_class=ForkedReader)

    def test_other_readers_are_refused(self, base):
        with pytest.raises(ConfigError, match=r"by threads \(None\) or by ForkedReader"):
            make(base, reader_class=ParallelReader)
