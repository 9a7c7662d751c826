"""Both ways to fetch rows and to add them up."""

from __future__ import annotations

import pytest

from plait.feature_column import rows


@pytest.fixture(params=["loops", "torch"])
def ways(request, monkeypatch):
    """As the loops in C do it, and as torch does where they were not built."""
    if request.param == "torch":
        monkeypatch.setattr(rows, "loops", None)
    elif rows.loops is None:
        pytest.skip("the loops in C are not built: there was no compiler when plait was installed")
