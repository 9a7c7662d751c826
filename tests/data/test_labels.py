from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import labels
from plait.data.labels import natural_key, read_labels, read_text, write_labels
from plait.errors import DataError


def written(tmp_path, data):
    path = tmp_path / "labels.txt"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0: a\n1: b\n2: c\n", ["a", "b", "c"]),
        ("0: a 1: b 2: c", ["a", "b", "c"]),
        ("0: label_i \n1: label_j \n", ["label_i", "label_j"]),
        ("0: a 1: b\n2: c 3: d\n", ["a", "b", "c", "d"]),
        ("0:a 1:b", ["a", "b"]),
        ("0: great white shark 1: sea lion", ["great white shark", "sea lion"]),
        ("1: b\n0: a\n", ["a", "b"]),
        ("\n\n  0 :  a \r\n\t1: b\r\n", ["a", "b"]),
        ("0: a\r1: b", ["a", "b"]),
        ("\ufeff0: a\n1: b", ["a", "b"]),
        ("0: screen 16: 9\n1: b: c", ["screen 16: 9", "b: c"]),
        ("0: crane\n1: crane", ["crane", "crane"]),
        ("0: 猫 1: 狗", ["猫", "狗"]),
        ("00: a\n01: b", ["a", "b"]),
        ("0: 7\n1: 1", ["7", "1"]),
    ],
)
def test_both_ways_to_write_it(tmp_path, text, names):
    assert read_labels(written(tmp_path, text)) == dict(enumerate(names))
    assert list(read_labels(tmp_path / "labels.txt")) == list(range(len(names)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no labels in it"),
        (" \n\n", "no labels in it"),
        ("a\n", "line 1 is 'a'; write 'number: name'"),
        ("0: a\nx: b\n", "line 2 is 'x: b'"),
        ("0: a\n-1: b\n", "line 2"),
        ("0: a\n1 b\n", "line 2 is '1 b'"),
        ("0: a\n1.5: b\n", "line 2"),
        ("0: a\n٣: b\n", "line 2"),
        ("0: a\n12345678901234567890: b", "line 2"),
        ("0: a\n\n1:\n", "line 3: the label 1 has no name"),
        ("0: 1: b", "label 0 has no name"),
        ("0: a\n1: b\n0: c", "line 3: the number 0 is there twice, for 'a' in line 1 and for 'c'"),
        ("1: a\n2: b", "none with the number 0.*0: background"),
        ("0: a\n999999999: b", "none with the number 1"),
        ("0: a\n1: b\0c", "line 2 has a zero byte"),
        (b"0: a\n1: \xff\xfe", "line 2 is not text in UTF-8"),
        ("0: a\n".encode("utf-16"), "not text in UTF-8"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, text, said):
    with pytest.raises(DataError, match=said) as raised:
        read_labels(written(tmp_path, text))
    assert "labels.txt" in str(raised.value)


def test_a_long_line_is_shown_in_part(tmp_path):
    with pytest.raises(DataError) as raised:
        read_labels(written(tmp_path, "x" * 100_000))
    assert len(str(raised.value)) < 1000


def test_a_file_too_long_is_not_read(tmp_path, monkeypatch):
    path = written(tmp_path, "0: a\n" + " " * 100)
    monkeypatch.setattr(labels, "MAX_LABEL_BYTES", 104)
    with pytest.raises(DataError, match="105 bytes, a file of labels at most 104"):
        read_labels(path)
    monkeypatch.setattr(labels, "MAX_LABEL_BYTES", 105)
    assert read_labels(path) == {0: "a"}


def test_what_is_not_there_is_said_as_by_open(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_labels(tmp_path / "labels.txt")
    with pytest.raises(DataError, match="is a directory"):
        read_text(tmp_path, 10)


def test_no_line_takes_long(tmp_path):
    # each of these is quadratic for a careless pattern; a megabyte would take hours
    for text in ["0: a" + " " * 1_000_000 + "b", "0: " + "1" * 1_000_000, "0: " + "1 " * 500_000 + "b"]:
        assert len(read_labels(written(tmp_path, text))) == 1


def test_a_hundred_thousand_labels(tmp_path):
    names = [f"class {number}" for number in range(100_000)]
    write_labels(tmp_path / "many.txt", names)
    assert list(read_labels(tmp_path / "many.txt").values()) == names
    assert len(read_labels(written(tmp_path, " ".join(f"{i}: {name}" for i, name in enumerate(names))))) == 100_000


@settings(max_examples=40)
@given(st.lists(st.text(max_size=12), max_size=4))
def test_what_is_written_comes_back_or_is_refused(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("labels") / "labels.txt"
    try:
        write_labels(path, names)
    except DataError:
        assert not path.exists()
        assert not names or any(
            name != name.strip() or not name.isprintable() or ":" in name or not name for name in names
        )
    else:
        assert read_labels(path) == dict(enumerate(names))


@pytest.mark.parametrize("names", [[], ["a\nb"], [" a"], ["a "], [""], ["a 1: b"], ["\ud800"], ["a\0"]])
def test_what_would_not_come_back_is_not_written(tmp_path, names):
    write_labels(tmp_path / "labels.txt", ["old"])
    with pytest.raises(DataError, match="was not written"):
        write_labels(tmp_path / "labels.txt", names)
    assert (tmp_path / "labels.txt").read_text() == "0: old\n"


def test_more_labels_than_could_be_read_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "MAX_LABEL_BYTES", 9)
    with pytest.raises(DataError, match="more than 9 bytes"):
        write_labels(tmp_path / "labels.txt", ["a", "b"])


def test_natural_order():
    names = ["label_10", "label_2", "label_1", "label_02", "a", "10", "9", "", "label", "label_2b"]
    ordered = ["", "9", "10", "a", "label", "label_1", "label_02", "label_2", "label_2b", "label_10"]
    assert sorted(names, key=natural_key) == ordered
    assert sorted(["x" + "9" * 5000, "x1" + "0" * 5000], key=natural_key)[0] == "x" + "9" * 5000


@given(st.lists(st.text(alphabet="ab019_"), unique=True))
def test_natural_order_is_an_order(names):
    keys = [natural_key(name) for name in names]
    assert len(set(keys)) == len(names)
    assert sorted(sorted(names), key=natural_key) == sorted(names, key=natural_key)


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_broken_files_give_labels_or_a_data_error(tmp_path, count):
    whole = ["0: daisy\n1: rose\n2: sun flower\n", "0: a 1: b 2: c 3: d", "\ufeff0: é\r\n1: 猫\r\n"]
    rng, path, errors = random.Random(count), tmp_path / "labels.txt", 0
    for _ in range(count):
        data = bytearray(rng.choice(whole).encode())
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                del data[place : place + rng.randint(1, 9)]
            elif kind == 1:
                data[place:place] = rng.randbytes(rng.randint(1, 6))
            elif kind == 2:
                data[place:place] = rng.choice([b"0:", b"\n", b":", b" 99: ", b"-", b"\0", b"\xe2\x80\xa8", b" 1:"])
            elif place < len(data):
                data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            found = read_labels(path)
        except DataError:
            errors += 1
        else:
            assert list(found) == list(range(len(found)))
            assert all(found.values())
    assert errors > 0.3 * count
