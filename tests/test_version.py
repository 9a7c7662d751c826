from __future__ import annotations

import importlib.metadata
import re

import plait
from plait.version import __version__


def test_the_version_is_the_installed_one():
    assert __version__ == plait.__version__ == importlib.metadata.version("plait")


def test_the_version_has_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
