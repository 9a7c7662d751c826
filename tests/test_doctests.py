"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import plait

NEED_TENSORFLOW = ("plait.export.savedmodel", "plait.export.tf_")
"""They import it, which few have; none has an example."""
NAMES = [
    "plait",
    *(
        found.name
        for found in pkgutil.walk_packages(plait.__path__, "plait.")
        if not found.name.startswith(NEED_TENSORFLOW)
    ),
]


def examples_of(name):
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_a_module(name):
    runner = doctest.DocTestRunner()
    for test in examples_of(name):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_there_are_examples():
    assert sum(len(examples_of(name)) for name in NAMES) >= 3
