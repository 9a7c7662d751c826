"""Starting a cluster: `plait launch` on one machine, Ray on many."""

from __future__ import annotations

from plait.launch.local import run

__all__ = ["run"]
