"""Files and Examples of TensorFlow read here, and ours there; skipped where TensorFlow is not installed."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from plait.data.example import make_example, parse_example  # noqa: E402 - after the skip
from plait.data.tfrecord import RecordFile, TFRecordWriter, read_records  # noqa: E402 - same
from plait.errors import DataError  # noqa: E402 - same

RECORDS = [b"", b"abc", bytes(70_000), np.random.default_rng(0).bytes(300_001)]
KINDS = [None, "GZIP", "ZLIB"]
VALUES = {
    "bytes": [b"", b"\0\xff", "grün".encode()],
    "floats": [0.0, -1.5, 3.25e30, float("inf")],
    "float": [2.5],
    "ints": [0, -1, 1 << 40, -(1 << 63), (1 << 63) - 1],
    "many": list(range(-1000, 1000)),
    "grün": [7],
}


def feature(values):
    if not values:
        return tf.train.Feature()
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def their_example(fields):
    features = {name: feature(values) for name, values in fields.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def theirs(raw):
    """What protobuf reads, as lists by name; None where it refuses."""
    try:
        features = tf.train.Example.FromString(raw).features.feature
    except Exception:  # noqa: BLE001 - its class depends on protobuf's version
        return None
    found = {}
    for name, one in features.items():
        kind = one.WhichOneof("kind")
        found[name] = list(getattr(one, kind).value) if kind else []
    return found


def ours(raw):
    return {name: list(values) for name, values in parse_example(raw).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_their_files_are_read_here(tmp_path, kind):
    path = tmp_path / "a"
    with tf.io.TFRecordWriter(str(path), kind or "") as writer:
        for record in RECORDS:
            writer.write(record)
    assert [bytes(record) for record in read_records(path)] == RECORDS
    file = RecordFile(path)
    assert file.compression == kind
    assert [bytes(file[number]) for number in (3, 1, 0, 2)] == [RECORDS[number] for number in (3, 1, 0, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_our_files_are_read_there(tmp_path, kind):
    path = tmp_path / "a"
    with TFRecordWriter(path, kind) as writer:
        for record in RECORDS:
            writer.write(record)
    assert list(tf.data.TFRecordDataset(str(path), kind or "").as_numpy_iterator()) == RECORDS
    if kind is None:
        with tf.io.TFRecordWriter(str(tmp_path / "b")) as writer:
            for record in RECORDS:
                writer.write(record)
        assert (tmp_path / "b").read_bytes() == path.read_bytes()


def test_their_examples_are_parsed_here():
    assert ours(their_example(VALUES)) == {
        **VALUES,
        "floats": np.float32(VALUES["floats"]).tolist(),
    }
    assert ours(their_example({"none": []})) == {"none": []}


def test_our_examples_are_parsed_there():
    raw = make_example(VALUES)
    assert theirs(raw) == theirs(their_example(VALUES)) == ours(raw)
    parsed = tf.io.parse_single_example(
        raw,
        {
            "bytes": tf.io.FixedLenFeature([3], tf.string),
            "ints": tf.io.VarLenFeature(tf.int64),
            "float": tf.io.FixedLenFeature([], tf.float32),
        },
    )
    assert parsed["bytes"].numpy().tolist() == VALUES["bytes"]
    assert parsed["ints"].values.numpy().tolist() == VALUES["ints"]
    assert parsed["float"].numpy() == 2.5


def test_damaged_examples_are_read_as_protobuf_reads_them():
    """Where both read something, they read the same; there is no check of what one of them alone refuses."""
    rng = np.random.default_rng(0)
    raw = make_example({"a": [b"x", b"yz"], "b": [1, 300, -1], "c": [1.0, 2.0], "d": 5})
    both = refused = 0
    for _ in range(5000):
        changed = bytearray(raw)
        for _ in range(rng.integers(1, 4)):
            changed[rng.integers(len(changed))] = rng.integers(256)
        mine = None
        try:
            mine = ours(bytes(changed))
        except DataError:
            refused += 1
        other = theirs(bytes(changed))
        if mine is not None and other is not None:
            both += 1
            # an entry with fields that it does not know, Python's protobuf drops whole; others do not
            mine = {name: values for name, values in mine.items() if name in other}
            assert repr(plain(mine)) == repr(plain(other)), bytes(changed).hex()
    assert both > 300
    assert refused > 300


def plain(fields):
    """By name, and as plain numbers, so that not-a-number is equal to itself."""
    items = {name: [item.item() if isinstance(item, np.generic) else item for item in fields[name]] for name in fields}
    return sorted(items.items())
