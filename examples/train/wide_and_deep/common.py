"""Wide and deep over the census: its columns, and the parts of the model that one or two parties compute."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import plait
from plait import feature_column as fc
from plait import train

sys.path.append(str(Path(__file__).parents[2] / "federal" / "census"))
import table  # examples/federal/census/table.py, which downloads the census

PARTIES = ("leader", "follower")
BATCH = 512
WIDTH = 64

NAMES = {
    0: "age", 1: "class_of_worker", 2: "industry", 3: "occupation", 4: "education", 5: "wage_per_hour",
    6: "enrolled", 7: "marital_status", 8: "major_industry", 9: "major_occupation", 10: "race", 11: "hispanic",
    12: "sex", 13: "union", 14: "unemployment", 15: "hours", 16: "gains", 17: "losses", 18: "dividends",
    19: "tax_filer", 20: "previous_region", 21: "previous_state", 22: "family", 23: "household", 25: "moved_msa",
    26: "moved_region", 27: "moved_within", 28: "same_house", 29: "sunbelt", 30: "employer_size", 31: "parents",
    32: "country_of_father", 33: "country_of_mother", 34: "country", 35: "citizenship", 36: "own_business",
    37: "veterans_form", 38: "veterans_benefits", 39: "weeks_worked", 40: "year",
}  # fmt: skip
BUCKETED = {"leader": "age", "follower": "weeks_worked"}
CROSSED = {
    "leader": [("age", "sex", "tax_filer"), ("family", "sex"), ("age", "family")],
    "follower": [("education", "major_occupation"), ("weeks_worked", "major_occupation"), ("education", "industry")],
}
"""Columns whose combinations the wide part learns by heart; "age" and "weeks_worked" stand for their buckets."""


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", default="~/.cache/plait/census", help="where the downloaded table is kept")
    parser.add_argument("--model-dir", help="where checkpoints go; without it, they are not made")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the rows")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=BATCH, help="rows in a batch of one worker")
    parser.add_argument("--rows", type=int, help="use only so many, to try it out")
    return parser.parse_args()


@functools.cache
def firsts(party, data):
    """The first code of each category of a party, and how many values it has: its codes follow each other."""
    codes = table.load(party, data)["train"]["codes"]
    first = np.where(codes > 0, codes, np.iinfo(codes.dtype).max).min(axis=0)
    return first, codes.max(axis=0) - first + 1


def features(party, args, part):
    """A party's columns by name, one array each; a category's 0 is a value that training has not seen."""
    rows = table.load(party, args.data)[part]
    numeric, categorical = table.COLUMNS[party]
    first, _ = firsts(party, args.data)
    codes = rows["codes"][: args.rows].astype(np.int64)
    codes = np.where(codes > 0, codes - first + 1, 0)
    found = {NAMES[column]: rows["numbers"][: args.rows, place] for place, column in enumerate(numeric)}
    return found | {NAMES[column]: codes[:, place].copy() for place, column in enumerate(categorical)}


def income(args, part):
    return table.load("leader", args.data)[part]["income"][: args.rows]


@functools.cache
def columns(party, data):
    """The columns of the wide and of the deep part."""
    numeric, categorical = table.COLUMNS[party]
    _, sizes = firsts(party, data)
    numbers = [fc.numeric_column(NAMES[column]) for column in numeric]
    categories = {
        NAMES[column]: fc.categorical_column_with_identity(NAMES[column], int(size) + 1)
        for column, size in zip(categorical, sizes, strict=True)
    }
    known = table.load(party, data)["train"]["numbers"][:, [NAMES[one] for one in numeric].index(BUCKETED[party])]
    edges = sorted({float(edge) for edge in np.quantile(known, np.linspace(0.05, 0.95, 19))})
    buckets = fc.bucketized_column(fc.numeric_column(BUCKETED[party]), edges)
    crosses = [
        fc.crossed_column([buckets if name == BUCKETED[party] else categories[name] for name in names], 10_000)
        for names in CROSSED[party]
    ]
    deep = [*numbers, *(fc.embedding_column(category, 8) for category in categories.values())]
    return [*categories.values(), buckets, *crosses], deep


def part_of(party, data, batch):
    """What a party makes of its columns: its share of the deep part, and of the wide part's sum."""
    wide, deep = columns(party, data)
    with plait.variable_scope(party):
        total = fc.linear_model(batch, wide)
        inputs = fc.input_layer(batch, deep)
        hidden = plait.layer("hidden", nn.Linear, inputs.shape[1], WIDTH)(inputs).relu()
    return torch.cat([hidden, total], dim=1)


def logit_of(ours, theirs):
    """The deep parts go through two more layers; the wide parts are added."""
    with plait.variable_scope("top"):
        joined = torch.cat([ours[:, :WIDTH], theirs[:, :WIDTH]], dim=1)
        joint = plait.layer("joint", nn.Linear, 2 * WIDTH, WIDTH)(joined).relu()
        deep = plait.layer("output", nn.Linear, WIDTH, 1)(joint)
    return (deep + ours[:, WIDTH:] + theirs[:, WIDTH:]).squeeze(1)


def optimizers(*scopes):
    """FTRL for what is wide, Adagrad for what is deep: both move only what a batch has touched, also on servers."""
    adagrad = train.AdagradOptimizer(0.02, initial_accumulator_value=1e-6)  # the gradients of a mean loss are small
    ftrl = train.FtrlOptimizer(0.02, l1_regularization_strength=0.001)
    found = {}
    for scope in scopes:
        if scope == "top":
            found[scope] = adagrad
        else:
            found |= {f"{scope}/linear_model": ftrl, f"{scope}/input_layer": adagrad, f"{scope}/hidden": adagrad}
    return found
