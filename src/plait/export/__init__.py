"""A trained module as files for those who only use it, and those files as something to run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.export.exporter import export
    from plait.export.formats import check_formats
    from plait.export.loaded import Loaded, load, versions

__all__ = ["Loaded", "check_formats", "export", "load", "versions"]

_WHERE = {"Loaded": "loaded", "check_formats": "formats", "export": "exporter", "load": "loaded", "versions": "loaded"}
"""Where a name is; it is imported when it is first used: who serves needs nothing of the exporter."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'plait.export' has no attribute {name!r}")
    return getattr(importlib.import_module(f"plait.export.{_WHERE[name]}"), name)
