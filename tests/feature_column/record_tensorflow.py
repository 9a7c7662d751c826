"""What TensorFlow makes of a table of cases: recorded once, by hand, and compared with it by `make test-tf`.

    python tests/feature_column/record_tensorflow.py      # in an environment that has TensorFlow

A case is plain data: features, columns as functions and their arguments, and a way to make tables' values (`cases.py`).
Strings are made from a seed; of their fingerprints only the 64-bit numbers are kept.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow's, of its own functions


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = load("cases")


def fingerprints():
    strings = cases.strings()
    numbers = tf.fingerprint(strings).numpy().view("<u8").ravel()
    buckets = tf.strings.to_hash_bucket_fast(strings, cases.BUCKETS).numpy()
    return {"fingerprints": numbers.astype("<u8").tobytes().hex(), "bucket_sum": int(buckets.sum())}


def as_feature(value):
    """A tensor, or for rows of different lengths a SparseTensor."""
    if not isinstance(value, dict):
        return tf.constant(value)
    rows = value["rows"]
    width = max((len(row) for row in rows), default=0)
    indices = [[number, place] for number, row in enumerate(rows) for place in range(len(row))]
    values = [item for row in rows for item in row]
    kind = {"int": tf.int64, "float": tf.float32, "str": tf.string}[value["kind"]]
    return tf.SparseTensor(np.array(indices, np.int64).reshape(-1, 2), tf.constant(values, kind), [len(rows), width])


DTYPES = {"string": tf.string, "int64": tf.int64, "float32": tf.float32}


def build(description, folder):
    """The column that a description says: names of TensorFlow's functions, arguments, and columns inside them."""
    if not isinstance(description, dict):
        return description
    arguments = {key: value_of(value, folder) for key, value in description.items() if key != "make"}
    if "dtype" in arguments:
        arguments["dtype"] = DTYPES[arguments["dtype"]]
    if "normalizer_fn" in arguments:
        arguments["normalizer_fn"] = cases.NORMALIZERS[arguments["normalizer_fn"]]
    return getattr(v1.feature_column, description["make"])(**arguments)


def value_of(value, folder):
    if isinstance(value, dict) and "make" in value:
        return build(value, folder)
    if isinstance(value, dict) and "lines" in value:
        path = folder / "words.txt"
        path.write_bytes(value["lines"].encode())
        return str(path)
    return [value_of(item, folder) for item in value] if isinstance(value, list) else value


def flat(columns):
    return [column for one in columns for column in (one if isinstance(one, list) else [one])]


def result(case, folder):
    """What the case's layer gives, with its variables at the values that are counted up from their names."""
    with tf.Graph().as_default(), v1.Session() as session:
        features = {key: as_feature(value) for key, value in case["features"].items()}
        columns = flat([build(one, folder) for one in case["columns"]])
        layer = getattr(v1.feature_column, case["layer"])
        out = layer(features, columns, **case.get("options", {}))
        variables = {one.op.name: one for one in v1.global_variables()}
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        for name, one in variables.items():
            one.load(cases.values_of(name, one.shape.as_list()), session)
        return {
            "output": session.run(out).tolist(),
            "variables": {name: one.shape.as_list() for name, one in variables.items()},
        }


def spec_of(case, folder):
    with tf.Graph().as_default():
        columns = flat([build(one, folder) for one in case["columns"]])
        spec = v1.feature_column.make_parse_example_spec(columns)
    return {
        key: ["fixed", list(one.shape), one.dtype.name, one.default_value]
        if isinstance(one, tf.io.FixedLenFeature)
        else ["variable", one.dtype.name]
        for key, one in spec.items()
    }


def everything(folder):
    return {name: {**result(case, folder), "spec": spec_of(case, folder)} for name, case in cases.CASES.items()}


def test_fingerprints_are_as_they_were_recorded():
    assert fingerprints() == json.loads(gzip.decompress((HERE / "fingerprints.json.gz").read_bytes()))


def test_columns_are_as_they_were_recorded(tmp_path):
    recorded = json.loads((HERE / "columns.json").read_text(encoding="utf-8"))
    found = json.loads(json.dumps(everything(tmp_path)))
    assert found.keys() == recorded.keys()
    for name, case in found.items():
        assert case["variables"] == recorded[name]["variables"], name
        assert case["spec"] == recorded[name]["spec"], name
        np.testing.assert_allclose(case["output"], recorded[name]["output"], rtol=1e-6, atol=1e-6, err_msg=name)


def main():
    raw = json.dumps(fingerprints()).encode()
    (HERE / "fingerprints.json.gz").write_bytes(gzip.compress(raw, mtime=0))
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(everything(Path(folder)), sort_keys=True)
    (HERE / "columns.json").write_text(text.replace('}, "', '},\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
