"""Starting a cluster: `plait launch` on one machine, Ray on many."""

from __future__ import annotations

from plait.cluster.launch.local import run

__all__ = ["run"]
