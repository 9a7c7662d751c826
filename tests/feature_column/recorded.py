"""Builds the cases of `cases.py` from plait's columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from plait import feature_column

from . import cases

HERE = Path(__file__).parent


RECORDED = json.loads((HERE / "columns.json").read_text(encoding="utf-8"))
DTYPES = {"int": torch.int64, "float": torch.float32}


def as_feature(value):
    """An array, or (values, offsets)."""
    if not isinstance(value, dict):
        array = np.array(value)
        if array.dtype.kind == "U":
            return array.astype(object)
        return torch.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)
    flat = [item for row in value["rows"] for item in row]
    values = np.array(flat, object) if value["kind"] == "str" else torch.tensor(flat, dtype=DTYPES[value["kind"]])
    return values, torch.tensor([0, *(len(row) for row in value["rows"])]).cumsum(0)


def build(description, folder):
    arguments = {key: value_of(value, folder) for key, value in description.items() if key != "make"}
    if "normalizer_fn" in arguments:
        arguments["normalizer_fn"] = cases.NORMALIZERS[arguments["normalizer_fn"]]
    return getattr(feature_column, description["make"])(**arguments)


def value_of(value, folder):
    if isinstance(value, dict) and "make" in value:
        return build(value, folder)
    if isinstance(value, dict) and "lines" in value:
        path = folder / "words.txt"
        path.write_bytes(value["lines"].encode())
        return str(path)
    return [value_of(item, folder) for item in value] if isinstance(value, list) else value


def columns_of(case, folder):
    built = [build(one, folder) for one in case["columns"]]
    return [column for one in built for column in (one if isinstance(one, list) else [one])]


def features_of(case):
    return {key: as_feature(value) for key, value in case["features"].items()}
