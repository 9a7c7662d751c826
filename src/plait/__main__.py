"""`python -m plait` is the command `plait`."""

from __future__ import annotations

from plait.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
