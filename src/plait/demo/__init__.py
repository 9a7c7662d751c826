"""`plait demo`: two parties learn one model from halves of real handwriting, in seconds, on a CPU.

A tour of plait: begin with `leader.py` and `follower.py`, which are what two companies write.
"""

from __future__ import annotations

from plait.demo.digits import load
from plait.demo.show import run

__all__ = ["load", "run"]
