from __future__ import annotations

import pytest

from plait import atomic


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """No machine loses its power in these tests."""
    monkeypatch.setattr(atomic, "sync_file", lambda path: None)
