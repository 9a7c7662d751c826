"""Metadata on this machine. Small files stand for pictures: nothing here looks into them."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data import folders
from plait.data.folders import (
    ImageClassificationRawMetadata,
    ImageClassificationTFRecordMetadata,
    MultilabelClassificationRawMetadata,
    split_image_classification_dataset,
)
from plait.data.labels import read_labels, write_labels
from plait.data.tfrecord import TFRecordWriter
from plait.errors import ConfigError, DataError


def fill(base, *names):
    for name in names:
        path = Path(base, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


@pytest.fixture
def base(tmp_path):
    """label_2 has two pictures, label_10 one, label_1 three."""
    base = tmp_path / "set"
    fill(base, "label_2/a.jpg", "label_2/b.JPEG", "label_10/c.png", "label_1/d.jpg", "label_1/e.gif", "label_1/f.webp")
    return base


def pairs(metadata):
    return [(name, metadata.labels_list[label]) for name, label in zip(metadata.names, metadata.labels, strict=True)]


def test_the_documented_signatures():
    def parameters(thing):
        found = inspect.signature(thing).parameters.values()
        return {each.name: each.default for each in found if each.kind is each.POSITIONAL_OR_KEYWORD}

    empty = inspect.Parameter.empty
    assert parameters(ImageClassificationRawMetadata) == {
        "base_dir": empty,
        "redirect_dir": None,
        "labels_filename": "labels.txt",
    }
    assert parameters(MultilabelClassificationRawMetadata) == {
        "base_dir": empty,
        "images_sub_dir": "images",
        "labels_sub_dir": "labels",
        "labels_extension": "txt",
        "redirect_dir": None,
        "labels_filename": "labels.txt",
    }
    assert parameters(ImageClassificationTFRecordMetadata) == {
        "base_dir": empty,
        "file_pattern": None,  # the other spelling, file_patterns, may stand for it
        "num_samples": None,
        "redirect_dir": None,
        "num_classes": 0,
        "label_map_file": "labels.txt",
    }
    assert list(parameters(split_image_classification_dataset)) == ["split_spec", "src_dir", "dst_dir", "overwrite"]


def test_a_folder_for_each_class(base):
    metadata = ImageClassificationRawMetadata(base)
    assert metadata.labels_list == ["label_1", "label_10", "label_2"]
    assert metadata.labels_to_names == {0: "label_1", 1: "label_10", 2: "label_2"}
    assert metadata.names_to_labels == {"label_1": 0, "label_10": 1, "label_2": 2}
    assert metadata.total_num_samples == metadata.num_samples == 6
    assert metadata.num_classes == 3
    assert metadata.names[:2] == ["label_1/d.jpg", "label_1/e.gif"]
    assert metadata.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert metadata.labels.dtype == np.int64
    assert Path(metadata.url_of(3)).read_text() == "label_10/c.png"


def test_natural_order(base):
    metadata = ImageClassificationRawMetadata(base, natural_order=True)
    assert metadata.labels_list == ["label_1", "label_2", "label_10"]
    assert dict(pairs(metadata))["label_10/c.png"] == "label_10"
    assert metadata.labels.tolist() == [0, 0, 0, 2, 1, 1]


def test_only_pictures_count_and_nothing_hidden(base, caplog):
    fill(base, "label_1/notes.txt", "label_1/.x.jpg", ".git/x.jpg", "label_1/.cache/x.jpg", "top.jpg", "label_2/jpg")
    assert ImageClassificationRawMetadata(base).total_num_samples == 6
    assert not caplog.records


def test_a_picture_may_lie_deeper(base):
    fill(base, "label_2/images/z.bmp", "label_2/.hidden/z.bmp")
    metadata = ImageClassificationRawMetadata(base)
    assert dict(pairs(metadata))["label_2/images/z.bmp"] == "label_2"
    assert metadata.total_num_samples == 7


def test_links_are_followed_and_circles_end(base, tmp_path):
    fill(tmp_path / "elsewhere", "x.jpg")
    os.symlink(tmp_path / "elsewhere", base / "label_3")
    os.symlink(base, base / "label_1" / "up")
    metadata = ImageClassificationRawMetadata(base)
    assert metadata.labels_list == ["label_1", "label_10", "label_2", "label_3"]
    assert metadata.total_num_samples == 7


def test_labels_txt_says_the_numbers(base):
    write_labels(base / "labels.txt", ["label_2", "label_1", "label_10"])
    metadata = ImageClassificationRawMetadata(base)
    assert metadata.labels_list == ["label_2", "label_1", "label_10"]
    assert metadata.labels.tolist() == [1, 1, 1, 2, 0, 0]
    assert ImageClassificationRawMetadata(base, labels_filename=None).labels_list[0] == "label_1"


def test_labels_of_another_name_have_to_be_there(base):
    (base / "names").write_text("0: label_2 1: label_10 2: label_1")
    assert ImageClassificationRawMetadata(base, labels_filename="names").labels_list[0] == "label_2"
    with pytest.raises(DataError, match="nams' is not there"):
        ImageClassificationRawMetadata(base, labels_filename="nams")


def test_labels_and_folders_have_to_be_the_same(base):
    write_labels(base / "labels.txt", ["label_1", "label_2", "daisy", "rose"])
    with pytest.raises(DataError, match=r"\['daisy', 'rose'\] only in the file, \['label_10'\] only among the folders"):
        ImageClassificationRawMetadata(base)
    write_labels(base / "labels.txt", ["label_1", "label_2", "label_10", "label_1"])
    with pytest.raises(DataError, match="'label_1' for the numbers 0 and 3"):
        ImageClassificationRawMetadata(base)


def test_an_empty_folder_is_a_class_and_the_log_says_so(base, caplog):
    (base / "label_0").mkdir()
    fill(base, "label_4/x.txt")
    metadata = ImageClassificationRawMetadata(base)
    assert metadata.labels_list == ["label_0", "label_1", "label_10", "label_2", "label_4"]
    assert "no picture in ['label_0', 'label_4']" in caplog.text


def test_a_directory_that_is_no_data_set(tmp_path):
    with pytest.raises(DataError, match="is not there: write the directory"):
        ImageClassificationRawMetadata(tmp_path / "none")
    fill(tmp_path, "file.jpg", "empty/x.txt")
    with pytest.raises(DataError, match="is a file"):
        ImageClassificationRawMetadata(tmp_path / "file.jpg")
    with pytest.raises(DataError, match=r"has 1 folders and no picture in them.*\.jpg"):
        ImageClassificationRawMetadata(tmp_path)


def test_pictures_are_read_from_the_redirect_dir(base, tmp_path):
    fill(tmp_path / "fast", "label_1/only-there.jpg")
    metadata = ImageClassificationRawMetadata(base, redirect_dir=f"{tmp_path}/fast/")
    assert metadata.total_num_samples == 6
    assert metadata.url_of(0) == f"{tmp_path}/fast/label_1/d.jpg"


def test_a_relative_directory_and_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, "[a] * ?/é 中#%.jpg")
    for base in [".", "", "file://" + str(tmp_path)]:
        metadata = ImageClassificationRawMetadata(base)
        assert Path(metadata.url_of(0).removeprefix("file://")).read_text() == "[a] * ?/é 中#%.jpg"
        assert metadata.labels_list == ["[a] * ?"]


# several labels


@pytest.fixture
def several(tmp_path):
    base = tmp_path / "several"
    fill(base, *[f"images/{number}.jpg" for number in range(4)])
    texts = ["dog cat", "cat\ndog\r\n", "", "polar bear\ncat"]
    for number, text in enumerate(texts):
        path = base / "labels" / f"{number}.jpg.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    (base / "labels.txt").write_text("0: cat 1: polar bear 2: dog")
    return base


def test_several_labels(several):
    metadata = MultilabelClassificationRawMetadata(several)
    assert metadata.names == [f"images/{number}.jpg" for number in range(4)]
    assert metadata.labels_to_names == {0: "cat", 1: "polar bear", 2: "dog"}
    assert metadata.names_to_labels == {"cat": 0, "polar bear": 1, "dog": 2}
    assert (metadata.total_num_samples, metadata.num_samples, metadata.num_classes) == (4, 4, 3)
    assert [metadata.labels_of(index) for index in range(4)] == [[2, 0], [0, 2], [], [1, 0]]
    assert metadata.labelled.tolist() == [True] * 4


def test_other_separators(several):
    metadata = MultilabelClassificationRawMetadata(several)
    (several / "labels/0.jpg.txt").write_text("polar bear, dog,,polar bear\n")
    assert metadata.labels_of(0, ",") == [1, 2]
    (several / "labels/0.jpg.txt").write_text("dog;cat")
    with pytest.raises(DataError, match=r"0\.jpg\.txt' has the label 'dog;cat', which is none of the 3.*label_sep"):
        metadata.labels_of(0)
    with pytest.raises(ConfigError, match="label_sep is empty"):
        metadata.labels_of(0, "")


def test_an_unknown_label_is_shown_with_those_near_it(several):
    metadata = MultilabelClassificationRawMetadata(several)
    (several / "labels/0.jpg.txt").write_text("dogg")
    with pytest.raises(DataError, match=r"'dogg'.*near it are \['dog'\]"):
        metadata.labels_of(0)


def test_a_picture_without_label_file(several):
    (several / "labels/1.jpg.txt").unlink()
    metadata = MultilabelClassificationRawMetadata(several)
    assert metadata.labelled.tolist() == [True, False, True, True]
    with pytest.raises(DataError, match=r"'images/1\.jpg' has no label file.*skip_label_not_found=True"):
        metadata.labels_of(1)


def test_a_label_file_that_is_too_long_or_no_text(several):
    metadata = MultilabelClassificationRawMetadata(several)
    (several / "labels/0.jpg.txt").write_bytes(b"cat " * (1 << 18) + b"c")
    with pytest.raises(DataError, match="1048577 bytes"):
        metadata.labels_of(0)
    (several / "labels/0.jpg.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not text"):
        metadata.labels_of(0)


def test_without_labels_txt_all_label_files_are_read(several, caplog):
    (several / "labels.txt").unlink()
    (several / "labels/3.jpg.txt").write_text("ant\ncat")
    with caplog.at_level(logging.INFO, "plait"):
        metadata = MultilabelClassificationRawMetadata(several)
    assert metadata.labels_list == ["ant", "cat", "dog"]
    assert "reading 4 label files" in caplog.text
    assert metadata.labels_of(0) == [2, 1]
    (several / "labels/3.jpg.txt").write_text("polar bear,cat")
    for number in range(3):
        (several / f"labels/{number}.jpg.txt").write_text("")
    assert MultilabelClassificationRawMetadata(several, label_sep=",").labels_list == ["cat", "polar bear"]


def test_no_labels_at_all(several):
    (several / "labels.txt").unlink()
    for number in range(4):
        (several / f"labels/{number}.jpg.txt").write_text(" \n")
    with pytest.raises(DataError, match="for 4 of 4 pictures, and no label"):
        MultilabelClassificationRawMetadata(several)


def test_a_broken_label_file_ends_the_reading(several):
    (several / "labels.txt").unlink()
    (several / "labels/2.jpg.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"2\.jpg\.txt"):
        MultilabelClassificationRawMetadata(several)


def test_other_directories_and_another_extension(tmp_path):
    fill(tmp_path, "deep/pictures/sub/a.png", "tags/sub/a.png.tag")
    (tmp_path / "tags/sub/a.png.tag").write_text("x")
    for extension in ["tag", ".tag"]:
        metadata = MultilabelClassificationRawMetadata(tmp_path, "deep/pictures/", "tags", extension)
        assert metadata.names == ["deep/pictures/sub/a.png"]
        assert metadata.labels_of(0) == [0]


def test_pictures_and_labels_in_one_directory(tmp_path):
    fill(tmp_path, "a.jpg", "b.jpg")
    for name in "ab":
        (tmp_path / f"{name}.jpg.txt").write_text(name)
    metadata = MultilabelClassificationRawMetadata(tmp_path, "", "", redirect_dir="/fast")
    assert metadata.names == ["a.jpg", "b.jpg"]
    assert metadata.url_of(1) == "/fast/b.jpg"
    assert metadata.labels_of(1) == [1]


def test_a_set_without_pictures_or_with_a_name_twice(several):
    with pytest.raises(DataError, match="no pictures in it"):
        MultilabelClassificationRawMetadata(several, images_sub_dir="labels")
    with pytest.raises(DataError, match="is not there"):
        MultilabelClassificationRawMetadata(several, labels_sub_dir="tags")
    (several / "labels.txt").write_text("0: cat 1: cat")
    with pytest.raises(DataError, match="'cat' for the numbers 0 and 1"):
        MultilabelClassificationRawMetadata(several)


# TFRecord files


@pytest.fixture
def records(tmp_path):
    base = tmp_path / "records"
    for name, count in {"data_train_0": 3, "data_train_1": 4, "data_eval_0": 2, "sub/more_train": 1}.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        with TFRecordWriter(base / f"{name}.tfrecord") as writer:
            for number in range(count):
                writer.write(bytes([number]))
    return base


def test_records_are_found_and_counted(records, caplog):
    metadata = ImageClassificationTFRecordMetadata(records, "*train*.tfrecord")
    assert metadata.names == ["data_train_0.tfrecord", "data_train_1.tfrecord"]
    assert metadata.files == [f"{records}/data_train_0.tfrecord", f"{records}/data_train_1.tfrecord"]
    with caplog.at_level(logging.INFO, "plait"):
        assert metadata.num_samples == metadata.total_num_samples == 7
    assert [record.getMessage() for record in caplog.records] == [
        "counting the records of 2 files; num_samples= saves this"
    ]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*eval*", 1),
        ("*train*, *eval*", 3),
        (["*train*", "*eval*"], 3),
        (["*train*", "data*"], 3),
        ("*/*.tfrecord", 1),
        ("sub/more_train.tfrecord,*", 4),
        ("data_train_[0].tfrecord", 1),
    ],
)
def test_patterns(records, pattern, count):
    assert len(ImageClassificationTFRecordMetadata(records, pattern).files) == count
    assert len(ImageClassificationTFRecordMetadata(records, file_patterns=pattern).files) == count


def test_an_index_beside_a_file_is_no_file_of_records(records):
    assert ImageClassificationTFRecordMetadata(records, "*").num_samples == 9
    assert any(name.name.startswith(".") for name in records.iterdir())
    assert len(ImageClassificationTFRecordMetadata(records, "*").files) == 3


def test_patterns_that_cannot_be(records):
    with pytest.raises(DataError, match=r"no file in .* fits '\*test\*'; files there: \['data_eval_0.tfrecord'"):
        ImageClassificationTFRecordMetadata(records, "*train*,*test*")
    with pytest.raises(ConfigError, match="two spellings of one thing"):
        ImageClassificationTFRecordMetadata(records, "*", file_patterns="*")
    with pytest.raises(ConfigError, match="give one"):
        ImageClassificationTFRecordMetadata(records)
    with pytest.raises(ConfigError, match="names no file"):
        ImageClassificationTFRecordMetadata(records, " ,")
    with pytest.raises(DataError, match="is not there"):
        ImageClassificationTFRecordMetadata(records / "none", "*")


def test_a_count_that_is_given_is_believed(records, monkeypatch):
    monkeypatch.setattr(folders, "_count_records", None)
    assert ImageClassificationTFRecordMetadata(records, "*train*", num_samples=5).num_samples == 5
    assert ImageClassificationTFRecordMetadata(records, "*train*", num_samples=0).num_samples == 0
    with pytest.raises(ConfigError, match="num_samples=-1"):
        ImageClassificationTFRecordMetadata(records, "*train*", num_samples=-1)


def test_classes_of_records(records):
    metadata = ImageClassificationTFRecordMetadata(records, "*")
    assert metadata.labels_to_names == {}
    with pytest.raises(DataError, match="give num_classes="):
        metadata.num_classes
    assert ImageClassificationTFRecordMetadata(records, "*", num_classes=7).num_classes == 7
    write_labels(records / "labels.txt", ["crane", "dog", "crane"])
    metadata = ImageClassificationTFRecordMetadata(records, "*train*", num_classes=3)
    assert metadata.labels_to_names == {0: "crane", 1: "dog", 2: "crane"}
    assert metadata.num_classes == 3
    with pytest.raises(ConfigError, match=r"num_classes=4, but labels\.txt names 3"):
        ImageClassificationTFRecordMetadata(records, "*train*", num_classes=4)
    with pytest.raises(ConfigError, match="num_classes=-1"):
        ImageClassificationTFRecordMetadata(records, "*train*", num_classes=-1)


def test_records_are_read_from_the_redirect_dir(records, tmp_path):
    metadata = ImageClassificationTFRecordMetadata(records, "*eval*", redirect_dir=tmp_path / "fast")
    assert metadata.files == [f"{tmp_path}/fast/data_eval_0.tfrecord"]


# splitting


@pytest.fixture
def whole(tmp_path):
    base = tmp_path / "whole"
    fill(base, *[f"many/{number:03}.jpg" for number in range(50)], *[f"few/{number}.jpg" for number in range(3)])
    return base


def split_names(target):
    found = {split.name: ImageClassificationRawMetadata(split).names for split in sorted(target.iterdir())}
    return {split: set(names) for split, names in found.items()}


@pytest.mark.parametrize("spec", [None, {"train": 0.9, "eval": 0.1}, "train:0.9,eval:0.1", " train:.9 , eval:.1"])
def test_each_class_is_split_by_itself(whole, tmp_path, spec):
    split_image_classification_dataset(spec, whole, tmp_path / "split")
    found = split_names(tmp_path / "split")
    assert {split: len(names) for split, names in found.items()} == {"train": 45 + 2, "eval": 5 + 1}
    assert not found["train"] & found["eval"]
    assert found["train"] | found["eval"] == set(ImageClassificationRawMetadata(whole).names)
    assert (tmp_path / "split/train/labels.txt").read_text() == "0: few\n1: many\n"
    assert all((tmp_path / "split/eval" / name).read_text() == name for name in found["eval"])


def test_the_split_follows_from_the_seed(whole, tmp_path):
    for name, seed in {"a": 0, "b": 0, "c": 1}.items():
        split_image_classification_dataset("train:0.5,eval:0.5", whole, tmp_path / name, seed=seed)
    a, b, c = (split_names(tmp_path / name) for name in "abc")
    assert a == b != c
    assert a["eval"] & {f"many/{number:03}.jpg" for number in range(25)}, "not simply the last ones"


def test_the_numbers_of_classes_stay(whole, tmp_path):
    write_labels(whole / "labels.txt", ["many", "few"])
    split_image_classification_dataset("a:0.2,b:0.3,c:0.5", whole, tmp_path / "split")
    assert all(read_labels(tmp_path / "split" / name / "labels.txt") == {0: "many", 1: "few"} for name in "abc")


def test_a_class_with_fewer_pictures_than_splits(whole, tmp_path, caplog):
    fill(whole, "one/1.jpg")
    (whole / "none").mkdir()
    split_image_classification_dataset(None, whole, tmp_path / "split")
    found = split_names(tmp_path / "split")
    assert "one/1.jpg" in found["train"]
    assert "class 'one' has 1 pictures, fewer than splits" in caplog.text
    assert ImageClassificationRawMetadata(tmp_path / "split/eval").labels_list == ["few", "many", "none", "one"]


def test_a_split_that_is_there_is_left_alone_or_replaced(whole, tmp_path):
    fill(tmp_path / "split", "eval/old/x.jpg", "other/class/y.jpg")
    with pytest.raises(ConfigError, match=r"split/eval' is there already.*overwrite=True"):
        split_image_classification_dataset(None, whole, tmp_path / "split")
    assert not (tmp_path / "split/train").exists()
    split_image_classification_dataset(None, whole, tmp_path / "split", overwrite=True)
    assert not (tmp_path / "split/eval/old").exists()
    assert (tmp_path / "split/other/class/y.jpg").exists()
    before = split_names(tmp_path / "split")
    split_image_classification_dataset(None, whole, tmp_path / "split", True)
    assert split_names(tmp_path / "split") == before


@pytest.mark.parametrize("inside", [".", "deep", "../whole"])
def test_a_split_may_not_lie_in_its_source(whole, inside):
    before = sorted(whole.rglob("*"))
    with pytest.raises(ConfigError, match="lie in one another"):
        split_image_classification_dataset(None, whole, whole / inside, overwrite=True)
    assert sorted(whole.rglob("*")) == before


def test_nothing_is_removed_where_one_split_is_the_source(tmp_path):
    fill(tmp_path, "eval/class/a.jpg", "train/class/b.jpg")
    with pytest.raises(ConfigError, match="lie in one another"):
        split_image_classification_dataset(None, tmp_path / "eval", tmp_path, overwrite=True)
    assert (tmp_path / "train/class/b.jpg").exists()
    assert (tmp_path / "eval/class/a.jpg").exists()


@pytest.mark.parametrize(
    "spec",
    [
        {},
        "",
        "train",
        "train:x,eval:y",
        "train:0.5,eval:0.4",
        "train:0.5,train:0.5",
        {"train": 1.1, "eval": -0.1},
        {"train": float("nan")},
        {"../x": 1.0},
        {".x": 1.0},
        {"": 1.0},
        {"train": None},
        {1: 1.0},
        0.9,
    ],
)
def test_specs_that_cannot_be(whole, tmp_path, spec):
    with pytest.raises(ConfigError, match="add up to 1: write"):
        split_image_classification_dataset(spec, whole, tmp_path / "split")
    assert not (tmp_path / "split").exists()


@given(st.integers(0, 1000), st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_counts_add_up_and_are_near_their_shares(total, weights):
    shares = [weight / sum(weights) for weight in weights]
    counts = folders._counts(total, shares)
    assert sum(counts) == total
    assert min(counts) >= (1 if total >= len(shares) else 0)
    assert all(abs(count - total * share) <= len(shares) for count, share in zip(counts, shares, strict=True))


def test_threads_work_in_order_and_by_blocks(monkeypatch):
    monkeypatch.setattr(folders, "_BLOCK", 3)
    assert list(folders._in_threads(lambda x: x * 2, range(10), "testing")) == list(range(0, 20, 2))
    failing = folders._in_threads(lambda x: 1 // x, [1, 0, 2], "testing")
    with pytest.raises(ZeroDivisionError):
        list(failing)
